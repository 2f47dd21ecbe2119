"""``psync launch``: the manifests of Kubernetes that it prints; and its options.

On Kubernetes ps tasks are a StatefulSet: each pod keeps its name, and one that has gone is made
again. Workers are an indexed Job: each index is done when its pod ends with 0, which it does when
the chief says so. One that is preempted ends with 143 (``PSYNC_SUPERVISED``), which is no failure,
and is made again under its name. The chief is a Job of one pod, which is made again a few times,
unless its set-up is wrong (code 2). Pods find each other by the names of one headless service; see
``KubernetesClusterResolver``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import click

from psync.errors import ConfigurationError
from psync.integrations.batch_scripts import Batch, script
from psync.integrations.yaml_text import dump

MAX_NAME_CHARS = 40
"""Of a cluster's name: with a job's and a number it is a host's name, of 63 at most."""

_NAME = re.compile("[a-z]([a-z0-9-]*[a-z0-9])?")
_JOBS = ("chief", "ps", "worker")

CERTIFICATE_DAYS = 365

command = click.argument("command", nargs=-1, required=True, metavar="-- SCRIPT [ARGS...]")
num_ps = click.option("--ps", type=click.IntRange(min=1), default=1, help="Number of ps tasks.")
num_workers = click.option(
    "--workers", type=click.IntRange(min=1), default=1, help="Number of workers."
)


@click.group()
def launch() -> None:
    """Print the manifests or batch script that run a script on Kubernetes or SLURM.

    Nothing is started. Read and edit the output, then pass it to kubectl or sbatch. The script is
    the same as for psync run.
    """


@launch.command(options_metavar="[OPTIONS]")
@command
@num_ps
@num_workers
@click.option(
    "--image", required=True, help="Image of all tasks, with psync, the script and its imports."
)
@click.option(
    "--name", help="Name of the cluster.  [default: the script's name]", show_default=False
)
@click.option("--namespace", help="Namespace of all objects.")
@click.option(
    "--spot-workers",
    is_flag=True,
    help="Run workers on spot machines, and all other tasks on regular ones.",
)
@click.option(
    "--resources",
    multiple=True,
    metavar="JOB:NAME=AMOUNT[,…]",
    help="Resources of each pod of a job: worker:cpu=4,memory=8Gi,nvidia.com/gpu=1. Repeatable.",
)
@click.option("--volume", default="10Gi", help="Size of the volume at /data. none: no volume.")
@click.option(
    "--shared-volume",
    is_flag=True,
    help="Make the volume ReadWriteMany, so that each ps writes its own part of a checkpoint. By "
    "default the chief writes all of it.",
)
@click.option("--tls", is_flag=True, help="Use TLS, with certificates from the Secret.")
@click.option(
    "--secret",
    metavar="NAME",
    help="Existing Secret with the key secret, and with --tls also ca.pem, cert.pem and key.pem. "
    "By default a new Secret is printed.",
)
@click.option(
    "--chief-restarts",
    type=click.IntRange(min=0),
    default=6,
    help="How many times the chief is restarted after an error; preemptions do not count.",
)
@click.option("--port", type=click.IntRange(1024, 65535), default=8470, help="Port of each task.")
def kubernetes(
    command: tuple[str, ...],
    ps: int,
    workers: int,
    image: str,
    name: str | None,
    namespace: str | None,
    spot_workers: bool,
    resources: tuple[str, ...],
    volume: str,
    shared_volume: bool,
    tls: bool,
    secret: str | None,
    chief_restarts: int,
    port: int,
) -> int:
    """Print manifests for Kubernetes: docs/howto/kubernetes.md.

    \b
    Two ps tasks, four workers on spot machines:
        psync launch kubernetes --ps 2 --workers 4 --image registry/train:1 \\
            --spot-workers -- train.py --epochs 10 > train.yaml
        kubectl apply -f train.yaml
    """

    if shared_volume and volume == "none":
        raise ConfigurationError("--shared-volume needs a volume", hint="--volume 10Gi")
    asked = Launch(
        name=_checked_name(name or _name_of(command[0]), "--name"),
        image=image,
        command=_python(command),
        num_ps=ps,
        num_workers=workers,
        namespace=namespace and _checked_name(namespace, "--namespace"),
        port=port,
        resources=_amounts(resources),
        spot_workers=spot_workers,
        volume=None if volume == "none" else volume,
        shared_volume=shared_volume,
        tls=tls,
        chief_restarts=chief_restarts,
        secret=secret or "",
    )
    secrets = None if secret else _secrets(asked.hosts if tls else [])
    click.echo(dump(manifests(asked, secrets)), nl=False)
    return 0


@launch.command(options_metavar="[OPTIONS]")
@command
@num_ps
@num_workers
@click.option("--name", help="Name of the job.  [default: the script's name]", show_default=False)
@click.option("--cpus-per-task", type=click.IntRange(min=1), help="CPU cores of each task.")
@click.option("--time", metavar="LIMIT", help="Time limit, in sbatch's format: 12:00:00.")
@click.option(
    "--sbatch",
    "options",
    multiple=True,
    metavar="OPTION",
    help="Extra option for sbatch: --sbatch=--partition=gpu. Repeatable.",
)
@click.option(
    "--setup",
    multiple=True,
    metavar="LINE",
    help="Shell line to run before the tasks start, such as 'source venv/bin/activate'. "
    "Repeatable.",
)
def slurm(
    command: tuple[str, ...],
    ps: int,
    workers: int,
    name: str | None,
    cpus_per_task: int | None,
    time: str | None,
    options: tuple[str, ...],
    setup: tuple[str, ...],
) -> int:
    """Print a batch script for SLURM: docs/howto/slurm.md.

    \b
        psync launch slurm --ps 2 --workers 4 --time 12:00:00 -- train.py > train.sbatch
        sbatch train.sbatch
    """

    for text in (*options, *setup, time or ""):
        if "\n" in text:
            raise ConfigurationError(f"expected one line, got {text!r}")
    if not all(option.startswith("-") for option in options):
        raise ConfigurationError(
            f"--sbatch: expected an option of sbatch, got {options!r}",
            hint="--sbatch=--partition=gpu",
        )
    asked = Batch(
        name=_checked_name(name or _name_of(command[0]), "--name"),
        command=_python(command),
        num_ps=ps,
        num_workers=workers,
        cpus_per_task=cpus_per_task,
        time=time,
        options=options,
        setup=setup,
    )
    click.echo(script(asked), nl=False)
    return 0


def _python(command: tuple[str, ...]) -> tuple[str, ...]:
    """A script is run by the image's, or the cluster's, Python; anything else as it stands."""
    return ("python", *command) if command[0].endswith(".py") else command


def _name_of(script: str) -> str:
    return re.sub("[^a-z0-9]+", "-", PurePath(script).stem.lower()).strip("-")


def _checked_name(name: str, option: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise ConfigurationError(
            f"{option}: expected at most {MAX_NAME_CHARS} lower-case letters, digits and dashes, "
            f"starting with a letter, got {name!r}"
        )
    return name


def _amounts(texts: tuple[str, ...]) -> dict[str, dict[str, str]]:
    given: dict[str, dict[str, str]] = {}
    for text in texts:
        job, _, amounts = text.partition(":")
        pairs = [pair.split("=") for pair in amounts.split(",")]
        if job not in _JOBS or not all(len(pair) == 2 and all(pair) for pair in pairs):
            raise ConfigurationError(
                f"--resources: expected one of {', '.join(_JOBS)} and amounts, as in "
                f"worker:cpu=4,memory=8Gi, got {text!r}"
            )
        given.setdefault(job, {}).update((name, amount) for name, amount in pairs)
    return given


def _secrets(hosts: list[str]) -> dict[str, str]:
    """Return a new secret, and certificates if there are hosts to make them for."""
    from psync.net.secret import mint_secret

    secrets = {"secret": mint_secret()}
    if hosts:
        from psync.net.certificates import mint

        made = mint(hosts, CERTIFICATE_DAYS)
        secrets |= {name: pem.decode("ascii") for name, pem in made.items()}
    return secrets


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
            _job(launch, "worker", launch.num_workers, NO_LIMIT),
        ),
        (
            "Runs the script, and ends the workers when that ends.",
            _job(launch, "chief", 1, launch.chief_restarts),
        ),
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


def _job(launch: Launch, job: str, count: int, retries: int) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": launch.metadata(f"{launch.name}-{job}", job),
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": retries,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": _failures(job),
            "template": pod_template(launch, job),
        },
    }


def _failures(container: str) -> dict[str, Any]:
    """Wrong set-up is no better the next time, and to be preempted is no failure."""

    def ended_with(code: int) -> dict[str, Any]:
        return {"containerName": container, "operator": "In", "values": [code]}

    preempted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": ended_with(WRONG_SETUP)},
            {"action": "Ignore", "onPodConditions": preempted},
            {"action": "Ignore", "onExitCodes": ended_with(LEFT)},
        ]
    }


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
