"""The state machine of a handshake, without I/O: bytes in, bytes out.

The shell's contract: fill ``decoder.get_buffer``, then ``received``; after it write what
``data_to_send`` returns, and look at the ``state``. Once that is OPEN the shell asks the
``decoder`` itself for frames.

    server                             client
    AWAIT_HELLO  --HELLO-->            AWAIT_CHALLENGE --CHALLENGE-->
    AWAIT_PROOF  --PROOF-->            AWAIT_WELCOME   --WELCOME-->
    OPEN                               OPEN
    any state --REFUSED, fault--> CLOSED; once closed, stays closed.

The ``received`` that opens the connection takes no frame even if some are there
already: the shell says first that it is open, then asks for them.
"""

from __future__ import annotations

import enum

from psync.errors import LocalProtocolError, RemoteProtocolError
from psync.wire.codec import Message, decode, encode
from psync.wire.frames import Buffer, Frame, FrameDecoder, Kind, Sink, encode_head
from psync.wire.handshake import ClientHandshake, ServerHandshake, refusal
from psync.wire.limits import HANDSHAKE_LIMITS, Limits
from psync.wire.messages import Challenge, Hello, Proof, Refused, Welcome


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

    # Handshake.

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
