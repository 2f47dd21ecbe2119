"""Word vectors from Python's own standard library: tables of rows, sharded over the ps tasks.

    psync run examples/embeddings.py --ps 2 --workers 2
    psync run examples/embeddings.py --ps 2 --workers 2 -- --quick

Skip-gram with negative sampling (Mikolov et al. 2013) learns a vector for each word such that it
foretells the words around it; so words that are used alike get like vectors. The text is on your
disk already: names, comments and docstrings of the standard library.

No worker ever holds a table. A step pulls the rows of the words in its batch and pushes gradients
for these rows; the ps tasks touch no others. A file is a data shard: it is read by one closure,
exactly once in each epoch, whichever workers die. It needs no package but numpy.
"""

import argparse
import asyncio
import re
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import numpy as np

import psync

SIZE = 64  # of a vector
WINDOW = 5  # words to either side that a word foretells
NEGATIVES = 5  # for each pair: words drawn at random, which it shall not foretell
DRAWN = 128  # of them for a batch, shared by its pairs: all products are then one of matrices
BATCH = 1024  # pairs
FREQUENT = 1e-4  # words with a larger share of the text are often passed over
WORD = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{2,}")  # inside of snake_case and CamelCase, too
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "encodings", "idlelib", "lib2to3"}
ALIKE = """true false  read write  stdin stdout  min max  left right  start end  int float
    encode decode  key value  first last  day month""".split()


def source_files():
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    return [str(folder / path) for path in files if not NOT_TEXT & set(path.parts)]


def words_of(file):
    return [word.lower() for word in WORD.findall(Path(file).read_text("utf-8", "replace"))]


class Vocabulary:
    """The words that get a vector, the most frequent ones first."""

    def __init__(self, counts):
        self.words = [word for word, count in counts.most_common() if count >= 5]
        self.rows = {word: row for row, word in enumerate(self.words)}
        share = np.array([counts[word] for word in self.words]) / counts.total()
        self.kept = np.sqrt(FREQUENT / share)
        self.drawn = np.cumsum(share**0.75)[:-1] / np.sum(share**0.75)

    def pairs(self, words, rng):
        """Return which row foretells which, in random order."""
        text = np.array([self.rows[word] for word in words if word in self.rows], np.int64)
        text = text[rng.random(len(text)) < self.kept[text]]
        reach = rng.integers(1, WINDOW + 1, len(text))  # so near words count more than far ones
        pairs = []
        for distance in range(1, WINDOW + 1):
            near = np.stack([text[:-distance], text[distance:]])
            pairs += [near[:, reach[:-distance] >= distance]]
            pairs += [near[::-1, reach[distance:] >= distance]]
        return rng.permutation(np.concatenate(pairs, axis=1), axis=1)


def loss_and_gradients(centers, contexts, negatives):
    """Return the loss, summed over the pairs, and its gradient for each of the given rows."""
    weight = NEGATIVES / len(negatives)  # together they count as NEGATIVES words for each pair
    seen = 1 / (1 + np.exp(-np.einsum("ij,ij->i", centers, contexts)))
    drawn = 1 / (1 + np.exp(-centers @ negatives.T))
    loss = -np.log(seen + 1e-9).sum() - weight * np.log(1 - drawn + 1e-9).sum()
    d_seen, d_drawn = (seen - 1)[:, None], weight * drawn
    d_centers = d_seen * contexts + d_drawn @ negatives
    return loss, d_centers, np.concatenate([d_seen * centers, d_drawn.T @ centers])


async def main():
    every, num_epochs = parse_options()
    resolver = psync.resolve_cluster()
    num_ps = resolver.cluster_spec().num_tasks("ps")
    strategy = psync.ParameterServerStrategy(resolver, psync.FixedShardsPartitioner(num_ps))
    files = source_files()[::every]
    counts = Counter(word for file in files for word in words_of(file))
    vocabulary = Vocabulary(counts)
    shape = len(vocabulary.words), SIZE
    first = np.random.default_rng(0).uniform(-0.5 / SIZE, 0.5 / SIZE, shape).astype(np.float32)
    print(f"{len(files)} files, {counts.total()} words, {shape[0]} of them with a vector")

    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            inputs = psync.Variable(first, name="inputs")
            outputs = psync.Variable(np.zeros(shape, np.float32), name="outputs")
        optimizer = psync.optimizers.Adam(0.01)  # its slots are tables of rows, too

        async def step(file, epoch):  # runs on some worker
            rng = np.random.default_rng([epoch, *file.encode()])
            centers, contexts = vocabulary.pairs(words_of(file), rng)
            losses = 0
            for start in range(0, len(centers), BATCH):
                center = centers[start : start + BATCH]
                negatives = np.searchsorted(vocabulary.drawn, rng.random(DRAWN))
                output = np.concatenate([contexts[start : start + BATCH], negatives])
                u, v = await asyncio.gather(
                    psync.embedding_lookup(inputs, center), psync.embedding_lookup(outputs, output)
                )
                loss, d_u, d_v = loss_and_gradients(u, v[: len(u)], v[len(u) :])
                d_inputs = psync.IndexedSlices(d_u, center)  # a row that occurs twice is summed
                d_outputs = psync.IndexedSlices(d_v, output)
                await optimizer.apply_gradients([(d_inputs, inputs), (d_outputs, outputs)])
                losses += loss
            return len(centers), losses

        history = []
        visits = coordinator.distribute_once(files, num_epochs, shuffle_seed=0)
        print("epoch    loss  rows/s, pulled and pushed")
        for epoch in visits:
            began = time.perf_counter()
            results = visits.schedule(step, args=(epoch,))
            await coordinator.join()
            pairs, losses = np.sum(await coordinator.fetch(results), axis=0)
            history.append(losses / pairs)
            rows = 2 * pairs / (time.perf_counter() - began)
            print(f"{epoch:5}  {history[-1]:6.4f}  {rows:6.0f}")
        print(*visits.account(), sep="\n")
        rank = show_neighbours(await inputs.read(), vocabulary)
    if history[-1] > history[0] or rank > len(vocabulary.words) / 4:  # by chance it is a half
        return "expected the loss to fall, and like words near each other"


def show_neighbours(vectors, vocabulary):
    """Print which words are near some words; return how far down the list those like them are."""
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    ranks = []
    for word, like in zip(ALIKE[::2], ALIKE[1::2], strict=True):
        if word in vocabulary.rows and like in vocabulary.rows:
            near = np.argsort(-vectors @ vectors[vocabulary.rows[word]])[1:].tolist()
            print(f"{word:>6}: {' '.join(vocabulary.words[row] for row in near[:9])}")
            ranks.append(1 + near.index(vocabulary.rows[like]))
    print(f"rank of true's false, read's write, …: {np.median(ranks):.0f} of {len(vectors)} words")
    return np.median(ranks)


def parse_options():
    parser = argparse.ArgumentParser(
        "embeddings.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--epochs", type=int, default=4, help="default: 4")
    parser.add_argument("--quick", action="store_true", help="2 epochs, a fifth of the files")
    options = parser.parse_args()
    return (5, 2) if options.quick else (1, options.epochs)


if __name__ == "__main__":
    failure = psync.run(main)  # on the chief; a worker serves in here until it is told to stop
    sys.exit(f"embeddings: {failure}" if failure else 0)
