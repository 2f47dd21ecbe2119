"""The usage example of TensorFlow's SyncReplicasOptimizer, on a chief and two workers.

What docs/howto/tensorflow.md says of its names is run here, in scripts/tensorflow_sync.py. Backup
replicas, late gradients and TensorFlow's own tokens: api/test_sync_replicas.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tasks_by_hand import ended, psync_run, script

pytestmark = [pytest.mark.processes, pytest.mark.slow]

REFUSED = [  # all of them are ValueErrors, too
    "ConfigurationError",  # the chief's queue runner before apply_gradients
    "ConfigurationError",  # initial tokens before apply_gradients
    "ConfigurationError",  # -2 tokens
    "ConfigurationError",  # a step of no gradients
    "ValueMismatchError",  # no gradients at all
    "ConfigurationError",  # no global step
    "ValueMismatchError",  # minimize: no variables
    "ConfigurationError",  # minimize: no gate
]


def found_by(aggregated: int) -> list[dict[str, Any]]:
    """Run the example; return what the chief, worker 0 and worker 1 have found."""
    run = ended(psync_run(*script("tensorflow_sync.py"), "--", str(aggregated)))
    assert run.code == 0, run.err
    lines = dict(re.findall(r"^(?:\[(worker-\d)\] )?({.*})$", run.out, flags=re.M))
    assert sorted(lines) == ["", "worker-0", "worker-1"], run.out
    return [json.loads(lines[name]) for name in sorted(lines)]


def after(steps: int) -> list[list[float]]:
    """The variable, its momentum and its moving average after steps whose gradient is 2."""
    w = v = average = 0.0
    for _ in range(steps):
        v = 0.5 * v - 0.5 * 2
        w += v
        average -= 0.5 * (average - w)
    return [[w], [v], [average]]


def test_the_usage_example_runs_step_by_step() -> None:
    chief, *workers = tasks = found_by(3)
    assert chief["step"] == 6
    assert chief["values"] == after(6)
    assert [task["losses"] for task in tasks] == [[1], [2], [3]]
    for task in tasks:
        assert task["before"] == REFUSED
        assert task["outcomes"] == ["accepted"]
        assert task["local_steps"] == [1, 2, 3, 4, 5, 6]  # nobody is ahead, and no step is wasted
        assert task["late"] is None  # should_stop: nothing runs any more
        assert task["slots"] == [["momentum"], None, "sync_replicas"]
        assert task["variables"] == ["w", "b"]  # not the local step, as in TensorFlow
        assert task["gates"] == [0, 1, 2]
    assert all("step" not in worker for worker in workers)


def test_replicas_compute_several_batches_for_one_step() -> None:
    chief, *workers = found_by(6)
    assert (chief["step"], chief["values"]) == (6, after(6))
    for task in (chief, *workers):
        assert task["outcomes"] == ["accepted"]
        # Three initial tokens of step 0 for the second batch; then two of each step.
        assert task["local_steps"] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
