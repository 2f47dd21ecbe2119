"""The platform of a task in a process of its own, built from its environment variables."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar

from psync.errors import ConfigurationError
from psync.net.certificates import load_tls
from psync.net.chief_presence import TrainingPresence
from psync.net.platform import (
    MISPLACED,
    Parts,
    PerProcess,
    Platform,
    flag,
    inherited_file,
    limits_of,
    workforce_of_launcher,
)
from psync.net.resolvers import ClusterResolver, TFConfigClusterResolver
from psync.net.secret import load_secret, require_secret
from psync.net.shared.doors import shares_memory
from psync.net.tls import TlsNetwork
from psync.net.transport import Network, SocketNetwork
from psync.wire.limits import Limits

logger = logging.getLogger(__name__)

script_is_shared: ContextVar[bool] = ContextVar("psync_script_is_shared", default=False)
"""Whether workers run this script too: then classes of its ``__main__`` travel by name."""

training_began: ContextVar[asyncio.Event | None] = ContextVar("psync_training_began", default=None)
"""Set once the set-up has proved right: a coordinator or training session has started, or the
evaluator has found a checkpoint. What goes wrong from then on is the program's own."""

training_over: ContextVar[asyncio.Event | None] = ContextVar("psync_training_over", default=None)
"""Set by a training session that ends: the program now says its last words."""

added_workers: ContextVar[dict[str, str] | None] = ContextVar("psync_added_workers", default=None)
"""Address of each worker that the program has added, by name: they, too, hear of its end."""

run_over: ContextVar[asyncio.Event | None] = ContextVar("psync_run_over", default=None)
"""Set when the run ends beside which a launcher has started this evaluator; None: none has."""

training_presence: ContextVar[TrainingPresence | None] = ContextVar(
    "psync_training_presence", default=None
)
"""What this evaluator sees of the training tasks; not set where a launcher says when that ends."""


platform_of_tf_config: ContextVar[Platform | None] = ContextVar(
    "psync_platform_of_tf_config", default=None
)
"""That of the cluster which ``TF_CONFIG`` describes, where this process has opened it itself."""


SETTINGS = (
    "PSYNC_CHECKPOINT_STREAM", "PSYNC_CHIEF_TIMEOUT", "PSYNC_DASHBOARD", "PSYNC_DASHBOARD_HOSTS",
    "PSYNC_FAILPOINTS", "PSYNC_INSECURE", "PSYNC_JOBS", "PSYNC_LOG_LEVEL", "PSYNC_LOOP",
    "PSYNC_METRICS", "PSYNC_NAMESPACE", "PSYNC_PLUGINS", "PSYNC_PORT", "PSYNC_RUN_LOG",
    "PSYNC_SECRET", "PSYNC_SECRET_FILE", "PSYNC_SERVICE", "PSYNC_SHARED_MEMORY", "PSYNC_STATUS",
    "PSYNC_SUPERVISED", "PSYNC_TASK_METRICS", "PSYNC_TLS_CA_FILE", "PSYNC_TLS_CERT_FILE",
    "PSYNC_TLS_KEY_FILE", "PSYNC_TLS_MUTUAL", "PSYNC_WATCHDOG_TIMEOUT",
    *(f"PSYNC_LIMIT_{field.name.upper()}" for field in dataclasses.fields(Limits)),
)  # fmt: skip
"""Variables that every process reads. Commands have their own, one for each option."""

_said = PerProcess(set[str])  # misspelt ones

_ALMOST = 0.9  # of the letters: one or two of a name are wrong

newest_incarnation = PerProcess(int)
"""The last incarnation under which this process was a coordinator; 0: it was none."""


def platform_of(
    resolver: ClusterResolver,
    address: str,
    *,
    insecure: bool = False,
    listens: bool = False,
    warn: Callable[[str], None] = logger.warning,
) -> Platform:
    """Return the platform for the task that ``resolver`` says this process is.

    Args:
        resolver: One that a local cluster made brings its own platform.
        address: Where the task listens, or is known by.
        insecure: Whether the task may run without a secret.
        listens: Whether it will listen there: then it gets the socket that a launcher passed on.
        warn: Told what running without a secret means, where that is allowed.

    Raises:
        ConfigurationError: No secret, certificates that cannot be used, or a variable that cannot
            be understood.
    """
    tell_launcher()
    for misspelt, meant in misspelt_settings(os.environ).items():
        if misspelt not in _said():
            _said().add(misspelt)
            logger.warning("%s is not a psync variable; did you mean %s?", misspelt, meant)
    own = getattr(resolver, "platform", None)
    if isinstance(resolver, TFConfigClusterResolver):
        own = platform_of_tf_config.get()
    if isinstance(own, Platform):
        return own
    environ = os.environ
    insecure = insecure or bool(flag(environ, "PSYNC_INSECURE"))
    secret = require_secret(load_secret(environ), insecure, address, warn)
    # A resolver that had to know its port has bound it.
    bound: Mapping[str, socket.socket] = getattr(resolver, "listening", {})
    return Platform(
        network_of(
            environ,
            {**_inherited(address, "PSYNC_LISTEN_FD"), **bound} if listens else {},
            _inherited(address, "PSYNC_DOOR_FD") if listens else {},
        ),
        secret,
        limits=limits_of(environ),
        parts=parts_of(environ),
        workforce=workforce_of_launcher(),
    )


def network_of(
    environ: Mapping[str, str],
    listening: dict[str, socket.socket] | None = None,
    doors: dict[str, socket.socket] | None = None,
) -> Network:
    """Return a network of sockets, with TLS and shared memory as an environment says.

    Args:
        environ: That.
        listening, doors: As of a ``SocketNetwork``.

    Raises:
        ConfigurationError: Certificates cannot be used.
    """
    tls = load_tls(environ)
    shares = tls is None and shares_memory(environ)
    sockets = SocketNetwork(listening, doors, shares_memory=shares)
    return sockets if tls is None else TlsNetwork(sockets, tls)


def misspelt_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return which variables are almost settings, and which ones; for them nobody reads.

    Others are nothing to complain of: Kubernetes sets some for each service, as
    ``PSYNC_0_PORT=tcp://10.0.0.1:8470`` for psync-0.
    """
    close = (
        (name, difflib.get_close_matches(name, SETTINGS, 1, _ALMOST))
        for name, text in sorted(environ.items())
        if name.startswith("PSYNC") and name not in SETTINGS and "://" not in text
    )
    return {name: meant[0] for name, meant in close if meant}


def parts_of(environ: Mapping[str, str]) -> Parts:
    """Return which parts a task is built of: others than usual if a variable of tests is set.

    Raises:
        ConfigurationError: If one of these cannot be understood.
    """
    if not any(name.startswith(("PSYNC_TESTING_", "PSYNC_FAILPOINTS")) for name in environ):
        return Parts()
    # By its name: it knows every part of a task, and no task but those of tests has to load it.
    try:
        sabotage = importlib.import_module("psync.testing.sabotage")
    except ModuleNotFoundError:
        raise ConfigurationError(
            "PSYNC_FAILPOINTS and PSYNC_TESTING_… inject faults, which the wheel does not include",
            hint="unset them, or install psync from a checkout: pip install -e .",
        ) from None
    parts: Parts = sabotage.SabotagedParts.from_environment(environ)
    return parts


def tell_launcher() -> None:
    """Tell the launcher, if there is one, that this program takes part in its cluster."""
    with contextlib.suppress(OSError):  # it has gone
        if (fd := inherited_file("PSYNC_MEMBER_FD")) is not None:
            os.write(fd, b"1")
            os.close(fd)


def note_training_began() -> None:
    """Whatever was to be connected to is there; see ``training_began``."""
    began = training_began.get()
    if began is not None:
        began.set()


def exit_if_misplaced() -> None:
    """End a worker that begins what is for the chief, if its launcher will say why.

    So it is where a launcher has started this very process and the script calls no ``psync.run``.
    """
    launched = bool(os.environ.get("PSYNC_LAUNCHED")) and os.getsid(0) == os.getpid()
    if launched and training_began.get() is None:
        sys.exit(MISPLACED)


def note_incarnation(granted: int) -> None:
    """This process is the coordinator of this incarnation from now on; 0: forget earlier ones."""
    newest_incarnation.value = granted


def _inherited(address: str, variable: str) -> dict[str, socket.socket]:
    """Return a listening socket that a launcher passed on, if it did; it has one owner."""
    number = os.environ.pop(variable, None)
    if not number:
        return {}
    try:
        listening = socket.socket(fileno=int(number))
    except (ValueError, OSError) as exc:
        raise ConfigurationError(
            f"{variable}: expected an open socket's number, got {number!r} ({exc})"
        ) from exc
    os.set_inheritable(listening.fileno(), False)
    return {address: listening}
