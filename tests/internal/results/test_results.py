"""Records survive what happens to files, and tables say what the records hold."""

import json
import math
import sys

import pytest
import torch
from parts.results import N, a_run, cells, line, write
from parts.user import simulation

from pflcore.results import canvas, pictures
from pflcore.results import table as report
from pflcore.results.record import Record, group, plain, read
from pflcore.results.table import table


@pytest.mark.parametrize(("classes", "marked"), [(10, 1), (2, 1), (20, 0), (None, 0)])
def test_chance_is_marked_where_the_axis_reaches_it(classes, marked):
    """Of accuracies between 8 and 60 percent."""
    pytest.importorskip("matplotlib")
    (axis,) = canvas.figure_of(4, 3)[1]
    canvas.lines(axis, {"a": ([1, 2], [8.0, 60.0])})
    (run,) = group(a_run())
    run.header["classes"] = classes
    pictures.mark_chance(axis, run)
    assert len(axis.lines) == 1 + marked and len(axis.texts) == 1 + marked


def test_plain_turns_everything_into_json():
    value = plain(
        {
            "t": torch.ones(2, dtype=torch.long),
            "p": (1, 2.5),
            3: {"x": torch.tensor(math.inf)},
            "f": math.sqrt,
            "s": {"a"},
        }
    )
    assert json.loads(json.dumps(value)) == {
        "t": [1, 1],
        "p": [1, 2.5],
        "3": {"x": None},
        "f": "sqrt",
        "s": ["a"],
    }


def test_runs_without_a_round_or_an_evaluation():
    (run,) = group([{"header": {"algorithm": "fedavg", "n": 2}}, {"stopped": "Interrupted."}])
    assert cells(report.table([run]), "fedavg")["final"] == "-"
    assert len(run.last()) == 0 and pictures.by_round(run)[0] == []


def test_every_picture(tmp_path):
    pytest.importorskip("matplotlib")
    runs = group(
        [*a_run(), *a_run(seed=1, shift=0.1), *a_run("local"), *a_run("feddwa", target=None)]
    )
    names = {p.name for p in pictures.draw(runs, tmp_path, baseline="local")}
    assert names == {"curves.png", "weights.png", "similarity.png", "clients.png", "deltas.png"}
    for name in names:
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_pictures_of_little(tmp_path):
    pytest.importorskip("matplotlib")
    assert pictures.draw(group([{"header": {}}]), tmp_path) == []
    one_client = [
        {"header": {"algorithm": "fedavg", "n": 1}},
        line(1, [math.nan], report={}),
        line(2, [0.5]),
    ]
    assert {p.name for p in pictures.draw(group(one_client), tmp_path)} == {
        "curves.png",
        "clients.png",
    }


def test_the_target_stands_in_the_middle():
    for n in (1, 4, 5, 10):
        for target in range(n):
            ids = pictures.order(n, target)
            assert ids[n // 2] == target and sorted(ids.tolist()) == list(range(n))


def test_weights_by_round_of_one_and_of_several_models():
    (one,), (several,) = group(a_run()), group(a_run(target=None))
    rounds, weights = pictures.by_round(one)
    assert rounds == list(range(1, 13)) and weights.shape == (12, N)
    assert pictures.by_round(several)[0] == []
    several.header["target"] = 2
    assert pictures.by_round(several)[1][0].tolist() == [0, 0, 1, 0]


def test_without_matplotlib_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pflcore\[plot\]") as e:
        pictures.draw(group(a_run()), tmp_path)
    assert "\n" not in str(e.value)


def test_numbers_of_numpy_are_numbers(tmp_path):
    np = pytest.importorskip("numpy")
    assert plain(
        [np.int64(3), np.float32(0.5), np.array(2), np.array([1, 2]), np.float64("nan")]
    ) == [3, 0.5, 2, [1, 2], None]
    (run,) = read(write(tmp_path / "record.jsonl", a_run(target=np.int64(1))))
    assert run.target == 1


def test_a_history_as_events(tmp_path):
    from pflcore.results.export import scalars

    history = simulation().run()
    assert (
        scalars(history.rounds[0], clients=True)["eval/accuracy/client 1"]
        == history.rounds[0]["eval"]["accuracy"][1]
    )
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from pflcore import TensorBoard

    history.to_tensorboard(tmp_path / "after")
    simulation().run(TensorBoard(tmp_path / "during"))
    for name in ("after", "during"):
        events = EventAccumulator(str(tmp_path / name)).Reload()
        assert [e.step for e in events.Scalars("eval/accuracy")] == [1, 2, 3]
        assert events.Scalars("eval/accuracy")[-1].value == pytest.approx(
            history.series()[1][-1].mean().item()
        )


def test_a_diverged_client_never_improves_a_table(tmp_path):
    with Record(tmp_path / "r.jsonl") as record:
        record.write({"header": {"algorithm": "fedavg", "n": 3, "rounds": 2, "seed": 0}})
        record.write({"round": 1, "eval": {"loss": [1.0, 3.0, math.nan], "size": [5, 5, 0]}})
        record.write({"round": 2, "eval": {"loss": [1.0, math.inf, math.nan], "size": [5, 5, 0]}})
    (got,) = read(tmp_path / "r.jsonl")
    assert got.curve() == ([1, 2], [2.0, math.inf])  # the client without samples is left out
    row = next(line for line in table([got]).splitlines() if line.startswith("| fedavg"))
    cells = [c.strip() for c in row.split("|")]
    assert (
        cells[2:7] == ["2.00000", "-", "-", "-", "-"] and cells[-2] == "1 client has no finite loss"
    )
    from pflcore.results import pictures

    pytest.importorskip("matplotlib")
    assert len(pictures.draw([got], tmp_path)) == 2
