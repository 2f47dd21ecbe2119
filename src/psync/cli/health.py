"""``psync health``: does this task answer? For the probes of schedulers, beside the task itself."""

from __future__ import annotations

import asyncio

import click

UNHEALTHY = 1
PROBE = "/job:probe/task:0"
"""The name under which it speaks to the task; no cluster has such a job."""


@click.command()
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    metavar="SECONDS",
    help="How long to wait for the answer.",
)
def health(timeout: float) -> int:
    """Check whether the ps or worker of this environment answers.

    The task is found as psync task finds it (TF_CONFIG, SLURM, Kubernetes) and contacted with the
    cluster's secret and TLS. An answer shows that the task's event loop runs. A step that computes
    on the loop delays the answer, so for workers use this as a readiness probe, not as a liveness
    probe.

    \b
    Exit codes:
        0  the task answers
        1  it does not: it is not listening yet, is busy, or hangs
        2  wrong configuration, as for psync task; or the task is a chief or evaluator, which
           does not listen
    """
    from psync.errors import AuthenticationError, ConfigurationError, PsyncError, VersionMismatch
    from psync.launch.identity import own_task

    own = own_task(None)
    if own.job not in ("ps", "worker"):
        raise ConfigurationError(
            f"{own.name} does not listen: only ps and worker tasks answer",
            hint="psync top --once shows what a chief does",
        )
    try:
        with asyncio.Runner() as runner:
            runner.run(_knock(own.resolver, own.name, own.address, timeout))
    except ConfigurationError:
        raise
    except (AuthenticationError, VersionMismatch) as error:
        raise ConfigurationError(error.message, hint=error.hint) from error
    except (PsyncError, TimeoutError) as error:
        why = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else error
        click.echo(f"psync: {own.name} at {own.address}: {why}", err=True)
        return UNHEALTHY
    click.echo(f"{own.name} answers")
    return 0


async def _knock(resolver: object, name: str, address: str, timeout: float) -> None:
    from psync.cluster_roles import ENQUIRER
    from psync.net.endpoint import Endpoint
    from psync.net.environment import platform_of
    from psync.net.resolvers import ClusterResolver

    assert isinstance(resolver, ClusterResolver)
    platform = platform_of(resolver, address, warn=lambda text: None)
    endpoint = Endpoint(platform, PROBE, ENQUIRER, {})  # which is fenced nowhere
    try:
        async with asyncio.timeout(timeout):
            await endpoint.connect(address, name)
    finally:
        await endpoint.close()
