"""Manifests of checkpoints, with a checksum that is right: as if psync had written them.

What comes out: a manifest, or CheckpointError.
"""

from __future__ import annotations

from driver import OneInput, fuzz


def setup() -> tuple[OneInput, list[bytes]]:
    import json

    from psync.checkpoints.manifest import Manifest, Slice, Tensor, commit_line, read_manifest
    from psync.errors import CheckpointError

    def one_input(data: bytes) -> None:
        try:
            manifest = read_manifest(data, commit_line(data), "ckpt-3")
        except CheckpointError as exc:
            assert str(exc).startswith("ckpt-3")
            return
        again = manifest.to_bytes()
        assert read_manifest(again, commit_line(again), "ckpt-3").to_bytes() == again
        for tensor in manifest.tensors.values():
            list(tensor.rows_in(0, tensor.rows))

    tensor = Tensor(
        "model/w", (10, 2), "float32",
        (Slice(0, 6, "data-0", 0, 48, 7), Slice(6, 4, "data-1", 0, 32, 8)),
    )  # fmt: skip
    full = Manifest(
        3, {"model/w": tensor}, {"optimizer": {"step": 3}}, {"data-0": 64, "data-1": 64}
    )
    data = full.to_bytes()
    content = json.loads(data)
    content["images"] = [
        {"data": "data-0", "state": "data-1", "crc32": 5, "places": [[0, 8, 16, 3]]}
    ]
    return one_input, [data, json.dumps(content).encode(), b"{}", b"[]"]


if __name__ == "__main__":
    fuzz(__file__, setup)
