"""Which task runs on which host. Whole runs: tests/processes/test_hosts.py."""

from __future__ import annotations

import asyncio

import pytest

from psync.errors import ConfigurationError
from psync.launch.hosts import HostsPlan, connect_all, parse_hosts
from psync.launch.remote_host import RemoteHost


@pytest.mark.parametrize(
    ("text", "slots"),
    [("a", {"a": 1}), ("a:2, user@b:3", {"a": 2, "user@b": 3}), ("10.0.0.1:4", {"10.0.0.1": 4})],
)
def test_hosts_are_named_with_their_room(text: str, slots: dict[str, int]) -> None:
    assert parse_hosts(text) == slots


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "expected names with numbers of workers, as in a:2,b:2, got ''"),
        ("a,,b", "expected names"),
        ("-oProxyCommand=x", "expected names"),  # or ssh would take it for an option
        ("a b", "expected names"),
        ("a:0", "expected a number of workers above 0 after a:, got '0'"),
        ("a:-1", "expected a number of workers above 0"),
        ("a:1,a:1", "a is named twice"),
        ("a:1,b:1048576", "expected at most 1048576 workers, got 'a:1,b:1048576'"),
        (f"a:{'9' * 5000}", "expected at most 1048576 workers"),
    ],
)
def test_what_names_no_hosts_is_an_error(text: str, error: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_hosts(text)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("ssh", "error"),
    [
        ("", "ssh: expected a command, got ''"),
        (" ", "ssh: expected a command, got ' '"),
        ("ssh 'x", 'ssh: "ssh \'x" is not a command: No closing quotation'),
    ],
)
def test_an_ssh_that_is_no_command_is_an_error(ssh: str, error: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        HostsPlan({"a": 1}, ssh)
    assert str(caught.value) == error


def test_workers_fill_one_host_after_the_other_and_ps_tasks_are_dealt_out() -> None:
    plan = HostsPlan({"a": 2, "b": 1})
    assert [plan.place("worker", index) for index in range(3)] == [("a", 0), ("a", 1), ("b", 0)]
    assert [plan.place("ps", index)[0] for index in range(3)] == ["a", "b", "a"]
    plan.check(3)
    with pytest.raises(ConfigurationError, match="4 workers, but a:2,b:1 has room for 3"):
        plan.check(4)


def test_tasks_there_get_what_is_psyncs_and_what_is_named_but_no_secret() -> None:
    environ = {
        "PSYNC_SECRET": "x", "PSYNC_SECRET_FILE": "x", "PSYNC_LISTEN_FD": "3",
        "PSYNC_LOOP": "asyncio",
        "PYTHONPATH": "/src", "OMP_NUM_THREADS": "4", "HOME": "/root", "HF_HOME": "/models",
    }  # fmt: skip
    forwarded = HostsPlan({"a": 1}, variables=["HF_HOME", "NOT_SET"]).environ(environ)
    assert forwarded == {
        "PSYNC_LOOP": "asyncio", "PYTHONPATH": "/src", "OMP_NUM_THREADS": "4", "HF_HOME": "/models",
    }  # fmt: skip


class Reached(RemoteHost):
    """A host that is there at once."""

    async def connect(self) -> None:
        await asyncio.sleep(0)
        self.address = self.name


async def test_hosts_that_cannot_reach_each_other_are_refused() -> None:
    def host(address: str) -> RemoteHost:
        return Reached(address, ["ssh"], "python3", {}, "", print, print, print)

    await connect_all([host("127.0.0.2"), host("127.0.0.3")])
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.2 is this machine"):
        await connect_all([host("127.0.0.2"), host("10.0.0.3")])
