"""The papers' figures, drawn from records.

- FedDWA's (Liu et al. 2023): mixing weights, nearest clients, accuracy against an
  option.
- Motley's, sections 4 and 5: gains by size, and pairs of results to weigh.
- WAFFLe's: images side by side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflcore import History, metrics
from pflcore.lab.results import _pictures as pictures
from pflcore.lab.results._pictures import LINE_COLOURS, figure_of, lines, save, tidy

Points = Sequence[tuple[float, float]]
Triple = tuple[Any, float, float]  # an option's value, and two results


def nearest(weights: Tensor, k: int) -> Tensor:
    """Mask [M, N] of the k largest weights in each row.

    Of equal weights the lower client counts. A weight of 0 never counts.
    """
    order = weights.sort(dim=1, descending=True, stable=True).indices[:, :k]
    mask = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, order, True)
    return mask & (weights > 0)


def of_rounds(run: History) -> list[tuple[int, Tensor]]:
    """Weights [N, N] of four rounds, from the first to the last.

    The first is the first that has any weights.

    The rounds are closer together early on.
    """
    found = []
    for r, w in zip(*run.weights(), strict=True):
        if w.ndim == 2 and bool(w.any()):
            found.append((r, w))
    if not found:
        return []
    last = len(found) - 1
    chosen = {round(last * (i / 3) ** 2) for i in range(4)}
    return [found[i] for i in sorted(chosen)]


def heat_maps(runs: Mapping[str, History], path: str, k: int | None = None) -> None:
    """Draws the mixing weights over time (Fig. 4).

    Each method and round has a panel.

    With `k` it draws each client's k nearest (Fig. 1) instead.
    """
    panels = []
    for name, run in runs.items():
        for r, w in of_rounds(run):
            shown = w if k is None else nearest(w, k).double()
            panels.append(pictures.HeatMap(f"{name}, round {r}", shown, range(len(w))))
    pictures.heat_maps(panels, path, wide=4)


def curves(
    series: Mapping[str, Points],
    path: str,
    x: str,
    y: str,
    notes: Mapping[Any, str] | None = None,
) -> None:
    """Draws a line of points (x, y) for each name.

    They are means over clients against an option of the algorithm (FedDWA's Figs. 2 and
    3), against the part of the personalization set that is used (Motley's Fig. 7c), or
    against the bytes that were sent (Fig. 6b, c).

    Args:
        notes: texts at some points
    """
    if not series:
        return
    figure, (axis,) = figure_of(5.4, 4.2)
    columns = {}
    for name, points in series.items():
        columns[name] = tuple(zip(*points, strict=True))
    lines(axis, columns, marker="o", markersize=4)  # type: ignore[arg-type]
    for at, text in (notes or {}).items():
        axis.annotate(text, at, (3, 2), fontsize=6, textcoords="offset points")
    tidy(axis, "", x, y)
    save(figure, path)


def deltas(size: Tensor, groups: Mapping[str, Tensor], path: str, unit: str) -> None:
    """Draws each client's change of accuracy or loss against its samples.

    They are the samples with which it personalizes. Each method has a panel (Fig. 3b,
    c).
    """
    figure, axes = figure_of(3.6 * len(groups), 3.4, len(groups))
    for axis, (name, delta) in zip(axes, groups.items(), strict=True):
        worse = delta < 0 if unit == "accuracy" else delta > 0
        for at, colour in ((~worse, LINE_COLOURS[0]), (worse, LINE_COLOURS[1])):
            axis.plot(size[at], delta[at], "o", markersize=4, alpha=0.7, color=colour)
        axis.axhline(0, color="0.4", linewidth=0.8)
        percent = 100 * int(worse.sum()) / max(1, metrics.count(delta))
        title = f"{name}: {percent:.0f} % hurt"
        tidy(axis, title, "samples of the client", f"change of {unit}")
    save(figure, path)


def option(points: Sequence[Triple], path: str, name: str, unit: str) -> None:
    """Draws the mean and the percentage hurt, by an option's value.

    They need not agree on the best value (Fig. 4c, 7a, b). Learning rates are on a
    logarithmic axis.
    """
    figure, (axis,) = figure_of(4.8, 3.6)
    x, mean, hurt = zip(*points, strict=True)
    (left,) = axis.plot(x, mean, "o-", color=LINE_COLOURS[0], label=unit)
    other = axis.twinx()
    (right,) = other.plot(x, hurt, "s--", color=LINE_COLOURS[1], label="% hurt")
    other.set_ylabel("clients hurt, %")
    other.set_ylim(bottom=0)
    if name.endswith("lr"):
        axis.set_xscale("log")
    axis.legend(handles=[left, right], fontsize=8, frameon=False)
    tidy(axis, "", name, f"mean {unit}")
    save(figure, path)


def distributions(series: Mapping[str, Sequence[Triple]], path: str, unit: str) -> None:
    """Draws results in distribution against those out of distribution (Fig. 5).

    Each method has a line, with its option's values along it.
    """
    points = {}
    notes: dict[tuple[float, float], str] = {}
    for name, found in series.items():
        points[name] = [(x, y) for _, y, x in found]
        if len(found) > 1:
            notes |= {(x, y): str(label) for label, y, x in found}
    out_of = f"{unit} out of distribution"
    curves(points, path, out_of, f"{unit} in distribution", notes)


def grid(rows: Mapping[str, Tensor], path: str | Path) -> None:
    """Draws named rows of K images [K, C, H, W] each.

    Their values are in 0..1.
    """
    count = max(map(len, rows.values()))
    figure, axes = figure_of(0.9 * count + 1.2, len(rows), count, len(rows))
    for i, (name, images) in enumerate(rows.items()):
        for axis, image in zip(axes[i * count :], images, strict=False):
            pixels = image.permute(1, 2, 0).squeeze(-1).numpy()
            axis.imshow(pixels, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        axes[i * count].set_ylabel(name, fontsize=8)
    save(figure, path)
