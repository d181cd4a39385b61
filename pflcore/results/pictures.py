"""Pictures of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflcore import metrics
from pflcore.results.canvas import (
    COLOURS,
    MOST,
    OFFSET,
    client_ticks,
    figure_of,
    lines,
    look,
    save,
    tidy,
)
from pflcore.results.record import Run, find, label
from pflcore.results.table import split_of


def _scale(run: Run) -> tuple[float, str]:
    """Factor and name of what the axes show."""
    return (
        (100.0, f"{split_of(run)} accuracy, %")
        if run.measure == "accuracy"
        else (1.0, f"{split_of(run)} loss")
    )


def curves(runs: Sequence[Run], path: str | Path) -> Path:
    """Accuracy by round, a line per algorithm: mean over clients, and the target's own where there
    is one; a band is ± std over seeds."""
    groups, (scale, unit) = label(runs), _scale(runs[0])
    targets: list[int | None] = [None, *sorted({r.target for r in runs if r.target is not None})]
    figure, axes = figure_of(5.6 * len(targets), 4.2, len(targets))
    for axis, client in zip(axes, targets, strict=True):
        series = {}
        for i, (name, members) in enumerate(groups.items()):
            seeds = [dict(zip(*r.curve(client, runs[0].measure), strict=True)) for r in members]
            rounds = sorted({r for s in seeds for r in s})
            at = [[scale * s[r] for s in seeds if r in s] for r in rounds]
            mean, std = ([f(v) for v in at] for f in (metrics.mean, metrics.std))
            series[name] = rounds, mean
            if len(members) > 1:
                low, high = ([m + k * d for m, d in zip(mean, std, strict=True)] for k in (-1, 1))
                band = {"alpha": 0.18, "linewidth": 0, "color": look(i)["color"]}
                axis.fill_between(rounds, low, high, **band)
        lines(axis, series)
        mark_chance(axis, runs[0])
        tidy(
            axis,
            "mean over clients" if client is None else f"client {client}, the target",
            "round",
            unit,
        )
    return save(figure, path)


def mark_chance(axis: Any, run: Run) -> None:
    """A dotted line where guessing is, if the axis reaches so far."""
    classes = run.header.get("classes")
    if run.measure == "accuracy" and classes and axis.get_ylim()[0] <= 100 / classes:
        axis.axhline(100 / classes, color="0.4", linestyle=":", linewidth=0.9)
        axis.annotate("chance", (axis.get_xlim()[1], 100 / classes), (3, -3), color="0.4", **OFFSET)


def order(n: int, target: int | None) -> Tensor:
    """Client ids with the target in the middle of a ring, as in the WAFFLE paper's Fig. 3,
    `[n]`."""
    ids = torch.arange(n)
    return ids if target is None else ids.roll(n // 2 - target)


def by_round(run: Run) -> tuple[list[int], Tensor]:
    """Weights of one model by round, `[T, N]`: the run's only model, or the target's of several. T
    is 0 where there are none."""
    last = run.weighted()[-1:]
    # a matrix for each round may not fit into memory
    if run.target is None and last and run.weights(last, MOST)[1][0].ndim > 1:
        return [], torch.empty(0, 0)
    rounds, weights = run.weights()
    target = -1 if run.target is None else run.target
    rows = [
        (r, w if w.ndim == 1 else w[target])
        for r, w in zip(rounds, weights, strict=True)
        if w.ndim == 1 or 0 <= target < len(w)
    ]
    rows = [(r, w) for r, w in rows if len(w) == len(rows[-1][1])]
    return (
        ([r for r, _ in rows], torch.stack([w for _, w in rows]))
        if rows
        else ([], torch.empty(0, 0))
    )


def weights(runs: Sequence[Run], path: str | Path) -> Path | None:
    """Mixing weights of one model by round: a heat map of clients by rounds for each algorithm that
    reports them (WAFFLE, Fig. 3)."""
    shown = [
        (name, members[0]) for name, members in label(runs).items() if len(by_round(members[0])[0])
    ]
    if not shown:
        return None
    figure, axes = figure_of(5.4 * len(shown), 3.8, len(shown))
    for axis, (name, run) in zip(axes, shown, strict=True):
        rounds, w = by_round(run)
        ids = order(w.shape[1], run.target)
        # a cell is as wide as the gap to the next report
        edges = torch.tensor([*rounds, rounds[-1] + 1]) - 0.5
        image = axis.pcolormesh(
            edges.tolist(),
            torch.arange(len(ids) + 1).sub(0.5).tolist(),
            w[:, ids].T.numpy(),
            cmap="Blues",
            vmin=0,
            rasterized=True,
        )
        client_ticks(axis.yaxis, ids)
        axis.set_title(
            name if run.target is None else f"{name}, target {run.target} in the middle",
            fontsize=10,
        )
        axis.set_xlabel("round")
        axis.set_ylabel("client")
        figure.colorbar(image, ax=axis, label="weight")
    return save(figure, path)


def similarity(runs: Sequence[Run], path: str | Path) -> Path | None:
    """Who mixes with whom: the last round's M x N weights as a heat map, one panel per algorithm
    that keeps several models."""
    shown = []
    for name, members in label(runs).items():
        rounds, weights = members[0].weights(members[0].weighted()[-1:], MOST)
        if rounds and weights[-1].ndim == 2:
            shown.append((name, rounds[-1], weights[-1], members[0].header.get("n")))
    if not shown:
        return None
    figure, axes = figure_of(4.6 * len(shown), 4.0, len(shown))
    for axis, (name, r, w, n) in zip(axes, shown, strict=True):
        image = axis.imshow(w.numpy(), cmap="Blues", vmin=0, interpolation="nearest", aspect="auto")
        block = -(-(n or 1) // MOST)
        client_ticks(axis.xaxis, torch.arange(w.shape[1]) * block)
        client_ticks(axis.yaxis, torch.arange(w.shape[0]) * block)
        axis.set_title(f"{name}, round {r}", fontsize=10)
        axis.set_xlabel("gives (client)")
        axis.set_ylabel("receives (model)")
        figure.colorbar(image, ax=axis, label="weight")
    return save(figure, path)


def clients(runs: Sequence[Run], path: str | Path) -> Path:
    """The clients' values at the last evaluation, a box per algorithm (seeds together), with a dot
    per client where they are few."""
    groups, (scale, unit) = label(runs), _scale(runs[0])
    values = [
        torch.cat([scale * r.last(runs[0].measure) for r in members]) for members in groups.values()
    ]
    values = [v[v.isfinite()] for v in values]
    figure, (axis,) = figure_of(1.6 + 1.1 * len(groups), 4.0)
    axis.boxplot(
        [v.tolist() for v in values],
        widths=0.5,
        showfliers=False,
        medianprops={"color": COLOURS[1]},
    )
    for i, v in enumerate(values):
        if len(v) <= 100:
            spread = torch.linspace(-0.12, 0.12, len(v)) if len(v) > 1 else torch.zeros(len(v))
            axis.plot(
                (i + 1 + spread).tolist(),
                v.tolist(),
                ".",
                color=COLOURS[0],
                alpha=0.6,
                markersize=5,
            )
    axis.set_xticks(range(1, len(groups) + 1), list(groups), rotation=20, ha="right", fontsize=8)
    tidy(axis, "clients at the last evaluation", "", unit)
    return save(figure, path)


def deltas(runs: Sequence[Run], baseline: str, path: str | Path) -> Path | None:
    """Gain of each client over the `baseline` algorithm against its number of samples (Motley, Fig.
    3). None without a baseline run."""
    groups, (scale, unit) = label(runs), _scale(runs[0])
    pair = find(groups, baseline)
    base = pair[0] if pair else None
    names = list(groups)  # an algorithm has its colour of the other pictures
    others = [
        (n, m[0])
        for n, m in groups.items()
        if base is not None and m[0] is not base and len(m[0].last()) == len(base.last())
    ]
    if base is None or not others or not len(base.last()):
        return None
    size, some = (
        base.header.get("size") or base.evaluations[-1]["eval"].get("size"),
        base.evaluations[-1]["eval"].get("clients"),
    )
    if some and base.header.get("size"):
        size = [size[i] for i in some]
    if not size:
        return None
    figure, (axis,) = figure_of(5.6, 4.2)
    for name, run in others:
        gain = scale * (run.last(runs[0].measure) - base.last(runs[0].measure))
        axis.plot(
            size,
            gain.tolist(),
            "o",
            label=name,
            alpha=0.75,
            markersize=4,
            color=COLOURS[names.index(name) % len(COLOURS)],
        )
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.legend(fontsize=8, frameon=False)
    which = "training samples" if base.header.get("size") else "test samples"
    tidy(axis, f"each client against {baseline}", f"{which} of the client", f"difference of {unit}")
    return save(figure, path)


def draw(runs: Sequence[Run], folder: str | Path, baseline: str | None = None) -> list[Path]:
    """Every picture that the runs have something for, into `folder`; returns the files."""
    runs, folder = [r for r in runs if r.evaluations or r.weighted()], Path(folder)
    if not runs:
        return []
    made: list[Path | None] = [
        weights(runs, folder / "weights.png"),
        similarity(runs, folder / "similarity.png"),
    ]
    evaluated = [r for r in runs if r.evaluations]
    if evaluated:
        made += [
            curves(evaluated, folder / "curves.png"),
            clients(evaluated, folder / "clients.png"),
        ]
        made += [deltas(evaluated, baseline, folder / "deltas.png")] if baseline else []
    return [p for p in made if p]
