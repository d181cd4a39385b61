"""What a run was told or derived once is true of all of its rounds.

Nets, schedules and data may serve several runs, and may change between them.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from entry_points import sentence
from parts.user import TRAINING, simulation
from pretend_gpu import pretended_gpu
from small import equals, images, layers, tiny_model
from torch import nn

from pflcore import (
    Adversary,
    Evaluation,
    Federation,
    Hardware,
    Net,
    Robustness,
    Training,
)


def one_score():
    return layers("Linear 6 5, Tanh, Linear 5 1")


def mean_square(scores, y):
    """A loss that broadcasts where shapes differ."""
    return ((scores - y) ** 2).mean()


def numbers(*shape):
    """A federation whose targets are numbers of this shape."""
    data = images()
    y = data.x[:, :1].reshape(-1, *shape)
    return Federation(data.x, y, data.index)


def play(net, data, other=None):
    """The last model of a run; before its rounds, another run of its net is made."""
    run = simulation(model=net, data=data)
    if other is not None:
        simulation(model=net, data=other).run()
    return run.run().state.server["x"]


@pytest.mark.deep("it takes a second")
def test_runs_that_share_a_net_change_no_other():
    column, plain = numbers(1), numbers()
    for data, other in ((plain, column), (column, plain)):
        net = Net(one_score, mean_square)
        equals(play(net, data, other), play(Net(one_score, mean_square), data))


def test_a_net_that_has_met_data_meets_others_anew():
    net = Net(one_score, mean_square)
    play(net, numbers(1))
    equals(play(net, numbers()), play(Net(one_score, mean_square), numbers()))


def any_loss(scores, y):
    """Cross entropy of labels, binary cross entropy of several bits."""
    if y.dim() == 1:
        return nn.functional.cross_entropy(scores, y)
    return nn.functional.binary_cross_entropy_with_logits(scores, y.to(scores))


def test_a_shared_net_leaves_a_record_its_accuracy():
    labels = images()
    bits = labels.y[:, None].expand(-1, 4) % 2
    several = Federation(labels.x, bits.contiguous(), labels.index, 2)
    net = Net(tiny_model(), any_loss)
    run = simulation(model=net, data=labels)
    simulation(model=net, data=several)

    assert "accuracy" in run.run().rounds[-1]["eval"]


# options of a simulation that is made ------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [
        ("training", Training(lr=1.0)),
        ("seed", 4),
        ("rounds", 5),
        ("data", images((9, 9))),
        ("algorithm", "scaffold"),
    ],
)
def test_an_option_of_a_made_simulation_stays(name, value):
    run = simulation()
    words = f"{name}: expected an option that stays as the simulation was made"
    with sentence(words, AttributeError):
        setattr(run, name, value)
    assert run.run().header["seed"] == 0


def test_a_simulation_of_another_flips_labels_once():
    robustness = Robustness(adversary=Adversary("label_flip", clients=[1]))
    run = simulation(robustness=robustness)

    again = replace(run, rounds=3)

    equals(again.run().state.server["x"], run.run().state.server["x"])


def test_a_simulation_of_another_splits_the_data_itself():
    data = images((20, 25, 30))
    run = simulation("fedfomo", data)
    assert run.config.data.size().tolist() == [16, 20, 24]

    for made in (replace(run, algorithm="fedavg"), replace(run, seed=5)):
        want = simulation(made.algorithm, data, seed=made.seed).config.data
        for split in want.splits:
            equals(list(made.config.data.lists(split)), list(want.lists(split)))


# schedules ------------------------------------------------------------------------


def test_a_function_that_gives_other_rates_is_asked_anew():
    factors = [1.0, 1.0, 1.0]
    training = Training(lr=0.1, schedule=lambda round, rounds: factors[round - 1])
    moved = simulation(training=training).run()
    factors[:] = [0.0, 0.0, 0.0]

    run = simulation(training=training)

    equals(run.run().state.server["x"], run.config.net.w0)
    assert not moved.state.server["x"].equal(run.config.net.w0)


@dataclass
class Falling:
    """A schedule that has no hash, as dataclasses that compare have none."""

    factor: float = 1.0

    def __call__(self, round, rounds):
        return self.factor / round


@dataclass
class Shifted:
    """An augmentation that has no hash."""

    amount: float = 0.0

    def __call__(self, batch, generator):
        return batch + self.amount


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
def test_functions_of_training_need_no_hash(engine):
    training = replace(TRAINING, schedule=Falling(), augment=Shifted())
    run = simulation(training=training, hardware=Hardware(engine=engine))
    assert not run.run().stopped


# data that change in place -----------------------------------------------------------


def test_a_header_describes_the_data_as_they_are():
    data = images()
    run = simulation(data=data)
    before = run.header()

    data.x[0] += 1

    assert run.header()["digests"] != before["digests"]
    assert run.run().header["digests"] == simulation(data=data).header()["digests"]


@pytest.mark.parametrize("door", ["run", "save"])
def test_rounds_on_data_changed_between_are_refused(door, tmp_path):
    data = images()
    run = simulation(data=data, rounds=3)
    first = simulation(data=data, rounds=3)
    for _ in zip(range(2), first.iterate(), strict=False):
        pass
    first.save(tmp_path)
    run.restore(tmp_path)
    run.save(tmp_path)

    data.x[0] += 1

    with sentence("data and model: expected those of the 2 rounds that are played"):
        run.run() if door == "run" else run.save(tmp_path)


@pytest.mark.deep("it takes a second")
def test_a_header_of_a_card_is_of_what_it_trains_on():
    data = images()
    with pretended_gpu() as gpu:
        run = simulation(data=data, hardware=Hardware(device=str(gpu)))
        data.x[0] += 1  # the card has a copy
        assert run.header()["digests"] == simulation(data=images()).header()["digests"]


# clients without training samples, on a card ------------------------------------------


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize(
    "name",
    [
        "fedamp",
        *(
            pytest.param(name, marks=pytest.mark.deep("a pretended GPU is slow"))
            for name in ("sfl", "feddwa", "fedfomo")
        ),
    ],
)
def test_ids_of_clients_that_train_stay_on_the_host(name):
    data = images((7, 20, 31))
    train = list(data.index["train"])
    train[0] = train[0][:0]
    data = replace(data, index={**data.index, "train": train})
    options = {"rounds": 1, "evaluation": Evaluation(every=1)}
    want = simulation(name, data, **options).run().series("loss")[1]
    with pretended_gpu() as gpu:
        hardware = Hardware(device=str(gpu))
        run = simulation(name, data, hardware=hardware, **options)
        assert run.config.data.trainable_clients.device.type == "cpu"
        got = run.run().series("loss")[1]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
