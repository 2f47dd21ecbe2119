"""An evolution strategy: eight workers learn to balance a pole, by messages of 100 numbers.

    psync run examples/gallery/evolution.py --ps 1 --workers 8
    psync run examples/gallery/evolution.py --ps 1 --workers 8 -- --quick

Nothing here has a gradient. A worker pulls the policy, changes it a little at random, in both
directions, and plays the game with each. From how long the pole stayed up it estimates in which
direction the policy gets better (Salimans 2017), and pushes that; the ps applies it at once, with
Adam. A game lasts as long as the pole stands, at most ten seconds of its time. So the better the
policies, the longer the games, and by very different times; nobody waits for anybody.
"""

import sys
import time

import common
import numpy as np

import psync

PAIRS = 8  # of changes in opposite directions, tried in one closure
SIGMA = 0.2
INPUTS, HIDDEN = 4, 16
SIZE = INPUTS * HIDDEN + HIDDEN + HIDDEN  # of the policy
STEPS = 500  # of a game: 10 s
GRAVITY, POLE, MASS_SHARE, FORCE, TICK = 9.8, 0.5, 0.1 / 1.1, 10 / 1.1, 0.02


def play(policies, rng):
    """Return for how many steps each policy keeps a pole up: the cart-pole of Barto 1983."""
    count = len(policies)
    w1 = policies[:, : INPUTS * HIDDEN].reshape(count, INPUTS, HIDDEN)
    b1, w2 = np.split(policies[:, INPUTS * HIDDEN :], 2, axis=1)
    state = rng.uniform(-0.05, 0.05, (count, 4))  # place, speed, angle, its speed
    lived, alive = np.zeros(count), np.ones(count, bool)
    for _ in range(STEPS):
        hidden = np.tanh(np.einsum("ci,cih->ch", state, w1) + b1)
        push = np.where(np.einsum("ch,ch->c", hidden, w2) > 0, FORCE, -FORCE)
        _, speed, angle, turning = state.T
        sine, cosine = np.sin(angle), np.cos(angle)
        force = push + MASS_SHARE * POLE * turning**2 * sine
        bend = (GRAVITY * sine - cosine * force) / (POLE * (4 / 3 - MASS_SHARE * cosine**2))
        change = speed, force - MASS_SHARE * POLE * bend * cosine, turning, bend
        state = state + TICK * np.stack(change, axis=1)
        alive &= (np.abs(state[:, 0]) < 2.4) & (np.abs(state[:, 2]) < 12 * np.pi / 180)
        lived += alive
        if not alive.any():
            break
    return lived


def gradient_of(policy, rng):
    """Return an estimate of where policies get worse, and how long these have lived."""
    noise = rng.normal(size=(PAIRS, SIZE))
    lived = play(np.concatenate([policy + SIGMA * noise, policy - SIGMA * noise]), rng)
    rank = lived.argsort().argsort() / (len(lived) - 1) - 0.5  # a lucky game counts no more
    better = (rank[:PAIRS] - rank[PAIRS:]) @ noise / (2 * PAIRS * SIGMA)
    return -better.astype(np.float32), lived


async def main():
    options = common.options(__doc__, closures=600)
    closures = 400 if options.quick else options.closures
    resolver = psync.resolve_cluster()
    strategy = psync.ParameterServerStrategy(resolver)
    rng = np.random.default_rng(options.seed)
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            policy = psync.Variable(rng.normal(0, 0.1, SIZE).astype(np.float32), name="policy")
        optimizer = psync.optimizers.Adam(0.05)

        def step(seed):  # no coroutine: it computes for long, and runs in a thread of the worker
            began = time.perf_counter()
            gradient, lived = gradient_of(
                psync.wait(psync.pull(policy)), np.random.default_rng(seed)
            )
            push = psync.wait(optimizer.apply_gradients([(gradient, policy)]))
            seconds = time.perf_counter() - began
            return time.time(), psync.get_worker_index(), seconds, push.staleness, *lived

        began = time.time()
        seeds = np.random.SeedSequence(options.seed).spawn(closures)
        scheduled = [coordinator.schedule(step, args=(seed.generate_state(4),)) for seed in seeds]
        await coordinator.join()
        log = np.array(await coordinator.fetch(scheduled))
        log = log[log[:, 0].argsort()]
        found = await policy.read()

    games = play(np.tile(found, (100, 1)), rng)
    seconds, lived = log[-1, 0] - began, log[:, 4:]
    workers = len(np.unique(log[:, 1]))
    fastest, slowest = log[:, 2].min() * 1e3, log[:, 2].max() * 1e3
    print(f"{lived.size} games of {lived.sum():.0f} steps in {seconds:.1f} s on {workers} workers")
    print(f"a closure took {fastest:.0f} to {slowest:.0f} ms, and sent {SIZE * 4} bytes")
    print(f"updates of others since a worker's last push: {log[:, 3].mean():.1f} on average")
    print(
        f"first 100 games: {lived.ravel()[:100].mean():.0f} steps; 100 new ones: {games.mean():.0f}"
    )
    draw(log, began, games, options.out)
    if games.mean() < 0.9 * STEPS:
        return f"a game lasts {games.mean():.0f} steps, expected at least {0.9 * STEPS:.0f}"


def draw(log, began, games, folder):
    """Draw how long games last, and how long closures take."""
    drawn, (left, right) = common.figure()
    left.plot(log[:, 0] - began, log[:, 4:].mean(axis=1), ".", markersize=3, alpha=0.4)
    left.axhline(games.mean(), color="C1", label="100 games with what was learned")
    left.set(title="steps that the pole stays up, with changes", xlabel="seconds", ylim=(0, 520))
    left.legend(frameon=False, loc="lower right")
    right.plot(log[:, 0] - began, log[:, 2] * 1e3, ".", markersize=3, alpha=0.4)
    right.set(title="milliseconds of a closure", xlabel="seconds", yscale="log")
    common.save(drawn, folder, "evolution")


if __name__ == "__main__":
    failure = psync.run(main)
    sys.exit(f"evolution: {failure}" if failure else 0)
