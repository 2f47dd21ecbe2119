"""Limits on what a peer may declare or leave with a task: sizes, connections, handshakes.

Every size that a peer declares is compared with these before memory is taken for it.
The figures follow what comparable systems chose: gRPC refuses messages over 4 MiB by
default, Dask ships frames of 64 MiB and more; tensors need more, headers far less.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on what peers may declare and leave with a task. All sizes in bytes."""

    header_bytes: int = 1 << 20  # msgpack header of one frame
    segments: int = 65_536  # raw segments in one frame
    segment_bytes: int = 1 << 30  # one segment: one shard of a variable, one pickle buffer
    body_bytes: int = 4 << 30  # all segments of one frame
    # Bodies of one peer's requests that handlers still work on: above it, no more is read.
    unfinished_bytes: int = 256 << 20
    gathered_bytes: int = 256 << 20  # rows of all shards that one request asks for
    connections: int = 4096  # open connections of one listening task
    handshakes: int = 64  # connections of one listening task that have not proved who they are
    handshake_seconds: int = 5  # from the connection to its end, with TLS's own
    # Failed handshakes a minute from one address, above which it is refused for a while; see
    # ``handshake_limits``.
    handshake_failures: int = 10
    # Pushes of synchronous steps that are not closed yet, on one ps; see ``staging``.
    staging_bytes: int = 2 << 30


DEFAULT_LIMITS = Limits()

HANDSHAKE_LIMITS = Limits(header_bytes=4096, segments=0, segment_bytes=0, body_bytes=0)
"""What a peer may send before it has proved that it knows the secret."""
