"""Pods of a cluster on Kubernetes: containers, environment, probes, and where they run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

USER = 10001
"""Of the processes: that of the Dockerfile, and no user of a machine."""

DATA = "/data"
"""Where the volume is, in the containers that have it."""

CERTIFICATES = "/run/psync/certificates"
PRIVATE = "/run/psync/tls"

# A spot machine gives 15 s on GKE, 30 s on AKS, two minutes on EKS.
WORKER_GRACE_S = 25
PS_GRACE_S = 30

SPOT = (  # label of spot machines, its value; the taint has the same key and value
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)


@dataclass(frozen=True)
class Launch:
    """What was asked for.

    Attributes:
        name: Of the headless service, and what all other names begin with.
        image: Of all tasks.
        command: What runs the script, with its arguments.
        num_ps: Number of ps tasks.
        num_workers: Number of workers.
        namespace: Of all objects; None: that of ``kubectl apply``.
        port: Where each task listens.
        resources: By job: amounts by resource, as in ``{"cpu": "2", "memory": "4Gi"}``.
        spot_workers: Whether workers are to run on spot machines, and all else is not.
        volume: Size of the volume; None: there is none.
        shared_volume: Whether ps tasks have it, too.
        tls: Whether connections have TLS.
        chief_restarts: How often the chief is started again.
        secret: Name of the Secret.
    """

    name: str
    image: str
    command: tuple[str, ...]
    num_ps: int
    num_workers: int
    namespace: str | None = None
    port: int = 8470
    resources: dict[str, dict[str, str]] = field(default_factory=dict)
    spot_workers: bool = False
    volume: str | None = "10Gi"
    shared_volume: bool = False
    tls: bool = False
    chief_restarts: int = 6
    secret: str = ""

    @property
    def secret_name(self) -> str:
        """The Secret's."""
        return self.secret or f"{self.name}-secret"

    @property
    def hosts(self) -> list[str]:
        """Names of all pods as tasks know each other."""
        counts = {"chief": 1, "ps": self.num_ps, "worker": self.num_workers}
        return [
            f"{self.name}-{job}-{index}.{self.name}"
            for job, count in counts.items()
            for index in range(count)
        ]

    def metadata(self, name: str, job: str | None = None) -> dict[str, Any]:
        """Return the name and labels of an object."""
        namespace = {"namespace": self.namespace} if self.namespace else {}
        return {"name": name, **namespace, "labels": self.labels(job)}

    def labels(self, job: str | None = None) -> dict[str, str]:
        """Return the labels of a job's pods, or those that all pods have."""
        component = {"app.kubernetes.io/component": job} if job else {}
        return {
            "app.kubernetes.io/name": "psync",
            "app.kubernetes.io/instance": self.name,
            **component,
        }


def pod_template(launch: Launch, job: str) -> dict[str, Any]:
    """Return the template of a job's pods, for a StatefulSet or a Job."""
    volumes, mounts, environ = _volumes(launch, job)
    container: dict[str, Any] = {
        "name": job,
        "image": launch.image,
        # Not "command": the image's entry point stays, which hands signals on.
        "args": [_literal(word) for word in (_SERVE if job == "ps" else launch.command)],
        "env": [*_environ(launch), *environ],
        "ports": [{"name": "psync", "containerPort": launch.port}],
        **_resources(launch.resources.get(job, {})),
        **_probes(job),
        "securityContext": _CONFINED,
    }
    if mounts:
        container["volumeMounts"] = mounts
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": WORKER_GRACE_S if job == "worker" else PS_GRACE_S,
    }
    if job != "ps":  # a StatefulSet gives its pods these, and restarts them
        spec = {"subdomain": launch.name, "restartPolicy": "Never", **spec}
    if launch.spot_workers:
        spec |= _on_spot_machines() if job == "worker" else _not_on_spot_machines()
    if job == "ps" and launch.num_ps > 1:
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": launch.labels(job)},
            }
        ]
    if launch.tls:
        spec["initContainers"] = [_private_certificates(launch)]
    spec["containers"] = [container]
    if volumes:
        spec["volumes"] = volumes
    return {"metadata": {"labels": launch.labels(job)}, "spec": spec}


_SERVE = ("psync", "task")


def _literal(word: str) -> str:
    """Return an argument that Kubernetes does not expand: it takes $(NAME) for a variable."""
    return word.replace("$(", "$$(")


_CONFINED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _environ(launch: Launch) -> list[dict[str, Any]]:
    jobs = f"chief=1,ps={launch.num_ps},worker={launch.num_workers}"
    plain = {
        "PSYNC_SERVICE": launch.name,
        "PSYNC_JOBS": jobs,
        "PSYNC_PORT": str(launch.port),
        "PSYNC_SUPERVISED": "1",
        "PSYNC_CHIEF_TIMEOUT": "3600",
    }
    source = {"secretKeyRef": {"name": launch.secret_name, "key": "secret"}}
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        {"name": "PSYNC_SECRET", "valueFrom": source},
    ]


def _resources(amounts: dict[str, str]) -> dict[str, Any]:
    """Memory and devices are limits, too; a limit on cores would make steps stutter."""
    limits = {name: amount for name, amount in amounts.items() if name != "cpu"}
    if not amounts:
        return {}
    return {"resources": {"requests": amounts, **({"limits": limits} if limits else {})}}


def _probes(job: str) -> dict[str, Any]:
    """A worker's step may hold its loop: it is not asked whether it lives. A chief cannot be."""
    if job == "chief":
        return {}
    ask = {"exec": {"command": ["psync", "health", "--timeout", "8"]}, "timeoutSeconds": 10}
    if job == "worker":
        return {"readinessProbe": {**ask, "periodSeconds": 30, "failureThreshold": 3}}
    return {
        "startupProbe": {**ask, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**ask, "periodSeconds": 30, "failureThreshold": 6},
        "readinessProbe": {**ask, "periodSeconds": 30, "failureThreshold": 2},
    }


def _volumes(
    launch: Launch, job: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a pod's volumes, where its container has them, and the variables about them."""
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    environ: dict[str, str] = {}
    if launch.volume and (job == "chief" or (job == "ps" and launch.shared_volume)):
        claim = {"claimName": f"{launch.name}-data"}
        volumes.append({"name": "data", "persistentVolumeClaim": claim})
        mounts.append({"name": "data", "mountPath": DATA})
    if launch.volume and job == "chief" and not launch.shared_volume:
        environ["PSYNC_CHECKPOINT_STREAM"] = "1"  # ps tasks do not see what the program saves to
    if launch.tls:
        files = [{"key": name, "path": name} for name in ("ca.pem", "cert.pem", "key.pem")]
        secret = {"secretName": launch.secret_name, "items": files}
        volumes.append({"name": "certificates", "secret": secret})
        volumes.append({"name": "tls", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
        mounts.append({"name": "tls", "mountPath": PRIVATE, "readOnly": True})
        for variable, name in (("CA", "ca"), ("CERT", "cert"), ("KEY", "key")):
            environ[f"PSYNC_TLS_{variable}_FILE"] = f"{PRIVATE}/{name}.pem"
    return volumes, mounts, [{"name": name, "value": value} for name, value in environ.items()]


def _private_certificates(launch: Launch) -> dict[str, Any]:
    """A key has to be its owner's alone, and files of a Secret are root's and a group's."""
    return {
        "name": "certificates",
        "image": launch.image,
        "command": ["sh", "-c", f"install -m 0600 {CERTIFICATES}/*.pem {PRIVATE}/"],
        "securityContext": _CONFINED,
        "volumeMounts": [
            {"name": "certificates", "mountPath": CERTIFICATES, "readOnly": True},
            {"name": "tls", "mountPath": PRIVATE},
        ],
    }


def _on_spot_machines() -> dict[str, Any]:
    terms = [
        {"matchExpressions": [{"key": label, "operator": "In", "values": [value]}]}
        for label, value in SPOT
    ]
    return {
        "tolerations": [
            {"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"}
            for label, value in SPOT
        ],
        "affinity": _node_affinity(terms),
    }


def _not_on_spot_machines() -> dict[str, Any]:
    apart = [{"key": label, "operator": "NotIn", "values": [value]} for label, value in SPOT]
    return {"affinity": _node_affinity([{"matchExpressions": apart}])}


def _node_affinity(terms: list[dict[str, Any]]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
