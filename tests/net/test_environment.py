"""What a task's platform takes from environment variables, and what it says if they are wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import socket
from pathlib import Path

import pytest

import psync
from psync.errors import ConfigurationError
from psync.net.environment import SETTINGS, misspelt_settings, platform_of
from psync.net.platform import Platform, watchdog_timeout
from psync.net.shared.doors import shares_memory
from psync.net.tls import TlsNetwork
from psync.net.transport import Network
from psync.testing import MemoryNetwork
from psync.testing.sabotage import failpoints_of
from psync.testing.seams import fresh_process
from psync.wire.limits import Limits
from recorder import Recorder
from tls_files import authority, variables_of

SECRET = "correct horse battery staple"
LOCAL = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PSYNC_"):
            monkeypatch.delenv(name)


def resolver() -> psync.SimpleClusterResolver:
    return psync.SimpleClusterResolver(psync.ClusterSpec({"ps": [LOCAL]}))


def test_the_secret_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSYNC_SECRET", SECRET)
    platform = platform_of(resolver(), LOCAL)
    assert platform.secret is not None
    assert platform.secret.value == SECRET.encode()
    assert platform.limits == Limits()


def test_without_a_secret_nothing_runs() -> None:
    with pytest.raises(ConfigurationError) as caught:
        platform_of(resolver(), LOCAL)
    assert caught.value.message == (
        f"no secret is set, so every user of this machine could run code on this task ({LOCAL})"
    )
    assert caught.value.hint is not None
    assert "PSYNC_SECRET_FILE" in caught.value.hint


@pytest.mark.parametrize("way", ["argument", "variable"])
def test_running_without_a_secret_is_said_to_be_what_it_is(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    if way == "variable":
        monkeypatch.setenv("PSYNC_INSECURE", "1")
    platform = platform_of(resolver(), "192.0.2.1:9", insecure=way == "argument", warn=said.append)
    assert platform.secret is None
    assert said == [
        "running without a secret: everybody who can reach it can run code on this task "
        "(192.0.2.1:9)"
    ]


def test_a_resolver_may_bring_its_platform() -> None:
    own = Platform(MemoryNetwork())
    mine = resolver()
    mine.platform = own  # type: ignore[attr-defined]
    assert platform_of(mine, LOCAL) is own


def test_limits_are_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSYNC_LIMIT_CONNECTIONS", "7")
    limits = platform_of(resolver(), LOCAL, insecure=True).limits
    assert limits.connections == 7
    assert limits.handshakes == Limits().handshakes


def test_every_limit_is_described_with_its_default() -> None:
    described = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
    for field in dataclasses.fields(Limits):
        row = rf"^\| `PSYNC_LIMIT_{field.name.upper()}` \| {field.default}\b"
        assert re.search(row, described, re.MULTILINE), field.name


def test_every_setting_is_described_and_no_other_name_there_is_taken_for_one() -> None:
    described = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
    assert [name for name in SETTINGS if f"`{name}`" not in described] == []
    names = dict.fromkeys(re.findall(r"PSYNC_[A-Z_]+[A-Z]", described), "")
    assert misspelt_settings(names) == {"PSYNC_TLS_CAFILE": "PSYNC_TLS_CA_FILE"}  # its example
    of_services = {"PSYNC_SERVICE_HOST": "10.0.0.1", "PSYNC_0_PORT": "tcp://10.0.0.1:8470"}
    assert misspelt_settings(of_services) == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PSYNC_SHARED_MEMRY", "PSYNC_SHARED_MEMORY"),
        ("PSYNC_TLS_CAFILE", "PSYNC_TLS_CA_FILE"),
        ("PSYNC_LIMIT_CONNECTION", "PSYNC_LIMIT_CONNECTIONS"),
    ],
)
def test_a_misspelt_setting_is_said(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "0")
    said = f"{name} is not a psync variable; did you mean {meant}?"
    with fresh_process():
        for _ in range(2):
            platform_of(resolver(), LOCAL, insecure=True)
        assert caplog.messages.count(said) == 1


def test_failpoints_are_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSYNC_FAILPOINTS", "ps.push.applied=error")
    platform = platform_of(resolver(), LOCAL, insecure=True)
    assert failpoints_of(platform).hits == {"ps.push.applied": 0}


def test_certificates_are_the_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, path in variables_of(tmp_path / "certs", authority()).items():
        monkeypatch.setenv(name, path)
    assert isinstance(platform_of(resolver(), LOCAL, insecure=True).network, TlsNetwork)
    monkeypatch.setenv("PSYNC_TLS_KEY_FILE", "/nowhere/key.pem")
    with pytest.raises(ConfigurationError, match=r"PSYNC_TLS_KEY_FILE \(/nowhere/key.pem\)"):
        platform_of(resolver(), LOCAL, insecure=True)


def test_certificates_do_not_take_the_secrets_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, path in variables_of(tmp_path / "certs", authority()).items():
        monkeypatch.setenv(name, path)
    with pytest.raises(ConfigurationError, match="no secret is set"):
        platform_of(resolver(), LOCAL)


# --- shared memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "shares"), [(None, True), ("1", True), ("0", False)])
async def test_tasks_of_one_host_share_memory_unless_it_is_switched_off(
    text: str | None, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        monkeypatch.setenv("PSYNC_SHARED_MEMORY", text)
    assert shares_memory(os.environ) is shares
    platform = platform_of(resolver(), LOCAL, insecure=True)
    assert await doors_beside(platform.network) == shares


@pytest.mark.parametrize("text", ["2", "yes", "true", " 1", "01"])
def test_another_word_than_0_or_1_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSYNC_SHARED_MEMORY", text)
    with pytest.raises(ConfigurationError) as caught:
        platform_of(resolver(), LOCAL, insecure=True)
    assert caught.value.message == f"PSYNC_SHARED_MEMORY: expected 0 or 1, got {text!r}"


async def test_under_tls_nothing_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PSYNC_SHARED_MEMORY", "1")
    for name, path in variables_of(tmp_path / "certs", authority()).items():
        monkeypatch.setenv(name, path)
    assert await doors_beside(platform_of(resolver(), LOCAL, insecure=True).network) == 0


def test_a_system_that_cannot_share_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert not shares_memory({})
    assert not shares_memory({"PSYNC_SHARED_MEMORY": "1"})


async def doors_beside(network: Network) -> int:
    """How many doors there are beside an address of this network."""
    listener = await network.listen("127.0.0.1:0", Recorder)
    sockets = Path("/proc/net/unix").read_text().splitlines()
    count = sum(line.endswith(f"/{listener.address}") and " @psync/" in line for line in sockets)
    listener.close()
    await listener.wait_closed()
    return count


# --- the socket of a launcher ------------------------------------------------------------------


async def test_a_task_that_listens_gets_the_launchers_socket_and_owns_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    number = listening.detach()
    os.set_inheritable(number, True)
    monkeypatch.setenv("PSYNC_LISTEN_FD", str(number))
    platform_of(resolver(), address, insecure=True)  # does not listen: leaves it alone
    network = platform_of(resolver(), address, insecure=True, listens=True).network
    assert not os.get_inheritable(number)
    assert "PSYNC_LISTEN_FD" not in os.environ

    def refuse() -> asyncio.BufferedProtocol:
        raise AssertionError

    listener = await network.listen(address, refuse)
    listener.close()
    await listener.wait_closed()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


@pytest.mark.parametrize("number", ["none", "999"])
def test_a_number_that_is_no_socket_is_an_error(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_LISTEN_FD", number)
    expected = f"PSYNC_LISTEN_FD: expected an open socket's number, got '{number}'"
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        platform_of(resolver(), LOCAL, insecure=True, listens=True)


def test_the_watchdogs_timeout_is_the_environments() -> None:
    for environ, seconds in [
        ({}, None),
        ({"PSYNC_WATCHDOG_TIMEOUT": "90"}, 90.0),
        ({"PSYNC_WATCHDOG_TIMEOUT": "0"}, None),
        ({"TF_CLUSTER_COORDINATOR_WATCH_DOG_TIMEOUT": "1.5"}, 1.5),
        ({"TF_CLUSTER_COORDINATOR_WATCH_DOG_TIMEOUT": "-1"}, None),
        ({"PSYNC_WATCHDOG_TIMEOUT": "0", "TF_CLUSTER_COORDINATOR_WATCH_DOG_TIMEOUT": "9"}, None),
    ]:
        assert watchdog_timeout(environ) == seconds
