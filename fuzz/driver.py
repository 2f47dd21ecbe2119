"""Runs one target: under atheris (coverage guides it), or without it on random mutations.

A target is a file of this folder with a function ``setup()``, which imports what it attacks and
returns what takes one input, and the seeds to begin with. An input is good if that function
returns; every exception that is not documented is left to escape, and so a finding.

    python fuzz/frames.py --seconds 60      one target
    python fuzz/run.py --seconds 60         all of them, one after the other
    python fuzz/frames.py --input FILE      one input again
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

OneInput = Callable[[bytes], None]
Setup = Callable[[], tuple[OneInput, list[bytes]]]

OUT = Path(__file__).parent.parent / "out" / "fuzz"
MAX_BYTES = 4096
MEMORY_MIB = 1024


def fuzz(target: str, setup: Setup) -> None:
    """Run the target that the command line speaks of: ``__file__`` of the caller, its set-up."""
    name = Path(target).stem
    parser = argparse.ArgumentParser(description=f"Fuzz {name}.")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None, help="of the random mutations")
    parser.add_argument("--input", type=Path, help="run this file as the only input")
    parser.add_argument("--plain", action="store_true", help="do not use atheris")
    options = parser.parse_args()
    logging.getLogger("psync").setLevel(logging.CRITICAL)  # it would say much of what comes in
    if options.input:
        setup()[0](options.input.read_bytes())
    elif importlib.util.find_spec("atheris") and not options.plain:
        _with_atheris(name, setup, options.seconds)
    else:
        _with_mutations(name, setup, options.seconds, options.seed)


def _with_atheris(name: str, setup: Setup, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["psync"]):
        one_input, seeds = setup()
    corpus = OUT / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    arguments = [
        sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}",
        f"-rss_limit_mb={MEMORY_MIB}", "-timeout=20", f"-artifact_prefix={OUT}/{name}-",
        "-print_final_stats=1", "-verbosity=1",
    ]  # fmt: skip
    atheris.Setup(arguments, one_input)
    atheris.Fuzz()


def _with_mutations(name: str, setup: Setup, seconds: int, seed: int | None) -> None:
    one_input, seeds = setup()
    seed = random.randrange(1 << 32) if seed is None else seed
    chance = random.Random(seed)
    until, count, data = time.monotonic() + seconds, 0, b""
    try:
        while time.monotonic() < until:
            data = mutated(chance, seeds)
            one_input(data)
            count += 1
    except BaseException:
        OUT.mkdir(parents=True, exist_ok=True)
        found = OUT / f"{name}-finding"
        found.write_bytes(data)
        print(f"{name}: finding after {count} inputs, seed {seed}: {found}", file=sys.stderr)
        raise
    print(f"{name}: {count} inputs in {seconds} s, no finding; seed {seed}; without atheris")


def mutated(chance: random.Random, seeds: list[bytes]) -> bytes:
    """Return a seed, or two seeds joined, with some bytes changed, removed, added or repeated."""
    data = bytearray(chance.choice(seeds))
    if chance.random() < 0.2:
        other = chance.choice(seeds)
        data = data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]
    for _ in range(chance.choice((0, 1, 1, 2, 4, 16))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0 if data:
                data[at % len(data)] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
            case 1 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 2:
                del data[at : at + chance.choice((1, 2, 4, 8, 32))]
            case 3:
                data[at:at] = chance.randbytes(chance.choice((1, 2, 4, 8, 32)))
            case _:
                data[at:at] = data[at : at + chance.choice((4, 16, 64))]
    return bytes(data[:MAX_BYTES])
