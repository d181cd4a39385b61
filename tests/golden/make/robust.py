"""Golden numbers of the defences that replace FedAvg's mean.

Symbols: d_i [P] are the updates of S clients, p_i their shares; f clients may be bad.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cases import Result, main, upload_results


def clipped_mean(d: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The mean of updates that are cut to the median norm M.

    It is `sum p_i d_i min(1, M / |d_i|)`. Sun et al. 2019 cut at a fixed bound.
    """
    norms = np.linalg.norm(d, axis=1)
    return (p * np.minimum(1, np.median(norms) / norms)) @ d


def trimmed_mean(d: np.ndarray, f: int) -> np.ndarray:
    """Each coordinate's mean without its f least and f largest (Yin et al. 2018).

    It is Definition 2 there.
    """
    return np.sort(d, 0)[f : len(d) - f].mean(0)


def krum_order(d: np.ndarray, f: int) -> list[int]:
    """The clients in the order of Krum's score (Blanchard et al. 2017, section 4).

    A score is the sum of the squared distances to the S - f - 2 nearest others.
    """
    scores = []
    for i in range(len(d)):
        to_others = [((d[i] - d[j]) ** 2).sum() for j in range(len(d)) if j != i]
        scores.append(sum(sorted(to_others)[: len(d) - f - 2]))
    return sorted(range(len(d)), key=lambda i: scores[i])


def trusted_mean(d: np.ndarray, trusted: int) -> np.ndarray:
    """FLTrust (Cao et al. 2021, Eqs. 2 to 4).

    It is `sum t_i (|r| / |d_i|) d_i / sum t_i`. r is the trusted client's update, and
    `t_i = max(0, cos(d_i, r))`. The package has the trusted client itself in the sum.
    """
    r = d[trusted]
    norms = np.linalg.norm(d, axis=1)
    t = np.maximum(0, d @ r / (norms * np.linalg.norm(r)))
    return (t * np.linalg.norm(r) / norms) @ d / t.sum()


def near_median(d: np.ndarray, count: int) -> np.ndarray:
    """Each coordinate's mean of the `count` numbers nearest to its median.

    It is Xie et al. 2018's mean around the median.
    """
    columns = []
    for column in d.T:
        median = np.median(column)
        nearest = sorted(column, key=lambda v: (abs(v - median), v))
        columns.append(np.mean(nearest[:count]))
    return np.array(columns)


def bulyan(d: np.ndarray, f: int) -> np.ndarray:
    """Bulyan (El Mhamdi et al. 2018, section 4).

    Krum chooses S - 2 f updates one by one; then each coordinate's mean of the S - 4 f
    that are nearest to its median is taken. Where Krum has no neighbours to sum, the
    package takes the nearest one.
    """
    left = list(range(len(d)))
    selected = []
    for _ in range(len(d) - 2 * f):
        count = max(1, len(left) - f - 2)
        scores = []
        for i in left:
            to_others = [((d[i] - d[j]) ** 2).sum() for j in left if j != i]
            scores.append(sum(sorted(to_others)[:count]))
        selected.append(left.pop(int(np.argmin(scores))))
    return near_median(d[sorted(selected)], len(d) - 4 * f)


def geometric_median(d: np.ndarray) -> np.ndarray:
    """The row with the least sum of distances to the updates, by Weiszfeld's steps."""
    z = np.median(d, 0)
    for _ in range(10_000):
        weights = 1 / np.maximum(np.linalg.norm(d - z, axis=1), 1e-12)
        z = weights @ d / weights.sum()
    return z


def centered_clipping(d: np.ndarray, v: np.ndarray, tau: float, steps: int):
    """Karimireddy et al. 2021, eq. 5, from the center v."""
    for _ in range(steps):
        way = d - v
        length = np.linalg.norm(way, axis=1, keepdims=True)
        v = v + (way * np.minimum(1, tau / np.maximum(length, 1e-300))).mean(0)
    return v


def robust_mean(d, p, name, f) -> np.ndarray:
    """The mean of a name; f is the number of bad clients, or the trusted one."""
    if name == "mean":
        return p @ d
    if name == "clip_to_median":
        return clipped_mean(d, p)
    if name == "median":  # Yin et al. 2018, Definition 1
        return np.median(d, 0)
    if name == "trimmed_mean":
        return trimmed_mean(d, f)
    if name == "fltrust":
        return trusted_mean(d, f)
    if name == "geometric_median":
        return geometric_median(d)
    if name == "mean_around_median":
        return near_median(d, len(d) - f)
    if name == "bulyan":
        return bulyan(d, f)
    count = 1 if name == "krum" else len(d) - f
    return d[krum_order(d, f)[:count]].mean(0)


def fedavg(rounds, x0, n, start, mean="mean") -> Iterator[dict]:
    """FedAvg (McMahan et al. 2017, Algorithm 1) with a robust mean: `x <- x + mean d`.

    The plain mean weighs clients by their samples. Centered clipping starts from the
    mean of the last round. A mean is written as NAME:NUMBER or NAME:OPTION=NUMBER.
    """
    name, *words = mean.split(":")
    options = [float(word.rpartition("=")[2]) for word in words] or [1]
    x = x0
    center = np.zeros_like(x0)
    for cohort, up in rounds:
        p = cohort.sizes / cohort.sizes.sum()
        d = up["delta"]
        if name == "centered_clipping":
            center = centered_clipping(d, center, options[0], int(options[1]))
            x = x + center
            yield {"state": {"x": x, "center": center}}
            continue
        x = x + robust_mean(d, p, name, int(options[0]))
        yield {"state": {"x": x}}


def results() -> Iterator[Result]:
    """The numbers of FedAvg's cases in uploads.json."""
    yield from upload_results({"fedavg": fedavg})


if __name__ == "__main__":
    main(results())
