"""TLS between tasks: who gets in, who does not, and what both sides say of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from endpoints import (
    PS,
    WORKER,
    Handlers,
    connected,
    done,
    is_deserted,
    new_endpoint,
    transport_of,
    wait_deserted,
)
from psync.errors import AuthenticationError, ConfigurationError, ConnectFailed, PsyncError
from psync.net.certificates import Tls, load_tls
from psync.net.connection import Handler
from psync.net.signing import Authority
from psync.net.tls import TlsNetwork
from psync.net.transport import Network, SocketNetwork
from psync.testing import MemoryNetwork, settle
from psync.wire.messages import AskStatistics, Done
from recorder import Recorder
from tls_files import authority, tls_of, variables_of, without_certificate

pytestmark = pytest.mark.usefixtures("closed_at_the_end")

SERVED: Handlers = {AskStatistics: Handler(done)}


@pytest.fixture(scope="module")
def signer() -> Authority:
    return authority()


@pytest.fixture
def tls(signer: Authority, tmp_path: Path) -> Tls:
    return tls_of(tmp_path / "certs", signer)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


async def refused(server: Network, client: Network, address: str = "ps0:1") -> PsyncError:
    """What a worker is told that cannot get in; nothing of it may be left."""
    ps, worker = new_endpoint(server, PS, SERVED), new_endpoint(client, WORKER)
    listener = await ps.listen(address)
    with pytest.raises(PsyncError) as caught:
        await worker.connect_retrying(listener.address, PS, timeout_s=10)
    await wait_deserted(ps)
    await worker.close()
    await ps.close()
    return caught.value


# --- who gets in -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["tcp", "name", "unix", "memory"])
@pytest.mark.parametrize("mutual", [True, False])
async def test_tasks_find_each_other(
    place: str, mutual: bool, signer: Authority, tmp_path: Path
) -> None:
    below: Network = MemoryNetwork() if place == "memory" else SocketNetwork()
    address = {
        "tcp": "127.0.0.1:0",
        "name": "localhost:0",
        "unix": f"unix:{tmp_path}/ps0",
        "memory": "ps0:1",
    }[place]
    network = TlsNetwork(below, tls_of(tmp_path / "certs", signer, mutual=mutual))
    async with connected(network, SERVED, address=address) as pair:
        assert (pair.peer.task, pair.back.task) == (PS, WORKER)
        assert (await pair.peer.call(AskStatistics())).message == Done()
        seen = [
            transport_of(peer).get_extra_info("channel_binding") for peer in (pair.peer, pair.back)
        ]
        assert seen[0] == seen[1] != b""
        tls = transport_of(pair.peer).get_extra_info("ssl_object")
        assert tls.version() == "TLSv1.3"


async def test_a_task_without_a_certificate_cannot_listen(
    signer: Authority, tmp_path: Path
) -> None:
    environ = variables_of(tmp_path / "certs", signer)
    bare = load_tls({"PSYNC_TLS_CA_FILE": environ["PSYNC_TLS_CA_FILE"], "PSYNC_TLS_MUTUAL": "0"})
    assert bare is not None
    ps = new_endpoint(TlsNetwork(SocketNetwork(), bare))
    with pytest.raises(ConfigurationError, match="needs its own certificate"):
        await ps.listen("127.0.0.1:0")


async def test_a_name_that_no_certificate_can_bear_is_an_error(tls: Tls) -> None:
    worker = new_endpoint(TlsNetwork(MemoryNetwork(), tls), WORKER)
    below = MemoryNetwork()
    listener = await below.listen(".ps0:1", asyncio.BufferedProtocol)
    worker.platform = dataclasses.replace(worker.platform, network=TlsNetwork(below, tls))
    with pytest.raises(ConfigurationError, match=r"address '\.ps0:1'"):
        await worker.connect(".ps0:1", PS)
    listener.close()


# --- who does not, and what both sides say ------------------------------------------------------

PLACES = pytest.mark.parametrize("place", ["memory", "tcp"])


def both(place: str) -> tuple[Network, Network, str]:
    """The network of the ps, that of the worker, and an address."""
    below = MemoryNetwork()
    return (
        (below, below, "ps0:1")
        if place == "memory"
        else (SocketNetwork(), SocketNetwork(), "127.0.0.1:0")
    )


Tasks = Callable[[Path, Authority], tuple[Tls | None, Tls | None]]


def of_another_authority(directory: Path, signer: Authority) -> tuple[Tls, Tls]:
    own = tls_of(directory / "own", signer)
    return tls_of(directory / "other", authority(), trusts=signer), own


def without_any(directory: Path, signer: Authority) -> tuple[Tls, Tls]:
    environ = variables_of(directory, signer)
    tls = load_tls(environ)
    assert tls is not None
    return without_certificate(environ), tls


def signed_between(first: float, last: float) -> Tasks:
    return lambda directory, _: (tls_of(directory, authority(first, last)),) * 2


@PLACES
@pytest.mark.parametrize(
    ("tasks", "told", "hint", "warning"),
    [
        pytest.param(
            of_another_authority,
            r"the certificate of \S+ is refused: (unable to get local issuer certificate|"
            r"self-signed certificate in certificate chain|certificate signature failure)",
            "PSYNC_TLS_CA_FILE",
            r"the peer refuses the certificate of this task: (unknown ca|decrypt error)",
            id="a server of another authority",
        ),
        pytest.param(
            lambda *args: of_another_authority(*args)[::-1],
            r".*refuses the certificate of this task: (unknown ca|decrypt error)$",
            "",
            r"the certificate of the peer is refused: ",
            id="a client of another authority",
        ),
        pytest.param(
            lambda *args: without_any(*args)[::-1],
            r".* requires a certificate, but this task has none$",
            "",
            r"the peer presents no certificate \(set PSYNC_TLS_CA_FILE, ",
            id="a client without a certificate",
        ),
        pytest.param(
            signed_between(-3, -1), r".* is refused: certificate has expired$", "clock", "",
            id="a certificate of yesterday",
        ),
        pytest.param(
            signed_between(1, 3),
            r".* is refused: certificate is not yet valid( or .*)?$",  # so newer OpenSSL
            "clock", "",
            id="a certificate of tomorrow",
        ),
        pytest.param(
            lambda *args: (tls_of(*args), None),
            r"the peer refused the connection: it uses TLS, but this task does not$",
            "^set PSYNC_TLS_CA_FILE, ",
            r"the peer does not use TLS, but this task does \(set PSYNC_TLS_CA_FILE, ",
            id="a client without TLS",
        ),
        pytest.param(
            lambda *args: (None, tls_of(*args)),
            r"\S+ does not use TLS, but this task does$",
            "",
            r"the peer uses TLS, but this task does not \(set PSYNC_TLS_CA_FILE, ",
            id="a server without TLS",
        ),
    ],
)  # fmt: skip
async def test_who_does_not_fit_is_refused_and_both_sides_say_why(
    place: str, tasks: Tasks, told: str, hint: str, warning: str,
    signer: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    server, client, address = both(place)
    ours, theirs = tasks(tmp_path / "certs", signer)
    error = await refused(
        TlsNetwork(server, ours) if ours is not None else server,
        TlsNetwork(client, theirs) if theirs is not None else client,
        address,
    )
    assert type(error) is AuthenticationError
    assert re.match(told, error.message)
    assert re.search(hint, error.hint or "")
    (warned,) = warnings_of(caplog)
    assert re.match(rf"{PS} lost a stranger \(.*\): {warning}", warned)


@PLACES
async def test_a_certificate_for_another_host_is_refused(
    place: str, signer: Authority, tmp_path: Path
) -> None:
    server, client, address = both(place)
    tls = tls_of(tmp_path / "certs", signer, ["ps1.example.org", "192.0.2.7"])
    error = await refused(TlsNetwork(server, tls), TlsNetwork(client, tls), address)
    assert type(error) is AuthenticationError
    told = (
        "hostname mismatch, certificate is not valid for 'ps0'"
        if place == "memory"
        else "iP address mismatch, certificate is not valid for '127.0.0.1'"
    )
    assert error.message.lower().endswith(f" is refused: {told}".lower())
    assert error.hint is not None
    assert "psync certs new --hosts" in error.hint


@PLACES
@pytest.mark.parametrize("hosts", [["worker7.example.org"], None], ids=["another host", "none"])
async def test_a_client_is_known_by_its_secret_and_not_by_its_certificate(
    place: str, hosts: list[str] | None, signer: Authority, tmp_path: Path
) -> None:
    """Its name proves nothing, as SECURITY.md says: the secret does."""
    server, client, address = both(place)
    environ = variables_of(tmp_path / "ps", signer)
    tls = load_tls({**environ, "PSYNC_TLS_MUTUAL": "1" if hosts else "0"})
    assert tls is not None
    ps = new_endpoint(TlsNetwork(server, tls), PS, SERVED)
    if hosts is None:  # nor is one demanded
        shown = without_certificate(environ)
    else:
        shown = tls_of(tmp_path / "worker", signer, hosts)
    worker = new_endpoint(TlsNetwork(client, shown), WORKER)
    listener = await ps.listen(address)
    peer = await worker.connect(listener.address, PS)
    assert (await peer.call(AskStatistics())).message == Done()


# --- in between ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def relay(tls: Tls, to: str) -> AsyncIterator[str]:
    """Somebody who ends TLS on both sides, with a certificate of his own, and passes all on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = to.rsplit(":", 1)
        there, back = await asyncio.open_connection(
            host, int(port), ssl=tls.client, server_hostname=host
        )

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65_536):
                    passed.append(data)
                    target.write(data)
                    await target.drain()
            target.close()

        await asyncio.gather(copy(reader, back), copy(there, writer))
        for each in (writer, back):
            with contextlib.suppress(OSError):
                await each.wait_closed()
        gone.set()

    passed: list[bytes] = []
    gone = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls.server)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await gone.wait()
        assert b"".join(passed).count(b"PSYN") >= 2  # greeting and challenge came through
    finally:
        server.close()


@pytest.mark.promise("security.tls")
async def test_whoever_relays_the_handshake_with_another_good_certificate_is_found_out(
    signer: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TLS alone accepts him: the same authority has signed his certificate for this host."""
    ps = new_endpoint(TlsNetwork(SocketNetwork(), tls_of(tmp_path / "ps", signer)), PS, SERVED)
    worker = new_endpoint(TlsNetwork(SocketNetwork(), tls_of(tmp_path / "w", signer)), WORKER)
    listener = await ps.listen("127.0.0.1:0")
    async with relay(tls_of(tmp_path / "relay", signer), listener.address) as between:
        connecting = asyncio.create_task(worker.connect(between, PS))
        await asyncio.wait([connecting])
        error = connecting.exception()
        if error is None:
            await worker.close()
    if error is not None:
        assert (await worker.connect(listener.address, PS)).is_open  # without him
    await worker.close()
    await ps.close()
    assert isinstance(error, AuthenticationError)
    assert error.message == (
        f"{PS} does not have the same secret as this task, or somebody between the two ends its TLS"
    )


async def test_a_relay_with_the_servers_own_key_is_the_server(
    signer: Authority, tmp_path: Path
) -> None:
    """What the key is for: the test above fails because of the certificate and nothing else."""
    own = tls_of(tmp_path / "ps", signer)
    ps = new_endpoint(TlsNetwork(SocketNetwork(), own), PS, SERVED)
    worker = new_endpoint(TlsNetwork(SocketNetwork(), tls_of(tmp_path / "w", signer)), WORKER)
    listener = await ps.listen("127.0.0.1:0")
    async with relay(own, listener.address) as between:
        assert (await worker.connect(between, PS)).is_open
        await worker.close()


# --- strangers -------------------------------------------------------------------------------


@pytest.mark.virtual_time
@pytest.mark.parametrize("words", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00"])
async def test_a_stranger_who_does_not_go_on_is_left_after_the_deadline(
    words: bytes, tls: Tls
) -> None:
    below = MemoryNetwork()
    ps = new_endpoint(TlsNetwork(below, tls))
    await ps.listen("ps0:1")

    await below.connect("ps0:1", lambda: Recorder(words))
    await settle()
    assert ps.statistics()["handshakes"] == 1
    await asyncio.sleep(5.1)
    assert is_deserted(ps)
    assert not below.links()


@pytest.mark.virtual_time
async def test_a_server_that_does_not_go_on_is_left_after_the_deadline(tls: Tls) -> None:
    below = MemoryNetwork()
    listener = await below.listen("ps0:1", Recorder)
    worker = new_endpoint(TlsNetwork(below, tls), WORKER)
    with pytest.raises(ConnectFailed, match="no answer within 5 s"):
        await worker.connect("ps0:1", PS)
    listener.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.virtual_time
async def test_either_side_may_go_in_the_middle_of_a_handshake(seed: int, tls: Tls) -> None:
    for delay in [step / 100 for step in range(0, 40, 3)]:
        for side in (0, 1):
            below = MemoryNetwork(seed, latency=(0.01, 0.05), chunk=(1, 300))
            network = TlsNetwork(below, tls)
            ps, worker = new_endpoint(network), new_endpoint(network, WORKER)
            await ps.listen("ps0:1")
            connecting = asyncio.create_task(worker.connect("ps0:1", PS))
            await asyncio.sleep(delay)
            await (ps, worker)[side].close()
            await asyncio.wait([connecting])
            assert connecting.exception() is None or isinstance(connecting.exception(), PsyncError)
            await worker.close()
            await ps.close()
            await asyncio.sleep(2)
            assert not below.links()
            assert is_deserted(ps)
            assert is_deserted(worker)
