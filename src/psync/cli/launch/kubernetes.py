"""Manifests of a cluster on Kubernetes.

ps tasks are a StatefulSet: each pod keeps its name, and one that has gone is made again. Workers
are an indexed Job: each index is done when its pod ends with 0, which it does when the chief says
so. One that is preempted ends with 143 (``PSYNC_SUPERVISED``), which is no failure, and is made
again under its name. The chief is a Job of one pod, which is made again a few times, unless its
set-up is wrong (code 2). Pods find each other by the names of one headless service; see
``KubernetesClusterResolver``.
"""

from __future__ import annotations

from typing import Any

from psync.cli.launch.pods import Launch, pod_template

WRONG_SETUP = 2
LEFT = 143
NO_LIMIT = 2**31 - 1

Document = tuple[str, dict[str, Any]]


def manifests(launch: Launch, secrets: dict[str, str] | None) -> list[Document]:
    """Return the objects, each with what is to be said above it.

    Args:
        launch: What was asked for.
        secrets: What the Secret holds, by key; None: it is there already.
    """
    documents = [
        ("Pods find each other by this service's names, also while they begin.", _service(launch)),
        ("Only pods of this cluster reach its tasks.", _network_policy(launch)),
    ]
    if secrets is not None:
        about = "Whoever reads it can run code in these pods. Made for this cluster alone."
        documents.append((about, _secret(launch, secrets)))
    if launch.volume:
        documents.append(_claim(launch))
    documents += [
        ("Hold the variables. One that has gone is made again under its name.", _ps(launch)),
        ("Maintenance takes one ps at a time.", _disruption_budget(launch)),
        (
            "Run the script. A worker that is preempted gives back what it runs, and is made "
            "again;\nindices are done when the chief has ended.",
            _workers(launch),
        ),
        ("Runs the script, and ends the workers when that ends.", _chief(launch)),
    ]
    return documents


def _service(launch: Launch) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": launch.metadata(launch.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": launch.labels(),
            "ports": [{"name": "psync", "port": launch.port}],
        },
    }


def _network_policy(launch: Launch) -> dict[str, Any]:
    """At any port: a backup that takes over for a ps serves at one of its own."""
    members = {"podSelector": {"matchLabels": launch.labels()}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": launch.metadata(launch.name),
        "spec": {**members, "policyTypes": ["Ingress"], "ingress": [{"from": [members]}]},
    }


def _secret(launch: Launch, secrets: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": launch.metadata(launch.secret_name),
        "type": "Opaque",
        "stringData": secrets,
    }


def _claim(launch: Launch) -> Document:
    assert launch.volume is not None
    if launch.shared_volume:
        about, mode = "Checkpoints: the chief and all ps tasks write them.", "ReadWriteMany"
    else:
        about, mode = "Checkpoints: the chief writes them.", "ReadWriteOnce"
    return about, {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": launch.metadata(f"{launch.name}-data"),
        "spec": {
            "accessModes": [mode],
            "resources": {"requests": {"storage": launch.volume}},
        },
    }


def _ps(launch: Launch) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": launch.metadata(f"{launch.name}-ps", "ps"),
        "spec": {
            "serviceName": launch.name,
            "replicas": launch.num_ps,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": launch.labels("ps")},
            "template": pod_template(launch, "ps"),
        },
    }


def _disruption_budget(launch: Launch) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": launch.metadata(f"{launch.name}-ps", "ps"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": launch.labels("ps")}},
    }


def _workers(launch: Launch) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": launch.metadata(f"{launch.name}-worker", "worker"),
        "spec": {
            "completionMode": "Indexed",
            "completions": launch.num_workers,
            "parallelism": launch.num_workers,
            "backoffLimit": NO_LIMIT,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": _failures("worker", LEFT),
            "template": pod_template(launch, "worker"),
        },
    }


def _chief(launch: Launch) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": launch.metadata(f"{launch.name}-chief", "chief"),
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": launch.chief_restarts,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": _failures("chief", LEFT),
            "template": pod_template(launch, "chief"),
        },
    }


def _failures(container: str, *passed_over: int) -> dict[str, Any]:
    """Wrong set-up is no better the next time, and to be preempted is no failure."""

    def ended_with(*codes: int) -> dict[str, Any]:
        return {"containerName": container, "operator": "In", "values": list(codes)}

    preempted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": ended_with(WRONG_SETUP)},
            {"action": "Ignore", "onPodConditions": preempted},
            {"action": "Ignore", "onExitCodes": ended_with(*passed_over)},
        ]
    }
