"""Workers get GPUs of their own, out of those that the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

import psync
from psync.errors import ConfigurationError
from psync.launch.processes import GpuShares, visible_gpus

NONE = {"PATH": ""}


def shares(per_worker: int | None, devices: str, num_workers: int) -> list[dict[str, str]]:
    gpus = GpuShares(per_worker, {"CUDA_VISIBLE_DEVICES": devices})
    gpus.check(num_workers)
    return [gpus.environ_of("worker", index) for index in range(num_workers)]


def test_workers_get_different_ones_out_of_those_that_are_visible() -> None:
    assert shares(1, "2,3", 2) == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    assert shares(2, "GPU-a, GPU-b,4,5,6", 2) == [
        {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
        {"CUDA_VISIBLE_DEVICES": "4,5"},
    ]


def test_a_ps_sees_none_and_a_chief_what_there_is() -> None:
    gpus = GpuShares(1, {"CUDA_VISIBLE_DEVICES": "0"})
    gpus.check(1)
    assert gpus.environ_of("ps", 0) == {"CUDA_VISIBLE_DEVICES": ""}
    assert gpus.environ_of("chief", 0) == gpus.environ_of("evaluator", 0) == {}


def test_none_hides_all_and_without_a_number_nothing_changes() -> None:
    assert shares(0, "0,1", 2) == [{"CUDA_VISIBLE_DEVICES": ""}] * 2
    assert shares(None, "", 3) == [{}] * 3


def test_too_few_are_an_error_that_says_what_there_is() -> None:
    for devices, shown in [
        ("0,1", "CUDA_VISIBLE_DEVICES='0,1' shows 2 (0, 1)"),
        ("", "CUDA_VISIBLE_DEVICES='' shows 0"),
        ("0,-1,1,2", "CUDA_VISIBLE_DEVICES='0,-1,1,2' shows 1 (0)"),  # as CUDA reads it
    ]:
        with pytest.raises(ConfigurationError) as caught:
            shares(1, devices, 3)
        assert caught.value.message == (
            f"gpus_per_worker: 3 workers with 1 each need 3 GPUs, but {shown}"
        )


def test_a_number_that_is_none_is_an_error() -> None:
    for number in [-1, True, "1"]:
        with pytest.raises(
            ConfigurationError, match="gpus_per_worker: expected a whole number, 0 or"
        ):
            GpuShares(number, NONE)


def smi(directory: Path, script: str) -> dict[str, str]:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


def test_nvidia_smi_lists_those_of_this_machine_and_parts_of_one(tmp_path: Path) -> None:
    environ = smi(
        tmp_path,
        "cat <<'END'\n"
        "GPU 0: NVIDIA H100 (UUID: GPU-aa-1)\n"
        "GPU 1: NVIDIA H100 (UUID: GPU-bb-2)\n"
        "  MIG 1g.10gb     Device  0: (UUID: MIG-cc-3)\n"
        "  MIG 1g.10gb     Device  1: (UUID: MIG-dd-4)\n"
        "GPU 2: NVIDIA H100 (UUID: GPU-ee-5)\nEND",
    )
    found = (["GPU-aa-1", "MIG-cc-3", "MIG-dd-4", "GPU-ee-5"], "nvidia-smi -L")
    assert visible_gpus(environ) == found


@pytest.mark.parametrize("broken", [True, False])
def test_without_it_the_driver_says_which_there_are(tmp_path: Path, broken: bool) -> None:
    environ = smi(tmp_path, "echo no driver; exit 9") if broken else NONE
    driver = tmp_path / "gpus"
    for number, uuid in (("0000:17:00.0", "GPU-aa"), ("0000:65:00.0", "GPU-bb")):
        (driver / number).mkdir(parents=True)
        (driver / number / "information").write_text(f"Model: X\nGPU UUID: \t {uuid}\nIRQ: 1\n")
    assert visible_gpus(environ, driver) == (["GPU-aa", "GPU-bb"], "this machine")
    assert visible_gpus(environ, tmp_path / "none") == ([], "this machine")


async def test_a_local_cluster_without_enough_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(ConfigurationError, match="2 workers with 1 each need 2 GPUs, but CUDA_V"):
        await psync.LocalCluster(1, 2, gpus_per_worker=1).start()
