"""Manifests of `psync launch kubernetes`, run: pods as real processes, with their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from namespaces import network
from played_kubernetes import PlayedKubernetes
from psync.integrations.manifests import Launch, _secrets, manifests
from tasks_by_hand import script

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(170)]


@pytest.fixture
def applied(tmp_path: Path) -> Iterator[Callable[..., PlayedKubernetes]]:
    """Make manifests, and run them."""
    with ExitStack() as stack:

        def apply(**options: Any) -> PlayedKubernetes:
            launch = Launch(
                name="train",
                image="train:1",
                command=("python", *script("anywhere.py", str(tmp_path / "data"))),
                num_ps=2,
                num_workers=2,
                **options,
            )
            secrets = _secrets(launch.hosts if launch.tls else [])
            documents = [data for _, data in manifests(launch, secrets)]
            played = PlayedKubernetes(stack.enter_context(network(tmp_path)), documents)
            stack.callback(played.stop)
            played.apply()
            return played

        yield apply


def ends_exactly(kubernetes: PlayedKubernetes, directory: Path) -> None:
    """The counts are exact, and the jobs end."""
    (directory / "data" / "enough").touch()
    assert "total True" in kubernetes.wait_for("total ")
    kubernetes.wait_until_succeeded("train-chief")
    kubernetes.wait_until_succeeded("train-worker")


def test_pods_that_are_evicted_and_preempted_leave_exact_counts(
    applied: Callable[..., PlayedKubernetes], tmp_path: Path
) -> None:
    kubernetes = applied(spot_workers=True)
    kubernetes.wait_for("counted 40")
    answer = kubernetes.wait_until_ready("train-ps-0", "livenessProbe")
    assert answer == "/job:ps/task:0 answers\n"
    assert kubernetes.wait_until_ready("train-worker-1") == "/job:worker/task:1 answers\n"
    assert kubernetes.evict("train-worker-0") == 143  # 0 would say that it is done
    kubernetes.wait_until_ready("train-worker-0")
    kubernetes.wait_for("counted ")
    assert kubernetes.evict("train-ps-1") == 0
    kubernetes.wait_until_ready("train-ps-1")
    kubernetes.wait_for("counted ")
    kubernetes.kill("train-worker-1")
    kubernetes.wait_until_ready("train-worker-1")
    kubernetes.wait_for("counted ")
    ends_exactly(kubernetes, tmp_path)
    assert kubernetes.failures == [("train-worker-1", -9)]


def test_a_chief_that_is_evicted_finds_the_others_and_goes_on(
    applied: Callable[..., PlayedKubernetes], tmp_path: Path
) -> None:
    kubernetes = applied(tls=True)
    kubernetes.wait_for("counted 60")
    kubernetes.wait_until_ready("train-ps-0")
    assert kubernetes.evict("train-chief-0") == 143
    assert int(kubernetes.wait_for("began at ").split()[-1]) >= 60
    assert [pod for pod, _ in kubernetes.ended] == ["train-chief-0"]
    kubernetes.wait_for("counted ")
    ends_exactly(kubernetes, tmp_path)
    assert kubernetes.failures == []
