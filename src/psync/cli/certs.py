"""``psync certs``: certificates for a cluster, and the options that name them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])

MAX_DAYS = 36_500


@click.group()
def certs() -> None:
    """Create certificates for TLS between tasks.

    \b
    Once, for all hosts of a cluster; then copy the files to each host:
        psync certs new --out certs --hosts ps0.example.org,10.0.0.7
    """


@certs.command("new")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("certs"),
    help="Folder for the files; it must not exist yet.",
)
@click.option(
    "--hosts",
    multiple=True,
    metavar="HOST[,HOST…]",
    help="Names and IP addresses of all hosts where tasks listen, as in the cluster description. "
    "This machine's name, localhost, 127.0.0.1 and ::1 are always included.",
)
@click.option(
    "--days",
    type=click.IntRange(min=1, max=MAX_DAYS),
    default=365,
    help="How long the certificates are valid.",
)
def new(out: Path, hosts: tuple[str, ...], days: int) -> int:
    """Create a certificate authority, and one certificate and key for all tasks.

    The authority's private key is discarded, so no further certificates can be made that these
    tasks would trust. To add hosts, create all files again. Needs: pip install 'psync[tls]'.
    """
    from psync.net.certificates import mint, own_hosts, write

    named = [host.strip().strip("[]") for text in hosts for host in text.split(",")]
    every = list(dict.fromkeys([*own_hosts(), *filter(None, named)]))
    variables = write(mint(every, days), out.absolute())
    click.echo(f"valid for {days} days, for {', '.join(every)}; on each host, for each task:")
    for name, path in variables.items():
        click.echo(f"export {name}={path}")
    return 0


def tls_options(command: F) -> F:
    """Add the options that name the files; the command gets them as ``tls_…``."""
    file = click.Path(dir_okay=False)
    options = (
        click.option(
            "--tls-ca-file",
            type=file,
            envvar="PSYNC_TLS_CA_FILE",
            help="Certificate of the authority that signed all tasks' certificates (PEM). Every "
            "connection then uses TLS, and every task presents a certificate.",
        ),
        click.option(
            "--tls-cert-file",
            type=file,
            envvar="PSYNC_TLS_CERT_FILE",
            help="Certificate that this task presents.",
        ),
        click.option(
            "--tls-key-file",
            type=file,
            envvar="PSYNC_TLS_KEY_FILE",
            help="Private key of that certificate; must be readable only by its owner.",
        ),
        click.option(
            "--tls-mutual/--no-tls-mutual",
            default=None,
            envvar="PSYNC_TLS_MUTUAL",
            help="Whether connecting tasks must present a certificate too.  [default: they must]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def tls_environ(
    tls_ca_file: str | None,
    tls_cert_file: str | None,
    tls_key_file: str | None,
    tls_mutual: bool | None,
) -> dict[str, str]:
    """Return the variables that say what the options say, once it is clear that they can be used.

    Raises:
        ConfigurationError: See ``tls_config.load_tls``.
    """
    from psync.net.tls_config import CA_FILE, CERT_FILE, KEY_FILE, MUTUAL, load_tls

    files = {CA_FILE: tls_ca_file, CERT_FILE: tls_cert_file, KEY_FILE: tls_key_file}
    environ = {name: os.path.abspath(path) for name, path in files.items() if path}
    if tls_mutual is not None:
        environ[MUTUAL] = "1" if tls_mutual else "0"
    load_tls(environ)  # here it is one error, and not one on each task
    return environ
