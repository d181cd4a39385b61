"""What nobody but the user can know is asked for, and nothing is run that nobody named."""

import contextlib
import sys

import pytest

from pflcore import ALGORITHMS, EarlyStopping, Training
from pflcore.cli import main


def test_whether_more_of_ones_own_metric_is_better_is_asked():
    with pytest.raises(ValueError, match=r"^higher: expected True or False for 'mse'"):
        EarlyStopping(3, "mse")
    assert EarlyStopping(3, "mse", higher=False).sign == -1 and EarlyStopping(3, "auc").sign == 1


@pytest.mark.parametrize("command", [["info"], ["report", "."], ["run", "fedavg", "--help"]])
def test_a_command_imports_nothing_from_the_current_folder(command, tmp_path, monkeypatch, capsys):
    """Not even where a file there has the name of a package that the command wants."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    before = list(sys.path)
    with contextlib.suppress(SystemExit):
        main(command)
    assert sys.path == before


def test_the_current_folder_comes_last_where_an_algorithm_of_ones_own_is_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    main(["run", "nothing_here:Mine"])
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("fedavg", {"hostile": 3}, "hostile: expected its default beside this defence"),
        (
            "fedavg",
            {"defence": "median", "hostile": 3},
            "hostile: expected its default beside this defence",
        ),
        ("fedavgm", {"beta2": 0.5}, "beta2: expected its default beside optimizer='heavy_ball'"),
        ("fedavgm", {"tau": 0.1}, "tau: expected its default beside optimizer='heavy_ball'"),
        ("fedadagrad", {"beta2": 0.5}, "beta2: expected its default beside optimizer='adagrad'"),
        ("waffle", {"weighting": "samples"}, "weighting: expected 'uniform'"),
    ],
)
def test_an_option_that_plays_no_part_is_refused(name, options, sentence):
    with pytest.raises(ValueError, match=rf"^{sentence}.*, got .*\.$"):
        ALGORITHMS[name](**options)


def test_an_option_that_plays_no_part_in_a_method_is_none_of_its():
    with pytest.raises(TypeError, match="unexpected keyword argument 'server_lr'"):
        ALGORITHMS["feddwa"](server_lr=0.5)


def test_sgd_has_no_betas():
    with pytest.raises(ValueError, match=r"^betas, eps: SGD has none"):
        Training(betas=(0.8, 0.9))
    assert Training(betas=(0.8, 0.9), local_optimizer="adamw", lr=0.01).betas == (0.8, 0.9)
