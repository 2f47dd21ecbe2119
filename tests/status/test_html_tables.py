"""HTML tables for notebooks: readable on any page, safe for any text, and not endless."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

import psync
from psync.status.html_tables import MAX_ROWS, table


def seen_in(page: str) -> list[str]:
    """What a reader sees; fails where elements do not match."""
    return [text.strip() for text in ElementTree.fromstring(page).itertext() if text.strip()]


def texts(thing: object) -> list[str]:
    return seen_in(thing._repr_html_())  # type: ignore[attr-defined]


def test_text_is_escaped_and_numbers_have_separators() -> None:
    page = table("<b>title</b>", ("name", "bytes"), [("<script>&", 1234567)])
    assert "<script>" not in page
    assert seen_in(page) == ["<b>title</b>", "name", "bytes", "<script>&", "1,234,567"]


def test_it_takes_the_colours_of_the_page() -> None:
    page = table("title", ("a",), [(1,)])
    assert not re.search("background|[^-]color|font|#[0-9a-f]{3}", page)


def test_a_long_table_is_cut_and_says_so() -> None:
    page = table("title", ("a",), [(n,) for n in range(MAX_ROWS + 5)])
    assert page.count("<tr>") == MAX_ROWS + 1
    assert seen_in(page)[-1] == "and 5 more"


async def test_what_a_notebook_shows_of_a_cluster_and_its_parts(tmp_path: Path) -> None:
    cluster = psync.LocalCluster(2, 2, processes=False)
    assert texts(cluster) == ["LocalCluster, 2 ps, 2 workers, not running"]
    async with cluster:
        assert texts(cluster)[4:7] == ["ps-0", "ps-0:1", "in this process"]
        strategy = psync.ParameterServerStrategy(cluster.resolver, psync.FixedShardsPartitioner(2))
        coordinator = psync.ClusterCoordinator(strategy)
        assert texts(coordinator) == ["ClusterCoordinator, not running"]
        async with coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros((10, 3), np.float32), name="w")
            coordinator.schedule(lambda: None)
            await coordinator.join()
            title, *rows = texts(coordinator)
            assert title.startswith("ClusterCoordinator: 2 of 2 workers; closures: 0 queued, 0 in")
            assert rows[6:9] == ["/job:worker/task:0", "worker-0:1", "here"]
            assert texts(w) == [
                "ShardedVariable 'w', float32 of shape (10, 3)",
                *("shard", "shape", "first row", "bytes", "ps"),
                *("0", "(5, 3)", "0", "60", "ps 0"),
                *("1", "(5, 3)", "5", "60", "ps 1"),
            ]
            assert texts(strategy.placement())[0] == "Placement: 120 bytes on 2 ps"
            checkpoint = psync.Checkpoint(
                model={"w": w}, optimizer=psync.optimizers.Adam(0.1), at=psync.SavedState(epoch=0)
            )
            assert texts(checkpoint) == [
                "Checkpoint of model, optimizer, at, with the slots of its optimizers",
                *("name", "what", "shape", "dtype", "bytes"),
                *("model/w", "variable", "(10, 3)", "float32", "120"),
                *("optimizer", "Adam"),
                *("at", "SavedState"),
            ]
            manager = psync.CheckpointManager(checkpoint, tmp_path)
            assert texts(manager) == [f"Checkpoints in {tmp_path}"]
            path = await manager.save()
            assert texts(manager)[-2:] == ["1", str(path)]
