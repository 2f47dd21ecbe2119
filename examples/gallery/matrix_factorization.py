"""Recommendations: what thousands of users would say of a thousand items, from a tenth of it.

    psync run examples/gallery/matrix_factorization.py --ps 2 --workers 2

Each user and each item has a vector, a row of a table that is sharded over the ps tasks; their
product foretells the rating. A step pulls the rows that its batch of ratings names, and pushes
gradients for these rows alone; so tables may be larger than the memory of any worker.

The ratings are made here: a matrix of low rank, plus noise. So it is known how good a model can
be, and what comes out is compared with that.
"""

import sys
import time

import common
import numpy as np

import psync

USERS, ITEMS, RANK = 3000, 1000, 6
OBSERVED, UNSEEN = 300_000, 20_000  # of the 3 million entries of the matrix
NOISE = 0.1  # standard deviation; that of the ratings is 1
BATCH = 4096
STEPS = OBSERVED // BATCH  # of an epoch, over all workers: each observed rating about once


def ratings(rng):
    """Return (users, items, ratings), all different entries: those observed, the unseen."""
    users, items = (rng.normal(0, RANK**-0.25, (rows, RANK)) for rows in (USERS, ITEMS))
    user, item = np.divmod(rng.choice(USERS * ITEMS, OBSERVED + UNSEEN, replace=False), ITEMS)
    exact = np.einsum("ij,ij->i", users[user], items[item])
    table = user, item, (exact + rng.normal(0, NOISE, len(exact))).astype(np.float32)
    return [column[:OBSERVED] for column in table], [column[OBSERVED:] for column in table]


def attainable():
    """Return about what the best fit to the observed ratings errs by on others.

    Each of its free numbers, here RANK * (USERS + ITEMS - RANK), learns as much of the noise as
    one rating has.
    """
    return NOISE * np.sqrt(1 + RANK * (USERS + ITEMS - RANK) / OBSERVED)


async def main():
    options = common.options(__doc__, epochs=10)
    epochs = 8 if options.quick else options.epochs
    resolver = psync.resolve_cluster()
    num_ps = resolver.cluster_spec().num_tasks("ps")
    strategy = psync.ParameterServerStrategy(resolver, psync.FixedShardsPartitioner(num_ps))
    rng = np.random.default_rng(options.seed)
    observed, unseen = ratings(rng)

    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            users, items = (
                psync.Variable(rng.normal(0, 0.3, (rows, RANK)).astype(np.float32), name=name)
                for rows, name in ((USERS, "users"), (ITEMS, "items"))
            )
        rate = psync.schedules.CosineDecay(0.05, decay_steps=epochs * STEPS)
        optimizer = psync.optimizers.Adam(rate)  # rows that a batch does not name stay as they are
        dataset = psync.data.from_arrays(tuple(observed), BATCH, shuffle_seed=0, num_epochs=None)
        shares = strategy.experimental_distribute_dataset(dataset)  # no rating goes to two workers
        data = iter(coordinator.create_per_worker_dataset(shares))

        async def error_of(user, item, rating):  # rows are pulled from here and from workers
            u = await psync.embedding_lookup(users, user)  # (len(user), RANK)
            v = await psync.embedding_lookup(items, item)
            return np.einsum("ij,ij->i", u, v) - rating, u, v

        async def step(data):  # runs on some worker
            user, item, rating = next(data)
            error, u, v = await error_of(user, item, rating)
            d_users = psync.IndexedSlices(error[:, None] * v, user)  # of half the sum of squares
            d_items = psync.IndexedSlices(error[:, None] * u, item)
            await optimizer.apply_gradients([(d_users, users), (d_items, items)])
            return error @ error, len(error)

        history, error = [], np.zeros(0)
        print("epoch  RMSE of its steps  of unseen ratings  rows/s, pulled and pushed")
        for epoch in range(1, epochs + 1):
            began = time.perf_counter()
            scheduled = [coordinator.schedule(step, args=(data,)) for _ in range(STEPS)]
            await coordinator.join()
            seconds = time.perf_counter() - began
            squares, count = np.sum(await coordinator.fetch(scheduled), axis=0)
            error, _, _ = await error_of(*unseen)
            history.append((np.sqrt(squares / count), np.sqrt(np.mean(error**2))))
            row = f"{epoch:5}  {history[-1][0]:17.4f}  {history[-1][1]:17.4f}"
            print(f"{row}  {2 * count / seconds:6.0f}")

    rmse = history[-1][1]
    print(f"error of ratings never seen: {rmse:.4f}")
    print(f"noise alone, which nobody can foretell: {NOISE:.4f}")
    print(f"noise, and what {OBSERVED} noisy ratings leave open: {attainable():.4f}")
    draw(history, error, options.out)
    if rmse > 1.1 * attainable():
        return f"the error is {rmse:.4f}, expected at most {1.1 * attainable():.4f}"


def draw(history, error, folder):
    """Draw the error after each epoch, and that of each unseen rating in the end."""
    drawn, (left, right) = common.figure()
    epochs = np.arange(1, len(history) + 1)
    for curve, name in zip(np.transpose(history), ("its own steps", "unseen ratings"), strict=True):
        left.plot(epochs, curve, "o-", markersize=3, label=name)
    left.axhline(attainable(), color="grey", linestyle="--", label="attainable")
    left.set(title="error of ratings (RMSE)", xlabel="epoch", yscale="log")
    left.legend(frameon=False)
    right.hist(error, bins=np.linspace(-0.5, 0.5, 61), alpha=0.6)
    right.set(title=f"errors of {UNSEEN} unseen ratings", xlabel="foretold less given")
    common.save(drawn, folder, "matrix_factorization")


if __name__ == "__main__":
    failure = psync.run(main)  # on the chief; a worker serves in here until it is told to stop
    sys.exit(f"matrix_factorization: {failure}" if failure else 0)
