"""Options of training that a method cannot have are refused before any round."""

import pytest
from entry_points import sentence
from small import images, tiny_model

from pflcore import ALGORITHMS, Simulation, Training
from pflcore.algorithms import algorithm_of
from pflcore.lab.cli import main

DATA = images((12, 12, 20))
OTHERS = {"local_optimizer": "adamw", "clip_grad": 0.5, "steps": 2}
# Options of methods on which their refusals depend.
OPTIONS = [
    *((name, {}) for name in ALGORITHMS),
    ("scaffold", {"option": "I"}),
    ("scaffold", {"option": "II"}),
    ("weight_erosion", {"size_unit": "epochs"}),
]
REFUSED = []
for name, options in OPTIONS:
    for option in algorithm_of(name, **options).traits.fixed_training:
        REFUSED.append((name, options, option))


@pytest.mark.parametrize("name, options, option", REFUSED)
def test_fixed_training_is_refused_when_made(name, options, option):
    algorithm = algorithm_of(name, **options)
    training = Training(**{option: OTHERS[option]})

    with pytest.raises(ValueError, match=f"^{option}: ") as e:
        Simulation(algorithm, tiny_model(), DATA, training)

    assert sentence(e)


def test_compare_refuses_before_the_first_run(tmp_path, capsys):
    words = "compare fedavg fednova --data synthetic_clusters --model linear --rounds 2"
    options = ["--local-optimizer", "adamw", "--lr", "0.01", "--quiet"]
    folder = tmp_path / "runs"

    code = main([*words.split(), *options, "--out", str(folder)])

    assert code == 2 and "local_optimizer: FedNova " in capsys.readouterr().err
    assert not folder.exists()
