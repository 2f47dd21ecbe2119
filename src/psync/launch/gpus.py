"""The GPUs of this machine, shared out to the tasks of a cluster."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from psync.errors import ConfigurationError

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")
LISTING_S = 20.0
"""``nvidia-smi`` waits for the driver, which a first call after boot has to load."""


class GpuShares:
    """Which devices each task of a cluster sees.

    Args:
        per_worker: Number for each worker; 0: workers see none; None: nothing is changed.
        environ: The environment of tasks, whose ``CUDA_VISIBLE_DEVICES`` is what there is to share
            out; where it is not set, all devices of the machine are.

    Raises:
        ConfigurationError: ``per_worker`` is no such number.
    """

    def __init__(self, per_worker: int | None, environ: Mapping[str, str]) -> None:
        if per_worker is not None and (type(per_worker) is not int or per_worker < 0):
            raise ConfigurationError(
                f"gpus_per_worker: expected a whole number, 0 or above, got {per_worker!r}"
            )
        self._per_worker = per_worker
        self._environ = environ
        self._found: tuple[list[str], str] | None = None  # None until they are looked for

    def check(self, num_workers: int) -> None:
        """Are there enough for so many workers? The first call may start ``nvidia-smi``.

        Raises:
            ConfigurationError: No; says what there is.
        """
        if not self._per_worker:
            return
        if self._found is None:
            self._found = visible_gpus(self._environ)
        (devices, source), needed = self._found, num_workers * self._per_worker
        if len(devices) < needed:
            shown = f" ({', '.join(devices)})" if devices else ""
            raise ConfigurationError(
                f"gpus_per_worker: {num_workers} workers with {self._per_worker} each need "
                f"{needed} GPUs, but {source} shows {len(devices)}{shown}",
                hint="ask for fewer workers, or fewer GPUs for each; 0 hides all of them",
            )

    def environ_of(self, job: str, index: int) -> dict[str, str]:
        """Return what a task has in its environment for this; call ``check`` before."""
        if self._per_worker is None or job not in ("ps", "worker"):
            return {}
        devices = self._found[0] if self._found is not None and job == "worker" else []
        first = index * self._per_worker
        return {VARIABLE: ",".join(devices[first : first + self._per_worker])}


def visible_gpus(environ: Mapping[str, str], driver: Path = DRIVER) -> tuple[list[str], str]:
    """Return the GPUs that programs of this process see, and where that was read.

    By number if the variable gives numbers, else by UUID: what ``nvidia-smi`` and CUDA number
    differs where GPUs are of several models.

    Args:
        environ: Where ``CUDA_VISIBLE_DEVICES`` and ``PATH`` are looked up.
        driver: The driver's directory, read where there is no ``nvidia-smi``, as in containers.
    """
    given = environ.get(VARIABLE)
    if given is not None:
        return _listed(given), f"{VARIABLE}={given!r}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(
            ["nvidia-smi", "-L"],
            env=dict(environ), capture_output=True, text=True, timeout=LISTING_S, check=True,
        ).stdout  # fmt: skip
        return _uuids(listing.splitlines()), "nvidia-smi -L"
    lines: list[str] = []
    for information in sorted(driver.glob("*/information")):
        with contextlib.suppress(OSError):
            lines += information.read_text(encoding="utf-8", errors="replace").splitlines()
    return _uuids(lines), "this machine"


def _listed(given: str) -> list[str]:
    """Return the devices of a value of the variable; as CUDA reads it, -1 ends the list."""
    parts = (part.strip() for part in given.split(","))
    return list(itertools.takewhile(lambda part: part and not part.startswith("-"), parts))


def _uuids(lines: Sequence[str]) -> list[str]:
    """Return GPUs, or in the place of one that is partitioned its MIG devices."""
    devices: list[str] = []
    for line in lines:
        for kind, uuid in re.findall(r"UUID:\s*((?:GPU|MIG)-)([^\s)]+)", line):
            if kind == "MIG-" and devices and devices[-1].startswith("GPU-"):
                devices.pop()  # the one that it is a part of
            devices.append(kind + uuid)
    return devices
