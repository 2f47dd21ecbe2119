"""TLS between real processes: clusters that train with it, and those that cannot."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import psync
from real_training import ONE_LOOP
from tasks_by_hand import (
    SERVE,
    Ended,
    by_hand,
    ended,
    interrupt,
    plain_environ,
    psync_run,
    script,
    wait_for_line,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]

Certs = dict[str, str]


@pytest.fixture(scope="module")
def make_certs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Certs]:
    """Call psync certs new; return the variables that it prints."""

    def make(*args: str) -> Certs:
        out = tmp_path_factory.mktemp("tls") / "certs"
        made = subprocess.run(
            [sys.executable, "-m", "psync", "certs", "new", "--out", str(out), *args],
            env=plain_environ(),
            capture_output=True,
            text=True,
            check=True,
        )
        return dict(re.findall(r"^export (\w+)=(.*)$", made.stdout, re.MULTILINE))

    return make


@pytest.fixture(scope="module")
def certs(make_certs: Callable[..., Certs]) -> Certs:
    return make_certs()


def run(environ: Certs, *args: str) -> Ended:
    return ended(psync_run(*args, *script("steps.py", "--", "counts"), **environ))


# --- with TLS --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["variables", "options", "not mutual", "asyncio"])
def test_a_run_trains_with_certificates_of_psync_certs_new(way: str, certs: Certs) -> None:
    options: list[str] = []
    environ = dict(certs)
    if way == "options":
        environ = {}
        for name, path in certs.items():
            options += ["--" + name.removeprefix("PSYNC_").lower().replace("_", "-"), path]
    elif way == "not mutual":
        options = ["--no-tls-mutual"]
    elif way == "asyncio":
        environ["PSYNC_LOOP"] = "asyncio"
    end = run(environ, *options)
    assert (end.code, end.out) == (0, "40.0 [40.0, 40.0, 40.0]\n"), end.err
    assert "TLS" not in end.err


@pytest.mark.smoke
def test_tasks_started_by_hand_train_and_a_chief_without_tls_is_told(certs: Certs) -> None:
    with by_hand() as cluster:
        serving = [
            cluster.start(job, 0, (*SERVE, "--log-level", "debug"), environ=certs)
            for job in ("ps", "worker")
        ]
        for task in serving:
            wait_for_line(task, " serves at ")
        plain = cluster.run("chief", 0, script("idle.py"))
        assert plain.code == 2
        assert "Traceback" not in plain.err
        assert (
            "psync: error: the peer refused the connection: it uses TLS, but this task does not"
            in (plain.err)
        )
        assert "hint: set PSYNC_TLS_CA_FILE, PSYNC_TLS_CERT_FILE and " in plain.err
        good = cluster.run("chief", 0, script("steps.py", "counts"), environ=certs)
        assert good.code == 0, good.err
        texts = [ended(task) for task in serving]
        assert [text.code for text in texts] == [0, 0]
        said = "".join(text.err for text in texts)
        assert "the peer does not use TLS, but this task does" in said
        assert "Traceback" not in said


def test_tasks_without_tls_and_a_chief_with_it_are_told(certs: Certs) -> None:
    with by_hand() as cluster:
        serving = cluster.serve_all()
        chief = cluster.run("chief", 0, script("idle.py"), environ=certs)
        assert chief.code == 2
        assert "Traceback" not in chief.err
        assert re.search(
            r"psync: error: 127\.0\.0\.1:\d+ does not use TLS, but this task does", chief.err
        )
        said = "".join(interrupt(task).err for task in serving)
        assert "the peer uses TLS, but this task does not" in said
        assert "Traceback" not in said


def temporary_directories() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("psync-tls-*"))


async def read_on(cluster: psync.LocalCluster) -> list[float]:
    """What a worker of the cluster reads of a variable."""
    strategy = psync.ParameterServerStrategy(cluster.resolver)
    network = cluster.resolver.platform.network
    assert type(network).__name__ == "TlsNetwork"
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            v = psync.Variable([1.0, 2.0])

        async def step() -> list[float]:
            return [float(x) for x in await v.read()]

        fetched: list[float] = await coordinator.schedule(step)
        return fetched


@ONE_LOOP
async def test_a_local_cluster_makes_its_own_certificates_and_removes_them() -> None:
    before = temporary_directories()
    async with psync.LocalCluster(1, 1, security=True) as cluster:
        (directory,) = temporary_directories() - before
        assert directory.stat().st_mode & 0o077 == 0
        assert await read_on(cluster) == [1.0, 2.0]
    assert temporary_directories() == before


@ONE_LOOP
async def test_a_local_cluster_uses_the_certificates_of_its_environment(
    certs: Certs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in certs.items():
        monkeypatch.setenv(name, path)
    async with psync.LocalCluster(1, 1) as cluster:
        assert await read_on(cluster) == [1.0, 2.0]


# --- without what TLS needs ------------------------------------------------------------------


@pytest.mark.promise("security.tls")
def test_a_chief_with_certificates_of_another_authority_is_told(
    certs: Certs, make_certs: Callable[..., Certs]
) -> None:
    with by_hand() as cluster:
        ps = cluster.start("ps", 0, SERVE, environ=certs)
        wait_for_line(ps, " serves at ")
        chief = cluster.run("chief", 0, script("idle.py"), environ=make_certs())
        assert chief.code == 2
        assert "Traceback" not in chief.err
        assert re.search(
            r"psync: error: the certificate of 127\.0\.0\.1:\d+ is refused: ", chief.err
        )
        said = interrupt(ps).err
        assert "the peer refuses the certificate of this task: " in said
        assert "Traceback" not in said
