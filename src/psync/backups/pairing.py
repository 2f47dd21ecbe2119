"""Pairing of a ps with its backup: both must compute by the same rules.

    the backup's process has    then
    another version of psync    it refuses: its rules, or its log, may be others
    other plugins               the same: they belong to the release, by names and versions
    another fingerprint         the primary decides, see ``backups.fingerprint``. Where a
                                synchronous group is deterministic it refuses: bits are promised.
                                Else they are paired, and it is counted and logged: a value of the
                                backup may differ in its last bits, its decisions do not

Source: docs/design.md, "Failover".
"""

from __future__ import annotations

from collections.abc import Sequence

from psync.backups.fingerprint import fingerprint
from psync.errors import ConfigurationError, VersionMismatch
from psync.numerics.rules import registered
from psync.wire.handshake import RELEASE


class Computation:
    """By what this process computes; see ``Platform.parts``."""

    @property
    def release(self) -> str:
        """The version of psync, and what plugins have registered."""
        plugins = [f"{kind} {name} {version}" for kind, name, version in registered()]
        return ", ".join((RELEASE, *plugins))

    @property
    def numerics(self) -> str:
        """The fingerprint of its arithmetic."""
        return fingerprint()


def check_release(host: str, own: str, primary: str, release: str) -> None:
    """Refuse to back up a ps that runs another version of psync.

    Args:
        host: In whose process the backup is to be.
        own: The version that it runs, and its plugins.
        primary: Who is to be backed up.
        release: The version that that one runs.

    Raises:
        VersionMismatch: It is another one.
    """
    if release != own:
        raise VersionMismatch(
            f"{host} runs psync {own:.1000} and cannot back up {primary}, which runs "
            f"{release:.1000}",
            hint="run one version of psync, and the same plugins, on all ps tasks: save a "
            "checkpoint, stop the cluster, start it with the new version, restore",
        )


def check_deterministic(primary: str, host: str, groups: Sequence[str]) -> None:
    """Refuse deterministic groups on a ps whose backup has another fingerprint.

    Args:
        primary: Who is backed up.
        host: In whose process.
        groups: Names of all deterministic groups there.

    Raises:
        ConfigurationError: There are such.
    """
    if groups:
        raise ConfigurationError(
            f"{', '.join(groups)}: deterministic=True, but {primary} and its backup in the process "
            f"of {host} do not compute bit-identical results: their CPU, numpy or C library differ",
            hint="run all ps tasks on identical machines and from one image, or leave out "
            'deterministic=True or ps_recovery="backup"',
        )
