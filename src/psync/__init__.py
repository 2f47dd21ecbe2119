"""psync: an asyncio-native parameter server.

A coordinator schedules step functions onto workers; workers pull sharded variables from ps
tasks and push gradients back; ps tasks apply them. See the README for a first program.

Names are loaded when they are first used, so that ``import psync`` costs next to nothing: the
launcher needs none of them, and a ps only a few.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psync import callbacks as callbacks
    from psync import data as data
    from psync import gradients as gradients
    from psync import metrics as metrics
    from psync import optimizers as optimizers
    from psync import partitioners as partitioners
    from psync import schedules as schedules
    from psync import testing as testing
    from psync.api.accumulators import GradientResult as GradientResult
    from psync.api.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
    from psync.api.conditional_accumulators import ConditionalAccumulator as ConditionalAccumulator
    from psync.api.conditional_accumulators import (
        SparseConditionalAccumulator as SparseConditionalAccumulator,
    )
    from psync.api.datasets import DistributedDataset as DistributedDataset
    from psync.api.datasets import InputOptions as InputOptions
    from psync.api.datasets import PerWorkerDataset as PerWorkerDataset
    from psync.api.datasets import PerWorkerIterator as PerWorkerIterator
    from psync.api.embeddings import embedding_lookup as embedding_lookup
    from psync.api.embeddings import embedding_lookup_sparse as embedding_lookup_sparse
    from psync.api.embeddings import safe_embedding_lookup_sparse as safe_embedding_lookup_sparse
    from psync.api.global_step import get_global_step as get_global_step
    from psync.api.global_step import get_or_create_global_step as get_or_create_global_step
    from psync.api.modules import Module as Module
    from psync.api.moving_averages import ExponentialMovingAverage as ExponentialMovingAverage
    from psync.api.optimizers.staleness_bound import StalenessBound as StalenessBound
    from psync.api.optimizers.state import PushResult as PushResult
    from psync.api.pulls import pull as pull
    from psync.api.reads import cache_variable_reads as cache_variable_reads
    from psync.api.strategy import ParameterServerStrategy as ParameterServerStrategy
    from psync.api.sync_replicas import SyncReplicasOptimizer as SyncReplicasOptimizer
    from psync.api.variables import ShardedVariable as ShardedVariable
    from psync.api.variables import Variable as Variable
    from psync.api.variables import VariableAggregation as VariableAggregation
    from psync.api.variables import VariableSynchronization as VariableSynchronization
    from psync.api.variables import variable_creator_scope as variable_creator_scope
    from psync.chief.events import FailoverEvent as FailoverEvent
    from psync.chief.events import RollbackEvent as RollbackEvent
    from psync.client.context import get_worker_index as get_worker_index
    from psync.client.context import wait as wait
    from psync.cluster import ClusterSpec as ClusterSpec
    from psync.cluster_roles import id_in_cluster as id_in_cluster
    from psync.cluster_roles import is_chief as is_chief
    from psync.cluster_roles import worker_count as worker_count
    from psync.compat.chief_queue_runner import ChiefQueueRunner as ChiefQueueRunner
    from psync.compat.session_hooks import SessionHook as SessionHook
    from psync.compat.session_hooks import SyncReplicasHook as SyncReplicasHook
    from psync.compat.strategy_extended import StrategyExtended as StrategyExtended
    from psync.compat.training_sessions import MonitoredTrainingSession as MonitoredTrainingSession
    from psync.errors import AttachError as AttachError
    from psync.errors import AuthenticationError as AuthenticationError
    from psync.errors import BusyError as BusyError
    from psync.errors import CaptureError as CaptureError
    from psync.errors import CheckpointCorrupt as CheckpointCorrupt
    from psync.errors import CheckpointError as CheckpointError
    from psync.errors import CheckpointMismatch as CheckpointMismatch
    from psync.errors import CheckpointNotFound as CheckpointNotFound
    from psync.errors import ClosedError as ClosedError
    from psync.errors import ClosureCancelled as ClosureCancelled
    from psync.errors import ClosureError as ClosureError
    from psync.errors import ClosureInputError as ClosureInputError
    from psync.errors import ConfigurationError as ConfigurationError
    from psync.errors import ConnectFailed as ConnectFailed
    from psync.errors import ConnectionLost as ConnectionLost
    from psync.errors import ContextError as ContextError
    from psync.errors import CutLost as CutLost
    from psync.errors import DeadlineExceeded as DeadlineExceeded
    from psync.errors import DuplicateTaskError as DuplicateTaskError
    from psync.errors import EndOfData as EndOfData
    from psync.errors import FencedError as FencedError
    from psync.errors import FrameTooLarge as FrameTooLarge
    from psync.errors import GradientError as GradientError
    from psync.errors import IndexTypeError as IndexTypeError
    from psync.errors import IndexValueError as IndexValueError
    from psync.errors import LocalProtocolError as LocalProtocolError
    from psync.errors import LockLost as LockLost
    from psync.errors import NotEnoughReplicas as NotEnoughReplicas
    from psync.errors import ParameterServerLost as ParameterServerLost
    from psync.errors import PartitionError as PartitionError
    from psync.errors import ProtocolError as ProtocolError
    from psync.errors import PsyncError as PsyncError
    from psync.errors import RemoteError as RemoteError
    from psync.errors import RemoteProtocolError as RemoteProtocolError
    from psync.errors import ReplicaValueError as ReplicaValueError
    from psync.errors import TaskLost as TaskLost
    from psync.errors import TrainingEnded as TrainingEnded
    from psync.errors import TransportError as TransportError
    from psync.errors import UnknownVariableError as UnknownVariableError
    from psync.errors import UnsupportedError as UnsupportedError
    from psync.errors import UsageError as UsageError
    from psync.errors import VariableIndexError as VariableIndexError
    from psync.errors import VersionMismatch as VersionMismatch
    from psync.errors import WorkerLost as WorkerLost
    from psync.launch.local import LocalCluster as LocalCluster
    from psync.launch.tasks import run as run
    from psync.launch.tasks import serve as serve
    from psync.net.kubernetes_resolver import ExecutableLocation as ExecutableLocation
    from psync.net.kubernetes_resolver import KubernetesClusterResolver as KubernetesClusterResolver
    from psync.net.resolvers import ClusterResolver as ClusterResolver
    from psync.net.resolvers import SimpleClusterResolver as SimpleClusterResolver
    from psync.net.resolvers import TFConfigClusterResolver as TFConfigClusterResolver
    from psync.net.slurm_resolver import SlurmClusterResolver as SlurmClusterResolver
    from psync.net.union_resolver import UnionClusterResolver as UnionClusterResolver
    from psync.numerics.indexed_slices import IndexedSlices as IndexedSlices
    from psync.numerics.replica_sums import ReduceOp as ReduceOp
    from psync.numerics.replica_values import Mirrored as Mirrored
    from psync.numerics.replica_values import PerReplica as PerReplica
    from psync.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
    from psync.partitioners import MaxSizePartitioner as MaxSizePartitioner
    from psync.partitioners import MinSizePartitioner as MinSizePartitioner
    from psync.partitioners import Partitioner as Partitioner
    from psync.replicas.context import ReplicaContext as ReplicaContext
    from psync.replicas.context import experimental_set_strategy as experimental_set_strategy
    from psync.replicas.context import get_replica_context as get_replica_context
    from psync.replicas.context import get_strategy as get_strategy
    from psync.replicas.context import has_strategy as has_strategy
    from psync.replicas.context import in_cross_replica_context as in_cross_replica_context
    from psync.replicas.losses import compute_average_loss as compute_average_loss
    from psync.replicas.losses import scale_regularization_loss as scale_regularization_loss
    from psync.serialization.captures import StaleCaptureWarning as StaleCaptureWarning
    from psync.serialization.remote_value import RemoteValue as RemoteValue
    from psync.serialization.remote_value import RemoteValueStatus as RemoteValueStatus
    from psync.specs import Outcome as Outcome
    from psync.training.checkpoint import Checkpoint as Checkpoint
    from psync.training.checkpoint_manager import CheckpointManager as CheckpointManager
    from psync.training.checkpoint_manager import latest_checkpoint as latest_checkpoint
    from psync.training.saved_objects import SavedState as SavedState
    from psync.training.sidecar_evaluator import Evaluation as Evaluation
    from psync.training.sidecar_evaluator import SidecarEvaluator as SidecarEvaluator
    from psync.training.trainer import History as History
    from psync.training.trainer import Trainer as Trainer
    from psync.worker.dataset_functions import InputContext as InputContext
    from psync.worker.dataset_functions import ValueContext as ValueContext
    from psync.worker.element_specs import TensorSpec as TensorSpec

__version__ = "0.1.0"

_MODULES = (
    "callbacks",
    "data",
    "gradients",
    "metrics",
    "optimizers",
    "partitioners",
    "schedules",
    "testing",
)
_HOMES = {
    "api.accumulators": ("GradientResult",),
    "api.cluster_coordinator": ("ClusterCoordinator",),
    "api.conditional_accumulators": ("ConditionalAccumulator", "SparseConditionalAccumulator"),
    "api.datasets": ("DistributedDataset", "InputOptions", "PerWorkerDataset", "PerWorkerIterator"),
    "api.embeddings": (
        "embedding_lookup", "embedding_lookup_sparse", "safe_embedding_lookup_sparse",
    ),
    "api.global_step": ("get_global_step", "get_or_create_global_step"),
    "api.modules": ("Module",),
    "api.moving_averages": ("ExponentialMovingAverage",),
    "api.optimizers.staleness_bound": ("StalenessBound",),
    "api.optimizers.state": ("PushResult",),
    "api.pulls": ("pull",),
    "api.reads": ("cache_variable_reads",),
    "api.strategy": ("ParameterServerStrategy",),
    "api.sync_replicas": ("SyncReplicasOptimizer",),
    "api.variables": (
        "ShardedVariable", "Variable", "VariableAggregation", "VariableSynchronization",
        "variable_creator_scope",
    ),
    "chief.events": ("FailoverEvent", "RollbackEvent"),
    "client.context": ("get_worker_index", "wait"),
    "cluster": ("ClusterSpec",),
    "cluster_roles": ("id_in_cluster", "is_chief", "worker_count"),
    "compat.chief_queue_runner": ("ChiefQueueRunner",),
    "compat.session_hooks": ("SessionHook", "SyncReplicasHook"),
    "compat.strategy_extended": ("StrategyExtended",),
    "compat.training_sessions": ("MonitoredTrainingSession",),
    "errors": (
        "AttachError", "AuthenticationError", "BusyError", "CaptureError", "CheckpointCorrupt",
        "CheckpointError", "CheckpointMismatch", "CheckpointNotFound", "ClosedError",
        "ClosureCancelled", "ClosureError", "ClosureInputError", "ConfigurationError",
        "ConnectFailed", "ConnectionLost", "ContextError", "CutLost", "DeadlineExceeded",
        "DuplicateTaskError", "EndOfData", "FencedError", "FrameTooLarge", "GradientError",
        "IndexTypeError", "IndexValueError", "LocalProtocolError", "LockLost", "NotEnoughReplicas",
        "ParameterServerLost", "PartitionError", "ProtocolError", "PsyncError", "RemoteError",
        "RemoteProtocolError", "ReplicaValueError", "TaskLost", "TrainingEnded", "TransportError",
        "UnknownVariableError", "UnsupportedError", "UsageError", "VariableIndexError",
        "VersionMismatch", "WorkerLost",
    ),
    "launch.local": ("LocalCluster",),
    "launch.tasks": ("run", "serve"),
    "net.kubernetes_resolver": ("ExecutableLocation", "KubernetesClusterResolver"),
    "net.resolvers": ("ClusterResolver", "SimpleClusterResolver", "TFConfigClusterResolver"),
    "net.slurm_resolver": ("SlurmClusterResolver",),
    "net.union_resolver": ("UnionClusterResolver",),
    "numerics.indexed_slices": ("IndexedSlices",),
    "numerics.replica_sums": ("ReduceOp",),
    "numerics.replica_values": ("Mirrored", "PerReplica"),
    "partitioners": (
        "FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner",
    ),
    "replicas.context": (
        "ReplicaContext", "experimental_set_strategy", "get_replica_context", "get_strategy",
        "has_strategy", "in_cross_replica_context",
    ),
    "replicas.losses": ("compute_average_loss", "scale_regularization_loss"),
    "serialization.captures": ("StaleCaptureWarning",),
    "serialization.remote_value": ("RemoteValue", "RemoteValueStatus"),
    "specs": ("Outcome",),
    "training.checkpoint": ("Checkpoint",),
    "training.checkpoint_manager": ("CheckpointManager", "latest_checkpoint"),
    "training.saved_objects": ("SavedState",),
    "training.sidecar_evaluator": ("Evaluation", "SidecarEvaluator"),
    "training.trainer": ("History", "Trainer"),
    "worker.dataset_functions": ("InputContext", "ValueContext"),
    "worker.element_specs": ("TensorSpec",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"psync.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'psync' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"psync.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    own = ("__all__", "__doc__", "__file__", "__name__", "__path__", "__version__")
    return sorted((*__all__, *own))
