"""Which task a process is, and whether the others exit when it does."""

from __future__ import annotations

import json

import pytest

import psync
from psync.errors import ConfigurationError
from psync.launch.identity import OwnTask, own_task

CLUSTER = {"chief": ["c:1"], "ps": ["p:1"], "worker": ["w:1", "w:2"]}


def resolver(
    job: str | None, index: int | None, *, chief: bool = True
) -> psync.SimpleClusterResolver:
    jobs = {name: each for name, each in CLUSTER.items() if chief or name != "chief"}
    return psync.SimpleClusterResolver(psync.ClusterSpec(jobs), task_type=job, task_id=index)


def test_a_task_knows_its_name_and_its_address() -> None:
    own = own_task(resolver("worker", 1))
    assert (own.job, own.index, own.name) == ("worker", 1, "/job:worker/task:1")
    assert own.address == "w:2"


@pytest.mark.parametrize(
    ("job", "index", "chief", "leads"),
    [
        ("chief", 0, True, True),
        ("worker", 0, True, False),
        ("ps", 0, True, False),
        ("worker", 0, False, True),
        ("worker", 1, False, False),
    ],
)
def test_the_others_exit_with_the_chief_or_with_worker_0_where_there_is_none(
    job: str, index: int, chief: bool, leads: bool
) -> None:
    assert own_task(resolver(job, index, chief=chief)).leads is leads


def test_without_a_resolver_the_environment_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"cluster": CLUSTER, "task": {"type": "ps", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(described))
    own: OwnTask = own_task(None)
    assert own.name == "/job:ps/task:0"
    monkeypatch.setenv("TF_CONFIG", "")
    with pytest.raises(ConfigurationError, match="this process belongs to no cluster"):
        own_task(None)


def test_an_evaluator_that_nobody_has_counted_is_the_first() -> None:
    assert own_task(resolver("evaluator", None)).name == "/job:evaluator/task:0"


@pytest.mark.parametrize(("job", "index"), [(None, None), ("worker", None)])
def test_a_description_that_does_not_say_which_task_it_is_is_refused(
    job: str | None, index: int | None
) -> None:
    with pytest.raises(ConfigurationError):
        own_task(resolver(job, index))
