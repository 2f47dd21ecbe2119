"""A layer of TLS between any transport and the wire protocol.

``TlsChannel`` is a protocol for the transport below, and a transport for the protocol above. The
protocol above is connected as soon as the one below is: what it writes waits until TLS is up, and
the reason that TLS is not comes with its ``connection_lost``. So deadlines, and how many
connections may be at their beginning, are its business as without TLS. ``TlsNetwork`` puts a
channel on each connection of another network.

asyncio and uvloop have TLS, too. Theirs does not report a connection that failed before TLS was up,
so nothing could be counted; closes it before the peer has read the reason; and needs sockets, while
this runs in virtual time. Both do for each record what is done here.

What is wrong before TLS is up (no TLS on one side, a certificate of another authority, for another
host or too old) is an AuthenticationError on the side that connects, which is final, and a line in
the log of the other. A failed peer has a second to read the reason before the socket is closed.

What is encrypted waits as it was given, and is encrypted piece by piece when there is room below:
as with other transports, memory must not change until the transport has let go of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Any

from psync.cluster import split_address
from psync.errors import AuthenticationError, ConfigurationError, ConnectionLost, PsyncError
from psync.net.certificates import CA_FILE, HOW_TO_MAKE_THEM, Tls, words_of
from psync.net.transport import Factory, Listener, Network
from psync.wire.codec import encode
from psync.wire.frames import SAME_TLS, Kind, encode_head
from psync.wire.messages import Refused

_SAME_CA = f"all tasks must trust the authority that signed this certificate: {CA_FILE}"
_HINTS = {  # by OpenSSL's number of what is wrong with a certificate
    9: "check the clocks of both machines",  # not yet valid
    10: "create new ones for all tasks: psync certs new; or check the clocks",  # expired
    62: "it must name the host as the cluster's description does: psync certs new --hosts …",
    64: "it must name the address as the cluster's description does: psync certs new --hosts …",
}


def refusal_of(error: ssl.SSLError, who: str) -> AuthenticationError:
    """Say who refuses whom, and why, when TLS has not come up.

    Args:
        error: What OpenSSL says.
        who: What to call the peer.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        why = words_of(error).rstrip(".")
        return AuthenticationError(
            f"the certificate of {who} is refused: {why[:1].lower()}{why[1:]}",
            hint=_HINTS.get(error.verify_code, _SAME_CA),
        )
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return AuthenticationError(f"{who} presents no certificate", hint=SAME_TLS)
    alert = re.search(r"ALERT_(\w+)", error.reason or "")
    if alert is None:
        return AuthenticationError(f"TLS with {who} failed: {words_of(error)}")
    what = alert[1].replace("_", " ").lower()
    if what == "certificate required":
        return AuthenticationError(
            f"{who} requires a certificate, but this task has none", hint=SAME_TLS
        )
    return AuthenticationError(
        f"{who} refuses the certificate of this task: {what}", hint=f"its log says more; {_SAME_CA}"
    )


RECORD_BYTES = 16 << 10
"""What TLS encrypts at once, at most."""

PIECE_BYTES = 256 << 10
"""Encrypted in one go, and read in one go where much is read."""

TURN_BYTES = 4 << 20
"""Encrypted in one turn of the loop: some milliseconds."""

BELOW_HIGH_BYTES = 1 << 20
"""Above this much unsent nothing more is encrypted."""

LINGER_S = 1.0
"""How long a peer that was refused may take to read why."""

TLS_RECORDS = range(0x14, 0x18)
"""The first byte of every record."""


class TlsChannel(asyncio.Transport, asyncio.BufferedProtocol):
    """One end of a connection with TLS.

    Invariant: the protocol above is told once that it is connected, and once that it is not.

    Args:
        above: Whom it serves as a transport.
        tls: Certificates and what is asked of the peer's.
        who: What to call the peer in errors.
        server_name: On the connecting side, the name that the peer's certificate must bear.
    """

    def __init__(
        self,
        above: asyncio.BufferedProtocol,
        tls: Tls,
        who: str = "the peer",
        *,
        server_name: str | None = None,
    ) -> None:
        super().__init__()
        self.above = above
        self._who = who
        self._accepts = server_name is None
        self._binding = tls.binding
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.server if self._accepts else tls.client
        assert context is not None, "who has no certificate does not listen"
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, self._accepts, server_hostname=server_name
        )
        self._below: Any = None  # asyncio.Transport, once connected
        self._room = bytearray(RECORD_BYTES)  # for what comes, encrypted
        self._heard = False  # anything from the peer
        self._up = False  # TLS is
        self._served = False  # the protocol above has got something
        self._error: PsyncError | None = None  # why nothing is read or written any more
        self._linger: asyncio.TimerHandle | None = None
        self._closing = False
        self._reading = True  # the protocol above wants to
        self._below_writable = True
        self._above_paused = False
        self._pumping = False
        self._backlog: deque[memoryview] = deque()  # to be encrypted
        self._backlog_bytes = 0
        self.set_write_buffer_limits()

    # asyncio.BufferedProtocol, for the transport below.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless the protocol above does not want to."""
        self._below = transport
        self._below.set_write_buffer_limits(high=BELOW_HIGH_BYTES)
        self.above.connection_made(self)
        if not self._closing and not self._accepts:
            self._shake_hands()

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return where the next bytes belong."""
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt what came, or go on with the handshake."""
        if self._error is not None or self._closing:
            return
        if not self._heard:
            self._heard = True
            if self._room[0] not in TLS_RECORDS:
                self._fail_without_tls()
                return
        with memoryview(self._room) as room:
            self._incoming.write(room[:nbytes])
        if nbytes == len(self._room) < PIECE_BYTES and self._up:
            self._room = bytearray(PIECE_BYTES)
        if self._up or self._shake_hands():
            self._read()

    def eof_received(self) -> bool:
        """Close, as the protocol above would."""
        if self._heard and not self._up and self._error is None:
            self._error = ConnectionLost(f"{self._who} left in the middle of the TLS handshake")
        return False

    def pause_writing(self) -> None:
        """There is no room below."""
        self._below_writable = False

    def resume_writing(self) -> None:
        """There is room again."""
        self._below_writable = True
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the protocol above, and why."""
        self._closing = True
        self._backlog.clear()
        self._backlog_bytes = 0
        if self._linger is not None:
            self._linger.cancel()
        self.above.connection_lost(self._error or exc)

    # asyncio.Transport, for the protocol above.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return ``channel_binding`` (hash of the server's certificate), or what is known below."""
        if name == "ssl_object":
            return self._tls
        if name == "channel_binding":
            if self._accepts:
                return self._binding
            shown = self._tls.getpeercert(binary_form=True)
            return hashlib.sha256(shown).digest() if shown else b""
        return self._below.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether nothing is sent any more."""
        return self._closing or self._below.is_closing()

    def close(self) -> None:
        """Close once everything is written; before TLS is up, at once."""
        if self._closing:
            return
        self._closing = True
        if self._up and self._error is None:
            self._pump()
        else:
            self._below.abort()

    def abort(self) -> None:
        """Close at once."""
        self._closing = True
        self._below.abort()

    def is_reading(self) -> bool:
        """Whether the protocol above gets what comes."""
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        """Hand over nothing until ``resume_reading``."""
        self._reading = False
        if not self.is_closing():
            self._below.pause_reading()

    def resume_reading(self) -> None:
        """Hand over what came meanwhile, and what comes."""
        self._reading = True
        if not self.is_closing():
            self._below.resume_reading()
            self._loop.call_soon(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Say at how many unsent bytes the protocol above is told to pause; a quarter: to go on."""
        self._high = 64 << 10 if high is None else high

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that have not been sent."""
        below: int = self._below.get_write_buffer_size()
        return self._backlog_bytes + below

    def write(self, data: Any) -> None:
        """Send bytes."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send buffers one after the other; references are kept until they are encrypted."""
        if self._closing or self._error is not None:
            return
        for data in list_of_data:
            if len(data):
                self._backlog.append(memoryview(data))
                self._backlog_bytes += len(data)
        self._pump()

    # Handshake.

    def _shake_hands(self) -> bool:
        """Take the next step; return whether TLS is up."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_encrypted()
            return False
        except ssl.SSLError as exc:
            self._fail(refusal_of(exc, self._who))
            return False
        self._up = True
        self._send_encrypted()
        self._pump()
        return True

    def _fail_without_tls(self) -> None:
        error = AuthenticationError(
            f"{self._who} does not use TLS, but this task does", hint=SAME_TLS
        )
        words = b""
        if self._accepts:  # to be understood, not encrypted
            refused = Refused("tls", "it uses TLS, but this task does not")
            words = encode_head(Kind.REFUSED, 0, encode(refused))
        self._fail(error, words)

    def _fail(self, error: PsyncError, words: bytes = b"") -> None:
        """End the connection once the peer has heard why: ``words``, or an alert of TLS."""
        self._error = error
        self._backlog.clear()
        self._backlog_bytes = 0
        if words := words or self._outgoing.read():
            self._below.write(words)
        if self._accepts:
            # A socket that is closed while something is unread takes back what it has sent.
            self._below.resume_reading()
            self._linger = self._loop.call_later(LINGER_S, self._below.abort)
        else:
            self._below.close()

    # Reading.

    def _read(self) -> None:
        """Decrypt what there is into the memory of the protocol above."""
        while self.is_reading() and self._error is None:
            room = memoryview(self.above.get_buffer(-1))
            filled, stopped, error = 0, False, None
            try:
                while filled < len(room) and not stopped:
                    got: Any = self._tls.read(len(room) - filled, room[filled:])  # a number
                    filled, stopped = filled + got, not got
            except ssl.SSLError as exc:
                stopped, error = True, exc
            if filled:
                self._served = True
                self.above.buffer_updated(filled)
            if stopped:
                self._stopped(error)
                break
        if not self._closing:
            self._send_encrypted()  # keys may change

    def _stopped(self, error: ssl.SSLError | None) -> None:
        """There is nothing more to decrypt for now, or for ever."""
        if self._closing or isinstance(error, ssl.SSLWantReadError):
            return
        if error is None or isinstance(error, ssl.SSLZeroReturnError):
            self.above.eof_received()
            self._closing = True
            self._below.close()  # without a word: nobody would hear it
        elif not self._served and "ALERT" in (error.reason or ""):
            self._fail(refusal_of(error, self._who))  # it looks at our certificate after we at its
        else:
            self._fail(ConnectionLost(f"TLS with {self._who} broke: {words_of(error)}"))

    # Writing.

    def _send_encrypted(self) -> None:
        if data := self._outgoing.read():
            self._below.write(data)

    def _pump(self) -> None:
        """Encrypt what waits, as far as there is room below."""
        if self._pumping or not self._up or self._error is not None:
            return
        self._pumping, done = True, 0
        try:
            while self._backlog and self._below_writable and done < TURN_BYTES:
                piece = self._next_piece()
                done += len(piece)
                self._backlog_bytes -= len(piece)
                self._tls.write(piece)
                self._send_encrypted()
        except ssl.SSLError as exc:
            self._fail(ConnectionLost(f"TLS with {self._who} broke: {words_of(exc)}"))
        finally:
            self._pumping = False
        if self._backlog and self._below_writable:
            self._loop.call_soon(self._pump)
        self._tell_above()
        if self._closing and not self._backlog and not self._below.is_closing():
            self._say_goodbye()

    def _next_piece(self) -> memoryview:
        first = self._backlog.popleft()
        if len(first) > PIECE_BYTES:
            self._backlog.appendleft(first[PIECE_BYTES:])
            return first[:PIECE_BYTES]
        small, size = [first], len(first)  # each would be a record of its own
        while self._backlog and size + len(self._backlog[0]) <= RECORD_BYTES:
            small.append(self._backlog.popleft())
            size += len(small[-1])
        return first if len(small) == 1 else memoryview(b"".join(small))

    def _tell_above(self) -> None:
        unsent = self.get_write_buffer_size()
        if not self._above_paused and unsent > self._high:
            self._above_paused = True
            self.above.pause_writing()
        elif self._above_paused and unsent <= self._high // 4:
            self._above_paused = False
            self.above.resume_writing()

    def _say_goodbye(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # it wants to hear the peer's as well
            self._tls.unwrap()
        self._send_encrypted()
        self._below.close()


UNIX_NAME = "localhost"
"""The name that the certificate of a task must bear that listens on a Unix socket."""


class TlsNetwork:
    """TLS on every connection of ``network``, Unix sockets included.

    Args:
        network: What the connections are made of.
        tls: Certificates of this task, and whom it trusts.
    """

    def __init__(self, network: Network, tls: Tls) -> None:
        self._network = network
        self._tls = tls

    async def connect(
        self, address: str, factory: Factory
    ) -> tuple[asyncio.BaseTransport, asyncio.BufferedProtocol]:
        """Open a connection; see ``transport.Network``. TLS itself may still be on its way.

        If it fails, the protocol's ``connection_lost`` gets an AuthenticationError, for good, or
        a ConnectionLost.
        """
        host, port = split_address(address)
        name = UNIX_NAME if port is None else host.partition("%")[0]

        def layered() -> asyncio.BufferedProtocol:
            try:
                return TlsChannel(factory(), self._tls, address, server_name=name)
            except ValueError as exc:  # of ssl: a name that no certificate can bear
                raise ConfigurationError(f"address {address!r}: {exc}") from exc

        channel: TlsChannel
        _, channel = await self._network.connect(address, layered)  # type: ignore[assignment]
        return channel, channel.above

    async def listen(self, address: str, factory: Factory) -> Listener:
        """Listen; see ``transport.Network``.

        Raises:
            ConfigurationError: This task has no certificate.
        """
        if self._tls.server is None:
            raise ConfigurationError(
                f"a task that listens ({address}) with TLS needs its own certificate: "
                "PSYNC_TLS_CERT_FILE and PSYNC_TLS_KEY_FILE are not set",
                hint=HOW_TO_MAKE_THEM,
            )
        return await self._network.listen(address, lambda: TlsChannel(factory(), self._tls))
