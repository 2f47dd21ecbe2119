"""``psync launch kubernetes`` and ``psync launch slurm``."""

from __future__ import annotations

import re
from pathlib import PurePath

import click

from psync.errors import ConfigurationError

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
    from psync.cli.launch.kubernetes import manifests
    from psync.cli.launch.pods import Launch
    from psync.cli.launch.yaml import dump

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
        resources=_resources(resources),
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
    from psync.cli.launch.slurm import Batch, script

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


def _resources(texts: tuple[str, ...]) -> dict[str, dict[str, str]]:
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
        files = {"ca.pem": made.ca, "cert.pem": made.cert, "key.pem": made.key}
        secrets |= {name: pem.decode("ascii") for name, pem in files.items()}
    return secrets
