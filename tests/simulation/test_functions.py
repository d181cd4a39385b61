"""Runs of other functions are told apart, also where a name or the code is the same."""

import threading
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from entry_points import sentence
from small import images, tiny_model
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from pflcore import (
    Evaluation,
    FedAvg,
    Hardware,
    Net,
    Simulation,
    Training,
    cross_silo,
    tune,
)
from pflcore.interop import Client

DATA = images((12, 12, 20, 7))


def times(factor):
    def augment(batch, generator):
        return batch * factor

    return augment


class Times:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, batch, generator):
        return batch * self.factor

    def augment(self, batch, generator):
        return batch * self.factor


def make(algorithm="fedavg", model=None, rounds=4, **options):
    training = options.pop("training", {})
    return Simulation(
        algorithm,
        model or tiny_model()(),
        DATA,
        Training(**{"lr": 0.05, "batch_size": 5, **training}),
        rounds=rounds,
        hardware=Hardware(workers=1),
        **options,
    )


def loss_of(scale):
    def loss(scores, y):
        return nn.functional.cross_entropy(scores * scale, y)

    return loss


def metric_of(scale):
    def metric(scores, y):
        return float(scale)

    return metric


def sampling_of(first):
    def draw(round, generator, sizes):
        return [first]

    return draw


def algorithm_of_scale(scale):
    @dataclass(frozen=True)
    class Scaled(FedAvg):
        def update(self, state, up, cohort):
            changes, mix = super().update(state, up, cohort)
            return {
                **changes,
                "x": state["x"] + scale * (changes["x"] - state["x"]),
            }, mix

    return Scaled()


class Scaled(nn.Sequential):
    def __init__(self, scale):
        super().__init__(*tiny_model()())
        self.scale = scale

    def forward(self, x):
        return super().forward(x) * self.scale


def steps_of(count):
    return lambda round, client, generator: count


OPTIONS = {
    "training.augment": lambda k: {"training": {"augment": times(k)}},
    "training.augment, one of two": lambda k: {
        "training": {"augment": (times(1.0), Times(k))}
    },
    "training.steps": lambda k: {"training": {"steps": steps_of(int(k))}},
    "learning_rates": lambda k: {"training": {"schedule": lambda r, n: k / r}},
    "learning_rates, a scheduler": lambda k: {
        "training": {"schedule": lambda o: StepLR(o, 1, gamma=1 / (1 + k))}
    },
    "loss": lambda k: {"loss": loss_of(k)},
    "loss, a module": lambda k: {"loss": nn.CrossEntropyLoss(label_smoothing=k / 10)},
    "metrics": lambda k: {"evaluation": Evaluation(metrics=[metric_of(k)])},
    "sampling": lambda k: {"sampling": sampling_of(int(k))},
    "algorithm": lambda k: {"algorithm": algorithm_of_scale(k)},
    "model": lambda k: {"model": Scaled(k)},
}


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("name", OPTIONS)
def test_resume_refuses_a_run_of_another_function(name, tmp_path):
    torch.manual_seed(0)
    make(**OPTIONS[name](1.0), rounds=2).save(tmp_path)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=rf": {name.split(',')[0]} is ") as e:
        make(**OPTIONS[name](2.0), rounds=2).restore(tmp_path)
    assert sentence(e)


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("name", OPTIONS)
def test_resume_takes_the_same_function_made_anew(name, tmp_path):
    torch.manual_seed(0)
    make(**OPTIONS[name](1.0), rounds=2).save(tmp_path)
    torch.manual_seed(0)
    assert make(**OPTIONS[name](1.0), rounds=2).restore(tmp_path).state.round == 0


def test_more_rounds_of_a_schedule_compare_the_played_ones(tmp_path):
    def run(function, rounds):
        return make(training={"schedule": function}, rounds=rounds)

    run(lambda o: CosineAnnealingLR(o, T_max=9), 2).run(checkpoint=tmp_path)

    run(lambda o: CosineAnnealingLR(o, T_max=9), 4).restore(tmp_path)
    with pytest.raises(ValueError, match="the schedule's step sizes") as e:
        run(lambda o: CosineAnnealingLR(o, T_max=8), 4).restore(tmp_path)
    assert sentence(e)


def test_ranks_compare_the_digests_of_functions():
    first, other = (make(training={"augment": times(k)}).header() for k in (1.0, 2.0))

    assert first["training"] == other["training"]
    assert first["functions"] != other["functions"]


def test_a_value_without_digest_is_told_at_resume(tmp_path):
    def run():
        lock = threading.Lock()

        def augment(batch, generator):
            with lock:
                return batch

        return make(training={"augment": augment})

    run().save(tmp_path)

    with pytest.warns(UserWarning, match=r"training\.augment.* by name alone\.$"):
        run().restore(tmp_path)


def test_a_module_of_ones_own_is_told_at_resume(tmp_path, monkeypatch):
    helpers = ModuleType("helpers")
    helpers.double = lambda batch: 2 * batch
    monkeypatch.setitem(globals(), "helpers", helpers)

    def run():
        return make(
            training={"augment": lambda batch, generator: helpers.double(batch)}
        )

    run().save(tmp_path)

    with pytest.warns(UserWarning, match=r"what helpers hold was compared by name"):
        run().restore(tmp_path)


def test_functions_of_another_python_compare_by_name(tmp_path, monkeypatch):
    run = make(training={"augment": times(1.0)})
    run.functions = {"training.augment": "code of before", "python": "3.1"}
    run.save(tmp_path)

    with pytest.warns(UserWarning, match=r"Python 3\.1, so that .* by name alone\.$"):
        make(training={"augment": times(1.0)}).restore(tmp_path)


def test_functions_that_remember_calls_stay_the_same():
    """Their digest is that of before the first call, in a trial of the engine."""
    calls = []

    def augment(batch, generator):
        calls.append(len(calls))
        return batch

    run = make(training={"augment": augment})
    calls.clear()
    want = make(training={"augment": augment}).functions
    run.run()

    assert run.header()["functions"] == want and calls


def test_a_client_refuses_its_state_of_another_function(tmp_path):
    def client(k):
        training = Training(augment=times(k))
        return Client("fedavg", tiny_model(), DATA.client(0), training)

    client(1.0).save(tmp_path)

    client(1.0).restore(tmp_path)
    with pytest.raises(ValueError, match=r"training\.augment is ") as e:
        client(2.0).restore(tmp_path)
    assert sentence(e)


def test_a_search_tells_functions_of_a_grid_apart(tmp_path):
    data = replace(DATA, index={"train": DATA.index["train"]})
    grid = {"training.augment": [times(1.0), times(-5.0)]}
    tuned = tune(
        cross_silo(data),
        Net(tiny_model()),
        "fedavg",
        Training(lr=0.5),
        grid,
        2,
        metric="loss",
        folder=tmp_path,
    )
    first, other = (trial.score for trial in tuned.trials)

    assert first != other
