"""Notebooks, executed by a real kernel: what workers write appears in the cell that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for needed in ("nbclient", "nbformat", "ipykernel"):
    pytest.importorskip(needed)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

# In a process of its own, for zmq and its loop leave files open.
EXECUTE = """
import json, sys, nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
notebook = new_notebook(cells=[new_code_cell(source) for source in json.load(sys.stdin)])
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
"""

# Each pair of cells does the same: with await, and in the plain calls of psync.blocking.
START = """
import logging, os
import numpy as np
import psync
from psync import blocking

cluster = {module}.LocalCluster(1, 2, processes={processes})
{await_}cluster.start()
strategy = psync.ParameterServerStrategy(cluster.resolver)
coordinator = {module}.ClusterCoordinator(strategy)
{await_}coordinator.start()
with strategy.scope():
    w = psync.Variable(np.zeros(3, np.float32), name="w")
"""
COROUTINES = """
async def step(number):
    print("coroutine", number)
    logging.getLogger("psync").warning("logged %d", number)

for number in range(3):
    coordinator.schedule(step, (number,))
{await_}coordinator.join()
"""
FUNCTIONS = """
def step(number):
    print("function", number)

for number in range(3):
    coordinator.schedule(step, (number,))
{await_}coordinator.join()
"""
FAILURE = """
def failing():
    print("before the error")
    raise ValueError("of a step")

coordinator.schedule(failing)
try:
    {await_}coordinator.join()
except ValueError as error:
    print("caught", error)
"""
FIT = """
def batches():
    rng = np.random.default_rng(0)
    while True:
        x = rng.normal(size=(32, 3)).astype(np.float32)
        yield x, x @ np.arange(3, dtype=np.float32)

def value_and_grad(model, batch):
    x, y = batch
    error = x @ model["w"] - y
    return np.mean(error**2), {{"w": 2 * x.T @ error / len(x)}}, error

trainer = psync.Trainer(strategy, {{"w": w}}, value_and_grad, psync.optimizers.SGD(0.1))
history = {wait}(trainer.fit(batches, epochs=3, steps_per_epoch=20))
print("losses", len(history.history["loss"]), bool(history.history["loss"][-1] < 0.01))
"""
PROGRESS = """
checkpoint = psync.Checkpoint(w=w)
path = {wait}(checkpoint.save("run", verbose="auto"))
_ = {wait}(checkpoint.restore(path, verbose="bar"))
"""
END = """
{await_}coordinator.close()
{await_}{close}
"""
TABLES = ("cluster", "coordinator", "w", "strategy.placement()", "psync.Checkpoint(w=w)")


def execute(style: str, processes: bool, directory: Path) -> list[list[Any]]:
    """Run the notebook; return what each cell shows."""
    words = {
        "await": {
            "module": "psync", "await_": "await ", "wait": "await ", "close": "cluster.stop()",
        },
        "blocking": {
            "module": "blocking", "await_": "", "wait": "psync.wait", "close": "cluster.close()",
        },
    }[style]  # fmt: skip
    sources = [START, *TABLES, COROUTINES, FUNCTIONS, FAILURE, FIT, PROGRESS, END]
    options = {"processes": processes, **words}
    cells = [each if each in TABLES else each.format(**options) for each in sources]
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE],
        input=json.dumps(cells), capture_output=True, text=True, cwd=directory,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown: list[list[Any]] = json.loads(done.stdout)
    return shown


def printed(outputs: list[Any]) -> list[str]:
    """Return the lines that a cell shows, in order of the alphabet, without names of tasks."""
    text = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    return sorted(line.partition("] ")[2] or line for line in text.splitlines())


@pytest.mark.parametrize("style", ["await", "blocking"])
@pytest.mark.parametrize("processes", [True, False])
def test_each_cell_shows_what_its_steps_write(style: str, processes: bool, tmp_path: Path) -> None:
    start, *tables, coroutines, functions, failure, fit, progress, end = execute(
        style, processes, tmp_path
    )
    assert printed(start) == []
    written = [line.split("psync: ")[-1] for line in printed(coroutines)]
    assert sorted(written) == [f"{what} {n}" for what in ("coroutine", "logged") for n in range(3)]
    assert printed(functions) == ["function 0", "function 1", "function 2"]
    assert printed(failure)[:2] == ["before the error", "caught of a step"]
    assert "losses 3 True" in printed(fit)
    # One output for the epochs, which was replaced again and again.
    (epochs,) = [output["data"] for output in fit if output["output_type"] == "display_data"]
    lines = epochs["text/plain"].splitlines()
    assert [line.partition(" in ")[0] for line in lines] == [
        f"epoch {n}/3: 20 steps" for n in (1, 2, 3)
    ]
    assert epochs["text/html"].count("<div>epoch") == 3
    moved = [output["data"]["text/plain"].partition(" in ")[0] for output in progress]
    assert [line.partition(" ")[0] for line in moved] == ["saving", "restoring"]
    shown = [output["data"]["text/html"] for (output,) in tables]
    for page, text in zip(
        shown,
        (
            "LocalCluster, 1 ps, 2 workers, running",
            "ClusterCoordinator: 2 of 2 workers",
            "Variable &#x27;w&#x27;, float32 of shape (3,)",
            "Placement: 12 bytes on 1 ps",
            "Checkpoint of w",
        ),
        strict=True,
    ):
        assert text in page
    assert printed(end) == []
