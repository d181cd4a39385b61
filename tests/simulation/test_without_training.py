"""Clients without training samples are evaluated, and change nothing for the others.

The law: a federation with such a client plays the very rounds of the federation without
it. Bits are equal, and records differ in the client's row alone.
"""

from dataclasses import replace

import pytest
import torch
from entry_points import held_out, sentence
from small import equals, images, normed_model, swept, tiny_model
from torch import nn

from pflcore import (
    Adversary,
    Evaluation,
    Federation,
    Hardware,
    Robustness,
    Simulation,
    Training,
    run_each_target,
)
from pflcore.algorithms import (
    FedAvg,
    FineTune,
    KnnPer,
    Scaffold,
    Waffle,
    WeightErosion,
)

UNIFORM = FedAvg(weighting="uniform")
KEPT = [0, 1, 2]
WITHOUT = 3  # the client that has test samples alone
# The uploads of these have a number for each client of the federation.
UPLOADS_BY_CLIENT = ("fedfomo", "l2c")


def without_training(data, client):
    """The federation in which a client has lost its training samples."""
    train = list(data.index["train"])
    train[client] = train[client][:0]
    return replace(data, index={**data.index, "train": train})


def federations():
    """Four clients, of which one has test samples alone; and the other three."""
    data = without_training(images((7, 20, 31, 12)), WITHOUT)
    return data, data.subset(KEPT)


def simulation(algorithm, data, engine="loop", model=None, **options):
    options = {"rounds": 2, "seed": 3, **options}
    return Simulation(
        algorithm,
        model or tiny_model(),
        data,
        Training(lr=0.1, batch_size=8),
        hardware=Hardware(engine=engine, workers=1),
        **options,
    )


def assert_same_rounds(history, want, name):
    """Asserts that the rounds of the other clients are equal, bit by bit."""
    for record, expected in zip(history.rounds, want.rounds, strict=True):
        evaluation = record["eval"]
        for key, values in expected["eval"].items():
            assert [evaluation[key][i] for i in KEPT] == values, key
        assert evaluation["size"][WITHOUT] == 12
        same = ["cohort", "train_loss", "dropped", "clipped", "relative_update_norm"]
        if name not in UPLOADS_BY_CLIENT:
            same += ["bytes_up", "bytes_down"]
        assert {k: record[k] for k in same} == {k: expected[k] for k in same}
    for i in KEPT:
        model, expected = history.model(i), want.model(i)
        for key in expected.keys:
            equals(model.get_buffer(f"view_{key}"), expected.get_buffer(f"view_{key}"))
        equals(model.buffer_row, expected.buffer_row)


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", swept())
def test_a_client_without_training_changes_no_bit_of_others(name):
    data, others = federations()
    participation = 0.67 if name != "waffle" else 1.0

    history = simulation(name, data, participation=participation).run()
    want = simulation(name, others, participation=participation).run()

    assert_same_rounds(history, want, name)
    assert torch.tensor(history.rounds[-1]["eval"]["loss"]).isfinite().all()
    weights = history.rounds[-1]["report"].get("weights")
    if name == "weight_erosion":
        assert weights[WITHOUT] == 0


@pytest.mark.parametrize("engine", ["vmap", "chain"])
@pytest.mark.parametrize(
    "name", swept(("fedavg", "hypcluster", "knnper", "finetune", "mocha"), ("fedavg",))
)
def test_no_engine_mixes_clients_without_training_in(engine, name):
    data, others = federations()
    history = simulation(name, data, engine).run()
    want = simulation(name, others, engine).run()
    assert_same_rounds(history, want, name)


@pytest.mark.deep("it takes a second")
def test_batch_norm_is_that_of_the_clients_that_train():
    data, others = federations()
    for policy in ("average", "local"):
        options = {"model": normed_model, "batch_norm": policy}
        history = simulation("fedavg", data, **options).run()
        want = simulation("fedavg", others, **options).run()
        assert_same_rounds(history, want, "fedavg")
    mean = history.state.buffers[:3].mean(0)
    equals(history.model(WITHOUT).buffer_row, mean)


def test_a_client_in_the_middle_is_one_that_takes_no_part():
    whole = images((7, 20, 31, 12))
    data = without_training(whole, 1)
    history = simulation("ditto", data).run()
    want = simulation("ditto", whole, clients=[0, 2, 3]).run()
    for i in (0, 2, 3):
        for record, expected in zip(history.rounds, want.rounds, strict=True):
            assert record["cohort"] == [0, 2, 3]
            assert record["eval"]["loss"][i] == expected["eval"]["loss"][i]
        equals(history.model(i).tensors(), want.model(i).tensors())


@pytest.mark.deep("it takes a second")
def test_methods_that_adapt_give_the_shared_model():
    data, _ = federations()
    shared = simulation("fedavg", data).run()
    x, _ = data.client(WITHOUT, "test")
    scores = shared.model(WITHOUT)(x)
    equals(simulation(FineTune(), data).run().model(WITHOUT)(x), scores)
    equals(simulation(KnnPer(), data).run().model(WITHOUT)(x), scores.softmax(1))
    for name in ("ditto", "pfedme", "fedala", "apfl"):
        history = simulation(name, data).run()
        equals(history.model(WITHOUT)(x), _shared_scores(history, x))


def _shared_scores(history, x):
    """Scores of the model that the server has."""
    model = tiny_model()()
    nn.utils.vector_to_parameters(history.state.server["x"], model.parameters())
    return model(x).detach()


def test_the_model_of_most_clients_serves_where_none_can_be_chosen():
    data, _ = federations()
    history = simulation("hypcluster", data).run()
    state = history.state.server
    popular = state["pick"][:3].bincount().argmax()
    equals(history.model(WITHOUT).get_buffer("view_w"), state["x"][popular])


@pytest.mark.deep("it takes a second")
def test_a_choice_on_validation_samples_counts_those_who_train():
    data = held_out(images((20, 25, 31, 12)))
    data = without_training(data, WITHOUT)
    rule = FineTune(choose="client", lr_grid=(0.01, 0.1), finetune_epochs=2)
    history = simulation(rule, data).run()
    want = simulation(rule, data.subset(KEPT)).run()
    for i in KEPT:
        equals(history.model(i).tensors(), want.model(i).tensors())


def test_a_resumed_run_is_the_run(tmp_path):
    data, _ = federations()
    whole = simulation("waffle", data, rounds=3).run()
    first = simulation("waffle", data, rounds=3)
    for _ in zip(range(2), first.iterate(), strict=False):
        pass
    first.save(tmp_path)
    resumed = simulation("waffle", data, rounds=3).restore(tmp_path).run()
    assert resumed.rounds[-1]["eval"] == whole.rounds[-1]["eval"]


def test_newcomers_join_with_and_without_training_samples():
    data, _ = federations()
    x, y = data.client(0)
    for name in ("scaffold", "fedamp"):
        history = simulation(name, data).run()
        adapted = history.adapt((x, y), rounds=1)
        assert adapted(x).isfinite().all()
        as_it_is = history.adapt({"test": (x, y)}, rounds=1)
        unused = history.adapt((x, y), rounds=0)
        equals(as_it_is(x), unused(x))


def test_every_door_takes_clients_with_test_samples_alone():
    x = torch.randn(6, 3)
    y = torch.arange(6) % 2
    pair = (x, y)
    data = Federation.from_clients(
        {"a": {"train": pair, "test": pair}, "b": {"test": pair}}
    )
    assert data.size().tolist() == [6, 0] and data.trainable_clients.tolist() == [0]
    assert "clients without train samples: 1" in data.summary()
    empty = (x[:0], y[:0])
    same = Federation.from_clients([pair, {"train": empty, "test": pair}])
    assert same.size("test").tolist() == [0, 6]
    assert Federation.from_clients([pair]).trainable_clients.tolist() == [0]
    with sentence(r"clients: expected a sample of each, .* the 1 without, got \['b'\]"):
        Federation.from_clients({"a": pair, "b": empty})
    with sentence("clients: expected training samples, to standardize features by"):
        data.subset(["b"]).standardize()


def test_what_needs_training_samples_says_so():
    data, _ = federations()
    with sentence("target: expected a client with training samples, got 3"):
        simulation(Waffle(target=WITHOUT), data)
    with sentence("clients: expected a client with training samples"):
        simulation("fedavg", data, clients=[WITHOUT])
    with sentence("data: no client has training samples"):
        simulation("fedavg", data.subset([WITHOUT]), evaluation=Evaluation(every=0))


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize(
    "algorithm, common", [(Waffle(), Scaffold()), (WeightErosion(p_d=0.1), UNIFORM)]
)
def test_who_cannot_be_the_target_is_served_by_a_run_without_one(algorithm, common):
    """A client without training samples, and one that attacks."""
    data = without_training(images((7, 20, 31, 12, 9)), 2)
    adversary = Adversary("scale", [0], 2.0)
    training = Training(lr=0.1, batch_size=8)
    options = {"rounds": 2, "robustness": Robustness(adversary=adversary)}
    history = run_each_target(algorithm, tiny_model(), data, training, **options)
    runs = {2: common} | {i: replace(algorithm, target=i) for i in (1, 3, 4)}
    alone = {
        i: Simulation(alg, tiny_model(), data, training, **options).run()
        for i, alg in runs.items()
    }
    for number, record in enumerate(history.rounds):
        singles = {i: run.rounds[number] for i, run in alone.items()}
        for i, single in singles.items():
            assert record["eval"]["loss"][i] == single["eval"]["loss"][i]
        assert record["bytes_up"] == sum(s["bytes_up"] for s in singles.values())
        weights = torch.tensor(record["report"]["weights"])
        assert weights.shape == (5, 5) and weights[[0, 2]].isnan().all()
        assert weights[[1, 3, 4], 2].eq(0).all()
    for i, run in alone.items():
        equals(history.model(i).tensors(), run.model(i).tensors())


def test_features_without_statistics_take_those_of_all_training_samples():
    data = without_training(images((7, 20, 12), shape=(4,)), 1)
    scaled = data.standardize()
    kept = data.subset([0, 2]).standardize()
    for i, j in ((0, 0), (2, 1)):
        for split in ("train", "test"):
            equals(scaled.client(i, split)[0], kept.client(j, split)[0])
    x = torch.cat([data.client(i)[0] for i in (0, 2)]).double()
    want = (data.client(1, "test")[0] - x.mean(0)) / x.std(0, correction=0)
    equals(scaled.client(1, "test")[0], want.float())
    equals(scaled.scaling.for_client(1).mean, x.mean(0))


@pytest.mark.parametrize("algorithm", ["fedamp", "feddwa"])
def test_a_newcomer_trains_beside_a_first_client_without_training(algorithm):
    """The servers of these methods keep a model for each client."""
    data = without_training(images((7, 20, 31, 12)), 0)
    history = simulation(algorithm, data).run()
    x, y = images((15,), seed=5).client(0)

    trained = history.adapt((x, y), rounds=1).tensors()
    as_it_came = history.adapt((x, y), rounds=0).tensors()

    assert any(not trained[key].equal(as_it_came[key]) for key in trained)
