"""Manifests, as files to look at. With PSYNC_REWRITE=1 they are written anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from psync.cli.launch.kubernetes import manifests
from psync.cli.launch.pods import Launch
from psync.cli.launch.yaml import dump
from psync.net.discovery.default import resolve_cluster

GOLDEN = Path(__file__).parent / "golden"
SECRETS = {"secret": "0123456789abcdef" * 4}
CERTIFICATES = {name: f"-----{name}-----\n" for name in ("ca.pem", "cert.pem", "key.pem")}

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "spot": {
        "spot_workers": True,
        "namespace": "team",
        "shared_volume": True,
        "resources": {"worker": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}},
    },
    "tls": {"tls": True, "volume": None, "num_ps": 1},
}


def launch(**options: Any) -> Launch:
    return Launch(
        **{
            "name": "train",
            "image": "registry.example.org/train:1",
            "command": ("python", "train.py", "--epochs", "10"),
            "num_ps": 2,
            "num_workers": 4,
            **options,
        }
    )


def objects(asked: Launch, secrets: dict[str, str] | None = SECRETS) -> dict[str, dict[str, Any]]:
    return {
        f"{data['kind']} {data['metadata']['name']}": data for _, data in manifests(asked, secrets)
    }


@pytest.mark.parametrize("name", ASKED)
def test_manifests_are_as_they_were(name: str) -> None:
    secrets = {**SECRETS, **(CERTIFICATES if name == "tls" else {})}
    text = dump(manifests(launch(**ASKED[name]), secrets))
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("PSYNC_REWRITE"):
        golden.write_text(text)
    assert golden.read_text() == text, f"read the diff; then PSYNC_REWRITE=1: {golden}"


@pytest.mark.parametrize(
    ("owner", "pod", "task"),
    [
        ("StatefulSet train-ps", "train-ps-1", ("ps", 1)),
        ("Job train-worker", "train-worker-3", ("worker", 3)),
        ("Job train-chief", "train-chief-0", ("chief", 0)),
    ],
)
def test_a_pod_finds_its_task_and_the_names_are_those_of_pods(
    owner: str, pod: str, task: tuple[str, int]
) -> None:
    asked = launch()
    (container,) = objects(asked)[owner]["spec"]["template"]["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    resolver = resolve_cluster({**environ, "HOSTNAME": pod})
    assert (resolver.task_type, resolver.task_id) == task
    spec = resolver.cluster_spec()
    addresses = [spec.task_address(job, i) for job in spec.jobs for i in spec.task_indices(job)]
    assert sorted(addresses) == sorted(f"{host}:8470" for host in asked.hosts)


def test_checkpoints_go_through_the_chief_unless_ps_tasks_have_its_volume() -> None:
    def variables(asked: Launch, owner: str) -> dict[str, str]:
        (container,) = objects(asked)[owner]["spec"]["template"]["spec"]["containers"]
        mounts = {each["name"]: each["mountPath"] for each in container.get("volumeMounts", ())}
        return mounts | {each["name"]: each.get("value") for each in container["env"]}

    stream = "PSYNC_CHECKPOINT_STREAM"
    assert {"data", stream} <= variables(launch(), "Job train-chief").keys()
    assert not {"data", stream} & variables(launch(), "StatefulSet train-ps").keys()
    for owner in ("Job train-chief", "StatefulSet train-ps"):
        shared = variables(launch(shared_volume=True), owner)
        assert shared["data"] == "/data"
        assert stream not in shared
    assert not {"data", stream} & variables(launch(volume=None), "Job train-chief").keys()


def test_members_reach_each_other_at_any_port_and_nobody_else_does() -> None:
    """A backup that takes over for a ps serves at a port of its own."""
    labels = {"app.kubernetes.io/name": "psync", "app.kubernetes.io/instance": "train"}
    members = {"podSelector": {"matchLabels": labels}}
    spec = objects(launch())["NetworkPolicy train"]["spec"]
    assert spec == {**members, "policyTypes": ["Ingress"], "ingress": [{"from": [members]}]}
    for owner in ("StatefulSet train-ps", "Job train-worker", "Job train-chief"):
        pod = objects(launch())[owner]["spec"]["template"]["metadata"]["labels"]
        assert labels.items() <= pod.items()


def test_a_secret_that_is_there_is_not_printed() -> None:
    named = objects(launch(secret="mine"), None)
    assert not any(name.startswith("Secret") for name in named)
    (container,) = named["Job train-chief"]["spec"]["template"]["spec"]["containers"]
    sources = [each["valueFrom"] for each in container["env"] if "valueFrom" in each]
    assert sources == [{"secretKeyRef": {"name": "mine", "key": "secret"}}]


def test_the_secret_is_in_its_secret_alone() -> None:
    documents = manifests(launch(), SECRETS)
    holders = [data["kind"] for _, data in documents if SECRETS["secret"] in str(data)]
    assert holders == ["Secret"]
