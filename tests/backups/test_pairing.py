"""What a ps and its backup must have in common."""

from __future__ import annotations

import pytest

import own_rules
from psync.backups.pairing import Computation, check_deterministic, check_release, fingerprint
from psync.errors import ConfigurationError, VersionMismatch
from psync.wire.handshake import RELEASE


def test_another_version_is_refused_and_the_error_names_both_and_what_to_do() -> None:
    check_release("/job:ps/task:1", RELEASE, "/job:ps/task:0", RELEASE)
    with pytest.raises(VersionMismatch) as caught:
        check_release("/job:ps/task:1", "1.2.4", "/job:ps/task:0", "1.2.3")
    assert caught.value.message == (
        "/job:ps/task:1 runs psync 1.2.4 and cannot back up /job:ps/task:0, which runs 1.2.3"
    )
    assert caught.value.hint == (
        "run one version of psync, and the same plugins, on all ps tasks: save a checkpoint, stop "
        "the cluster, start it with the new version, restore"
    )


def test_rules_of_plugins_belong_to_the_version() -> None:
    with own_rules.forgetting():
        own_rules.register()
        release = Computation().release
    assert release == f"{RELEASE}, rule tests.momentum 1, schedule Halving 1"
    with pytest.raises(VersionMismatch, match=r"rule tests\.momentum 1.* which runs 0\S+\n"):
        check_release("/job:ps/task:1", release, "/job:ps/task:0", RELEASE)


def test_a_process_computes_by_its_fingerprint() -> None:
    assert Computation().numerics == fingerprint()


def test_deterministic_groups_are_refused_by_name_and_others_are_not() -> None:
    check_deterministic("/job:ps/task:0", "/job:ps/task:1", [])
    with pytest.raises(ConfigurationError) as caught:
        check_deterministic("/job:ps/task:0", "/job:ps/task:1", ["a", "b"])
    assert caught.value.message == (
        "a, b: deterministic=True, but /job:ps/task:0 and its backup in the process of "
        "/job:ps/task:1 do not compute bit-identical results: their CPU, numpy or C library "
        "differ"
    )
    assert "identical machines" in str(caught.value)
