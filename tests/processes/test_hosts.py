"""`psync run --hosts`: tasks on other hosts over ssh, with a real sshd on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_program import PSYNC, Program, program
from ssh_hosts import IS_POSSIBLE, WHY_NOT, SshHosts, children_of, command_of, kill
from tasks_by_hand import wait_until_gone

SCRIPT = str(Path(__file__).parent / "scripts" / "asked.py")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not IS_POSSIBLE, reason=WHY_NOT),
]


@pytest.fixture
def hosts() -> Iterator[SshHosts]:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        running = SshHosts(Path(made), "a", "b")
        try:
            yield running
        finally:
            running.stop()


def command(hosts: SshHosts, *args: str, named: str = "a:2,b:2") -> list[str]:
    ssh = ["--ssh", hosts.ssh, "--hosts", named]
    return [*PSYNC, "run", *ssh, *args, "--", SCRIPT]


def connections(run: Program) -> dict[str, int]:
    """The ssh process of each host."""
    found = {}
    for pid in children_of(run.process.pid):
        words = command_of(pid).decode().split("\0")
        if words[0] == "ssh":
            found[words[-3]] = pid
    return found


def descendants(pid: int) -> set[int]:
    """All that a process has started."""
    found = set(children_of(pid))
    return found.union(*(descendants(each) for each in found))


def gone(pids: set[int]) -> None:
    wait_until_gone({str(pid): pid for pid in pids})


# --- a run -------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_tasks_run_on_the_hosts_and_nothing_is_left(
    hosts: SshHosts, environ: dict[str, str]
) -> None:
    with program(command(hosts, "--ps", "2"), environ) as run:
        workers = run.there(4)
        at = [address.partition(":")[0] for address in run.ask("ps").split()]
        assert at == ["127.0.0.2", "127.0.0.3"]
        assert run.ask("add 100") == "begun"
        assert run.line() == "total 100"
        all_of_them = descendants(run.process.pid).union(*map(descendants, hosts.sessions()))
        assert workers < all_of_them
        for pid in all_of_them:
            told = Path(f"/proc/{pid}/environ").read_bytes() + command_of(pid)
            assert b"PSYNC_SECRET=" not in told
        assert set(connections(run)) == {"a", "b"}
        assert run.end()[0] == 0
    gone(all_of_them)


def test_what_tasks_print_has_their_name(hosts: SshHosts, environ: dict[str, str]) -> None:
    done = subprocess.run(
        [*command(hosts, named="a,b"), "--by-name"],
        env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert any(line in ("[worker-0] asked by name", "[worker-1] asked by name") for line in lines)


def test_a_worker_that_is_killed_is_started_again_there(
    hosts: SshHosts, environ: dict[str, str]
) -> None:
    with program(command(hosts), environ) as run:
        before = run.there(4)
        assert run.ask("add 400") == "begun"
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        assert "was killed by SIGKILL and is started again" in run.wait_for_error("SIGKILL")
        assert run.line() == "total 400"
        assert before - run.there(4) == {killed}
        assert run.end()[0] == 0


def test_a_run_is_scaled_within_the_room_that_hosts_have(
    hosts: SshHosts, environ: dict[str, str]
) -> None:
    def scale(number: int) -> subprocess.CompletedProcess[str]:
        asked = [*PSYNC, "scale", str(number)]
        return subprocess.run(asked, env=environ, capture_output=True, text=True, check=False)

    with program(command(hosts, "--workers", "1"), environ) as run:
        (first,) = run.there(1)
        assert scale(4).returncode == 0
        assert first in run.there(4)
        full = scale(5)
        assert full.returncode == 2
        assert "5 workers, but a:2,b:2 has room for 4" in full.stderr
        assert scale(2).returncode == 0
        assert first in run.there(2)
        assert scale(3).returncode == 0
        run.there(3)
        assert run.end()[0] == 0


def test_a_worker_joins_a_run_on_hosts(hosts: SshHosts, environ: dict[str, str]) -> None:
    environ = {**environ, "PSYNC_SECRET": "a secret of some thirty-two bytes"}
    with program(command(hosts), environ) as run:
        assert f"psync join {run.greeting}" in run.wait_for_error("workers may join")
        joined = subprocess.Popen([*PSYNC, "join", run.greeting], env=environ)
        assert joined.pid in run.there(5)
        joined.terminate()
        assert joined.wait() == 0
        run.there(4)
        assert run.end()[0] == 0


def test_tasks_on_hosts_have_tls_where_it_is_configured(
    hosts: SshHosts, environ: dict[str, str], tmp_path: Path
) -> None:
    made = subprocess.run(
        [*PSYNC, "certs", "new", "--out", str(tmp_path), "--hosts", "127.0.0.2,127.0.0.3"],
        env=environ, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    tls = dict(re.findall(r"^export (\w+)=(.*)$", made, re.MULTILINE))
    environ = {**environ, **tls, "PSYNC_SECRET": "a secret of some thirty-two bytes"}
    with program(command(hosts), environ) as run:
        run.there(4)
        ssh = connections(run)["a"]
        assert b"PSYNC_SECRET" not in Path(f"/proc/{ssh}/environ").read_bytes()
        without = {name: text for name, text in environ.items() if name not in tls}
        said = subprocess.run(
            [*PSYNC, "join", run.greeting], env=without, capture_output=True, text=True, check=False
        )
        assert said.returncode == 2
        assert "TLS" in said.stderr
        joined = subprocess.Popen([*PSYNC, "join", run.greeting], env=environ)
        assert joined.pid in run.there(5)
        assert run.end()[0] == 0
        assert joined.wait() == 0


# --- who dies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ssh", "session", "sshd"])
def test_a_host_whose_connection_is_cut_comes_back(
    hosts: SshHosts, environ: dict[str, str], how: str
) -> None:
    with program(command(hosts), environ) as run:  # the only ps is on a
        before = run.there(4)
        (on_b,) = (each for each in hosts.sessions() if not _has_ps(each))
        lost = descendants(on_b) & before
        assert len(lost) == 2
        assert run.ask("add 600") == "begun"
        if how == "ssh":
            os.kill(connections(run)["b"], signal.SIGKILL)
        else:
            for pid in [on_b, *children_of(on_b)]:
                if b"sshd" in command_of(pid):
                    kill(pid)
        if how == "sshd":
            hosts.pause()
        assert "its tasks end" in run.wait_for_error("the connection to host b is lost")
        gone(lost)
        if how == "sshd":
            hosts.start()
        run.wait_for_error("host b is connected again")
        assert run.line() == "total 600"
        after = run.there(4)
        assert before & after == before - lost
        assert run.end()[0] == 0
    gone(after)


def _has_ps(session: int) -> bool:
    return any(b"task" in command_of(pid) for pid in descendants(session))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_end_with_the_launcher(hosts: SshHosts, environ: dict[str, str], signum: int) -> None:
    with program(command(hosts), environ) as run:
        run.there(4)
        all_of_them = descendants(run.process.pid).union(*map(descendants, hosts.sessions()))
        code = run.interrupt(signum)
        assert code == (-signum if signum == signal.SIGKILL else 128 + signum)
    gone(all_of_them)
