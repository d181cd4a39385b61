"""Pictures of runs: curves, clients and mixing weights.

A picture has a panel for each setting. An algorithm has one colour in all panels.

Symbols: N clients; M models; T rounds.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore import metrics
from pflcore.lab.results._labels import (
    label_runs,
    one_run_per_seed,
    setting_words,
    settings_of,
    split_name,
)
from pflcore.lab.results._pictures import (
    HeatMap,
    LineStyle,
    figure_of,
    heat_maps,
    line_styles,
    round_ticks,
    save,
    tidy,
)
from pflcore.simulation._history import History
from pflcore.simulation._weights import min_num_clients
from pflcore.simulation.record import Runs

PICTURE_NAMES = ("weights", "curves", "clients")  # names of the files that `draw` makes
MAX_WEIGHT_CLIENTS = 1000  # clients in a picture of mixing weights
MAX_STACKED_PANELS = 3  # panels of curves that stand in one column
MAX_POINTS = 60  # clients of a box that are drawn as points, too
# The look of the mean in a box.
MEAN_STYLE = {
    "marker": "D",
    "markerfacecolor": "white",
    "markeredgecolor": "black",
    "markersize": 4,
}
NAME_LETTERS = 30  # letters of an algorithm's name on one line
TITLE_LETTERS = 70  # letters of a panel's title on one line
MAP_LETTERS = 44  # letters of a heat map's title on one line


class Setting(NamedTuple):
    """The runs of one setting.

    Attributes:
        title: The words by which the setting differs from the others; "" for one
            setting.
        groups: The runs of each algorithm, by label: one for each seed.
    """

    title: str
    groups: Mapping[str, list[History]]

    @property
    def runs(self) -> list[History]:
        """The runs of all algorithms."""
        return list(itertools.chain.from_iterable(self.groups.values()))


def distinct_settings(runs: Runs) -> tuple[str, list[Setting]]:
    """The words that all settings have in common, and the settings."""
    members = list(settings_of(runs).values())
    words = [setting_words(of_setting[0]) for of_setting in members]
    common = [word for word in words[0] if all(word in other for other in words)]
    settings = []
    for own_words, of_setting in zip(words, members, strict=True):
        title = ", ".join(word for word in own_words if word not in common)
        groups = label_runs(of_setting)
        distinct = {label: one_run_per_seed(runs) for label, runs in groups.items()}
        settings.append(Setting(title, distinct))
    return ", ".join(common), settings


def styles_of(settings: Sequence[Setting]) -> dict[str, LineStyle]:
    """The line style of each label, the same in all settings."""
    labels = dict.fromkeys(
        itertools.chain.from_iterable(setting.groups for setting in settings)
    )
    return dict(zip(labels, line_styles(len(labels)), strict=True))


def _scale(run: History) -> tuple[float, str]:
    """The factor of a run's values in pictures, and their name."""
    if run.main_metric == "accuracy":
        return 100.0, f"{split_name(run)} accuracy, %"
    return 1.0, f"{split_name(run)} loss"


def wrap(text: str, letters: int) -> str:
    """The text in lines of at most this number of letters, where words allow it."""
    return textwrap.fill(text, letters, break_long_words=False)


# curves -----------------------------------------------------------------------
def curves(runs: Runs, path: str | Path) -> Path:
    """Draws the accuracy or loss by round, with one line per algorithm.

    A setting has a panel with the mean over clients, without algorithms whose only
    model is made for one client. Each client that is the target of a run has a panel of
    its own. The band around a line is ± the standard deviation over seeds. The names
    stand in the order in which the lines end.
    """
    common, settings = distinct_settings(runs)
    styles = styles_of(settings)
    panels: list[tuple[Setting, int | None]] = []
    for setting in settings:
        panels += [(setting, client) for client in _curve_clients(setting)]
    wide = 1 if len(panels) <= MAX_STACKED_PANELS else 2
    tall = math.ceil(len(panels) / wide)
    names = max(len(setting.groups) for setting, _ in panels)
    height = max(3.4, 0.9 + 0.3 * names)
    figure, axes = figure_of(6.8 * wide, height * tall, wide, tall)
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (setting, client) in zip(axes, panels, strict=False):
        _draw_curves(axis, setting, client, styles)
    figure.suptitle(wrap(common, TITLE_LETTERS * wide), fontsize=11)
    return save(figure, path)


def _curve_clients(setting: Setting) -> list[int | None]:
    """The clients whose curves a setting has; None stands for the mean."""
    targets = {run.target for run in setting.runs if run.target is not None}
    clients: list[int | None] = [*sorted(targets)]
    if not targets or any(map(_has_mean, setting.runs)):
        clients.insert(0, None)
    return clients


def _has_mean(run: History) -> bool:
    """True where the mean over clients tells something of the algorithm.

    It is false for an algorithm whose only model is made for one client.
    """
    own_target = (run.header.get("options") or {}).get("target")
    targets = (run.header.get("model_target"), own_target)
    return not any(isinstance(target, int) for target in targets)


def _draw_curves(
    axis: Any, setting: Setting, client: int | None, styles: Mapping[str, LineStyle]
) -> None:
    """Draws a panel of curves, with its names beside it."""
    runs = setting.runs
    metric = runs[0].main_metric  # all lines have the metric of the first run
    scale, unit = _scale(runs[0])
    ends: list[tuple[float, Any, str]] = []
    for label, members in setting.groups.items():
        shown = [run for run in members if metric in run.keys]
        if client is None:
            shown = [run for run in shown if _has_mean(run)]
        if not shown:
            continue
        rounds, mean, std = _seed_curve(shown, client, metric, scale)
        style = styles[label]
        # Markers at some rounds tell lines apart that lie on one another.
        every = max(1, len(rounds) // 8)
        start = list(styles).index(label) % every
        (line,) = axis.plot(rounds, mean, **style._asdict(), markevery=(start, every))
        with np.errstate(invalid="ignore"):  # an infinite loss has no band
            axis.fill_between(
                rounds,
                mean - std,
                mean + std,
                alpha=0.18,
                linewidth=0,
                color=style.color,
            )
        ends.append((_end_of(mean), line, wrap(label, NAME_LETTERS)))
    ends.sort(key=lambda end: -end[0])
    legend = axis.legend(
        [line for _, line, _ in ends],
        [name for _, _, name in ends],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        fontsize=8,
        frameon=False,
        title=_band_note(setting),
        title_fontsize=8,
        alignment="left",
    )
    legend.set_in_layout(True)
    title = "mean over clients"
    if client is not None:
        run = next(run for run in setting.runs if run.target == client)
        title = f"client {run.client_name(client)}, the target"
    words = ": ".join(filter(None, [setting.title, title]))
    tidy(axis, wrap(words, TITLE_LETTERS), "round", unit)
    round_ticks(axis.xaxis)


def _end_of(mean: np.ndarray[Any, Any]) -> float:
    """The last finite value of a line; -inf without one."""
    finite = mean[np.isfinite(mean)]
    return float(finite[-1]) if len(finite) else -math.inf


def _band_note(setting: Setting) -> str:
    """The name of the bands; "" where no algorithm has several seeds."""
    counts = {len(members) for members in setting.groups.values()}
    most = max(counts)
    if most == 1:
        return ""
    least = min(counts)
    seeds = f"{most}" if least == most else f"{least} to {most}"
    return f"band: ± std over {seeds} seeds"


def _seed_curve(
    runs: Runs, client: int | None, metric: str, scale: float
) -> tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The evaluated rounds, with means and deviations over seeds.

    The mean of a round is over the runs that were evaluated in it.
    """
    values: dict[int, list[float]] = {}
    for run in runs:
        rounds, curve = run.curve(client, metric)
        for round, value in zip(rounds, curve, strict=True):
            values.setdefault(round, []).append(scale * value)
    rounds = sorted(values)
    mean = np.array([metrics.mean(values[round]) for round in rounds])
    std = np.array([metrics.std_over_seeds(values[round]) for round in rounds])
    return rounds, mean, std


# clients ----------------------------------------------------------------------
def clients(runs: Runs, path: str | Path) -> Path:
    """Draws the clients' last values, with one box per algorithm.

    A box has the clients of all seeds together, without values that are not finite. The
    line in it is the median, and the diamond the mean. Few clients are points, too.
    """
    common, settings = distinct_settings(runs)
    styles = styles_of(settings)
    counts = [len(setting.groups) for setting in settings]
    figure, axes = figure_of(7.2, sum(1.2 + 0.42 * n for n in counts), 1, len(counts))
    axes[0].get_gridspec().set_height_ratios([1.2 + 0.42 * n for n in counts])
    for axis, setting in zip(axes, settings, strict=True):
        _draw_boxes(axis, setting, styles)
    figure.suptitle(wrap(common, TITLE_LETTERS), fontsize=11)
    return save(figure, path)


def _draw_boxes(axis: Any, setting: Setting, styles: Mapping[str, LineStyle]) -> None:
    """Draws a panel of boxes, the first algorithm on top."""
    runs = setting.runs
    metric = runs[0].main_metric
    scale, unit = _scale(runs[0])
    labels = [*setting.groups]
    boxes = [_box_values(setting.groups[label], metric, scale) for label in labels]
    heights = [*range(len(labels), 0, -1)]
    most = max(map(len, boxes))
    parts = axis.boxplot(
        boxes,
        positions=heights,
        orientation="horizontal",
        widths=0.6,
        showmeans=True,
        meanprops=MEAN_STYLE,
        medianprops={"color": "black"},
        patch_artist=True,
        showfliers=most > MAX_POINTS,
        flierprops={"marker": ".", "markersize": 3},
    )
    for patch, label in zip(parts["boxes"], labels, strict=True):
        patch.set(facecolor=styles[label].color, alpha=0.35)
    if most <= MAX_POINTS:
        for values, height, label in zip(boxes, heights, labels, strict=True):
            # Points at different heights do not hide one another.
            rows = np.linspace(height - 0.2, height + 0.2, len(values))
            colour = styles[label].color
            axis.plot(values, rows, ".", color=colour, markersize=4, zorder=3)
    axis.set_yticks(heights, [wrap(label, NAME_LETTERS) for label in labels])
    axis.tick_params(axis="y", labelsize=8)
    words = ": ".join(filter(None, [setting.title, _boxes_note(setting, most)]))
    tidy(axis, wrap(words, TITLE_LETTERS), unit, "")


def _boxes_note(setting: Setting, values: int) -> str:
    """The note on the clients of a panel.

    Args:
        values: The number of values in the largest box.
    """
    seeds = max(map(len, setting.groups.values()))
    note = f"{values // seeds} clients at the last evaluation"
    return note if seeds == 1 else f"{note}, {seeds} seeds together"


def _box_values(runs: Runs, metric: str, scale: float) -> list[float]:
    """The finite last values of the clients in all runs."""
    by_run = [run.last_values(metric) for run in runs if metric in run.keys]
    values = scale * torch.cat([torch.empty(0, dtype=torch.float64), *by_run])
    finite: list[float] = values[values.isfinite()].tolist()
    return finite


# mixing weights -----------------------------------------------------------------
def weights_by_round(run: History) -> tuple[list[int], Tensor]:
    """The rounds of a run with one model, and weights `[T, N]`.

    Rounds with another number of clients than the last round are left out.
    """
    rounds, rows = run.weights()
    kept_rounds = []
    kept_rows = []
    for round, row in zip(rounds, rows, strict=True):
        if len(row) == len(rows[-1]):
            kept_rounds.append(round)
            kept_rows.append(row)
    return kept_rounds, torch.stack(kept_rows)


def weights(runs: Runs, path: str | Path) -> Path | None:
    """Draws a heat map of mixing weights for each algorithm.

    For one model the axes of the map are clients and rounds (WAFFLE, Fig. 3). For
    several models the map shows each client's weight in each model in the last round.
    Returns None where no run reports weights.
    """
    if not runs:
        return None
    panels = []
    for setting in distinct_settings(runs)[1]:
        for name, members in setting.groups.items():
            if members[0].rounds_with_weights():
                words = filter(None, [setting.title, name])
                panels.append(_weights_panel(members[0], ", ".join(words)))
    return heat_maps(panels, path, wide=3)


def _weights_panel(run: History, title: str) -> HeatMap:
    """The heat map of a run that reports weights."""
    # Only the last round is read, because matrices of all may not fit into memory.
    last = run.rounds_with_weights()[-1]
    _, (weight,) = run.weights([last])
    if weight.ndim == 2:
        title = wrap(f"{title}, round {last}", MAP_LETTERS)
        return HeatMap(title, weight, range(weight.shape[1]))
    rounds, by_round = weights_by_round(run)
    if run.target is not None:
        title = f"{title}, target {run.client_name(run.target)}"
    return HeatMap(wrap(title, MAP_LETTERS), by_round.T, rounds, "round", "client")


def _count_clients(run: History) -> int:
    """The number of clients of a run.

    Where the header is lost, it is the smallest number that fits the mixing weights.
    """
    n = run.header.get("n")
    if n is not None:
        return int(n)
    return max(min_num_clients(record.get("report") or {}) for record in run.rounds)


def draw(runs: Runs, folder: str | Path) -> list[Path]:
    """Draws every picture that the runs have values for, into `folder`.

    Returns the paths of the PNG files. Mixing weights are drawn for runs of at most
    1,000 clients.
    """
    folder = Path(folder)
    small = []
    for run in runs:
        if run.rounds_with_weights() and _count_clients(run) <= MAX_WEIGHT_CLIENTS:
            small.append(run)
    evaluated = [run for run in runs if run.evaluations]
    paths = [weights(small, folder / "weights.png")]
    if evaluated:
        paths.append(curves(evaluated, folder / "curves.png"))
        paths.append(clients(evaluated, folder / "clients.png"))
    return [path for path in paths if path]
