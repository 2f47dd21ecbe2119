"""The secret of a cluster, which every task of it proves to know.

The holder of the secret can run code on every task, because steps are functions that the
coordinator sends. So a task listens without one only if its owner says so in words
(``--insecure``), and a secret that was asked for and cannot be had is an error: nothing falls back
to less than what was asked for.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from psync.cluster import is_loopback
from psync.errors import ConfigurationError, SerializationError, check_fits

MIN_SECRET_BYTES = 16
"""128 bits, if they are random: not to be guessed, not even from a recorded handshake."""

HOW_TO_MAKE_ONE = "make one: python3 -c 'import secrets; print(secrets.token_hex(32))'"


class Secret:
    """The bytes that every task of a cluster proves to know. They show in no text and no pickle.

    Args:
        value: At least ``MIN_SECRET_BYTES`` bytes.
        source: What to call it in an error: ``PSYNC_SECRET``.

    Raises:
        ConfigurationError: If it is too short.
    """

    __slots__ = ("value",)

    def __init__(self, value: bytes, *, source: str = "the secret") -> None:
        expected = f"{source}: expected at least {MIN_SECRET_BYTES} bytes"
        check_fits(len(value) >= MIN_SECRET_BYTES, expected, len(value), HOW_TO_MAKE_ONE)
        self.value: Final = value  # for the handshake, and for nothing that is printed or sent

    def __repr__(self) -> str:
        return "Secret(…)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]  # equality takes constant time, a hash table not

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SerializationError(
            "the cluster's secret cannot be pickled or copied",
            hint="a step must not use it; tasks read PSYNC_SECRET or PSYNC_SECRET_FILE themselves",
        )


def mint_secret() -> str:
    """Return a new random secret, as the text that ``PSYNC_SECRET`` takes."""
    return secrets.token_hex(32)


def load_secret(environ: Mapping[str, str]) -> Secret | None:
    """Return the secret that the environment gives: ``PSYNC_SECRET``, else ``PSYNC_SECRET_FILE``.

    White space around it does not count. None if neither variable is set.

    Raises:
        ConfigurationError: If it is empty or too short, or the file cannot be read, or others than
            its owner can read or change it.
    """
    text = environ.get("PSYNC_SECRET")
    if text is not None:
        return Secret(os.fsencode(text).strip(), source="PSYNC_SECRET")
    path = environ.get("PSYNC_SECRET_FILE")
    if path is None:
        return None
    source = f"PSYNC_SECRET_FILE ({path})"
    return Secret(read_private(path, source).strip(), source=source)


def read_private(path: str, source: str, hint: str | None = None) -> bytes:
    """Return what a file holds that nobody but its owner can read or change.

    Args:
        path: Of the file.
        source: What to call it in an error.
        hint: What to do where it cannot be read.

    Raises:
        ConfigurationError: If it cannot be read or is no file, or others can read or change it.
    """
    # A pipe would wait for somebody to write into it. The checks are of the file that is open, not
    # of a name that may change hands meanwhile.
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConfigurationError(f"{source}: cannot be read: {why}", hint=hint) from exc
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"{source}: expected a file")
        if status.st_mode & 0o066:
            raise ConfigurationError(
                f"{source}: users other than its owner can read or change it (mode "
                f"{stat.S_IMODE(status.st_mode):04o})",
                hint=f"chmod 600 {path}",
            )
        return file.read()


def require_secret(
    secret: Secret | None, insecure: bool, address: str, warn: Callable[[str], None]
) -> Secret | None:
    """Return what a task that listens on ``address`` is protected by; None only if asked for.

    Args:
        secret: From ``load_secret``.
        insecure: The owner has said that the task may run without a secret. Where there is one, it
            is used all the same.
        address: Where the task listens.
        warn: Called with one line that says what running without a secret means.

    Raises:
        ConfigurationError: If there is no secret and ``insecure`` is false. A loopback address is
            no exception: other users of the machine reach it.
    """
    if secret is not None:
        return secret
    who = "every user of this machine" if is_loopback(address) else "everybody who can reach it"
    if not insecure:
        raise ConfigurationError(
            f"no secret is set, so {who} could run code on this task ({address})",
            hint="set PSYNC_SECRET, or PSYNC_SECRET_FILE to the path of a file with it, to the "
            f"same secret for all tasks ({HOW_TO_MAKE_ONE}); or allow running without one: "
            "--insecure, or PSYNC_INSECURE=1",
        )
    warn(f"running without a secret: {who} can run code on this task ({address})")
    return None
