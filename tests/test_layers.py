"""The import law of docs/design.md section 1, read from the source with ``ast``.

A module that is new gets a line in ``LAYERS``, at the place that says what it may know, and a
test file of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "psync"

# The simulator is tested as a whole, by tests/testing/test_simulation.py.
SIMULATION = (
    "plan", "faults", "tight", "drawing", "processes", "disk", "tables", "oracle", "rounds",
    "journal", "own_updates", "ps_oracle", "replayed_tables", "sync_tables", "hand_tables",
    "data_tables", "table_kinds", "injection", "program", "world", "marks", "watch", "mutants",
    "run", "sweep", "shrink", "__main__",
)  # fmt: skip

# A module imports modules named before it, and "wire" and "rules" know nothing of each other.
LAYERS = {
    "L0 ground": ["errors", "specs", "cluster", "cluster_roles"],
    "L1 wire": [
        "wire", "wire.limits", "wire.tensors", "wire.frames", "wire.codec", "wire.messages",
        "wire.worker_messages", "wire.ps_messages", "wire.lock_messages", "wire.sync_messages",
        "wire.session_messages", "wire.accumulator_messages", "wire.recovery_messages",
        "wire.catalogue", "wire.remote_errors", "wire.handshake", "wire.protocol",
    ],
    "L1 rules": [
        "partitioners", "placement", "placement_report", "row_sets", "sums", "fitting",
        "accumulators", "dense_accumulators", "sparse_accumulators", "scatter_ops",
        "indexed_slices", "indexing", "await_first", "embedding_rules", "replica_sums",
        "distributed_values", "variable_copies", "schedule_base", "schedules", "rule_options",
        "gradient_clipping", "update_rules", "moment_rules", "adaptive_rules", "layerwise_rules",
        "rule_configs",
        "blocks", "row_blocks", "shard_work", "shards", "row_checks", "row_store", "lock_table",
        "means", "gradient_accumulation", "shard_updates", "gradient_store", "store", "ledger",
        "update_gate", "commit_log", "log_names", "sync_config", "ledger_image", "untrusted_json",
        "image_state", "ps_image", "rollback_rules", "adoption", "former_store", "step_norms",
        "closure_states", "served_tasks", "metric_rules", "checkpoint_manifest",
        "checkpoint_layout", "closure_order", "dispatching", "closure_waits", "closure_errors",
        "open_closures", "closures", "gangs", "membership", "coordinator_grants", "flapping",
        "tokens", "sync_groups", "sync_steps", "followed_steps", "staging", "session_members",
        "pulled_steps", "schedule_report", "round_clocks", "visitation", "element_specs",
        "handshake_limits",
    ],
    "L2 shell": [
        "process_state", "access", "signing", "certificates", "tls_config", "disk",
        "checkpoint_files", "image_files", "checkpoint_writer", "weak_writer", "checkpoint_images",
        "resolvers", "union_resolver", "slurm_resolver", "kubernetes_resolver", "testing_notes",
        "testing_switches", "weak_rules", "failpoints", "stacks", "task_reports", "platform",
        "transport", "tls_channel", "tls_network", "connection", "exchanges", "serving",
        "lost_messages", "rpc", "endpoint", "chief_presence", "environment",
    ],
    "L3 roles": [
        "context", "captures", "payloads", "failures", "functions", "dataset_functions",
        "data_sources", "iterators", "coordinator_enquiry", "declarations", "plans", "ps_link",
        "ps_calls", "served_search", "ps_rows", "ps_client", "measure_client", "shard_locks",
        "slot_client", "cuts", "pulled_ahead", "sync_client", "accumulator_client", "reattachment",
        "creation", "runtime", "scopes", "variable_creators", "turns", "collectives", "extended",
        "replica_states", "replica_context", "updates", "apply_log", "whole_sets", "long_work",
        "ps_locks", "hosted_accumulators", "take_waits", "gradient_takes", "clock_service",
        "session_service", "step_updates", "slot_service", "measure_service", "gate_service",
        "shard_creation", "committer", "accumulator_service", "accumulator_image", "backup_sender",
        "backup_service", "ps_updates", "row_pulls",
        "group_table", "global_steps", "sync_entries", "step_applier", "ps_sync", "token_waits",
        "ps_pulls", "all_ps", "step_rounds", "step_takeover", "sync_follower", "step_closer",
        "sync_image", "frozen_images", "image_service", "adoption_service", "replica_host",
        "served_service", "ps_report", "ps_task", "step_thread", "gang_member", "closure_inputs",
        "closure_results", "worker_session", "worker_leave", "worker_task", "remote_value",
        "closure_messages", "closure_timeout", "watchdog", "closure_service", "gang_merges",
        "gang_run", "gang_runner", "joins", "worker_links", "cluster_links", "schedule_reporter",
        "events", "ps_recovery", "replica_recovery", "cluster_recovery", "coordinator",
        "session_links",
    ],
    "L4 user API": [
        "losses", "merged_updates", "row_access", "reads", "value_access", "on_read", "variables",
        "embeddings", "modules", "pulls", "accumulator_handles", "conditional_accumulators",
        "global_step", "moving_averages", "staleness_bound", "gradient_arguments", "variable_lists",
        "optimizer_registry", "value_and_gradients", "optimizer_state", "gradient_pushes",
        "optimizer_handles", "optimizers", "gradients", "replica_runs", "strategy_extended",
        "colocation", "distributed_datasets", "strategy", "datasets", "visits", "data",
        "worker_changes", "coordinator_options", "worker_iterators", "cluster_coordinator",
        "session_hooks", "training_sessions", "sync_arguments", "group_config",
        "chief_queue_runner", "sync_replicas", "metrics", "checkpoint_objects", "checkpoint_values",
        "checkpoint_names", "checkpoint_arrays", "checkpoint", "checkpoint_manager",
        "checkpoint_reports", "callbacks",
        "sidecar_evaluator", "training_progress", "evaluation", "trainer", "task_output",
        "lifeline", "task_process", "processes", "testing.deadlock", "testing.segments",
        "testing.loop_base", "testing.clock", "testing.memory_transport", "testing.link",
        "testing.network", "testing.chaos_proxy", "testing", "process_loop", "own_task",
        "shut_down", "tasks", "local", "__init__",
    ],
    "L5 edge": [
        "launcher", "bench.draws", "bench.digits", "bench.modes", "bench.training", "bench.checks",
        "bench.figures", "bench.report", "bench.plots", "bench.real_runs", "bench.virtual_runs",
        "bench.peers", "bench.sync_async", "bench", "testing.chaos", "testing.chaos.marks",
        "testing.chaos.journal", "testing.chaos.victims", "testing.chaos.killer",
        "testing.chaos.scenes", "testing.chaos.oracle", "testing.chaos.program",
        "testing.chaos.replay", "testing.chaos.one_run", "testing.chaos.summary",
        "testing.chaos.__main__", "testing.simulation",
        *(f"testing.simulation.{name}" for name in SIMULATION),
        "certs_cli", "checkpoint_cli", "cli", "__main__",
    ],
}  # fmt: skip
ORDER = [module for modules in LAYERS.values() for module in modules]
LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules}

# Ground, wire and rules are pure: what they need of these is given to them as a value.
IMPURE = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "os", "random", "secrets", "select",
    "selectors", "signal", "socket", "ssl", "subprocess", "threading", "time", "uvloop",
}  # fmt: skip
PURE_LAYERS = {"L0 ground", "L1 wire", "L1 rules"}

WITHOUT_TEST_FILE = {
    "__init__": "only re-exports; test_init.py reads it",
    "testing": "only re-exports",
    "testing.chaos": "a docstring",
    "testing.chaos.__main__": "the command; tests/processes/test_chaos_command.py runs it",
    "testing.simulation": "a docstring",
    **dict.fromkeys(
        (f"testing.simulation.{name}" for name in SIMULATION), "the simulator is tested as a whole"
    ),
    "wire": "a docstring",
    "__main__": "two lines; the tests of cli start it as a process",
}

# Arrays become bytes in wire/tensors.py. The others handle memory that is bytes already.
BYTES_ALLOWED = {
    "wire.tensors": "the border itself",
    "wire.frames": "cuts what was received without copying it",
    "wire.protocol": "the same, before a frame is complete",
    "transport": "hands the buffers of segments to the loop",
    "tls_channel": "hands bytes to TLS, and takes them from it",
    "rpc": "gathers the small segments of a reply in one buffer",
    "blocks": "memory of shards is cut into blocks of bytes",
    "row_blocks": "blocks that lie in one mapping of memory",
    "testing.segments": "finds memory that is changed while it is in flight",
    "testing.memory_transport": "copies into the receiver's buffer, as a kernel does",
}
BYTES_CALL = re.compile(r"\.tobytes\(|\bfrombuffer\(|\bmemoryview\((?!b\")")


def module_of(path: Path) -> str:
    """The module's name without the leading ``psync.``; ``__init__`` is psync itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
each_module = pytest.mark.parametrize("module", [name for name in MODULES if name in LAYER_OF])


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, those in functions too, except what stands under ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from runtime_nodes(node)


def imports_of(module: str) -> list[tuple[int, str]]:
    """What a module imports when it runs: (line, dotted name)."""
    path = MODULES[module]
    found: list[tuple[int, str]] = []
    for node in runtime_nodes(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute in psync"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}".removeprefix("psync.")
                is_module = submodule in LAYER_OF and node.module.split(".")[0] == "psync"
                found.append((node.lineno, f"psync.{submodule}" if is_module else node.module))
    return found


def test_every_module_has_its_place() -> None:
    assert [name for name in MODULES if name not in LAYER_OF] == []


def words_after(text: str, start: str, end: str) -> set[str]:
    """The words of a list that goes over several lines."""
    return set(text[text.index(start) + len(start) : text.index(end)].replace("\\\n", " ").split())


def test_the_list_of_the_documentation_has_every_module() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    listed = words_after(text, "\n## 1. Layers\n", "\n```\n\n`wire/`")
    names = {name.removeprefix("wire.") for name in ORDER} - {"wire"}
    packages = ("bench.", "testing.")  # stand for what is in them
    in_package = {name for name in names if name.startswith(packages)}
    assert names - in_package - listed == set()


def test_the_rules_and_the_wire_are_covered_by_make() -> None:
    text = (ROOT / "Makefile").read_text()
    rules = words_after(text, "\nRULES :=", "\nWIRE :=")
    assert rules == {*LAYERS["L0 ground"], *LAYERS["L1 rules"]}
    wire = words_after(text, "\nWIRE :=", "\n\nDEMO :=")
    assert wire == {name.removeprefix("wire.") for name in LAYERS["L1 wire"]} - {"wire"}


@each_module
def test_docstring_names_the_layer(module: str) -> None:
    if module not in WITHOUT_TEST_FILE:
        docstring = ast.get_docstring(ast.parse(MODULES[module].read_text())) or ""
        assert f"\nLayer: {LAYER_OF[module].split()[0]}" in docstring, MODULES[module]


@each_module
def test_imports_go_down_only(module: str) -> None:
    allowed = set(ORDER[: ORDER.index(module)])
    if LAYER_OF[module] == "L1 rules":
        allowed -= set(LAYERS["L1 wire"])
    for line, name in imports_of(module):
        if name.split(".")[0] == "psync":
            imported = name.removeprefix("psync").lstrip(".") or "__init__"
            assert imported in allowed, (
                f"{MODULES[module]}:{line}: psync.{module} ({LAYER_OF[module]}) must not import "
                f"psync.{imported} ({LAYER_OF.get(imported, 'no layer')})"
            )


@each_module
def test_ground_wire_and_rules_are_pure(module: str) -> None:
    if LAYER_OF[module] in PURE_LAYERS:
        for line, name in imports_of(module):
            assert name.split(".")[0] not in IMPURE, (
                f"{MODULES[module]}:{line}: {LAYER_OF[module]} must not import {name}"
            )


@each_module
def test_every_module_has_its_test_file(module: str) -> None:
    if module not in WITHOUT_TEST_FILE:
        *folders, name = module.split(".")
        mirror = TESTS.joinpath(*folders, f"test_{name}.py")
        assert mirror.exists(), f"{mirror} is missing"


@each_module
def test_arrays_become_bytes_in_one_place(module: str) -> None:
    if module not in BYTES_ALLOWED:
        for number, line in enumerate(MODULES[module].read_text().splitlines(), 1):
            assert not BYTES_CALL.search(line), (
                f"{MODULES[module]}:{number}: only wire/tensors.py turns arrays into bytes"
            )
