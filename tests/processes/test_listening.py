"""Nothing listens where others reach it, unless its own address says so, and with a secret."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from listening import descendants, listening
from ports import claimed_ports
from real_training import training
from tasks_by_hand import SERVE, by_hand, plain_environ, script, wait_for_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def own_address() -> str | None:
    """An address of this machine that is not a loopback one, if it has any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.99", 9))  # sends nothing
            address: str = probe.getsockname()[0]
            return None if address.startswith("127.") else address
    return None


def test_the_kernel_is_understood() -> None:
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)):
        assert listening({os.getpid()}) == {"127.0.0.1", "0.0.0.0"}


def test_a_run_with_an_evaluator_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    options = ("--ps", "2", "--workers", "2", "--evaluator")
    program = script("evaluated.py", "--", str(tmp_path / "checkpoints"))
    with subprocess.Popen(
        [sys.executable, "-m", "psync", "run", *options, *program],
        env=plain_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as run:
        try:
            assert run.stdin is not None
            run.stdin.write("save\n")
            run.stdin.flush()
            wait_for_line(run, "[evaluator-0] found ", "stdout")  # everybody has worked by then
            processes = descendants(run.pid)
            assert len(processes) == 1 + 1 + 2 + 2 + 1
            assert listening(processes) == {"127.0.0.1"}
        finally:
            run.terminate()


def test_a_local_cluster_listens_on_the_loopback_address_alone() -> None:
    async def look() -> set[str]:
        async with training(1, 1) as (_, _, _):
            return listening(descendants(os.getpid()))

    assert asyncio.run(look()) == {"127.0.0.1"}


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_task_listens_on_its_own_address_alone_and_not_without_a_secret(job: str) -> None:
    host = own_address()
    if host is None:
        pytest.skip("this machine has no other address than its loopback one")
    with claimed_ports(1, host) as (port,), by_hand() as cluster:
        cluster.cluster[job] = [f"{host}:{port}"]
        refused = cluster.run(job, 0, SERVE, secret=None)
        assert refused.code == 2
        assert "everybody who can reach it could run code on this task" in refused.err
        task = cluster.start(job, 0)
        wait_for_line(task, " serves at ")
        assert listening({task.pid}) == {host}
