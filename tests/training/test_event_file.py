"""Event files: their checksums and values; that TensorBoard reads them: tests/integrations."""

from __future__ import annotations

import math
from pathlib import Path

from event_files import crc32c, scalars, unmasked
from loops import for_each
from psync.callbacks import EventFile, masked_crc


@for_each(
    "data, crc",
    [
        (b"", 0),
        (b"123456789", 0xE3069283),  # the check value of CRC-32C
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (bytes([0xFF] * 32), 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_checksums_are_those_of_the_standard(data: bytes, crc: int) -> None:
    assert unmasked(masked_crc(data)) == crc == crc32c(data)


def test_scalars_come_back(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "a" / "b")
    added = [("loss", 0.5, 0), ("a/b", -1.5, 127), ("x" * 200, 0.0, 128), ("ü", 1.0, 10**12)]
    for tag, value, step in added:
        file.add_scalar(tag, value, step)
    file.close()
    assert scalars(file.path.read_bytes()) == added


def test_values_that_float32_cannot_hold_are_infinite(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    for value in (1e300, -1e300, math.inf, math.nan):
        file.add_scalar("loss", value, 1)
    file.close()
    values = [value for _, value, _ in scalars(file.path.read_bytes())]
    assert values[:3] == [math.inf, -math.inf, math.inf]
    assert math.isnan(values[3])


def test_what_was_flushed_can_be_read_and_two_files_do_not_meet(tmp_path: Path) -> None:
    first, second = EventFile(tmp_path), EventFile(tmp_path)
    first.add_scalar("loss", 2.0, 1)
    first.flush()
    assert scalars(first.path.read_bytes()) == [("loss", 2.0, 1)]
    assert first.path.name < second.path.name
    first.close()
    second.close()
