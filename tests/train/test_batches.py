"""A last batch of one sample, numbers of numpy, and what messages advise."""

import json
import pickle

import numpy as np
import pytest
import torch
from doors import leaf, sentence
from small import ENGINES, grouped, images, with_test
from torch import nn

import pflcore
from pflcore import Adversary, Federation, Simulation, Training

FIVES = images((5, 5, 5))


def normed():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


def linear():
    return nn.Linear(6, 4)


def losses(model=normed, data=None, engine="auto", **training):
    data, how, hardware = data or FIVES, Training(**training), pflcore.Hardware(engine)
    run = Simulation("local", model, data, how, rounds=2, hardware=hardware).run()
    return run.series("loss")[1][-1]


# batch norm -----------------------------------------------------------------
@ENGINES
def test_a_last_batch_of_one_joins_the_one_before_for_batch_norm(engine):
    """Of five samples four and one are one batch of five."""
    four, five = (losses(batch_size=b, epochs=2, engine=engine) for b in (4, 5))
    assert torch.equal(four, five)
    sizes = images((9, 8, 13))
    assert losses(data=sizes, batch_size=4, engine=engine).isfinite().all()


def test_other_models_take_a_last_batch_of_one():
    with sentence(r"data: client 1 \(1 samples, batch_size 4\) has a batch of one sample"):
        losses(data=images((5, 1, 5)), batch_size=4)
    assert not torch.equal(losses(linear, batch_size=4), losses(linear, batch_size=5))
    left_out = losses(data=images((8, 9, 7)), batch_size=4, drop_last=True)
    assert left_out.isfinite().all()


def test_a_newcomers_last_sample_joins_too():
    run = Simulation("ditto", normed, images((8, 8)), Training(batch_size=4), rounds=1).run()
    x, y = torch.randn(5, 6), torch.arange(5) % 4
    assert run.adapt((x, y))(x).isfinite().all()
    with sentence(r"samples: client 2 \(1 samples, batch_size 4\) has a batch of one sample"):
        run.adapt((x[:1], y[:1]))


# numbers --------------------------------------------------------------------
def test_numpys_numbers_are_numbers(tmp_path):
    half, one = np.float32(0.5), np.int64(1)
    how = Training(half, np.int64(4), one, schedule=lambda r, n: np.float32(1))
    options = {"clip": half, "evaluated": np.int64(2), "seed": np.int64(3), "participation": half}
    alg = pflcore.FedAvg(server_lr=half)
    run = Simulation(alg, normed, FIVES, how, rounds=one, **grouped(options))
    json.dumps(run.run().header)
    run.save(tmp_path)
    assert Simulation(alg, normed, FIVES, how, 1, **grouped(options)).restore(tmp_path)
    assert pflcore.Server(pflcore.FedAvg(), nn.Linear(2, 2), 2).join(one) == 1


@pytest.mark.parametrize("kind", [np.array, torch.tensor, set, tuple])
def test_clients_in_any_collection(kind):
    assert Adversary("sign_flip", kind([1, 2])).clients == (1, 2)
    run = Simulation("fedavg", normed, FIVES, clients=kind([0, 2]))
    assert run.clients.tolist() == [0, 2]


# another run ----------------------------------------------------------------
class Own(nn.Module):
    """A loss that holds a function, whose address is another in every process."""

    def __init__(self):
        super().__init__()
        self.weigh = lambda v: 2 * v

    def forward(self, scores, y):
        return self.weigh(nn.functional.cross_entropy(scores, y))


SMOOTH = nn.CrossEntropyLoss(label_smoothing=0.1)
ONE, OTHER = Own(), Own()  # both at once, so that they lie at two places


@pytest.mark.parametrize(
    "key, first, then, what",
    [
        (
            "model",
            nn.Sequential(linear(), nn.ReLU()),
            nn.Sequential(linear(), nn.Tanh()),
            r"1 is 'ReLU\(\)' there",
        ),
        (
            "loss",
            nn.CrossEntropyLoss(weight=torch.ones(4)),
            nn.CrossEntropyLoss(weight=torch.ones(4) * 2),
            "digest of the loss",
        ),
        ("loss", SMOOTH, nn.CrossEntropyLoss(label_smoothing=0.5), "digest of"),
        ("loss", ONE, OTHER, None),
    ],
)
def test_another_model_or_loss_does_not_go_on(tmp_path, key, first, then, what):
    given = {"algorithm": "fedavg", "model": linear(), "data": FIVES, "rounds": 2}
    run = Simulation(**{**given, key: first})
    next(run.iterate())
    run.save(tmp_path)
    same = first if what else then
    assert Simulation(**{**given, key: same}).restore(tmp_path).state.round == 1
    if what:
        with sentence(f".*that of another run: {what}"):
            Simulation(**{**given, key: then}).restore(tmp_path)


# data -----------------------------------------------------------------------
def test_a_table_in_pandas_order_trains_as_any_other():
    x = torch.randn(4, 40).T  # columns lie apart
    data = Federation.from_table(x, torch.arange(40) % 2, torch.arange(40) % 4)
    assert data.x.is_contiguous() and torch.equal(data.x, x)


def test_leafs_labels_in_a_column_of_signs(tmp_path):
    users = {u: {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [[-1], [1]]} for u in "ab"}
    whole = {"users": ["a", "b"], "num_samples": [2, 2], "user_data": users}
    (tmp_path / "all.json").write_text(json.dumps(whole))
    fed = leaf(tmp_path / "all.json")
    assert fed.y.tolist() == [0, 1, 0, 1] and fed.classes == 2


def test_data_sets_as_they_come():
    full = torch.utils.data.TensorDataset(torch.randn(4, 2), torch.arange(4) % 2)
    none = torch.utils.data.Subset(full, [])
    data = Federation.from_clients(with_test([full] * 2, [full, none]))
    assert data.size("test").tolist() == [4, 0]


# sentences ------------------------------------------------------------------
X, Y = torch.randn(8, 6), torch.arange(8) % 4


def clients(y, test=0.5):
    data = Federation.from_clients([(X, y)] * 2)
    return data.split(test=test) if test else data


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda: Federation.from_clients([(np.array([["a", "b"]] * 8), Y)]),
            "turn images and words into numbers",
        ),
        (lambda: pflcore.ops.pairwise_sqdist([torch.ones(3)]), "torch.stack"),
        (lambda: losses(data=clients(Y, 0)), r"split\(test=0\.2\)"),
        (lambda: losses(data=clients(Y + 1)), "count them from 0"),
        (lambda: losses(data=clients(Y[:, None])), "make labels of one"),
        (
            lambda: Simulation("fedavg", normed, FIVES).run().predict(0, torch.randn(3, 7)),
            r"x: expected samples \[B",
        ),
        (
            lambda: Simulation("FedDAW", normed, FIVES),
            ".* got 'FedDAW'",
        ),
        (
            lambda: Federation.from_clients({"alice": (torch.ones(2, 2), torch.ones(2))}),
            "of a dict give its values",
        ),
        (lambda: Federation.from_clients([[{"x": 1, "y": 2}]]), "a Dataset of pairs"),
        (
            lambda: pflcore.pack([{1: torch.ones(2)}]),
            "client 0: expected .* a dict of tensors by name",
        ),
        (lambda: losses(torch.compile(linear())), "give its _orig_mod"),
        (lambda: losses(torch.jit.script(linear())), "scripted or traced"),
    ],
)
def test_what_messages_advise(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_algorithms_in_any_spelling():
    assert Simulation("FedDWA", normed, FIVES).name == "feddwa"
    assert Simulation("LG-FedAvg", normed, FIVES).name == "lg_fedavg"


def test_exports_are_as_readable_as_their_folder(tmp_path):
    pytest.importorskip("safetensors")
    history = Simulation("fedavg", normed, FIVES, rounds=1).run()
    (tmp_path / "out").mkdir(mode=0o755)
    history.export(tmp_path / "out")
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").glob("*.safetensors")} == {0o644}


@pytest.mark.parametrize("name", ["fedavg", "apfl", "knnper", "fedrod"])
def test_a_model_whose_net_was_made_by_a_lambda_is_kept(name):
    model = Simulation(name, lambda: linear(), FIVES, rounds=1).run().model(0)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(torch.ones(2, 6)), model(torch.ones(2, 6)))
