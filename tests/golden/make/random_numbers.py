"""Golden random numbers, by splitmix64 with Python's integers.

A key, such as (seed, round, stream), becomes a word of 63 bits by BLAKE2b. The n-th
word of a seed is `mix(seed + n gamma)` (Steele, Lea and Flood 2014), n from 1, and so
is the seed of the client with the number n - 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from cases import Result, load, main

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
POSITION_BITS = 24  # low bits of a shuffle's key, which the position replaces
CLIENTS = (0, 1, 7)
SIZES = (5, 4, 3)  # samples of these clients


def seed_of(*key: object) -> int:
    """The word of a key: the first 8 bytes of its digest, without the lowest bit."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") // 2


def word(seed: int, n: int) -> int:
    """The n-th random word of a seed."""
    z = (seed + n * GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def shuffle(seed: int, size: int) -> list[int]:
    """The positions 0 .. size - 1, in the order of random words without low bits."""
    return sorted(range(size), key=lambda i: (word(seed, i + 1) >> POSITION_BITS, i))


def uniform(seed: int, n: int) -> float:
    """A number between 0 and 1, to 7 decimals.

    It is the middle of one of 2^24 equal intervals, in float32: in the upper half, the
    middle is rounded to an end of the interval.
    """
    middle = np.float32((word(seed, n) >> 40) + 0.5)
    return round(float(middle) / 2**24, 7)


def draw(n: int, count: int, *key: object) -> list[int]:
    """`count` different numbers below n, in the order of their draw.

    At least a quarter of all numbers are drawn by a shuffle of them all, fewer by words
    modulo n, of which repetitions are left out.
    """
    seed = seed_of(*key)
    if 4 * count >= n:
        return sorted(range(n), key=lambda i: word(seed, i + 1))[:count]
    drawn: list[int] = []
    position = 1
    while len(drawn) < count:
        number = word(seed, position) % n
        if number not in drawn:
            drawn.append(number)
        position += 1
    return drawn


def results() -> Iterator[Result]:
    """The numbers of random_numbers.json."""
    of_round = seed_of(0, 3, "fit", 0)
    seeds = [word(of_round, i + 1) for i in CLIENTS]
    longest = max(SIZES)
    shuffles = []
    uniforms = []
    for seed, size in zip(seeds, SIZES, strict=True):
        shuffles.append(shuffle(seed, size) + [0] * (longest - size))
        uniforms += [uniform(seed, 1), uniform(seed, 2)]
    found = {
        "seed": seed_of("a", 1, 2.5),
        "seeds": seeds,
        "shuffles": shuffles,
        "uniforms": uniforms,
        "4 of 1000": draw(1000, 4, 0, 1, "cohort"),
        "4 of 16": draw(16, 4, 0, 1, "cohort"),
    }
    if set(found) != set(load("random_numbers")):
        raise ValueError("random_numbers.json: expected the keys that are made here.")
    for key, value in found.items():
        yield Result("random_numbers", (key,), value, 0, 0)


if __name__ == "__main__":
    main(results())
