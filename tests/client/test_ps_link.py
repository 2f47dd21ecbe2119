from __future__ import annotations

import asyncio
import functools
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from inside import endpoint_of, handlers_of, work_of
from ps_cluster import CHIEF, OTHER, PsCluster, hold, pull, until
from psync.client import ps_link
from psync.client.ps_link import Answers, Call, Question, always, expect, together
from psync.errors import (
    AuthenticationError,
    ClosedError,
    ConnectionLost,
    LocalProtocolError,
    ParameterServerLost,
    RemoteProtocolError,
    TransportError,
)
from psync.net.connection import Connection, Handler, Request
from psync.net.secret import Secret
from psync.ps_task import PsTask
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.messages import AskStatistics, Done, Pull, Pulled, Statistics

pytestmark = pytest.mark.asyncio


class TestLost:
    @pytest.mark.virtual_time
    async def test_a_ps_that_cannot_be_reached_is_lost_after_a_while(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            client, told = cluster.client(), []
            client.links[0].on_lost = told.append
            loop = asyncio.get_running_loop()
            cluster.network.partition("ps0:1")
            began = loop.time()
            for _ in range(2):
                with pytest.raises(ParameterServerLost) as caught:
                    await pull(client, v)
            assert str(caught.value) == (
                "/job:ps/task:0 at ps0:1 cannot be reached (no connection within 15 s: "
                "/job:ps/task:0 at ps0:1: no answer within 5 s)\nhint: its shards are lost, and "
                "there is no checkpoint or complete backup: restart the program; with a "
                'psync.CheckpointManager, or with ps_recovery="backup" and a complete backup, '
                "training would continue"
            )
            assert caught.value.task == "/job:ps/task:0"
            assert 15 <= loop.time() - began < 25
            assert len(told) == 1

    async def test_a_loop_that_stood_still_takes_nobody_for_lost(self) -> None:
        async with PsCluster() as cluster:
            link = cluster.client().links[0]
            await link.call(always(AskStatistics()))
            link.away_for_s = 0.05
            endpoint, blocked = endpoint_of(link), []
            connect = endpoint.connect

            async def connect_late(*where: str) -> Connection:
                if not blocked:
                    blocked.append(where)
                    time.sleep(0.15)  # noqa: ASYNC251  a step of the program, say
                return await connect(*where)

            endpoint.connect = connect_late  # type: ignore[method-assign]
            cluster.network.cut("ps0:1")
            await link.call(always(AskStatistics()))
            assert blocked

    @pytest.mark.virtual_time
    @pytest.mark.parametrize("turns", range(6))
    async def test_one_that_is_given_up_just_as_it_is_revived_is_lost(self, turns: int) -> None:
        async with PsCluster() as cluster:
            link = cluster.client().links[0]
            cluster.network.partition("ps0:1")
            calling = asyncio.create_task(link.call(always(AskStatistics())))
            await asyncio.sleep(1)
            link.revive()
            for _ in range(turns):
                await asyncio.sleep(0)
            link.give_up("is not started again")
            with pytest.raises(ParameterServerLost, match="is not started again"):
                await calling

    @pytest.mark.virtual_time
    async def test_who_connects_where_a_ps_was_does_not_keep_others_from_where_it_is(self) -> None:
        async with PsCluster() as cluster:
            link = cluster.client(CHIEF).links[0]
            await link.call(always(AskStatistics()))
            cluster.network.partition("ps0:1")
            cluster.network.cut("ps0:1")
            waiting = asyncio.create_task(link.call(always(AskStatistics())))
            await asyncio.sleep(1)
            moved = PsTask(cluster.platform(), 0, "elsewhere:1")
            await moved.start()
            link.revive()
            link.address = "elsewhere:1"
            began = asyncio.get_running_loop().time()
            await link.call(always(AskStatistics()), urgent=True)
            assert asyncio.get_running_loop().time() - began < 0.1
            await waiting
            await moved.close()
            cluster.network.heal("ps0:1")

    @pytest.mark.virtual_time
    async def test_a_call_fails_though_who_was_told_looks_for_the_ps_elsewhere(self) -> None:
        async with PsCluster() as cluster:
            link = cluster.client().links[0]
            await link.call(always(AskStatistics()))
            link.on_lost = lambda _: link.revive()
            cluster.network.refuse("ps0:1")
            cluster.network.cut("ps0:1")
            with pytest.raises(ParameterServerLost):
                await link.call(always(AskStatistics()))
            cluster.network.admit("ps0:1")
            await link.call(always(AskStatistics()))

    @pytest.mark.virtual_time
    async def test_a_call_that_was_connecting_when_a_recovery_began_waits_for_its_end(self) -> None:
        async with PsCluster() as cluster:
            link = cluster.client().links[0]
            cluster.network.refuse("ps0:1")
            call = asyncio.ensure_future(link.call(lambda _: AskStatistics()))
            await asyncio.sleep(1)
            link.hold()
            cluster.network.admit("ps0:1")
            await link.call(lambda _: AskStatistics(), urgent=True)
            await asyncio.sleep(1)
            assert not call.done()
            link.release()
            await call

    async def test_a_message_that_the_ps_would_never_take_costs_one_connection(self) -> None:
        async with PsCluster() as cluster:
            client = cluster.client()
            link = client.links[0]
            made = []

            def wrong(peer: Connection) -> Message:
                made.append(peer)
                return Pull("one", None, -1, "")  # type: ignore[arg-type]

            for send in (link.call(wrong), together([Call(link, wrong, Pulled, "a pull")])):
                with pytest.raises(LocalProtocolError, match=r"Pull\.\w+: expected int, got 'o"):
                    await send
                assert len(made) == 1
                await link.call(lambda _: AskStatistics())  # the next one has a new connection
                made.clear()

    @pytest.mark.virtual_time
    async def test_one_that_comes_back_in_time_goes_on(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.ones(3, np.float32))
            client = cluster.client(host="w")
            await pull(client, v)
            for away_s, fault, end in (
                (1, cluster.network.refuse, cluster.network.admit),
                (10, cluster.network.partition, cluster.network.heal),
            ):
                fault("ps0:1")
                cluster.network.cut("w")
                reading = asyncio.create_task(pull(client, v))
                await asyncio.sleep(away_s)
                assert not reading.done()
                end("ps0:1")
                assert (await reading)[0].all()

    @pytest.mark.virtual_time
    @pytest.mark.parametrize(("patience_s", "lost_s"), [(15, 2), (1, 1)])
    async def test_one_that_has_ended_is_lost_soon(self, patience_s: float, lost_s: float) -> None:
        async with PsCluster(lost_after_s=patience_s) as cluster:
            v = await cluster.create("v", np.ones(3, np.float32))
            client = cluster.client()
            await pull(client, v)
            await cluster.ps[0].close()
            loop = asyncio.get_running_loop()
            began = loop.time()
            with pytest.raises(ParameterServerLost, match=f"no connection within {lost_s} s"):
                await pull(client, v)
            assert loop.time() - began < lost_s + 0.1

    @pytest.mark.virtual_time
    async def test_one_that_was_restarted_has_lost_its_shards(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            client = cluster.client(CHIEF, 100)  # workers are refused until it has been attached
            large = await cluster.create("large", np.zeros(1 << 16, np.float32))
            await pull(client, v, large)
            await cluster.ps[0].close()
            again = PsTask(cluster.platform(incarnation=8), 0, "ps0:1")
            await again.start()
            with pytest.raises(ParameterServerLost) as caught:
                await pull(client, v)
            assert caught.value.message == (
                "/job:ps/task:0 at ps0:1 was restarted and has lost its shards"
            )
            with pytest.raises(ParameterServerLost, match="was restarted"):
                await pull(client, large)
            await again.close()


class TestRefused:
    async def test_a_ps_with_another_secret(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            client = cluster.client(OTHER, secret=Secret(b"another secret of thirty-two bytes"))
            with pytest.raises(AuthenticationError):
                await pull(client, v)
            assert client.links[0].lost is None

    async def test_a_request_that_breaks_every_connection_is_given_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ps_link, "MAX_LOSSES", 3)
        async with PsCluster() as cluster:
            client = cluster.client(host="w")
            tries = []

            def build(peer: object) -> AskStatistics:
                tries.append(peer)
                cluster.network.cut("w")
                return AskStatistics()

            with pytest.raises(ConnectionLost) as caught:
                await client.links[0].call(build)
            assert caught.value.message.startswith(
                "/job:ps/task:0: 3 connections in a row were lost with the same request, the last "
                "because: the connection to /job:ps/task:0"
            )
            assert isinstance(caught.value, TransportError)
            assert len(set(map(id, tries))) == 3


class TestSets:
    async def test_members_are_sent_until_the_ps_has_answered(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            client = cluster.client(host="w")
            link, plan, sent = client.links[0], client.plan((v,)), []
            ask = link.ask

            def spying(build: object, *args: object, **options: object) -> object:
                def spied(peer: object) -> Pull:
                    message = build(peer)  # type: ignore[operator]
                    sent.append(message.members)
                    return message  # type: ignore[no-any-return]

                return ask(spied, *args, **options)  # type: ignore[arg-type]

            link.ask = spying  # type: ignore[method-assign, assignment]
            members = [(v.variable_id, 0)]
            await asyncio.gather(client.pull(plan), client.pull(plan))
            await client.pull(plan)
            assert sent == [members, members, None]
            cluster.network.cut("w")
            await until(lambda: not cluster.network.links("w"))
            await client.pull(plan)
            assert sent[-1] == members


class TestClose:
    async def test_calls_under_way_fail_and_later_ones_too(self) -> None:
        async with PsCluster() as cluster:
            v = await cluster.create("v", np.zeros(3, np.float32))
            release = hold(cluster.ps[0], v)
            client = cluster.client()
            reading = asyncio.create_task(pull(client, v))
            await until(lambda: work_of(cluster.ps[0]).waiting)
            await client.close()
            for task in (reading, pull(client, v)):
                with pytest.raises(ClosedError, match="the link to /job:ps/task:0 is closed"):
                    await task
            release()

    @pytest.mark.virtual_time
    async def test_a_connection_that_comes_up_afterwards_is_closed(self) -> None:
        async with PsCluster(latency=(0.1, 0.2)) as cluster:
            client = cluster.client(host="w")
            connecting = asyncio.create_task(client.links[0].peer("control"))
            await asyncio.sleep(0.05)
            await client.close()
            with pytest.raises(ClosedError):
                await connecting
            await asyncio.sleep(5)
            assert not cluster.network.links("w")

    async def test_nothing_is_notified_without_a_connection(self) -> None:
        async with PsCluster() as cluster:
            link = cluster.client().links[0]
            link.notify(AskStatistics())
            assert link.state == "unconnected"


async def test_a_question_without_a_coroutine_is_answered_and_asked_again() -> None:
    async with PsCluster() as cluster:
        client = cluster.client(host="w")
        link = client.links[0]
        got: list[Any] = []
        link.ask(lambda peer: AskStatistics(), (), got.append)  # there is no connection yet
        await until(lambda: len(got) == 1)
        link.ask(lambda peer: AskStatistics(), (), got.append, set_ids=(5,))
        await until(lambda: len(got) == 2)
        assert 5 in (await link.peer("control")).state["sets"]
        handlers = handlers_of(cluster.ps[0])
        answer = handlers[AskStatistics]
        cuts = iter([True])

        def run(request: Request[Any]) -> None:
            peer, message, segments = request.peer, request.message, request.segments
            if next(cuts, False):
                cluster.network.cut("w")
            return answer.run(peer, message, segments)

        handlers[AskStatistics] = Handler(run)
        link.ask(lambda peer: AskStatistics(), (), got.append)
        await until(lambda: len(got) == 3)
        assert [type(each.message) for each in got] == [Statistics] * 3
        await link.close()
        link.ask(lambda peer: AskStatistics(), (), got.append)
        await until(lambda: len(got) == 4)
        assert isinstance(got[3], ClosedError)


async def test_a_question_that_is_given_up_is_answered_no_more() -> None:
    async with PsCluster() as cluster:
        client = cluster.client(host="w")
        link = client.links[0]
        got: list[Any] = []
        link.ask(lambda peer: AskStatistics(), (), got.append).give_up()  # while it connects
        peer = await link.peer("control")
        waiting: list[Later] = []
        given_up: list[Later] = []

        def run(request: Request[Any]) -> None:
            waiting.append(Later(given_up.append))
            return waiting[-1]

        handlers_of(cluster.ps[0])[AskStatistics] = Handler(run)
        question = link.ask(lambda peer: AskStatistics(), (), got.append)
        await until(lambda: len(waiting) == 1)
        for _ in range(2):
            question.give_up()
        assert peer.statistics()["calls"] == 0
        await until(lambda: given_up == waiting)
        assert got == []
        assert not link._asking


async def test_a_question_holds_nothing_once_it_is_answered() -> None:
    """Not even until the garbage is collected: the memory of a pull is used again at once."""

    class Asker:
        def heard(self, outcome: object) -> None:
            got.append(outcome)

    got: list[object] = []
    async with PsCluster() as cluster:
        link = cluster.client().links[0]
        await link.peer("control")
        asker = Asker()
        gone = weakref.ref(asker)
        gc.disable()
        try:
            link.ask(lambda peer: AskStatistics(), (), asker.heard)
            await until(lambda: len(got) == 1)
            del asker
            assert gone() is None
        finally:
            gc.enable()


async def test_a_connection_that_knows_too_many_sets_makes_way_for_one_that_knows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ps_link, "SETS_PER_CONNECTION", 3)
    async with PsCluster() as cluster:
        variables = [await cluster.create(f"v{i}", np.float32(i)) for i in range(5)]
        client = cluster.client()
        for _ in range(2):
            got = await asyncio.gather(*(pull(client, v) for v in variables))
            assert [float(value) for (value,) in got] == [0, 1, 2, 3, 4]


class Played:
    """A link to a ps whose answers a test gives; notes which questions were given up."""

    task = "a ps"

    def __init__(self) -> None:
        self.answer: list[Callable[[Frame | Exception], None]] = []
        self.given_up: list[int] = []

    def ask(self, build: object, segments: object, then: Any, **_: object) -> Question:
        question = Question()
        question.end = functools.partial(self.given_up.append, len(self.answer))
        self.answer.append(then)
        return question

    def calls(self, count: int) -> list[Call[Statistics]]:
        return [Call(self, lambda _: Done(), Statistics, "it")] * count  # type: ignore[arg-type]


class TestAnswers:
    @staticmethod
    def received(number: int) -> Frame:
        return Frame(Statistics({"number": number}), [])

    @pytest.mark.parametrize("before", [0, 1, 3])
    async def test_they_come_in_the_order_of_the_questions(self, before: int) -> None:
        """Also if some of them, or all, were there before somebody waits."""
        link, order = Played(), [2, 0, 1]
        answers = Answers(link.calls(3))
        for number in order[:before]:
            link.answer[number](self.received(number))
        waiting = asyncio.create_task(answers.all())
        for number in order[before:]:
            await asyncio.sleep(0)
            assert not waiting.done()
            link.answer[number](self.received(number))
        assert await waiting == [self.received(number).message for number in range(3)]
        assert await Answers[Done]([]).all() == []

    async def test_the_first_error_is_raised_once_all_have_ended(self) -> None:
        link = Played()
        waiting = asyncio.create_task(Answers(link.calls(3)).all())
        await asyncio.sleep(0)
        link.answer[2](ValueError("last"))
        link.answer[1](ValueError("first"))
        await asyncio.sleep(0)
        assert not waiting.done()
        link.answer[0](self.received(0))
        with pytest.raises(ValueError, match="first"):
            await waiting

    async def test_who_is_cancelled_gives_all_up(self) -> None:
        link = Played()
        waiting = asyncio.create_task(Answers(link.calls(2)).all())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert link.given_up == [0, 1]
        for number in range(2):
            link.answer[number](self.received(number))  # too late, and harmless

    async def test_who_waits_for_their_end_may_leave_that_to_another(self) -> None:
        link = Played()
        answers = Answers(link.calls(2))
        answers.settled().cancel()
        link.answer[0](self.received(0))
        settled = answers.settled()
        link.answer[1](self.received(1))
        assert settled.done()
        assert (len(answers.messages()), link.given_up) == (2, [])


async def test_an_answer_of_another_kind_is_named_with_who_gave_it() -> None:
    received = Frame(Done(), [])
    assert expect(received, Done, "a ps", "a pull") is received.message
    with pytest.raises(RemoteProtocolError, match=r"^a ps answered a pull with Done"):
        expect(received, Statistics, "a ps", "a pull")
