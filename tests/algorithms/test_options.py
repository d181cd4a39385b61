"""An option that cannot be is refused with one sentence that begins with its name."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from pflcore.algorithms import ALGORITHMS

BAD: dict[str, list[dict[str, Any]]] = {
    "apfl": [{"alpha": 1.5}, {"alpha_lr": -1.0}, {"alpha_decay": -1.0}, {"mix": "outputs"}, {"evaluate_on": "both"}],
    "clustered_fl": [{"linkage": "average"}, {"eps1": -1.0}],
    "ditto": [{"lam": -1}],
    "ensemble": [{"k": 0}],
    "factorized_waffle": [
        {"preset": "x"}, {"optimizer": "x"}, {"kl_b": "x"}, {"eval_mode": "x"}, {"never": "x"}, {"start": "x"}, {"lr_var": -1.0},
        {"tau": 0.0},
    ],
    "fedala": [
        {"layers": -1}, {"window": 1}, {"most": 0}, {"eta": -1.0}, {"sample": 0.0}, {"sample": 1.5}, {"threshold": -1.0},
    ],
    "fedamp": [{"sigma": 0.0}, {"start": "w"}, {"self_weight": "x"}],
    "fedadagrad": [{"tau": 0.0}],
    "fedadam": [{"tau": 0.0}],
    "fedavgm": [{"tau": 0.0}],
    "fedbabu": [{"finetune_epochs": -1}],
    "feddwa": [
        {"k": 0}, {"guidance": "next"}, {"ahead": 0}, {"newcomer": "x"}, {"search": "fast"}, {"power": -1.0}, {"power": "2"},
        {"stride": 0}, {"stride": 0.0}, {"stride": "far"}, {"serve": "model"},
    ],
    "feddwa_qp": [{"theta": 1.5}, {"ridge": -1.0}, {"k": -1}],
    "fedfomo": [{"m": 0}, {"epsilon": 2.0}, {"norm": "l3"}, {"none_positive": "x"}],
    "fedopt": [{"tau": 0.0}],
    "fedper": [{"train": "both"}, {"private": ()}, {"private": 3}],
    "fedrep": [{"private_epochs": 0}],
    "fedrod": [{"gamma": -1.0}, {"head": "ones"}],
    "fedyogi": [{"tau": 0.0}],
    "finetune": [{"choose": "best"}, {"mu": -1.0}],
    "heurfedamp": [{"xi_self": 1.5}],
    "hypcluster": [{"k": 0}],
    "knnper": [{"lam": 1.5}],
    "l2c": [{"alpha_lr": -1.0}],
    "mocha": [{"delta": 0.0}],
    "mrmtl": [{"lam": math.nan}],
    "per_fedavg": [{"variant": "so"}, {"delta": 0.0}],
    "pfedme": [{"inner": 0}],
    "qfedavg": [{"q": -1}],
    "scaffold": [{"option": "III"}, {"weighting": "size"}],
    "sfl": [{"k": 0}, {"s": 2.0}, {"adjacency": "oracle"}],
    "waffle": [
        {"target": -1}, {"control_agg": "x"}, {"distance_on": "x"}, {"tie": "x"}, {"history_init": "x"}, {"do": math.nan},
        {"option": "III"}, {"weighting": "samples"},
    ],
    "weight_erosion": [{"target": -1}, {"p_d": -0.1}, {"p_d": math.nan}, {"p_s": -1.0}, {"size_unit": "rows"}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [(name, options) for name, every in BAD.items() for options in every])
def test_a_bad_option_is_one_sentence(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^[^:]*\b{next(iter(options))}\b[^:]*: expected .*\.$"):
        ALGORITHMS[name](**options)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("feddwa", {"search": "fast"}, "search: expected 'auto', 'exact' or 'groups', got 'fast'."),
        ("feddwa", {"power": "2"}, "power: expected a number >= 0, got '2'."),
        ("feddwa", {"stride": "far"}, "stride: expected a number > 0, or None, got 'far'."),
        ("fedper", {"train": "both"}, "train: expected one of joint, alternate, body, got 'both'"),
        ("fedrep", {"private_epochs": 0}, "private_epochs: expected at least 1"),
        ("scaffold", {"option": "III"}, "option: expected 'mean_grad', 'II' or 'I', got 'III'"),
    ],
)
def test_the_sentence_names_what_would_do(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        ALGORITHMS[name](**options)


@pytest.mark.parametrize("guidance", ["previous", "current"])
def test_what_is_served_must_have_been_trained_ahead(guidance: str) -> None:
    with pytest.raises(ValueError, match=r"^serve: 'guidance' is trained ahead"):
        ALGORITHMS["feddwa"](serve="guidance", guidance=guidance)


def test_the_quadratic_program_refuses_a_power() -> None:
    with pytest.raises(ValueError, match=r"^power: FedDWAQP solves for its weights"):
        ALGORITHMS["feddwa_qp"](power=2.0)
