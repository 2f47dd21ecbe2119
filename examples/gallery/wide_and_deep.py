"""Will this person click on that? Wide and deep, with tables of ten million hashed rows.

    psync run examples/gallery/wide_and_deep.py --ps 2 --workers 3
    psync run examples/gallery/wide_and_deep.py --ps 2 --workers 3 -- --quick

A view of an advertisement is five names: person, item, place, hour, and the pair of person and
item. Each is hashed into one of ten million rows, without a dictionary. The wide part adds up one
weight for each (Cheng 2016); the deep part looks up a vector for each but the pair, and a net makes
a number of them. The tables and the slots of their optimizers have 760 MB; a batch names some five
thousand rows, and only these are pulled, pushed and changed. What a step costs depends on them, and
not on the size of the tables.

The views are made here, by a rule that is known; so is the best AUC that anybody can reach.
"""

import asyncio
import sys
import time

import common
import numpy as np

import psync

ROWS, SIZE = 10_000_000, 8
PEOPLE, ITEMS, PLACES, HOURS = 20_000, 2_000, 200, 24
FIELDS, DEEP, BATCH = 5, 4, 2048  # the pair is for the wide part alone


def views(rng, count):
    """Return names as numbers, (count, FIELDS), whether each was clicked, and how likely it was."""
    person = (PEOPLE * rng.random(count) ** 3).astype(np.int64)  # some come again and again
    item = (ITEMS * rng.random(count) ** 2).astype(np.int64)
    place, hour = person * 7919 % PLACES, rng.integers(0, HOURS, count)
    taste, kind = person * 31 % 5, item * 17 % 5  # who likes what
    alone = np.sin(item * 13.0) + 0.5 * np.sin(person * 29.0) + np.sin(hour / 24 * 2 * np.pi)
    logit = alone + 2.5 * (taste == kind) - 2
    likely = 1 / (1 + np.exp(-logit))
    names = np.stack([person, item, place, hour, person * ITEMS + item], axis=1)
    return names, (rng.random(count) < likely).astype(np.float32), likely


def hashed(names):
    """Return a row for each name; a field's number keeps equal names of two fields apart."""
    mixed = names.astype(np.uint64) * np.uint64(8) + np.arange(FIELDS, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(29))) % np.uint64(ROWS)).astype(np.int64)


def first_vectors(rows):
    """Return what vectors of rows are in the beginning: a function of the row, stored nowhere."""
    return (0.3 * np.sin(rows[..., None] * np.linspace(0.1, 2.9, SIZE))).astype(np.float32)


def auc(labels, scores):
    """Return how often a view that was clicked scores above one that was not."""
    rank = np.empty(len(scores))
    rank[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicked = labels > 0
    above = rank[clicked].sum() - clicked.sum() * (clicked.sum() + 1) / 2
    return above / (clicked.sum() * (~clicked).sum())


async def main():
    options = common.options(__doc__, steps=2000)
    steps = 300 if options.quick else options.steps
    resolver = psync.resolve_cluster()
    num_ps = resolver.cluster_spec().num_tasks("ps")
    strategy = psync.ParameterServerStrategy(resolver, psync.MinSizePartitioner(1 << 20, num_ps))
    rng = np.random.default_rng(options.seed)
    names, clicks, likely = views(rng, 40_000)  # that no step sees
    tests = hashed(names), clicks, auc(clicks, likely)

    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            wide = psync.Variable(np.zeros(ROWS, np.float32), name="wide")
            deep = psync.Variable(np.zeros((ROWS, SIZE), np.float32), name="deep")
            first = common.new_net(rng, DEEP * SIZE, 32, 1)
            net = [psync.Variable(array, name=f"net/{i}") for i, array in enumerate(first)]
        ftrl = psync.optimizers.Ftrl(0.1)  # as in the paper: one each
        adagrad = psync.optimizers.Adagrad(0.1)

        async def forward(rows):
            weights, vectors, arrays = await asyncio.gather(
                psync.embedding_lookup(wide, rows), psync.embedding_lookup(deep, rows[:, :DEEP]),
                psync.pull(net),
            )  # fmt: skip
            x = (vectors + first_vectors(rows[:, :DEEP])).reshape(len(rows), -1)
            hidden, deep_logits = common.predict(arrays, x)
            return x, hidden, arrays, weights.sum(axis=1) + deep_logits[:, 0]

        async def step(seed):  # runs on some worker
            names, clicks, _ = views(np.random.default_rng(seed), BATCH)
            rows = hashed(names)
            x, hidden, (w1, _, w2, _), logits = await forward(rows)
            d_logits = (1 / (1 + np.exp(-logits)) - clicks)[:, None]  # of the sum: a row is in few
            d_hidden = d_logits @ w2.T * (hidden > 0)
            d_deep = psync.IndexedSlices(
                (d_hidden @ w1.T).reshape(-1, SIZE), rows[:, :DEEP].ravel()
            )
            dense = x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_logits, d_logits.sum(0)
            d_wide = psync.IndexedSlices(np.repeat(d_logits[:, 0], FIELDS), rows.ravel())
            await asyncio.gather(
                ftrl.apply_gradients([(d_wide, wide)]),
                adagrad.apply_gradients([(d_deep, deep), *zip(dense, net, strict=True)]),
            )
            return np.unique(rows)

        history, named, moved, began = [], np.zeros(ROWS, bool), 0, time.perf_counter()
        print(f"   views     AUC (at most {tests[2]:.4f})  rows named by now    rows/s")
        for done in range(0, steps, part := steps // 10):
            seeds = [(options.seed, number) for number in range(done, done + part)]
            scheduled = [coordinator.schedule(step, args=(seed,)) for seed in seeds]
            await coordinator.join()
            for rows in await coordinator.fetch(scheduled):
                named[rows] = True
                moved += 2 * len(rows)  # pulled and pushed
            scores = np.concatenate([(await forward(rows))[3] for rows in np.split(tests[0], 10)])
            history.append(((done + part) * BATCH, auc(tests[1], scores), named.sum()))
            rate = moved / (time.perf_counter() - began)
            print("{:8}  {:8.4f}  {:26}".format(*history[-1]), f"{rate:9.0f}")

    a_step = moved / steps / 2
    print(f"a step moved {a_step:.0f} rows each way, {a_step / ROWS:.3%} of a table")
    draw(np.array(history), tests[2], options.out)
    first, last = history[0][1], history[-1][1]
    if not first < last or last < (0.68 if options.quick else 0.8):
        return f"the AUC went from {first:.4f} to {last:.4f}, of at most {tests[2]:.4f}"


def draw(history, best, folder):
    """Draw the AUC, and how many rows were named, over views."""
    drawn, (left, right) = common.figure()
    millions = history[:, 0] / 1e6
    left.plot(millions, history[:, 1], ".-", label="wide and deep")
    left.axhline(best, color="grey", linestyle="--", label="the rule that made the views")
    left.set(title="AUC of views never seen", xlabel="million views", ylim=(0.5, 0.85))
    left.legend(frameon=False, loc="lower right")
    right.plot(millions, history[:, 2] / 1e6, ".-", color="C1")
    right.set(title="million rows that were named, of 10", xlabel="million views", ylim=(0, None))
    common.save(drawn, folder, "wide_and_deep")


if __name__ == "__main__":
    failure = psync.run(main)
    sys.exit(f"wide_and_deep: {failure}" if failure else 0)
