"""Sets of shards that a ps knows on a connection: these are named by their number alone."""

from __future__ import annotations

from psync.net.peer import Peer

SETS_PER_CONNECTION = 8192
"""Fewer than a ps allows; forgotten sets stay known to a connection for its life."""


def knows_set(peer: Peer, set_id: int) -> bool:
    """Return whether the ps certainly knows a set on this connection."""
    return set_id in peer.state.get("sets", ())


def note_known(peer: Peer, set_id: int) -> None:
    """The ps knows a set: only its answer says so, as messages may overtake one another."""
    known: set[int] = peer.state.setdefault("sets", set())
    if set_id in known:
        return
    known.add(set_id)
    if len(known) >= SETS_PER_CONNECTION:
        peer.close()  # a new one knows none; what is under way is repeated there
