"""The handshake: mutual proof of the cluster's secret before the first request.

    client                                   server
    HELLO  versions, task, nonce     →
                                     ←       CHALLENGE  version, task, nonce,
                                                        HMAC(server key, transcript)
    PROOF  HMAC(client key, transcript)  →
                                     ←       WELCOME

The transcript holds both nonces, both tasks, both incarnations, the versions and whether
each side holds a secret, so nothing of it can be changed or replayed. Each direction has
a key of its own (no reflection). The server proves first: a client that reaches a
stranger reveals nothing. Without TLS this proves who is at the other end when the
connection opens; it neither hides nor seals what follows.

With TLS the transcript also holds the *binding*: the hash of the server's certificate, as each
side sees it. So the proof covers the secret and this TLS connection: a relay that terminates TLS
in between is detected, even with a certificate of the cluster's own authority.

Each side is a state machine without I/O: bytes in, bytes out. Nonces are given, never drawn. The
caller fills the buffer of a decoder that has ``HANDSHAKE_LIMITS``, and calls ``received``; then it
writes ``data_to_send``, and looks at the ``state``. Once that is OPEN it raises the decoder's
limits, and takes the frames itself.

    server                             client
    AWAIT_HELLO  --HELLO-->            AWAIT_CHALLENGE --CHALLENGE-->
    AWAIT_PROOF  --PROOF-->            AWAIT_WELCOME   --WELCOME-->
    OPEN                               OPEN
    any state --REFUSED, fault--> CLOSED; once closed, stays closed.

The ``received`` that opens the connection takes no further frame even if some are there already:
the caller says first that it is open, then asks for them.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Callable

from psync.errors import (
    AuthenticationError,
    ConnectFailed,
    FencedError,
    LocalProtocolError,
    PsyncError,
    RemoteProtocolError,
    VersionMismatch,
)
from psync.wire.codec import Message, decode, encode, replace
from psync.wire.frames import SAME_TLS, VERSION, Buffer, Frame, FrameDecoder, Kind, encode_head
from psync.wire.messages import Challenge, Hello, Proof, Refused, Welcome

RELEASE = "0.1.0"
"""The version of psync, said here alone: pyproject.toml and ``psync.__version__`` read it.

Tasks of two versions may connect where that of the wire is the same.
"""

NONCE_BYTES = 32
MAX_NAME_CHARS = 200

BULK = "bulk"
"""The lane for large bodies, where small messages overtake them. The other one keeps their order,
and is read as long as its peer may end a wait."""

LANES = ("control", BULK)
"""A task has up to one connection of each to another one, see ``frames.SMALL_BODY_BYTES``."""

_SAME_VERSION = "install the same version of psync for all tasks"
_SAME_SECRET = "give all tasks of the cluster the same PSYNC_SECRET"


def _is_greeting(task: str, nonce: bytes) -> bool:
    """Whether a stranger's words may be used: names are logged, also before they are proved."""
    return len(nonce) == NONCE_BYTES and len(task) <= MAX_NAME_CHARS and task.isprintable()


def _mac(
    secret: bytes | None, label: bytes, hello: Hello, challenge: Challenge, binding: bytes
) -> bytes:
    """Return what one side proves itself by; b"" in a cluster without a secret."""
    if secret is None:
        return b""
    key = hmac.digest(secret, b"psync/1 key " + label, "sha256")
    unsigned = replace(challenge, mac=b"")
    first, second = encode(hello), encode(unsigned)
    transcript = hashlib.sha256(
        len(first).to_bytes(4, "little") + first
        + len(second).to_bytes(4, "little") + second
        + binding
    ).digest()  # fmt: skip
    return hmac.digest(key, b"psync/1 " + label + transcript, "sha256")


class State(enum.Enum):
    """Where a connection stands."""

    AWAIT_HELLO = "waiting for the peer's greeting"
    AWAIT_PROOF = "waiting for the peer's proof"
    AWAIT_CHALLENGE = "waiting for the peer's challenge"
    AWAIT_WELCOME = "waiting to be let in"
    OPEN = "open"
    CLOSED = "closed"


EXPECTED: dict[State, tuple[Kind, ...]] = {
    State.AWAIT_HELLO: (Kind.HELLO,),
    State.AWAIT_PROOF: (Kind.PROOF,),
    State.AWAIT_CHALLENGE: (Kind.CHALLENGE, Kind.REFUSED),
    State.AWAIT_WELCOME: (Kind.WELCOME, Kind.REFUSED),
}
"""Frames that the peer may send; anything else could skip a step. The kind of each is the code of
its message."""


class Handshake:
    """One side of a connection until it is open; single owner, no I/O.

    Args:
        secret: The cluster's secret, or None when the cluster runs without one.

    Attributes:
        binding: Hash of the certificate that the server shows; b"" without TLS. Set before the
            peer's first word is taken.
        peer_task: Name of the peer's task; proven once the state is OPEN.
        peer_incarnation: Incarnation of that task.
        lane: One of ``LANES``.
        refused: The answer of this side to a peer that it turned away.
    """

    state: State
    binding = b""
    peer_task = ""
    peer_incarnation = 0
    lane = ""
    refused: Refused | None = None

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._out: list[Buffer] = []

    def received(self, decoder: FrameDecoder, nbytes: int) -> None:
        """Account for ``nbytes`` in the last buffer, and take the steps that they complete.

        Raises:
            RemoteProtocolError: The peer broke the protocol. The connection is CLOSED.
            AuthenticationError: The peer did not prove itself, or refused us. Likewise.
            FencedError, ConnectFailed: It refused us for another reason. Likewise.
        """
        if self.state is State.CLOSED:
            raise LocalProtocolError("bytes were received on a closed connection")
        try:
            frame = decoder.received(nbytes)
            while frame is not None:
                self._take(self._message_of(frame))
                if self.state in (State.OPEN, State.CLOSED):
                    return
                frame = decoder.next_frame()
        except Exception:
            if isinstance(self, ServerHandshake):
                self._out = []
                self._say(Refused("protocol", "malformed greeting"))
            self.state = State.CLOSED
            raise

    def data_to_send(self) -> list[Buffer]:
        """Return what the handshake has to say, once."""
        out, self._out = self._out, []
        return out

    def refuse(self, refused: Refused) -> None:
        """Server side: turn the peer away before it is in."""
        self.refused = refused
        self._say(refused)
        self.state = State.CLOSED

    def _message_of(self, frame: Frame) -> Message:
        kind = Kind(frame.kind)
        if kind not in EXPECTED[self.state]:
            raise RemoteProtocolError(
                f"got a frame {kind.name} while {self.state.value}",
                hint="the peer must finish the handshake first",
            )
        message = decode(frame.header)
        if message.code != kind:
            raise RemoteProtocolError(f"got {type(message).__name__} in a frame {kind.name}")
        return message

    def _take(self, message: Message) -> None:
        """Go on, given what the other side has said."""

    def _say(self, message: Message) -> None:
        self._out.append(encode_head(message.code, 0, encode(message)))


class ClientHandshake(Handshake):
    """The connecting side.

    Args:
        secret: The cluster's secret, or None when the cluster runs without one.
        hello: What this side says first; it is ``secured`` if there is a secret, its nonce are 32
            fresh random bytes, its lane is one of ``LANES``.
        expect: Name of the task that should answer, or None for any.
    """

    state = State.AWAIT_CHALLENGE

    def __init__(self, secret: bytes | None, hello: Hello, expect: str | None) -> None:
        super().__init__(secret)
        self._expect = expect
        self.hello = hello
        self.lane = hello.lane
        self._say(hello)

    def _take(self, message: Message) -> None:
        if isinstance(message, Refused):
            raise refusal(message, self.peer_task or "the peer")
        if isinstance(message, Challenge):
            self._say(self.answer(message))
            self.state = State.AWAIT_WELCOME
        else:
            self.state = State.OPEN

    def answer(self, challenge: Challenge) -> Proof:
        """Check the server's proof and return our own.

        Raises:
            AuthenticationError: If the server does not hold the same secret.
            VersionMismatch: If it chose a version that was not offered.
            RemoteProtocolError: If the challenge is malformed, or another task answers than
                the one expected.
        """
        if not _is_greeting(challenge.task, challenge.nonce):
            raise RemoteProtocolError("malformed challenge")
        if challenge.version != VERSION:
            raise VersionMismatch(
                f"{challenge.task} speaks version {challenge.version} of the wire protocol, "
                f"this task speaks {VERSION}",
                hint=_SAME_VERSION,
            )
        if challenge.secured != (self._secret is not None):
            ours, theirs = ("no", "one") if self._secret is None else ("a", "none")
            raise AuthenticationError(
                f"this task has {ours} secret, but {challenge.task} has {theirs}",
                hint=f"{_SAME_SECRET}, or start all of them with --insecure",
            )
        expected = _mac(self._secret, b"server", self.hello, challenge, self.binding)
        if not hmac.compare_digest(expected, challenge.mac):
            between = ", or somebody between the two ends its TLS" if self.binding else ""
            raise AuthenticationError(
                f"{challenge.task} does not have the same secret as this task{between}",
                hint=_SAME_SECRET,
            )
        if self._expect is not None and challenge.task != self._expect:
            raise RemoteProtocolError(
                f"expected {self._expect} at this address, {challenge.task} answered",
                hint="check the addresses of the cluster, in TF_CONFIG for example",
            )
        self.peer_task, self.peer_incarnation = challenge.task, challenge.incarnation
        return Proof(_mac(self._secret, b"client", self.hello, challenge, self.binding))


class ServerHandshake(Handshake):
    """The listening side.

    Args:
        secret: The cluster's secret, or None when the cluster runs without one.
        challenge: What this side answers to a greeting, as yet without a proof; it is ``secured``
            if there is a secret, its nonce are 32 fresh random bytes.
        admit: Last word on a peer that has proved itself, such as on a fenced incarnation.
    """

    state = State.AWAIT_HELLO

    def __init__(
        self,
        secret: bytes | None,
        challenge: Challenge,
        admit: Callable[[Hello], Refused | None] | None = None,
    ) -> None:
        super().__init__(secret)
        self._challenge = challenge
        self._admit = admit
        self.hello: Hello  # what the client said; set by ``challenge``

    def _take(self, message: Message) -> None:
        if isinstance(message, Hello):
            answer: Message = self.challenge(message)
            following = State.AWAIT_PROOF
        else:
            assert isinstance(message, Proof), "nothing else is expected"
            answer = self.verify(message) or Welcome()
            following = State.OPEN
        if isinstance(answer, Refused):
            self.refuse(answer)
            return
        self._say(answer)
        self.state = following

    def challenge(self, hello: Hello) -> Challenge | Refused:
        """Answer the client's first word."""
        task = self._challenge.task
        if not _is_greeting(hello.task, hello.nonce) or hello.lane not in LANES:
            return Refused("protocol", "malformed greeting")
        if not hello.oldest_version <= VERSION <= hello.newest_version:
            return Refused(
                "version",
                f"{task} speaks version {VERSION} of the wire protocol, the peer speaks "
                f"{hello.oldest_version} to {hello.newest_version}",
            )
        if self._secret is not None and not hello.secured:
            return Refused("authentication", f"{task} has a secret, the peer has none")
        self.hello, self.lane = hello, hello.lane
        self.peer_task, self.peer_incarnation = hello.task, hello.incarnation
        mac = _mac(self._secret, b"server", hello, self._challenge, self.binding)
        self._challenge = replace(self._challenge, mac=mac)
        return self._challenge

    def verify(self, proof: Proof) -> Refused | None:
        """Return None if the client holds the secret and may come in. Call after ``challenge``."""
        expected = _mac(self._secret, b"client", self.hello, self._challenge, self.binding)
        if not hmac.compare_digest(expected, proof.mac):
            return Refused("authentication", "the proof does not match")
        return None if self._admit is None else self._admit(self.hello)


def refusal(refused: Refused, task: str) -> PsyncError:
    """Return the exception for a connection that ``task`` refused."""
    detail = refused.detail if refused.detail.isprintable() else ascii(refused.detail)
    text = f"{task} refused the connection: {detail}"
    match refused.reason:
        case "version":
            return VersionMismatch(text, hint=_SAME_VERSION)
        case "authentication":
            return AuthenticationError(text, hint=_SAME_SECRET)
        case "tls":
            return AuthenticationError(text, hint=SAME_TLS)
        case "fenced":
            return FencedError(text)
        case "full" | "early":  # it may have room, or serve somebody, later
            return ConnectFailed(text)
    return RemoteProtocolError(text)
