"""The fingerprint of a process's arithmetic: two that are equal compute the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import own_rules
from psync import rules
from psync.backups.pairing import (
    DTYPES,
    _fingerprint_with,
    fingerprint,
    values,
)

RULES_AND_SCHEDULES = """
import hashlib, sys
import numpy as np
sys.path.append("tests/helpers")
from psync import schedules
from psync.backups.pairing import fingerprint
from psync.numerics.sums import DenseSum, SparseSum, at_once, sum_of_squares
from rule_table import RULES, run

digest = hashlib.blake2b()
for dtype in map(np.dtype, ("float16", "float32", "float64")):
    for rule in RULES.values():
        param, slots = run(rule, dtype, chunk=1000)
        digest.update(param)
        for slot in slots:
            digest.update(slot)
    array = (np.random.default_rng(7).standard_normal(200_007) * 1e-3).astype(dtype)
    dense, sparse = DenseSum(array.shape, dtype), SparseSum((3,), dtype)
    for weight in (1.0, 0.1):
        at_once(dense.adding(array, weight))
        at_once(sparse.adding(np.arange(66_669) * 7 % 999, array.reshape(-1, 3), weight))
    digest.update(at_once(dense.making("mean")))
    digest.update(at_once(sparse.making("mean", per_index=True)))
    digest.update(np.float64(sum_of_squares(array)))
for schedule in (schedules.CosineDecay(0.1, 20_000), schedules.ExponentialDecay(0.1, 97, 0.9)):
    digest.update(np.array([schedule(step) for step in range(20_000)]))
print(fingerprint(), digest.hexdigest())
"""


def computed(**environ: str) -> tuple[str, str]:
    """The fingerprint of a process, and a digest of other results of it."""
    run = subprocess.run(
        [sys.executable, "-c", RULES_AND_SCHEDULES],
        env={**os.environ, **environ}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    mark, results = run.stdout.split()
    return mark, results


def optional_features() -> list[str]:
    """What numpy uses of this CPU beside the least that it needs, the widest last."""
    config: Any = np.show_config(mode="dicts")
    return list(config["SIMD Extensions"].get("found", ()))


@pytest.mark.slow
def test_it_is_that_of_every_other_process_and_of_narrower_registers_and_other_blas() -> None:
    features = optional_features()
    settings = [{}, {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Prescott"}]
    settings += [
        {"NPY_DISABLE_CPU_FEATURES": " ".join(features[at:])} for at in range(len(features))
    ]
    found = {computed(**environ) for environ in settings}
    assert len(found) == 1, found
    assert found.pop()[0] == fingerprint()


@pytest.mark.promise("backups.other-arithmetic-reported")
def test_where_it_is_equal_the_results_are() -> None:
    """Another libm, which rounds some schedules another way: not every C library has the switch."""
    mark, results = computed(GLIBC_TUNABLES="glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4")
    here, ours = computed()
    assert (mark == here) == (results == ours)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_its_numbers_are_of_all_sizes_and_of_no_library(dtype: np.dtype) -> None:
    made = values(525, dtype, 1)
    size = np.abs(made[made != 0])
    assert size.min() < np.finfo(dtype).tiny
    assert 10 < size.max() < np.finfo(dtype).max
    assert (made < 0).any()
    assert np.signbit(made[made == 0]).any()
    assert made[:3].tobytes() == values(3, dtype, 1).tobytes() != values(3, dtype, 2).tobytes()


class Scaling(rules.UpdateRule):
    name = "tests.scaling"
    by = 1.0

    def update(self, value: Any, slots: Any, gradient: Any, step: Any) -> Any:
        return value * value.dtype.type(self.by)


def test_names_and_versions_are_part_of_the_fingerprint() -> None:
    with own_rules.forgetting():
        own_rules.register()
        check_names_and_versions()


def check_names_and_versions() -> None:
    marks = {fingerprint()}
    rules.register(Scaling)
    marks.add(fingerprint())
    Scaling.version = 2
    try:
        marks.add(fingerprint())
    finally:
        del Scaling.version
    own_rules.Halving.version = 7
    try:
        marks.add(fingerprint())
    finally:
        del own_rules.Halving.version
    assert len(marks) == 4


def test_results_are_part_of_the_fingerprint() -> None:
    marks = set()
    for factor in (1.0, 1.0000001):
        with own_rules.forgetting():
            rules.register(type("Scaled", (Scaling,), {"name": "scaled", "by": factor}))
            marks.add(fingerprint())
            _fingerprint_with.cache_clear()
    assert len(marks) == 2
