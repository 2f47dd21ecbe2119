"""States of snapshots of ps tasks, as they lie in checkpoints: damaged JSON, and odd values.

What comes out: a state that is written in the same way again, CheckpointError, or
ConfigurationError where a rule or schedule has another name.
"""

from __future__ import annotations

from driver import OneInput, fuzz


def setup() -> tuple[OneInput, list[bytes]]:
    import json
    from dataclasses import replace

    from samples import Draw, changed

    from psync.errors import CheckpointError, ConfigurationError
    from psync.numerics.rules import Adam
    from psync.schedules import Constant
    from psync.specs import STEP_BITS
    from psync.store.push_counts import PushCount
    from psync.store.snapshot_state import (
        NOTHING,
        OptimizerSnapshot,
        SenderState,
        ShardSnapshot,
        SnapshotState,
    )
    from psync.store.untrusted_json import Signed

    config = Adam(Constant(0.1)).to_config()
    count = PushCount(9, 4, 2, 0, {(): 1, (0, 2): 1}, {1: {0: 2}})
    shard = ShardSnapshot(
        variable="h", id=0, index=1, offset=2, shape=(2, 3), dtype="bfloat16", ps=1, version=7,
        slots=((1, "m", None), (1, "v", b"\0\0\x80\x3f")), pushes=(),
    )  # fmt: skip
    answers = ((5, (3, 0), b"yes"), (7, None, b"no"))
    state = replace(
        NOTHING,
        shards=(shard,),
        optimizers=(OptimizerSnapshot(1, config, Constant(0.25).to_config(), count.marked),),
        counts=((1, count.state),),
        senders=(SenderState("/job:worker/task:0", 21, 5, answers),),
        variable_sets=((Signed(-77), ("h",)), (Signed(12), ())),
        calls=((3, 0, 0), (3, 1, 1)),
        final_below=3,
    )
    whole = state.to_bytes()
    content = json.loads(whole)

    def one_input(data: bytes) -> None:
        if data[:1] == b"\xc1":  # which begins no JSON
            data = json.dumps(changed(content, Draw(data[1:])), default=repr).encode()
        try:
            made = SnapshotState.from_bytes(data, "snapshot of ps 1")
        except (CheckpointError, ConfigurationError) as exc:
            assert str(exc).startswith("snapshot of ps 1")
            assert len(str(exc)) < 5000
            return
        assert SnapshotState.from_bytes(made.to_bytes(), "").to_bytes() == made.to_bytes()
        assert 0 <= made.iterations < 1 << STEP_BITS

    seeds = [whole, *(b"\xc1" + bytes(range(number, number + 12)) for number in range(0, 200, 5))]
    return one_input, seeds


if __name__ == "__main__":
    fuzz(__file__, setup)
