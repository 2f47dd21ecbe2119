"""Closed forms: a push too many or too few is found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench_runs import asynchronous_run, push, synchronous_run
from psync.bench.checks import WrongResultError, check
from psync.bench.training import Run

RUNS = {"async": asynchronous_run, "sync": synchronous_run}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]()


def test_right_results_pass(run: Run) -> None:
    check(run)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_wrong_global_step_is_found(run: Run, off: int) -> None:
    expected = run.global_step
    with pytest.raises(WrongResultError, match=f"global step: expected {expected}, got"):
        check(dataclasses.replace(run, global_step=expected + off))


@pytest.mark.parametrize("off", [-1, 1])
def test_a_counter_that_one_push_is_missing_in_is_found(run: Run, off: int) -> None:
    counter = run.counter + np.eye(1, len(run.counter))[0] * off * run.rate / run.mode.aggregated
    with pytest.raises(WrongResultError, match="sum of the counter: expected"):
        check(dataclasses.replace(run, counter=counter))


def test_a_gradient_that_no_step_has_counted_is_found() -> None:
    run = synchronous_run()
    run.pushes[1][1] = run.pushes[1][1]._replace(outcome="accepted", counted=2)
    with pytest.raises(WrongResultError, match="gradients in all steps: expected 5, got 4"):
        check(run)


def test_a_last_step_for_which_nobody_waited_counts_as_a_step() -> None:
    run = synchronous_run()
    run.pushes[1].append(push(3.0, 2))  # found a token of step 2, and was the last
    run.counter[1] += 0.5
    with pytest.raises(WrongResultError, match="global step: expected 3, got 2"):
        check(run)
    run.global_step = 3
    check(run)
