"""Ranks of a torchrun job as the tasks of a cluster."""

from __future__ import annotations

import sys

import pytest

import psync
from psync.integrations.torchrun import TorchrunClusterResolver

RANK_2 = {
    "RANK": "2",
    "WORLD_SIZE": "5",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
JOBS = {"worker": 2, "chief": 1, "ps": 2}


def test_jobs_take_the_ranks_in_the_order_of_their_names() -> None:
    for rank, task in [("0", ("chief", 0)), ("2", ("ps", 1)), ("3", ("worker", 0))]:
        resolver = TorchrunClusterResolver(JOBS, environ={**RANK_2, "RANK": rank})
        assert (resolver.task_type, resolver.task_id) == task


def test_what_does_not_fit_is_told() -> None:
    for changes, told in [
        ({"RANK": ""}, "torchrun: RANK: expected a number, got ''"),
        ({"WORLD_SIZE": "many"}, "torchrun: WORLD_SIZE: expected a number, got 'many'"),
        ({"MASTER_ADDR": ""}, "torchrun: MASTER_ADDR is not set"),
        ({"MASTER_PORT": "x"}, "torchrun: MASTER_PORT: expected a number, got 'x'"),
        ({"WORLD_SIZE": "6"}, "the jobs have 5 tasks .*, and rank 2 is one of 6"),
        ({"RANK": "5"}, "rank 5 is one of 5"),
    ]:
        with pytest.raises(psync.ConfigurationError, match=told):
            TorchrunClusterResolver(JOBS, environ={**RANK_2, **changes})


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    resolver = TorchrunClusterResolver(JOBS, environ=RANK_2)
    with pytest.raises(psync.ConfigurationError, match="torch cannot be imported") as exc:
        resolver.cluster_spec()
    assert exc.value.hint == "pip install 'psync[torch]'"
