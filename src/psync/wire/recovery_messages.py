"""Messages of consistent cuts, snapshots, backups, recovery, and workers that leave.

A *cut* is one position on every ps: every update is wholly in it or wholly out. A *snapshot* is
that of a ps at a cut: a state, as JSON, and arrays, its *items*, by their place in the state. See
docs/design.md, "A save" and "Recovery".
"""

from __future__ import annotations

from psync.wire.codec import Message, message

# Coordinator → ps: a cut.


@message(74)
class Gate(Message):
    """Begin no update that has not been begun, and close no step; answered by Gated."""

    cut: int  # number of the cut, from 1, of this coordinator


@message(75)
class Gated(Message):
    """No step is being closed here, and these messages belong to updates that have begun here."""

    # (ps, client's task, its incarnation, sequence)
    others: list[tuple[int, str, int, int]]


@message(76)
class Admit(Message):
    """Let these messages through the gate; answered by Done once all of them are settled."""

    cut: int
    updates: list[tuple[str, int, int]]  # (client's task, its incarnation, sequence)


@message(77)
class Freeze(Message):
    """Hold the present contents until DropFrozen; answered by Frozen."""

    cut: int


@message(78)
class Frozen(Message):
    """Segment: the state of the snapshot."""

    # Closures whose gradients count in a synchronous step that has not been applied.
    pending: list[int]


@message(79)
class OpenGate(Message):
    """Go on with updates; answered by Done, also if there is no such gate."""

    cut: int


@message(84)
class DropFrozen(Message):
    """Hold the contents no longer; answered by Done, also if they are not held."""

    cut: int


@message(87)
class WriteFrozen(Message):
    """Write items of a snapshot to a new file, if you see its directory. Answered by Written.

    Segment: a JSON list of [item, name in the file], in the order in which they are to lie there.
    """

    cut: int
    path: str  # of a safetensors file, which must not exist
    nonce: str  # the text of the file "nonce" beside it: who reads another, or none, writes nothing


@message(88)
class Written(Message):
    """The file is on the disk. Segment: a JSON list of [first byte, bytes, crc32], one an item."""

    size: int | None  # of the file, in bytes; None: there is none, as the directory is not seen


@message(89)
class ReadFrozen(Message):
    """Bytes of an item of a snapshot; answered by FrozenBytes."""

    cut: int
    item: int
    start: int  # first byte
    stop: int  # the one after the last; at most 16 MiB on


@message(92)
class FrozenBytes(Message):
    """Segment: the bytes."""


# Coordinator → ps: back to a snapshot.


@message(93)
class PrepareSnapshot(Message):
    """Make ready to hold another snapshot; what is held now stays. Answered by Done when ready.

    Segments: the state of the snapshot; then, if there is a path, a JSON list of [item, first byte,
    bytes, crc32] in the file. Else the bytes follow, by FillSnapshot.
    """

    load: int  # number of this loading; one that was begun before is given up
    path: str  # of a file that this ps can read, or ""


@message(94)
class FillSnapshot(Message):
    """Bytes of an item of the snapshot that is being prepared; answered by Done. Segment: they."""

    load: int
    item: int
    start: int  # first byte


@message(95)
class RestoreSnapshot(Message):
    """Hold the prepared snapshot from now on, under a new timeline; answered by Done.

    What was begun before is given up. A repetition changes nothing.
    """

    load: int
    timeline: int
    fences: list[tuple[str, int]]  # (task, lowest incarnation of it that may still be served)


# A ps and its backup.


@message(97)
class BackUp(Message):
    """Coordinator → ps: have a backup in the process of another ps; answered by Done.

    With ``lost``, the answer comes when that backup does not follow any more; else when it has
    all that is answered. An earlier backup is given up.
    """

    epoch: int  # grows with each that a coordinator says
    task: str  # the other ps
    address: str  # where it listens; "": go on without a backup
    lost: bool


@message(98)
class BeginBackup(Message):
    """Ps → the process of its backup: a snapshot of me comes; answered by BackupBegun.

    Segment: its state. Its items follow, by FillBackup, then LogEntries, from ``first`` on.
    """

    ps: int
    epoch: int
    coordinator: int  # as in AttachPs, also the next two
    ps_addresses: list[str]
    ps_timeout_s: float
    timeline: int
    first: int  # number of the first entry that the snapshot does not have
    lineage: int  # of what is backed up, see ``reattach``
    release: str  # the version of psync that the ps runs, and its plugins


@message(136)
class BackupBegun(Message):
    """This process runs the same version of psync, and awaits the snapshot."""

    numerics: str  # fingerprint of its arithmetic


@message(99)
class FillBackup(Message):
    """Bytes of an item of such a snapshot; answered by Done. Segment: they."""

    ps: int
    epoch: int
    item: int
    start: int  # first byte


@message(102)
class LogEntries(Message):
    """What a ps is about to do, in order; answered by LogTaken. Segments: those of all entries.

    An entry: (who asked for it, its incarnation, the message that asked, number of segments).
    """

    ps: int
    epoch: int
    first: int  # number of the first entry
    entries: list[tuple[str, int, bytes, int]]


@message(103)
class LogTaken(Message):
    """The backup has all entries up to this one, and will do them in order."""

    upto: int


@message(104)
class Promote(Message):
    """Coordinator → the process of a backup: let it serve. Answered by Promoted."""

    ps: int
    epoch: int
    coordinator: int
    fences: list[tuple[str, int]]  # (task, lowest incarnation of it that may still be served)


@message(114)
class Promoted(Message):
    """It serves."""

    address: str


# Workers that leave.


@message(112)
class LeaveCluster(Message):
    """Worker → coordinator: send nothing more; answered by Done, after which nothing more comes.

    Coordinator → worker: leave, and end; answered by Done, at once.
    """

    reason: str


@message(113)
class EndSession(Message):
    """Worker → coordinator: this session ends; answered by Done, once all before it is heard.

    In order: the worker has left, and has said all that it has to say. Else: it cannot go on.
    """

    reason: str
    in_order: bool


# A coordinator that comes, or comes back.


@message(108)
class GrantCoordinator(Message):
    """Under which incarnation may I be the coordinator? Answered by CoordinatorGranted.

    ps 0 grants a new one; every other task says which is the highest that it has served.
    """

    previous: int  # what ps 0 has granted this coordinator before; 0: nothing
    seen: int  # the highest that another task has served, as far as it is known; 0: none


@message(109)
class CoordinatorGranted(Message):
    """See GrantCoordinator."""

    incarnation: int


@message(6)
class AskServed(Message):
    """Which ps tasks are served in this process? Answered by ServedHere.

    From then on no backup of an earlier coordinator is made or begins to serve here.
    """


@message(7)
class ServedHere(Message):
    """See AskServed, and ``locate_ps``."""

    # (ps, address or "", coordinator, timeline, epoch, process of its backup or -1, its epoch)
    primaries: list[tuple[int, str, int, int, int, int, int]]
    copies: list[tuple[int, int, int]]  # (ps, coordinator, epoch) of backups that do not serve


@message(14)
class EndFormer(Message):
    """All ps tasks are attached: end what earlier coordinators have left in this process.

    Answered by Done.
    """


@message(110)
class DescribeShards(Message):
    """What do you hold of earlier programs that nobody has adopted? Answered by ShardsDescribed."""


@message(111)
class ShardsDescribed(Message):
    """Segment: ``reattach.Holding`` as JSON."""


@message(120)
class AdoptShards(Message):
    """Let the present program have what an earlier one has left; idempotent. Answered by Done.

    Segment: ``reattach.Adopted`` as JSON.
    """

    lineage: int  # the number by which all ps tasks know this state from now on; 0: as it is
    last: bool  # drop what is left then
