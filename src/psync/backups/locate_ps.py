"""Locating the ps tasks after the coordinator has died: the newest of each, or AttachError.

Each ps process has said what is served in it, and which backups it hosts, and promotes no backup
of earlier coordinators from then on. What follows is decided for all at once.

    of one ps there are                                     it is
    several that serve it (some were replaced, and do not   the newest: coordinator, then timeline,
    know)                                                   then the order that let it serve
    none, and no backup of it                               at its own address, where it is empty
    only a backup                                           lost: AttachError

The newest may itself have been replaced, by a backup that has died since: this is possible only if
it waits for a backup that is not where it was. A backup alone may be out of date: it may lack
updates that were answered after it was given up.

Source: docs/design.md, "Attach".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from psync.errors import AttachError
from psync.store.reattach import BACK
from psync.wire.messages import Primary, ServedHere


class Place(NamedTuple):
    """Where one ps is served."""

    process: int
    address: str  # "": at that of the process


def places(found: Sequence[ServedHere]) -> list[Place]:
    """Return where each ps is served.

    Args:
        found: What each process has said, by the index of the ps whose address it has.

    Raises:
        AttachError: What there is may not be the newest that there was.
    """
    result, doubts = [], []
    copied = {ps for there in found for ps, _, _ in there.copies}
    for ps in range(len(found)):
        serving = [
            (primary.coordinator, primary.timeline, primary.epoch, process, primary)
            for process, there in enumerate(found)
            for primary in there.primaries
            if primary.ps == ps
        ]
        if not serving:
            result.append(Place(ps, ""))
            if ps in copied:
                doubts.append(
                    f"nobody serves /job:ps/task:{ps}, whose backup may have been left behind"
                )
            continue
        *_, process, newest = max(serving, key=lambda each: each[:4])
        if newest.host >= 0 and not _is_there(newest, found):
            doubts.append(
                f"/job:ps/task:{ps} may have been replaced by its backup in the process of "
                f"/job:ps/task:{newest.host}, which is gone"
            )
        result.append(Place(process, newest.address))
    if doubts:
        raise AttachError(f"cannot attach to living variables: {'; '.join(doubts)}", hint=BACK)
    return result


def _is_there(primary: Primary, found: Sequence[ServedHere]) -> bool:
    """Return whether the backup that a ps waits for is where it was: then it has not served."""
    copy = (primary.ps, primary.coordinator, primary.backup)
    return primary.host < len(found) and copy in found[primary.host].copies
