"""Safeguards that a test can switch off, to see that its oracle notices.

``PSYNC_TESTING_WITHOUT=dedup,staleness`` makes every task that reads it wrong on purpose. It is
no setting: nobody who trains wants any of these off.

    name            what is missing without it
    dedup           nothing is remembered of an update: a repetition is applied again
    fencing         whoever was replaced is served on
    low_water       calls are forgotten when newer closures come, not when they are final
    staleness       a synchronous push counts however old its values are
    staged_commit   a synchronous push counts before all of its parts are there
    one_cut         each ps freezes when it likes, with no gate
    timeline        who trained before a roll-back is served on after it
    commit_marker   a checkpoint is marked as complete before its data are written
    replica_ack     a ps answers before its backup has the update
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from psync.errors import ConfigurationError

logger = logging.getLogger(__name__)

VARIABLE = "PSYNC_TESTING_WITHOUT"

NAMES = frozenset(
    {
        "dedup", "fencing", "low_water", "staleness", "staged_commit", "one_cut", "timeline",
        "commit_marker", "replica_ack",
    }
)  # fmt: skip
"""Every safeguard that has a switch."""


def switched_off(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names in ``PSYNC_TESTING_WITHOUT``.

    Raises:
        ConfigurationError: There is no such safeguard.
    """
    names = frozenset(filter(None, map(str.strip, environ.get(VARIABLE, "").split(","))))
    if not names <= NAMES:
        raise ConfigurationError(
            f"{VARIABLE}: unknown safeguard {', '.join(sorted(names - NAMES))}",
            hint=f"known: {', '.join(sorted(NAMES))}",
        )
    if names:
        logger.warning(
            "%s: this task is wrong on purpose, without %s", VARIABLE, ", ".join(sorted(names))
        )
    return names
