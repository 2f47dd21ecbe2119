"""How numbers and names of tasks read."""

from __future__ import annotations

from psync.status.units import (
    bytes_text,
    number_text,
    seconds_text,
    short_names,
    tasks_text,
)


def test_durations() -> None:
    for seconds, text in [
        (2e-6, "2 µs"),
        (0.9999e-3, "1 ms"),
        (0.015, "15 ms"),
        (0.9999, "1 s"),
        (3.24, "3.2 s"),
        (42, "42 s"),
        (185, "3:05 min"),
        (7500, "2:05 h"),
    ]:
        assert seconds_text(seconds) == text


def test_sizes() -> None:
    for size, text in [
        (512, "512 B"),
        (2048, "2.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 40, "5.0 TiB"),
    ]:
        assert bytes_text(size) == text


def test_rates() -> None:
    for rate, text in [(0, "0.0"), (99.94, "99.9"), (1250.4, "1,250")]:
        assert number_text(rate) == text


def test_names_of_tasks() -> None:
    names = [f"/job:worker/task:{index}" for index in range(5)]
    assert tasks_text(names[:2]) == "worker 0, worker 1"
    assert tasks_text(names) == "worker 0, worker 1, worker 2 and 2 more"
    assert short_names("closure 3 on /job:worker/task:12; x") == "closure 3 on worker 12; x"
