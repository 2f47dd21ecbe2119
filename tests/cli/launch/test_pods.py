"""Pods: confined, with probes, on the machines that they are meant for."""

from __future__ import annotations

from typing import Any

import pytest

from psync.cli.launch.pods import SPOT, Launch, pod_template

JOBS = ("chief", "ps", "worker")


def spec(job: str, **options: Any) -> dict[str, Any]:
    asked = Launch("train", "train:1", ("python", "train.py"), 2, 4, **options)
    found: dict[str, Any] = pod_template(asked, job)["spec"]
    return found


@pytest.mark.parametrize("job", JOBS)
def test_pods_may_nothing_that_the_restricted_standard_forbids(job: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    pod = spec(job, tls=True)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod["containers"], *pod["initContainers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    assert pod["automountServiceAccountToken"] is False
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"secret", "emptyDir", "persistentVolumeClaim"}


def test_workers_alone_are_on_spot_machines() -> None:
    worker, ps = spec("worker", spot_workers=True), spec("ps", spot_workers=True)
    assert {each["key"] for each in worker["tolerations"]} == {label for label, _ in SPOT}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = worker["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    assert [len(term["matchExpressions"]) for term in terms] == [1] * len(SPOT)  # any of them
    (term,) = ps["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    assert [each["operator"] for each in term["matchExpressions"]] == ["NotIn"] * len(SPOT)
    assert "tolerations" not in ps
    assert "affinity" not in spec("worker")


def test_only_a_ps_is_asked_whether_it_lives() -> None:
    probes = {job: {name for name in spec(job)["containers"][0] if "Probe" in name} for job in JOBS}
    assert probes == {
        "chief": set(),
        "ps": {"startupProbe", "livenessProbe", "readinessProbe"},
        "worker": {"readinessProbe"},
    }


def test_arguments_are_not_expanded() -> None:
    asked = Launch("train", "train:1", ("python", "train.py", "$(HOME)", "$HOME"), 1, 1)
    (container,) = pod_template(asked, "chief")["spec"]["containers"]
    assert container["args"] == ["python", "train.py", "$$(HOME)", "$HOME"]


def test_a_limit_is_set_on_memory_and_devices_and_not_on_cores() -> None:
    amounts = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}
    (container,) = spec("worker", resources={"worker": amounts})["containers"]
    limits = {"memory": "8Gi", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"requests": amounts, "limits": limits}
    assert "resources" not in spec("ps", resources={"worker": amounts})["containers"][0]
