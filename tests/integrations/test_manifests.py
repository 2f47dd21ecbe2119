"""What `psync launch` prints, and the Dockerfile, as the tools of their users see them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from psync.cli.launch.kubernetes import manifests
from psync.cli.launch.pods import USER, Launch
from psync.cli.launch.slurm import Batch, script
from psync.cli.launch.yaml import dump

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.31", "1.34", "1.37")
"""Of Kubernetes: podReplacementPolicy and podFailurePolicy are there in all that are kept up."""

EVERYTHING = Launch(
    "train", "registry.example.org/train:1", ("python", "train.py", "--epochs", "10"), 2, 4,
    namespace="team", spot_workers=True, shared_volume=True, tls=True,
    resources={"worker": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}},
)  # fmt: skip
PLAIN = Launch("train", "train:1", ("python", "train.py"), 1, 1, volume=None)
SECRETS = {"secret": "0" * 64, "ca.pem": "-----BEGIN\n\nMII=\n-----END\n", "odd": "no\ttab: #"}


def tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    return str(path)


@pytest.mark.parametrize("launch", [EVERYTHING, PLAIN], ids=["everything", "plain"])
def test_what_is_printed_is_what_was_meant(launch: Launch) -> None:
    documents = manifests(launch, SECRETS)
    assert list(yaml.safe_load_all(dump(documents))) == [data for _, data in documents]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("launch", [EVERYTHING, PLAIN], ids=["everything", "plain"])
def test_each_object_is_as_kubernetes_publishes_it(launch: Launch, version: str) -> None:
    for data in yaml.safe_load_all(dump(manifests(launch, SECRETS))):
        kubernetes_validate.validate(data, version, strict=True)


def test_the_batch_script_has_nothing_for_shellcheck_to_say(tmp_path: Path) -> None:
    file = tmp_path / "train.sbatch"
    file.write_text(script(Batch("train", ("python", "train.py", "a b"), 2, 4, 8, "1:00:00")))
    run = subprocess.run(
        [tool("shellcheck"), str(file)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_the_dockerfile_has_nothing_for_hadolint_to_say() -> None:
    run = subprocess.run(
        [tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_the_image_runs_as_the_user_that_manifests_name() -> None:
    assert f"USER {USER}:{USER}\n" in (ROOT / "Dockerfile").read_text()


def test_the_image_is_built_of_what_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    names = [name for line in copied for name in line.split()]
    assert names
    assert [name for name in names if f"!{name}\n" not in ignored] == []
    assert [name for name in names if not (ROOT / name).exists()] == []
