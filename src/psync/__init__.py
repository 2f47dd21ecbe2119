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
    from psync import optimizers as optimizers
    from psync import schedules as schedules
    from psync import testing as testing
    from psync.cluster import ClusterSpec as ClusterSpec
    from psync.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
    from psync.conditional_accumulators import ConditionalAccumulator as ConditionalAccumulator
    from psync.conditional_accumulators import GradientResult as GradientResult
    from psync.conditional_accumulators import (
        SparseConditionalAccumulator as SparseConditionalAccumulator,
    )
    from psync.context import get_worker_index as get_worker_index
    from psync.context import wait as wait
    from psync.datasets import PerWorkerDataset as PerWorkerDataset
    from psync.datasets import PerWorkerIterator as PerWorkerIterator
    from psync.errors import AuthenticationError as AuthenticationError
    from psync.errors import BusyError as BusyError
    from psync.errors import CaptureError as CaptureError
    from psync.errors import ClosedError as ClosedError
    from psync.errors import ClosureCancelled as ClosureCancelled
    from psync.errors import ClosureError as ClosureError
    from psync.errors import ClosureInputError as ClosureInputError
    from psync.errors import ConfigurationError as ConfigurationError
    from psync.errors import ConnectFailed as ConnectFailed
    from psync.errors import ConnectionLost as ConnectionLost
    from psync.errors import DeadlineExceeded as DeadlineExceeded
    from psync.errors import EndOfData as EndOfData
    from psync.errors import FencedError as FencedError
    from psync.errors import FrameTooLarge as FrameTooLarge
    from psync.errors import GradientError as GradientError
    from psync.errors import LocalProtocolError as LocalProtocolError
    from psync.errors import NotEnoughReplicas as NotEnoughReplicas
    from psync.errors import ParameterServerLost as ParameterServerLost
    from psync.errors import PartitionError as PartitionError
    from psync.errors import ProtocolError as ProtocolError
    from psync.errors import PsyncError as PsyncError
    from psync.errors import RemoteError as RemoteError
    from psync.errors import RemoteProtocolError as RemoteProtocolError
    from psync.errors import TaskLost as TaskLost
    from psync.errors import TrainingEnded as TrainingEnded
    from psync.errors import TransportError as TransportError
    from psync.errors import UnknownVariableError as UnknownVariableError
    from psync.errors import UsageError as UsageError
    from psync.errors import VersionMismatch as VersionMismatch
    from psync.errors import WorkerLost as WorkerLost
    from psync.functions import StaleCaptureWarning as StaleCaptureWarning
    from psync.global_step import get_global_step as get_global_step
    from psync.global_step import get_or_create_global_step as get_or_create_global_step
    from psync.iterators import InputContext as InputContext
    from psync.local import LocalCluster as LocalCluster
    from psync.moving_averages import ExponentialMovingAverage as ExponentialMovingAverage
    from psync.optimizers import PushResult as PushResult
    from psync.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
    from psync.partitioners import MaxSizePartitioner as MaxSizePartitioner
    from psync.partitioners import MinSizePartitioner as MinSizePartitioner
    from psync.partitioners import Partitioner as Partitioner
    from psync.pulls import pull as pull
    from psync.remote_value import RemoteValue as RemoteValue
    from psync.remote_value import RemoteValueStatus as RemoteValueStatus
    from psync.resolvers import ClusterResolver as ClusterResolver
    from psync.resolvers import SimpleClusterResolver as SimpleClusterResolver
    from psync.resolvers import TFConfigClusterResolver as TFConfigClusterResolver
    from psync.session_hooks import SessionHook as SessionHook
    from psync.session_hooks import SyncReplicasHook as SyncReplicasHook
    from psync.specs import Outcome as Outcome
    from psync.staleness_bound import StalenessBound as StalenessBound
    from psync.strategy import ParameterServerStrategy as ParameterServerStrategy
    from psync.sync_replicas import ChiefQueueRunner as ChiefQueueRunner
    from psync.sync_replicas import SyncReplicasOptimizer as SyncReplicasOptimizer
    from psync.tasks import run as run
    from psync.tasks import serve as serve
    from psync.training_sessions import MonitoredTrainingSession as MonitoredTrainingSession
    from psync.variables import ShardedVariable as ShardedVariable
    from psync.variables import Variable as Variable
    from psync.variables import VariableAggregation as VariableAggregation
    from psync.variables import VariableSynchronization as VariableSynchronization

__version__ = "0.1.0"

_MODULES = ("optimizers", "schedules", "testing")
_HOMES = {
    "cluster": ("ClusterSpec",),
    "cluster_coordinator": ("ClusterCoordinator",),
    "conditional_accumulators": (
        "ConditionalAccumulator", "GradientResult", "SparseConditionalAccumulator",
    ),
    "context": ("get_worker_index", "wait"),
    "datasets": ("PerWorkerDataset", "PerWorkerIterator"),
    "errors": (
        "AuthenticationError", "BusyError", "CaptureError", "ClosedError", "ClosureCancelled",
        "ClosureError", "ClosureInputError", "ConfigurationError", "ConnectFailed",
        "ConnectionLost", "DeadlineExceeded", "EndOfData", "FencedError", "FrameTooLarge",
        "GradientError", "LocalProtocolError", "NotEnoughReplicas", "ParameterServerLost",
        "PartitionError", "ProtocolError", "PsyncError", "RemoteError", "RemoteProtocolError",
        "TaskLost", "TrainingEnded", "TransportError", "UnknownVariableError", "UsageError",
        "VersionMismatch", "WorkerLost",
    ),
    "functions": ("StaleCaptureWarning",),
    "global_step": ("get_global_step", "get_or_create_global_step"),
    "iterators": ("InputContext",),
    "local": ("LocalCluster",),
    "moving_averages": ("ExponentialMovingAverage",),
    "optimizers": ("PushResult",),
    "partitioners": (
        "FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner",
    ),
    "pulls": ("pull",),
    "remote_value": ("RemoteValue", "RemoteValueStatus"),
    "resolvers": ("ClusterResolver", "SimpleClusterResolver", "TFConfigClusterResolver"),
    "session_hooks": ("SessionHook", "SyncReplicasHook"),
    "specs": ("Outcome",),
    "staleness_bound": ("StalenessBound",),
    "strategy": ("ParameterServerStrategy",),
    "sync_replicas": ("ChiefQueueRunner", "SyncReplicasOptimizer"),
    "tasks": ("run", "serve"),
    "training_sessions": ("MonitoredTrainingSession",),
    "variables": (
        "ShardedVariable", "Variable", "VariableAggregation", "VariableSynchronization",
    ),
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
    return sorted([*globals(), *__all__])
