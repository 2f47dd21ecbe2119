"""Gradients that count once, and takes, as they come in a turn of the loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asked import Asked, Reply, peer_of
from ps_by_hand import COORDINATOR, A, B, PsByHand
from psync.errors import (
    ConfigurationError,
    ConnectionLost,
    RemoteProtocolError,
    UnknownVariableError,
    UsageError,
    ValueMismatchError,
)
from psync.ps.takes import HostedAccumulator
from psync.wire.codec import Message
from psync.wire.messages import (
    ApplyGradient,
    AskAccumulator,
    DefineAccumulator,
    Done,
    Fence,
    ForgetTakes,
    GradientApplied,
    TakeGradient,
)
from psync.wire.tensors import to_bytes_view

DENSE = DefineAccumulator("g", "dense", "float32", None, "MEAN", "", False, 0)
SPARSE = DefineAccumulator("s", "sparse", "float32", None, "MEAN", "per_index", False, 0)


def applying(
    gradient: Any,
    sequence: int,
    definition: DefineAccumulator = DENSE,
    *,
    local_step: int = 0,
    weight: float = 1.0,
    closure: int = -1,
    ordinal: int = 0,
    indices: Any = None,
) -> tuple[ApplyGradient, list[memoryview]]:
    """A message that brings a gradient."""
    array = np.asarray(gradient, np.float32)
    segments = [to_bytes_view(array)]
    if indices is not None:
        segments.insert(0, to_bytes_view(np.asarray(indices, np.int64)))
    message = ApplyGradient(
        sequence, 1, closure, ordinal, definition.name, list(array.shape), None, local_step, weight
    )
    return message, segments


class ByHand(PsByHand):
    """One ps with accumulators. Takes come as they do in the log: whoever asks does not wait."""

    def __init__(self, *definitions: DefineAccumulator) -> None:
        super().__init__()
        self.accumulators = self.services.accumulators
        self._log = self.accumulators.replayed()
        self._sequence = 0
        for definition in definitions or (DENSE,):
            assert self.ask(COORDINATOR, definition) == Done()

    @property
    def hosted(self) -> dict[str, HostedAccumulator]:
        return self.accumulators.hosted

    def counters(self) -> dict[str, int]:
        return self.accumulators.statistics()

    def held(self) -> tuple[int, int, int, int]:
        """Gradients held, the step, takes that wait, values that are kept."""
        rule, counters = self.hosted["g"].rule, self.counters()
        return rule.num_accumulated(), rule.step, counters["waiting"], counters["kept"]

    def apply(
        self, client: tuple[str, int], gradient: Any, *, sequence: int = 0, **options: Any
    ) -> GradientApplied:
        self._sequence += 1
        message, segments = applying(gradient, sequence or self._sequence, **options)
        answer = self.ask(client, message, *segments)
        assert isinstance(answer, GradientApplied)
        return answer

    def log(self, client: tuple[str, int], message: Message) -> None:
        """Do what an entry of the log says."""
        asked = Asked(self.peer(client), message)
        self._log[type(message)].serve(asked)
        assert asked.result() == Reply(Done())

    def taken(
        self,
        client: tuple[str, int],
        num_required: int = 1,
        number: int = 1,
        definition: DefineAccumulator = DENSE,
    ) -> Reply | None:
        """Ask for a take; return its answer, or None: it waits."""
        self.log(client, TakeGradient(definition.name, number, 1, num_required))
        return self.answer_of(client, number, definition)

    def answer_of(
        self, client: tuple[str, int], number: int = 1, definition: DefineAccumulator = DENSE
    ) -> Reply | None:
        """The answer to a take that was asked for; None: it waits."""
        wanted = self.hosted[definition.name].wanted(client, number)
        assert wanted is not None
        return None if wanted.answer is None else Reply(*wanted.answer)


def value_of(answer: Reply | None) -> list[float]:
    """The values that a take has got."""
    assert answer is not None
    values: list[float] = np.frombuffer(answer.segments[-1], np.float32).tolist()  # type: ignore[arg-type]
    return values


# --- definitions -----------------------------------------------------------------------------


def test_another_definition_under_the_same_name_is_refused():
    ps = ByHand()
    other = DefineAccumulator("g", "dense", "float64", None, "SUM", "", False, 0)
    with pytest.raises(
        ConfigurationError,
        match="expected dtype='float32', reduction='MEAN', got dtype='float64', reduction='SUM'",
    ):
        ps.ask(A, other)
    assert ps.hosted["g"].definition == DENSE


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"kind": "other"}, RemoteProtocolError, 'expected kind "dense" or "sparse", got \'other'),
        ({"dtype": "int32"}, ConfigurationError, "expected one of float16, .* got 'int32'"),
        ({"reduction": "MAX"}, ConfigurationError, "'MEAN' or 'SUM', got 'MAX'"),
        ({"max_staleness": -1}, ConfigurationError, "max_staleness of 0 or more, got -1"),
        ({"shape": [2, -3]}, ConfigurationError, "dimensions of 0 or more, or None, got -3"),
    ],
)
def test_a_definition_of_nothing_is_refused(change, error, text):
    ps = ByHand()
    fields = {name: getattr(DENSE, name) for name in DENSE.__slots__}
    with pytest.raises(error, match=text):
        ps.ask(A, DefineAccumulator(**(fields | {"name": "x"} | change)))
    assert ps.counters()["accumulators"] == 1


@pytest.mark.parametrize(
    "message", [ApplyGradient(1, 1, -1, 0, "x", [], None, 0, 1.0), AskAccumulator("x")]
)
def test_what_is_not_defined_is_refused(message):
    with pytest.raises(UnknownVariableError, match='accumulator "x" is not defined'):
        ByHand().ask(A, message)


def test_a_take_of_what_is_not_defined_is_refused():
    with pytest.raises(UnknownVariableError, match='accumulator "x" is not defined'):
        ByHand().log(A, TakeGradient("x", 1, 1, 1))


# --- gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "segments", "text"),
    [
        ([2], [bytes(4)], r"expected 8 bytes for shape \(2,\) float32, got 4"),
        ([-1, -2], [bytes(8)], "expected 8 bytes for shape"),
        ([2], [bytes(8), bytes(8)], "expected 1 arrays, got 2"),
        ([2], [], "expected 8 bytes"),
    ],
)
def test_bytes_that_are_no_gradient_are_refused(shape, segments, text):
    ps = ByHand()
    with pytest.raises(ValueMismatchError, match=text):
        ps.ask(A, ApplyGradient(1, 1, -1, 0, "g", shape, None, 0, 1.0), *segments)
    assert ps.held()[0] == 0


def test_indices_that_are_no_integers_are_refused():
    message = ApplyGradient(1, 1, -1, 0, "s", [1, 1], None, 0, 1.0)
    with pytest.raises(ValueMismatchError, match="7 bytes are not int64 indices"):
        ByHand(SPARSE).ask(A, message, bytes(7), bytes(4))


# --- takes -----------------------------------------------------------------------------------


def test_a_value_is_kept_until_its_client_says_that_it_has_it():
    ps = ByHand()
    ps.apply(A, [1, 3])
    assert ps.taken(COORDINATOR)
    assert ps.counters()["kept"] == 1
    ps.tell(COORDINATOR, ForgetTakes("g", 2))
    assert ps.counters()["kept"] == 0
    with pytest.raises(UsageError, match="has cancelled take 1"):
        ps.taken(COORDINATOR)


@pytest.mark.parametrize("asks_again", [False, True])
def test_takes_of_two_clients_are_apart_and_one_that_waits_keeps_its_place(asks_again):
    ps = ByHand()
    for client in (A, B, *[A] * asks_again):
        assert ps.taken(client) is None
    ps.apply(A, [1, 3])
    assert value_of(ps.answer_of(A)) == [1, 3]
    assert ps.answer_of(B) is None
    ps.apply(A, [2, 2], local_step=1)
    assert value_of(ps.answer_of(B)) == [2, 2]


def test_what_is_kept_for_a_fenced_client_goes():
    ps = ByHand()
    ps.apply(B, [1, 3])
    assert ps.taken(A)
    assert ps.counters()["kept"] == 1
    ps.ask(COORDINATOR, Fence(A[0], A[1] + 1))
    assert ps.counters()["kept"] == 0


@pytest.mark.parametrize("required", [0, -3])
def test_a_take_of_no_gradients_is_refused(required):
    ps = ByHand()
    with pytest.raises(ConfigurationError, match=f"gradients above 0, got {required}"):
        ps.taken(A, required)
    assert ps.held() == (0, 0, 0, 0)


def test_a_take_that_is_read_after_its_connection_has_gone_does_not_wait():
    ps = ByHand()
    gone = peer_of(A)
    gone.is_closed = True
    with pytest.raises(ConnectionLost, match="has gone"):
        ps.accumulators.handlers()[TakeGradient].serve(Asked(gone, TakeGradient("g", 1, 1, 1)))
    assert ps.held() == (0, 0, 0, 0)
