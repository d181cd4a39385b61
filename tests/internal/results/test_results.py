"""Tests of figures and of values in records."""

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from parts.results import N, a_long_run, a_run, line, write
from parts.user import simulation
from places import ROOT

from pflcore.lab.results import _run_pictures as pictures
from pflcore.lab.results._labels import cut_words
from pflcore.lab.results._pictures import line_styles
from pflcore.lab.results.table import markdown_table
from pflcore.simulation._export import scalars
from pflcore.simulation._history import History, client_values
from pflcore.simulation.record import group_runs, read, to_json


def test_plain_turns_everything_into_json(tmp_path):
    for value, want in (
        (torch.ones(2, dtype=torch.long), [1, 1]),
        ((1, 2.5), [1, 2.5]),
        ({3: torch.tensor(math.inf)}, {"3": None}),
        (math.sqrt, "sqrt"),
        ({"a"}, ["a"]),
        ([np.int64(3), np.float32(0.5), np.array(2)], [3, 0.5, 2]),
        ([np.array([1, 2]), np.float64("nan")], [[1, 2], None]),
    ):
        assert json.loads(json.dumps(to_json(value))) == want
    assert (
        read(write(tmp_path / "record.jsonl", a_run(target=np.int64(1))))[0].target == 1
    )


# pictures -------------------------------------------------------------------
@pytest.mark.deep("it takes seconds")
def test_every_picture(tmp_path):
    """Figures of weights and mixes show at most a thousand clients."""
    pytest.importorskip("matplotlib")
    lines = [
        *a_run(),
        *a_run(seed=1, shift=0.1),
        *a_run("local"),
        *a_run("feddwa", target=None),
    ]
    names = {p.name for p in pictures.draw(group_runs(lines), tmp_path)}
    assert names == {"curves.png", "weights.png", "clients.png"}
    for name in names:
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    many = group_runs(a_long_run())
    del many[0].rounds[1]["eval"], many[0].rounds[0]["eval"]
    assert (
        pictures.draw(many, tmp_path)
        == pictures.draw(group_runs([{"header": {}}]), tmp_path)
        == []
    )


METHODS = ("fedavg", "local", "feddwa", "waffle", "scaffold", "ditto", "fedprox")
LONG = {"options": {"weighting": "uniform", "lam": 0.123456789}, "clip": 10.0}


def many_runs(settings, methods, seeds, long):
    """Runs of several settings, methods and seeds."""
    lines = []
    for setting, method, seed in itertools.product(
        range(settings), METHODS[:methods], range(seeds)
    ):
        lines += a_run(
            method,
            seed,
            shift=0.01 * METHODS.index(method),
            target=None,
            partition=f"partition number {setting}",
        )
        if long:  # the same method with other options, so that labels name them
            lines += a_run(method, seed, target=None, **LONG)
    return group_runs(lines)


def figures(monkeypatch, tmp_path, runs):
    """The drawn figures of the curves and of the clients."""
    drawn = []
    monkeypatch.setattr(pictures, "save", lambda figure, _: drawn.append(figure))
    pictures.curves(runs, tmp_path)
    pictures.clients(runs, tmp_path)
    for figure in drawn:
        pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
        figure.canvas.draw()
    return drawn


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(
    "settings, methods, seeds, long",
    [
        (1, 2, 1, False),
        (2, 7, 2, False),
        pytest.param(1, 3, 2, True),
        pytest.param(4, 7, 1, True, marks=pytest.mark.deep("large pictures")),
    ],
)
def test_no_label_is_cut_off_or_hides_a_line(
    settings, methods, seeds, long, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    for figure in figures(
        monkeypatch, tmp_path, many_runs(settings, methods, seeds, long)
    ):
        # All that is drawn, in inches.
        drawn = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert drawn.x0 >= 0 and drawn.y0 >= 0
        assert drawn.x1 <= width and drawn.y1 <= height
        for axis in figure.axes:
            legend = axis.get_legend()
            if legend is not None:
                assert not legend.get_window_extent().overlaps(axis.bbox)


@pytest.mark.deep("it takes a second")
def test_curves_have_a_panel_for_each_setting(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    curves, boxes = figures(monkeypatch, tmp_path, many_runs(2, 3, 2, long=False))
    for figure in (curves, boxes):
        titles = [axis.get_title() for axis in figure.axes]
        assert ["number 0" in titles[0], "number 1" in titles[1]] == [True, True]
        assert figure.get_suptitle() == "digits, 4 clients"
    legends = [axis.get_legend() for axis in curves.axes]
    for axis, legend in zip(curves.axes, legends, strict=True):
        names = [text.get_text() for text in legend.get_texts()]
        assert names == ["feddwa", "local", "fedavg"]  # as the lines end
        assert legend.get_title().get_text() == "band: ± std over 2 seeds"
        ticks = axis.get_xticks()
        assert (ticks == ticks.round()).all()
    colours = [
        {line.get_label(): line.get_color() for line in axis.lines}
        for axis in curves.axes
    ]
    assert [*colours[0].values()] == [*colours[1].values()]


def test_a_run_that_is_here_twice_is_drawn_once():
    runs = [group_runs(a_run(seed=seed))[0] for seed in (0, 1, 0)]
    _, (setting,) = pictures.distinct_settings(runs)
    assert setting.groups == {"waffle": runs[:2]}


def test_lines_differ_without_colours():
    styles = line_styles(28)
    assert len({(s.linestyle, s.marker) for s in styles}) == len(styles)


@pytest.mark.deep("it takes a second")
def test_the_mean_leaves_out_a_model_for_one_client(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    lines = [*a_run(model_target=1), *a_run("local", model_target=None)]
    curves = figures(monkeypatch, tmp_path, group_runs(lines))[0]
    mean, target = curves.axes
    assert target.get_title() == "client 1, the target"
    names = [
        [text.get_text() for text in axis.get_legend().get_texts()]
        for axis in (mean, target)
    ]
    assert names[0] == ["local"] and sorted(names[1]) == ["local", "waffle"]
    alone = figures(monkeypatch, tmp_path, group_runs(a_run(model_target=1)))[0]
    assert [axis.get_title() for axis in alone.axes] == ["client 1, the target"]


@pytest.mark.deep("it takes a second")
def test_runs_without_weights_have_no_picture_of_them(tmp_path):
    pytest.importorskip("matplotlib")
    lines = a_run("local")
    for one in lines[1:]:
        one["report"] = {}
    assert pictures.weights(group_runs(lines), tmp_path / "weights.png") is None
    assert pictures.weights([], tmp_path / "weights.png") is None
    both = group_runs([*lines, *a_run()])
    assert pictures.weights(both, tmp_path / "weights.png").is_file()


@pytest.mark.deep("it takes seconds")
def test_pictures_of_little(tmp_path):
    pytest.importorskip("matplotlib")
    little = [
        {"header": {"algorithm": "fedavg", "n": 1}},
        line(1, [math.nan]),
        line(2, [0.5]),
    ]
    assert [p.name for p in pictures.draw(group_runs(little), tmp_path)] == [
        "curves.png",
        "clients.png",
    ]
    for one in little[1:]:
        one["eval"] = {"loss": [math.inf], "size": [5]}
    assert len(pictures.draw(group_runs(little), tmp_path)) == 2


@pytest.mark.deep("it takes a second")
def test_a_full_disk_leaves_the_pictures_that_were_there(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    runs = group_runs(a_run())
    path = tmp_path / "curves.png"
    pictures.curves(runs, path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {*before} == {"curves.png", "curves.svg", "curves.pdf"}

    def half(self, file, **_):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure.Figure, "savefig", half)
    with pytest.raises(OSError, match="No space"):
        pictures.curves(runs, path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


WRITES = re.compile(
    r'\.write_(text|bytes)\(|\.savefig\(|(?<!safetensors.)torch\.save\(|open\(.*"[aw]b?"'
)
TEMPORARY = "frameworks.py", "player.py"
GROWS = 'file = open(path, "ab")', 'self._file = open(self.path, "ab" if goes_on'


def test_every_file_is_written_by_one_mechanism():
    """Each file is written beside its place and then renamed.

    The exceptions are a record, which grows by lines, and a lock. bench/frameworks.py
    and its player write into a folder that goes when the player has ended.
    """
    folders = "pflcore/lab/cli", "pflcore/lab/results", "pflcore/simulation", "bench"
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    texts = [p.read_text() for p in files if p.name not in TEMPORARY]
    found = [
        line.strip()
        for text in texts
        for line in text.splitlines()
        if WRITES.search(line)
    ]
    whole = [line for line in found if "part" in line]
    assert len(whole) >= 5
    others = [line for line in found if line not in whole]
    assert len(others) == 2 and all(line.startswith(GROWS) for line in others), others


def test_weights_by_round():
    (one,) = group_runs(a_run())
    rounds, weights = pictures.weights_by_round(one)
    assert rounds == list(range(1, 13)) and weights.tolist() == [[1 / N] * N] * 12


def test_a_history_as_events(tmp_path):
    history = simulation().run()
    first = history.rounds[0]
    got = scalars(first, clients=True)
    assert got["eval/accuracy/client 1"] == first["eval"]["accuracy"][1]
    assert (
        got["traffic/bytes_up"] == first["bytes_up"]
        and got["train/loss"] == first["train_loss"]
    )
    names = ["a", "b", "north"][: len(first["eval"]["accuracy"])]
    assert scalars(first, True, names).keys() >= {
        f"eval/loss/client {n}" for n in names
    }
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from pflcore import TensorBoard

    history.to_tensorboard(tmp_path / "after")
    simulation().run(TensorBoard(tmp_path / "during"))
    for name in ("after", "during"):
        events = (
            EventAccumulator(str(tmp_path / name)).Reload().Scalars("eval/accuracy")
        )
        assert [e.step for e in events] == [1, 2, 3]
        assert events[-1].value == pytest.approx(history.series()[1][-1].mean().item())


def test_any_text_is_one_cell_of_a_markdown_table():
    _, _, row = markdown_table([["candidate", "note"], ["f='a|b`\\|'", "x\ny"]])
    assert row == r"| f='a\|b\`\\\|' | x y  |"


@pytest.mark.parametrize("key", ["loss", "train_loss", "brier", "ece", "mae", "rmse"])
def test_an_error_of_a_client_that_diverged_is_infinite(key):
    values = client_values({"size": [3, 3, 0], key: [0.5, None, None]}, key)
    assert values[:2].tolist() == [0.5, math.inf] and values[2].isnan()


def test_a_title_has_the_options_of_the_partition_that_no_label_shows():
    def words_of(*changes):
        runs = []
        for changed in changes:
            options = {"alpha": 0.5, "balance": False, **changed}
            header = {"partition": "dirichlet", "partition_options": options}
            runs.append(History(header))
        return cut_words(runs)

    assert words_of({}, {}) == []
    assert words_of({"alpha": 0.3}, {"alpha": 0.3}) == ["alpha 0.3"]
    both = ({"alpha": 0.3, "balance": True}, {"alpha": 0.1, "balance": True})
    assert words_of(*both) == ["balance True"]
    assert cut_words([History({"partition": "own"})]) == []
