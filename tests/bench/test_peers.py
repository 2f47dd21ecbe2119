"""psync beside its peers: small programs stand in for those that are large to install."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from psync.bench import peers
from psync.bench.peers import Row, System
from psync.cli.main import main
from psync.errors import ConfigurationError

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "peers"

GREETING = {"name": "stub", "version": "1", "works": ["pull"]}
ROW = Row("pull", "1/s", 8, 1.0)


def answering(greeting: object, answer: str) -> list[str]:
    """Return the command of a system that says ``answer`` to each order, an expression."""
    return [
        sys.executable, "-c",
        "import json, sys\n"
        f"print({json.dumps(greeting)!r}, flush=True)\n"
        "for line in sys.stdin:\n"
        "    order = json.loads(line)\n"
        f"    print({answer}, flush=True)\n",
    ]  # fmt: skip


def test_a_system_is_told_the_work_and_tells_what_was_done() -> None:
    notes: list[str] = []
    answer = "json.dumps({'done': order['steps'] * 2, 'seconds': 0.5})"
    with peers.started([answering(GREETING, answer)], notes.append) as systems:
        assert [system.name for system in systems] == ["stub"]
        [row] = peers.measure(systems, [ROW], 2, quick=False, note=notes.append)
    assert row["systems"]["stub"]["runs"] == [32.0, 32.0]
    assert notes[-1] == "pull, 1 MiB, repetition 2 of 2"


def test_what_is_not_installed_is_left_out() -> None:
    notes: list[str] = []
    with peers.started([answering({"missing": "ray"}, "None")], notes.append) as systems:
        assert systems == []
    assert notes[-1] == "left out: ray is not installed"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("json.dumps({'error': 'out of memory'})", "pull, 1 MiB: out of memory"),
        ("'nonsense'", "gave no answer but 'nonsense"),
        ("sys.exit(1)", "gave no answer but ''"),
        ("__import__('signal').pause()", "gave no answer but ''"),
    ],
)
def test_a_system_that_fails_is_named_and_one_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch, answer: str, said: str
) -> None:
    with System(answering(GREETING, answer)) as system:
        if "pause" in answer:
            monkeypatch.setattr(peers, "LIMIT_S", 0.5)
        with pytest.raises(ConfigurationError, match=said):
            system.measure(ROW, 3)


def test_a_system_that_polls_is_stopped_but_for_its_turns() -> None:
    def wait_stopped() -> None:
        os.waitid(os.P_PID, system.pid, os.WSTOPPED)

    answer = "json.dumps({'done': order['steps'], 'seconds': 0.5})"
    with System(answering(GREETING, answer)) as system:
        system.pause()
        wait_stopped()
        assert system.measure(ROW, 3) == 6.0
        wait_stopped()


def test_ratios_are_those_of_neighbours() -> None:
    compared = peers.compared({"psync": [8.0, 90.0, 10.0], "torch": [2.0, 30.0, 5.0]})
    assert compared["torch"]["ratio"] == 3.0
    assert "ratio" not in compared["psync"]


def _stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before_answer: str = "0") -> list[str]:
    """Let a small program stand in for psync; return the options of a run."""
    greeting = GREETING | {"name": "psync", "works": ["pull", "push"]}
    answer = f"({before_answer}, json.dumps({{'done': order['steps'], 'seconds': 0.5}}))[1]"
    command = answering(greeting, answer)
    monkeypatch.setattr(peers, "commands_of", lambda *_, **__: [command])
    monkeypatch.setattr(peers, "IDLE_S", 0.01)
    return ["bench", "peers", "--only", "psync", "--rows", "1 MiB", "--out", str(tmp_path)]


def test_an_interrupted_run_keeps_its_rows_and_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second row sends Ctrl-C and waits, as a long row does.
    waits = (
        "order['work'] == 'push' and (__import__('os').kill(__import__('os').getppid(), 2), "
        "__import__('time').sleep(60))"
    )
    assert main(_stub(monkeypatch, tmp_path, waits)) == 130
    printed = capsys.readouterr().out
    assert "| pull, 1 MiB, GiB/s |" in printed
    assert f"interrupted: 1 rows are in {tmp_path / 'peers.json'}; --resume" in printed
    again = [*_stub(monkeypatch, tmp_path), "--resume"]
    assert main([*again, "--quick"]) == 2
    assert "resume with the same options" in capsys.readouterr().err
    assert main(again) == 0
    captured = capsys.readouterr()
    assert "measured before: pull, 1 MiB\n" in captured.err
    assert "… pull, 1 MiB, repetition" not in captured.err
    written = json.loads((tmp_path / "peers.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["pull, 1 MiB", "push + SGD, 1 MiB"]
    assert "| push + SGD, 1 MiB, GiB/s |" in (tmp_path / "peers.md").read_text()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_table_has_psync_and_the_floors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "IDLE_S", 0.1)
    arguments = ["--quick", "--rows", "1 MiB", "--scripts", os.fspath(SCRIPTS)]
    assert main(["bench", "peers", *arguments, "--out", str(tmp_path)]) == 0
    assert "| pull, 1 MiB, GiB/s |" in capsys.readouterr().out
    written: dict[str, Any] = json.loads((tmp_path / "peers.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["pull, 1 MiB", "push + SGD, 1 MiB"]
    shared = {"shared memory", "shared memory, no copy"}
    floors = {"raw TCP", "raw Unix sockets", "memcpy"} | shared
    for row, more in zip(written["rows"], (set(), {"arithmetic alone"}), strict=True):
        assert row["systems"].keys() == {"psync"} | floors | more
