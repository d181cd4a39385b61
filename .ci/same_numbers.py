#!/usr/bin/env python3
"""Compares what two machines' kernels wrote (tests/internal/sanitize/kernels.cpp).

A result counts by its largest number: 1e-6 of it, 2e-5 after several steps of training.
"""

import sys

import numpy as np


def main(one: str, other: str) -> int:
    """Prints the largest difference of each kernel; 1 where one is too large."""
    worst: dict[str, float] = {}
    with open(one) as a, open(other) as b:
        for mine, theirs in zip(a, b, strict=True):
            (name, x), (again, y) = mine.split("\t"), theirs.split("\t")
            u, v = (np.array(text.split(), dtype=float) for text in (x, y))
            assert name == again and np.array_equal(np.isfinite(u), np.isfinite(v)), (
                name
            )
            u, v = u[np.isfinite(u)], v[np.isfinite(v)]
            size = max(float(np.abs(u).max(initial=0)), 1e-300)
            off = float(np.abs(u - v).max(initial=0)) / size
            worst[name] = max(worst.get(name, 0.0), off)
    bad = {k: v for k, v in worst.items() if v > (2e-5 if k == "chain" else 1e-6)}
    print(
        f"{'too far apart' if bad else 'the same numbers'}:",
        bad or f"{len(worst)} kernels,",
        end=" ",
    )
    print(", ".join(f"{k} {v:.0e}" for k, v in worst.items() if v))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
