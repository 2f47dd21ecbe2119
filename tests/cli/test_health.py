"""`psync health`; with pods: tests/processes/test_kubernetes.py."""

from __future__ import annotations

import json

import pytest

from psync.cli.main import main
from tasks_by_hand import SECRET, by_hand


def config(job: str, **cluster: list[str]) -> str:
    described = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"], "worker": ["127.0.0.1:3"]}
    return json.dumps({"cluster": {**described, **cluster}, "task": {"type": job, "index": 0}})


def test_a_task_that_serves_answers_to_who_has_the_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with by_hand() as cluster:
        cluster.serve_all()
        monkeypatch.setenv("PSYNC_SECRET", SECRET)
        for job in ("ps", "worker"):
            monkeypatch.setenv("TF_CONFIG", config(job, **cluster.cluster))
            assert main(["health"]) == 0
            assert capsys.readouterr().out == f"/job:{job}/task:0 answers\n"
        monkeypatch.setenv("PSYNC_SECRET", "another one, of the same kind")
        assert main(["health"]) == 2
        assert "does not have the same secret" in capsys.readouterr().err


def test_a_task_that_is_not_there_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PSYNC_SECRET", SECRET)
    monkeypatch.setenv("TF_CONFIG", config("ps"))
    assert main(["health", "--timeout", "2"]) == 1
    assert "psync: /job:ps/task:0 at 127.0.0.1:2: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"TF_CONFIG": config("chief")}, "/job:chief/task:0 does not listen"),
        ({"TF_CONFIG": config("ps"), "PSYNC_SECRET": ""}, "PSYNC_SECRET: expected at least"),
        ({}, "this process belongs to no cluster"),
    ],
)
def test_wrong_set_up_is_told(
    variables: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["health"]) == 2
    assert told in capsys.readouterr().err
