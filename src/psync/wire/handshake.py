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

Both halves are plain objects: message in, message out. Nonces are given, never drawn.

``Protocol`` is a state machine around them, without I/O: bytes in, bytes out. The shell's contract:
fill ``decoder.get_buffer``, then ``received``; after it write what ``data_to_send`` returns, and
look at the ``state``. Once that is OPEN the shell asks the ``decoder`` itself for frames.

    server                             client
    AWAIT_HELLO  --HELLO-->            AWAIT_CHALLENGE --CHALLENGE-->
    AWAIT_PROOF  --PROOF-->            AWAIT_WELCOME   --WELCOME-->
    OPEN                               OPEN
    any state --REFUSED, fault--> CLOSED; once closed, stays closed.

The ``received`` that opens the connection takes no frame even if some are there already: the shell
says first that it is open, then asks for them.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace

from psync.errors import (
    AuthenticationError,
    ConnectFailed,
    FencedError,
    LocalProtocolError,
    PsyncError,
    RemoteProtocolError,
    VersionMismatch,
)
from psync.wire.codec import Message, decode, encode
from psync.wire.frames import (
    SAME_TLS,
    VERSION,
    Buffer,
    Frame,
    FrameDecoder,
    Kind,
    Sink,
    encode_head,
)
from psync.wire.limits import HANDSHAKE_LIMITS, Limits
from psync.wire.messages import Challenge, Hello, Proof, Refused, Welcome

RELEASE = "0.1.0"
"""The version of psync, said here alone: pyproject.toml and ``psync.__version__`` read it.

Tasks of two versions may connect where that of the wire is the same.
"""

NONCE_BYTES = 32
MAX_NAME_CHARS = 200

BULK = "bulk"
"""The lane for large bodies, where small messages overtake them. The other one keeps their order,
and is always read."""

LANES = ("control", BULK)
"""A task has up to one connection of each to another one, see ``frames.SMALL_BODY_BYTES``."""

_SAME_VERSION = "install the same version of psync for all tasks"
_SAME_SECRET = "give all tasks of the cluster the same PSYNC_SECRET"


def _is_greeting(task: str, nonce: bytes) -> bool:
    """Whether a stranger's words may be used: names are logged, also before they are proved."""
    return len(nonce) == NONCE_BYTES and len(task) <= MAX_NAME_CHARS and task.isprintable()


def _mac(secret: bytes, label: bytes, hello: Hello, challenge: Challenge, binding: bytes) -> bytes:
    key = hmac.digest(secret, b"psync/1 key " + label, "sha256")
    unsigned = replace(challenge, mac=b"")
    first, second = encode(hello), encode(unsigned)
    transcript = hashlib.sha256(
        len(first).to_bytes(4, "little") + first
        + len(second).to_bytes(4, "little") + second
        + binding
    ).digest()  # fmt: skip
    return hmac.digest(key, b"psync/1 " + label + transcript, "sha256")


class ClientHandshake:
    """The connecting side.

    Args:
        secret: The cluster's secret, or None when the cluster runs without one.
        hello: What this side says first; it is ``secured`` if there is a secret, its nonce are 32
            fresh random bytes, its lane is one of ``LANES``.
        expect: Name of the task that should answer, or None for any.

    Attributes:
        binding: Hash of the certificate that the server has shown; b"" without TLS. Set before
            ``answer``.
    """

    binding = b""

    def __init__(self, secret: bytes | None, hello: Hello, expect: str | None) -> None:
        self._secret = secret
        self._expect = expect
        self.hello = hello

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
        if self._secret is not None:
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
        if self._secret is None:
            return Proof(b"")
        return Proof(_mac(self._secret, b"client", self.hello, challenge, self.binding))


class ServerHandshake:
    """The listening side.

    Args:
        secret: The cluster's secret, or None when the cluster runs without one.
        challenge: What this side answers to a greeting, as yet without a proof; it is ``secured``
            if there is a secret, its nonce are 32 fresh random bytes.
        admit: Last word on a peer that has proved itself, such as on a fenced incarnation.

    Attributes:
        binding: Hash of the certificate that this task has shown; b"" without TLS. Set before
            ``challenge``.
    """

    binding = b""

    def __init__(
        self,
        secret: bytes | None,
        challenge: Challenge,
        admit: Callable[[Hello], Refused | None] | None = None,
    ) -> None:
        self._secret = secret
        self._challenge = challenge
        self._admit = admit
        self.hello: Hello  # what the client said; set by ``challenge``

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
        self.hello = hello
        if self._secret is not None:
            mac = _mac(self._secret, b"server", hello, self._challenge, self.binding)
            self._challenge = replace(self._challenge, mac=mac)
        return self._challenge

    def verify(self, proof: Proof) -> Refused | None:
        """Return None if the client holds the secret and may come in. Call after ``challenge``."""
        if self._secret is not None:
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


class State(enum.Enum):
    """Where a connection stands."""

    AWAIT_HELLO = "waiting for the peer's greeting"
    AWAIT_PROOF = "waiting for the peer's proof"
    AWAIT_CHALLENGE = "waiting for the peer's challenge"
    AWAIT_WELCOME = "waiting to be let in"
    OPEN = "open"
    CLOSED = "closed"


TRANSITIONS: dict[State, dict[Kind, tuple[type[Message], State]]] = {
    State.AWAIT_HELLO: {Kind.HELLO: (Hello, State.AWAIT_PROOF)},
    State.AWAIT_PROOF: {Kind.PROOF: (Proof, State.OPEN)},
    State.AWAIT_CHALLENGE: {
        Kind.CHALLENGE: (Challenge, State.AWAIT_WELCOME),
        Kind.REFUSED: (Refused, State.CLOSED),
    },
    State.AWAIT_WELCOME: {
        Kind.WELCOME: (Welcome, State.OPEN),
        Kind.REFUSED: (Refused, State.CLOSED),
    },
}
"""What a frame of the handshake carries (anything else could skip a step of it) and leads to."""

_KIND_OF = {cls: kind for steps in TRANSITIONS.values() for kind, (cls, _) in steps.items()}


class Protocol:
    """The state of one connection until it is open; single owner, no I/O.

    Args:
        handshake: This side's half.
        limits: In force once the connection is open.
        sink: Where the bodies of frames go, see ``frames.Sink``.
        make: Makes frames.
    """

    def __init__(
        self,
        handshake: ClientHandshake | ServerHandshake,
        limits: Limits,
        sink: Sink,
        make: type[Frame] = Frame,
    ) -> None:
        self._handshake = handshake
        self.limits = limits
        self.decoder = FrameDecoder(HANDSHAKE_LIMITS, sink, make)
        self._out: list[Buffer] = []
        self.peer_task = ""  # name of the peer's task; proven once the state is OPEN
        self.peer_incarnation = 0
        self.lane = ""  # one of handshake.LANES
        self.refused: Refused | None = None  # what this side answered to a peer it turned away
        if isinstance(handshake, ClientHandshake):
            self.state = State.AWAIT_CHALLENGE
            self.lane = handshake.hello.lane
            self._send(handshake.hello)
        else:
            self.state = State.AWAIT_HELLO

    def bind(self, binding: bytes) -> None:
        """Say over which TLS connection the handshake goes; see ``handshake``."""
        self._handshake.binding = binding

    def received(self, nbytes: int) -> None:
        """Account for ``nbytes`` in the last buffer, and take the steps that they complete.

        Raises:
            RemoteProtocolError: The peer broke the protocol. The connection is CLOSED.
            AuthenticationError: The peer did not prove itself, or refused us. Likewise.
            FencedError, ConnectFailed: It refused us for another reason. Likewise.
        """
        if self.state is State.CLOSED:
            raise LocalProtocolError("bytes were received on a closed connection")
        try:
            frame = self.decoder.received(nbytes)
            while frame is not None:
                self._step(frame)
                if self.state in (State.OPEN, State.CLOSED):
                    return
                frame = self.decoder.next_frame()
        except Exception:
            if isinstance(self._handshake, ServerHandshake):
                self._out = []
                self._send(Refused("protocol", "malformed greeting"))
            self.state = State.CLOSED
            raise

    def data_to_send(self) -> list[Buffer]:
        """Return what the handshake has to say, once."""
        out, self._out = self._out, []
        return out

    def refuse(self, refused: Refused) -> None:
        """Server side: turn the peer away before it is in."""
        self.refused = refused
        self._send(refused)
        self.state = State.CLOSED

    def _step(self, frame: Frame) -> None:
        kind = Kind(frame.kind)
        if kind not in TRANSITIONS[self.state]:
            raise RemoteProtocolError(
                f"got a frame {kind.name} while {self.state.value}",
                hint="the peer must finish the handshake first",
            )
        expected, following = TRANSITIONS[self.state][kind]
        message = decode(frame.header)
        if type(message) is not expected:
            raise RemoteProtocolError(f"got {type(message).__name__} in a frame {kind.name}")
        answer: Message | None = None
        match message, self._handshake:
            case Refused() as refused, _:
                raise refusal(refused, self.peer_task or "the peer")
            case Challenge() as challenge, ClientHandshake() as client:
                answer = client.answer(challenge)
            case Hello() as hello, ServerHandshake() as server:
                answer = server.challenge(hello)
            case Proof() as proof, ServerHandshake() as server:
                answer = server.verify(proof) or Welcome()
        if isinstance(answer, Refused):
            self.refuse(answer)
            return
        if isinstance(message, Hello | Challenge):
            self.peer_task, self.peer_incarnation = message.task, message.incarnation
        if isinstance(message, Hello):
            self.lane = message.lane
        if answer is not None:
            self._send(answer)
        self.state = following
        if following is State.OPEN:
            self.decoder.limits = self.limits

    def _send(self, message: Message) -> None:
        self._out.append(encode_head(_KIND_OF[type(message)], 0, encode(message), (), ()))
