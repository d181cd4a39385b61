"""FedDWA's figures (Liu et al. 2023) from records: who mixes with whom, who is nearest, accuracy
against an option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflcore.results.canvas import MOST, client_ticks, figure_of, lines, save, tidy
from pflcore.results.record import Run


def nearest(weights: Tensor, k: int) -> Tensor:
    """Bool [M, N]: the k clients of the largest weights in each row, ties to the lower number; a
    weight of 0 never counts."""
    order = weights.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(1, order, True) & (weights > 0)


def within(weights: Tensor, group: Tensor) -> tuple[float, float]:
    """The mean mixing weight [N, N] within the groups [N] of clients, and between them."""
    same = group[:, None] == group
    return weights[same].mean().item(), weights[~same].mean().item()


def of_rounds(run: Run, rounds: Sequence[int] | None, count: int = 4) -> list[tuple[int, Tensor]]:
    """The [N, N] weights of these rounds; by default of the first, the last and some between,
    closer together early on."""
    if rounds is None:
        found = [r for r in run.weighted() if _any(run, r)]
        at = (
            sorted({round((len(found) - 1) * (i / (count - 1)) ** 2) for i in range(count)})
            if found
            else []
        )
        rounds = [found[i] for i in at]
    return [
        (r, w)
        for r, w in zip(*run.weights(rounds, MOST), strict=True)
        if w.ndim == 2 and bool(w.any())
    ]


def _any(run: Run, round: int) -> bool:
    _, (w,) = run.weights([round], MOST)
    return w.ndim == 2 and bool(w.any())


def heat_maps(
    runs: Mapping[str, Run], path: str | Path, rounds: Sequence[int] | None = None
) -> Path | None:
    """The mixing weights over time (Fig. 4): a row of panels for each method, a panel for each
    round."""
    return _grid(runs, path, rounds, lambda w: w)


def neighbours(
    runs: Mapping[str, Run], path: str | Path, k: int = 5, rounds: Sequence[int] | None = None
) -> Path | None:
    """Which are the k nearest of each client (Fig. 1): a row of panels for each method, a panel for
    each round."""
    return _grid(runs, path, rounds, lambda w: nearest(w, k).double())


def _grid(
    runs: Mapping[str, Run], path: str | Path, rounds: Sequence[int] | None, shown: Any
) -> Path | None:
    rows = {name: of_rounds(run, rounds) for name, run in runs.items()}
    rows = {name: panels for name, panels in rows.items() if panels}
    if not rows:
        return None
    wide = max(map(len, rows.values()))
    figure, _ = figure_of(2.9 * wide, 3.0 * len(rows))
    figure.clear()
    for i, (name, panels) in enumerate(rows.items()):
        for j, (r, w) in enumerate(panels):
            axis = figure.add_subplot(len(rows), wide, i * wide + j + 1)
            axis.imshow(shown(w).numpy(), cmap="Blues", vmin=0, interpolation="nearest")
            for side in (axis.xaxis, axis.yaxis):
                client_ticks(side, torch.arange(len(w)))
                side.set_tick_params(labelsize=5)
            axis.set_title(f"{name}, round {r}", fontsize=9)
    return save(figure, path)


def against(rows: Sequence[Mapping[str, Any]], option: str, path: str | Path) -> Path | None:
    """Accuracy against an option of the algorithm (Figs. 2 and 3: `k`, `ahead`), a line for each
    setting, from a result's rows."""
    found: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        if option in r["options"] and r["best"] is not None:
            found.setdefault(r["setting"], []).append((r["options"][option], r["best"]))
    if not found:
        return None
    figure, (axis,) = figure_of(5.6, 4.2)
    series = {name: tuple(zip(*sorted(points), strict=True)) for name, points in found.items()}
    lines(axis, series, marker="o")  # type: ignore[arg-type]
    tidy(axis, "", option, "test accuracy, %")
    return save(figure, path)
