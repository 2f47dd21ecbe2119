"""All messages: their numbers and bytes, which do not change by accident, and what holds for all.

The handshake, the first five, never changes.
"""

from __future__ import annotations

import subprocess
import sys
import typing

from psync.wire import messages as m
from psync.wire.codec import Message, decode, encode
from wire_tools import check_bytes, kinds_of

CLASSES = kinds_of(m)

GOLDEN: list[tuple[Message, str]] = [
    (
        m.Hello(1, 1, "/job:ps/task:0", 7, "bulk", bytes(32), True),
        "98010101ae2f6a6f623a70732f7461736b3a3007a462756c6bc420" + "00" * 32 + "c3",
    ),
    (
        m.Challenge(1, "/job:ps/task:0", 2**63, bytes(32), False, b"m"),
        "970201ae2f6a6f623a70732f7461736b3a30cf8000000000000000c420" + "00" * 32 + "c2c4016d",
    ),
    (m.Proof(b"\1" * 32), "9203c420" + "01" * 32),
    (m.Welcome(), "9104"),
    (m.Refused("full", "no room"), "9305a466756c6ca76e6f20726f6f6d"),
    (m.Done(), "9108"),
    (m.Number(4), "92cc8804"),
    (m.Text("a"), "9272a161"),
    (m.Failure("", "E", "", "m", None, "t"), "9709a0a145a0a16dc0a174"),
    (m.Shutdown("r"), "921ba172"),
    (m.AskStatistics(), "911c"),
    (m.AskSpans("r", True), "93cc8aa172c3"),
    (m.Statistics({"a": 1}), "921d81a16101"),
    (m.DefinePlan(1, [(0, 1)]), "9d250191920001ffc0a0a0c0c0c0c400c0c2"),
    (
        m.DefinePlan(1, [], 2, {"a": 1}, "m", "add", [3], [(0, 1)], (7, 0), b"d", [1], True),
        "9d2501900281a16101a16da3616464910391920001920700c401649101c3",
    ),
    (m.Read(1), "94220100c0"),
    (m.Read(1, 4), "94220104c0"),
    (m.Pulled([]), "922390"),
    (m.Pulled([(4, 7)]), "9223919204" + "07"),
    (m.Update(1, 1, -1, 0, 2), "9e3d0101ff00020000c0c0c000ffcb3ff0000000000000"),
    (
        m.Update(1, 1, 4, 0, 2, 9, 1, [(1, 6)], [-1, 5], [0.5], 4, 7, 0.5),
        "9e3d010104000209019192010692ff0591cb3fe00000000000000407cb3fe0000000000000",
    ),
    (m.Pushed("accepted", 10), "9526a861636365707465640ac000"),
    (m.Pushed("accepted", 10, [(4, 7)]), "9526a861636365707465640a9192040700"),
    (m.Read(1, rows=[(3, 7, 0, 0, 0)]), "942201009195030700" + "0000"),
    (m.AttachPs(1, ["a"], 1.5, moves=3), "96200191a161cb3ff8000000000000c203"),
    (m.PsAttached([("rule", "a", 3)]), "92cc899193a472756c65a16103"),
    (
        m.CreateShards([("v", 0, 1, 2, [3], "float32")], [None, b"0", (0, 1)]),
        "93219196a1760001029103a7666c6f6174333293c0c40130920001",
    ),
    (m.Fence("w", 7), "9327a17707"),
    (m.FinalBelow(5), "93280500"),
    (m.FinalBelow(5, 2), "93280502"),
    (m.MeasurePush(2, 9), "93500209"),
    (m.OptimizerState(9, 5, 4), "947c090504"),
    (m.TellCounts([(3, {}, 5, [(1, 4)])]), "92cc989194038005" + "91920104"),
    (m.SetOptimizer(3, {}), "957e0380ffc0"),
    (m.LockShards(1, [(0, 1)], 5.0), "94730191920001cb4014000000000000"),
    (m.UnlockShards(1), "927401"),
    (
        m.UpdateAccumulator(1, 1, -1, 0, "a", 4, [2, 3], None, 0.5),
        "9a3f0101ff00a16104920203c0cb3fe0000000000000",
    ),
    (m.UpdateAccumulator(1, 1, -1, 0, "a", 4), "9a3f0101ff00a16104c0c0cb3ff0000000000000"),
    (m.AccumulatorState("stale", 2, 4), "9641a57374616c65020490c0"),
    (m.AccumulatorState("", 3, 5, [2, 3], [-1, 3]), "9641a00305920203" + "92ff03"),
    (m.TakeGradient("a", 1, 1, 3), "9542a161010103"),
    (
        m.DefineAccumulator("a", "dense", "float32", [None, 2], "MEAN", "", False, 0),
        "993ea161a564656e7365a7666c6f6174333292c002a44d45414ea0c200",
    ),
    (m.EndTakes("a", 3, [4]), "9444a161039104"),
    (m.KeepPart(9, 1), "932a0901"),
    (
        m.Contributed(9, "accepted", 0, 4, False, 2, [(4, 7)]),
        "992d09a861636365707465640004c20291920407c2",
    ),
    (m.BeginGroup(9, {}, -1), "95320980ffff"),
    (m.BeginGroup(9, {"name": "g"}, step=3), "95320981a46e616d65a167c003"),
    (m.FollowParts(), "915a"),
    (m.Held(1, [(9, "w", 7, 1, -1)]), "935b01919509a1770701ff"),
    (
        m.CloseStep(9, None, 4, [("w", 7, 1, 0.5)], [(0, 0.5)]),
        "983009c0049194a1770701cb3fe0000000000000919200cb3fe0000000000000c0a0",
    ),
    (m.CloseStep(9, None, 4, [], measures="updates"), "983009c00490c0c0a775706461746573"),
    (m.Measured([(0, 1, 0.5, 1.0)]), "925391940001cb3fe0000000000000cb3ff0000000000000"),
    (m.AwaitWaiters(), "910f"),
    (
        m.ReportSchedule(1, [("v", 7)], ["w"], False, [(5, "v")]),
        "9831019192a1760791a177c2919205a176c0cb0000000000000000",
    ),
    (m.FinishSteps(), "9147"),
    (m.TickClock(1, 2, 3), "9438010203"),
    (m.CheckState(3, b"d", 7), "94cc8703c4016407"),
    (m.ForgetPush(9, 3), "93cc800903"),
    (m.Tick(1.5), "92cc82cb3ff8000000000000"),
    (m.NormsMeasured(9, 4, [(0, 0.5)], None), "95cc830904919200cb3fe0000000000000c0"),
    (m.StepApplied(9, 4, b"f"), "94cc840904c40166"),
    (m.Gate(1), "924a01"),
    (m.Freeze(1), "934d0190"),
    (m.Freeze(1, [("w", 7, 3)]), "934d019193a1770703"),
    (m.OpenGate(1), "934f01c2"),
    (m.WriteFrozen(1, "p", "n"), "945701a170a16e"),
    (m.ReadFrozen(1, 2, 0, 8), "955901020008"),
    (m.PrepareSnapshot(1, ""), "935d01a0"),
    (m.FillSnapshot(0, 1, 2, 8), "955e00010208"),
    (m.RestoreSnapshot(1, 2, [("w", 8)]), "945f01029192a17708"),
    (m.BackUp(1, "t", "a", True), "956101a174a161c3"),
    (
        m.BeginBackup(0, 1, 7, ["a"], 1.5, 0, 4, 2, 6, "v"),
        "9b6200010791a161cb3ff800000000000000040206a176",
    ),
    (m.LogEntries(0, 1, 4, [("w", 7, b"m", 1)]), "95660001049194a17707c4016d01"),
    (m.Promote(0, 2, 7, [("w", 8)]), "95680002079192a17708"),
    (m.LeaveCluster("r"), "9270a172"),
    (m.EndSession("r", True), "9371a172c3"),
    (m.GrantCoordinator(1, 2), "936c0102"),
    (m.AskServed(True), "9206c3"),
    (m.ServedHere([m.Primary(0, "a", 7, 1, 2)], [(1, 7, 3)]), "9307919700a161070102ff009193010703"),
    (m.MarkRestore(True), "927fc3"),
    (m.AdoptShards(4, True), "937804c3"),
    (m.RunClosures([(5, b"key", 1, [2])]), "94119194" + "05c4036b6579019102c0c0"),
    (m.RunClosures([], [(5, 3)]), "941190" + "91920503c0"),
    (m.RunClosures([], None, (0, 2)), "941190" + "c0920002"),
    (
        m.ClosureResults([(5, "ok", 1, None), (6, "error", 0, ("E", "m", "t"))], 0.5),
        "96159294"
        + "05a26f6b01c0"
        + "9406a56572726f720093a145a16da174"
        + "cb3fe0000000000000c0c0c0",
    ),
    (
        m.ClosureResults([], 0.0, None, [("step", "pull", 2)]),
        "961590cb0000000000000000c0" + "9193a473746570a470756c6c02c0",
    ),
    (
        m.ClosureResults([], 0.0, stop=(5, "NaN")),
        "961590cb0000000000000000c0c0" + "9205a34e614e",
    ),
    (
        m.AttachWorker(0, 3, 1, "o", "p", ["a"], 1.5),
        "9810000301a16fa17091a161cb3ff8000000000000",
    ),
    (m.GiveBack([5]), "92129105"),
    (m.CancelClosures([5]), "92149105"),
    (m.FetchFunction(b"key"), "9216c4036b6579"),
    (m.FetchArguments(5), "921805"),
    (m.AskPosition("u", last=True), "9364a175c3"),
    (m.ReachCollective(5, "w"), "936a05a177"),
    (m.JoinCluster("b:1", -1, "3.11"), "94cc96a3623a31ffa4332e3131"),
    (m.Post(-1, False), "9334ffc2"),
    (m.Posted(9, 1, [("w", True)]), "943509019192a177c3"),
]


def test_messages_have_these_bytes_and_come_back() -> None:
    for sent, expected in GOLDEN:
        check_bytes(sent, expected)
    assert {type(sent) for sent, _ in GOLDEN} == CLASSES


def test_each_message_is_explained_and_has_a_number_of_its_own() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES) > 70
    for kind in CLASSES:
        assert kind.__doc__
        assert kind.code > 0
        assert not hasattr(kind(*[0] * len(kind.__struct_fields__)), "__dict__")


def test_who_reads_frames_can_decode_every_message() -> None:
    program = (
        "import sys, psync.wire.handshake\n"
        "from msgspec import msgpack\n"
        "from psync.wire.codec import decode\n"
        "for code in sys.argv[1:]:\n"
        "    try: decode(msgpack.encode([int(code)]))\n"
        "    except Exception as exc:\n"
        "        if 'unknown message' in str(exc): print(exc)\n"
    )
    codes = [str(kind.code) for kind in CLASSES]
    done = subprocess.run([sys.executable, "-c", program, *codes], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def sample(annotation: typing.Any) -> typing.Any:
    """A value of the annotated type, not empty where that is possible."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return [sample(args[0])]
    if origin is tuple:
        return tuple(sample(arg) for arg in args)
    if origin is dict:
        return {"key": sample(args[1])}
    if hasattr(annotation, "_fields"):
        return annotation(*map(sample, typing.get_type_hints(annotation).values()))
    if args:  # a union
        return sample(args[0])
    return {int: 3, float: 0.5, str: "text", bytes: b"raw", bool: True}.get(annotation, [1, None])


def test_every_message_comes_back_with_all_its_fields() -> None:
    for kind in CLASSES:
        hints = typing.get_type_hints(kind)
        message = kind(*(sample(hints[name]) for name in kind.__struct_fields__))
        assert decode(encode(message)) == message
