"""Models of a standardized federation take raw features."""

import copy
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from entry_points import sentence
from parts.user import TRAINING, simulation
from small import equals, images, layers, normed_model, swept, tiny_model
from torch import nn

from pflcore import Client, Evaluation, Server, Simulation, Training, run_each_target
from pflcore.algorithms import Waffle


def raw_images(sizes=(12, 20, 31, 24), **options):
    """Clients with features far from 0, which differ in shift and scale.

    Feature 2 is constant.
    """
    data = images(sizes, **options)
    x = data.x.clone()
    for split in data.splits:
        for i, rows in enumerate(data.lists(split)):
            x[rows] = x[rows] * (10 + 30 * i) + 1000 * (i - 1)
    x[:, 2] = 7.0
    return replace(data, x=x).split(val=0.2, seed=1)


def without_scaling(model):
    bare = copy.deepcopy(model)
    bare.scaling = None
    return bare


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("algorithm", swept())
def test_a_model_of_raw_features_is_what_was_evaluated(algorithm):
    raw = raw_images()
    data = raw.subset([0, 1, 2]).standardize()
    run = simulation(algorithm, data, rounds=2)
    history = run.run()
    for split in raw.splits:
        accuracy = run.evaluate(split)["accuracy"]
        for i in range(3):
            model = history.model(i)
            x, y = raw.client(i, split)
            equals(model(x), without_scaling(model)(data.client(i, split)[0]))
            for predicted in (model.predict(x), history.predict(i, x.numpy())):
                got = (predicted == y).double().mean().item()
                assert got == pytest.approx(accuracy[i].item())


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("algorithm", swept())
def test_a_newcomer_is_scaled_by_its_own_training_samples(algorithm):
    raw = raw_images()
    history = simulation(algorithm, raw.subset([0, 1, 2]).standardize(), rounds=2).run()
    newcomer = raw.subset([3])
    x, y = newcomer.client(0, "train")
    model = history.adapt((x, y), rounds=1)
    equals(model.scaling.mean, x.double().mean(0))
    deviation = x.double().std(0, correction=0)
    deviation[2] = 1.0
    equals(model.scaling.deviation, deviation)
    scaled = newcomer.standardize()
    again = history.adapt(scaled, rounds=1)  # the federation knows its scaling
    test = raw.client(3, "test")[0]
    equals(model(test), without_scaling(model)(scaled.client(0, "test")[0]))
    # With a "val" split, the two newcomers have different "val" samples.
    if not history.models.config.algorithm.traits.needs_val:
        equals(again(test), model(test))


def test_a_newcomer_with_one_sample_is_shifted_only():
    raw = raw_images()
    history = simulation(data=raw.standardize(), rounds=1).run()
    x, y = (v[:1] for v in raw.client(0))
    model = history.adapt((x, y), rounds=1)
    equals(model.scaling.mean, x[0].double())
    equals(model.scaling.deviation, torch.ones(6, dtype=torch.float64))


def test_a_newcomer_of_wide_numbers_is_scaled_before_they_are_rounded():
    gen = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(9, 2, generator=gen).double() + 1e6, torch.arange(9) % 2)] * 2
    from_clients = type(images()).from_clients
    wide = from_clients(pairs, dtype=torch.float64).standardize()
    history = simulation(
        data=wide, model=nn.Linear(2, 2).double(), rounds=1, **TRAIN_ONLY
    ).run()
    x = pairs[0][0]
    # FedAvg gives every client the shared model.
    equals(history.adapt(pairs[0], 1)(x), history.model(0)(x))


TRAIN_ONLY = {"evaluation": Evaluation(split="train")}


def test_a_scaled_newcomer_of_raw_clients_is_refused():
    raw = raw_images()
    history = simulation(data=raw, rounds=1).run()
    with sentence(
        "samples: expected raw features, which the run's clients have, got Federation"
    ):
        history.adapt(raw.subset([0]).standardize())
    x, y = raw.client(0)
    assert history.adapt((x, y)).scaling is None


def test_labels_that_a_newcomer_turns_are_its_own():
    """A newcomer that is a federation brings its relabelling."""
    data = images((20, 20, 20))
    history = simulation(
        "local", data, rounds=1, training=Training(lr=0.3, batch_size=8)
    ).run()
    x, y = data.client(1)  # a client with permuted labels
    other = history.adapt(data.subset([1]), 5)
    same = history.adapt((x, y), 5)
    equals(other(x), same(x))
    plain = simulation("local", replace(data, relabel=None), rounds=1).run()
    other = plain.adapt(data.subset([1]), 5)
    same = plain.adapt((x, y), 5)
    equals(other(x), same(x))


@pytest.mark.parametrize("model", [tiny_model(), normed_model])
def test_a_module_begins_with_the_scaling(model):
    raw = raw_images()
    history = simulation("ditto", raw.standardize(), model=model, rounds=2).run()
    x = raw.client(1, "test")[0]
    module = history.model(1).module()
    equals(module(x), history.model(1)(x))
    assert not module.training and [name for name, _ in module.named_children()] == [
        "scaling",
        "model",
    ]
    equals(pickle.loads(pickle.dumps(module))(x), module(x))
    loaded = copy.deepcopy(module)
    loaded.load_state_dict(module.state_dict())
    equals(loaded(x), module(x))


def test_a_model_of_raw_features_is_copied_and_moved_with_its_scaling():
    raw = raw_images()
    history = simulation("apfl", raw.standardize(), rounds=2).run()
    model, other = history.model(1), history.model(0)
    x = raw.client(1, "test")[0]
    assert not torch.equal(model(x), other(x))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        again.load_state_dict(model.state_dict())
        equals(again(x), model(x))


def test_a_federation_that_was_not_standardized_is_as_it_was():
    raw = raw_images()
    history = simulation("ditto", raw, rounds=2).run()
    model, module = history.model(1), history.model(1).module()
    assert model.scaling is None and type(module[0]) is nn.Linear
    assert {k.partition(".")[0] for k in model.state_dict()} == {"buffer_row", "view_w"}


@pytest.mark.parametrize("shape", [(5, 1), (5, 7), (6,)])
def test_features_that_would_be_spread_are_refused(shape):
    history = simulation(data=raw_images().standardize(), rounds=1).run()
    with sentence(r"x: expected samples \[B, \.\.\.\], got shape"):
        history.predict(0, torch.ones(shape))
    with sentence(r"x: expected raw features \[B, 6\], got"):
        history.model(0)(torch.ones(shape))


def test_whole_numbers_are_raw_features_too():
    raw = raw_images()
    history = simulation(data=raw.standardize(), rounds=1).run()
    x = raw.client(1, "test")[0].round()
    equals(history.predict(1, x.long()), history.predict(1, x))
    equals(history.model(1)(x.long()), history.model(1)(x))


def test_standardizing_twice_keeps_what_raw_features_are():
    raw = raw_images()
    once = raw.standardize()
    twice = once.keep_fraction(0.5).standardize()
    history = simulation(data=twice, rounds=1).run()
    for i in range(raw.n):
        x = raw.client(i, "test")[0]
        got = history.model(i).scaling(x)
        torch.testing.assert_close(
            got, twice.client(i, "test")[0], rtol=1e-4, atol=1e-4
        )


# files ------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["fedavg", "fedbn"])
def test_an_export_is_loaded_by_the_words_of_its_manifest(tmp_path, algorithm):
    safetensors = pytest.importorskip("safetensors.torch")
    raw = replace(raw_images(), names=tuple("abcd"))
    history = simulation(
        algorithm, raw.standardize(), model=normed_model, rounds=2
    ).run()
    history.export(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    prose, _, code = manifest["predict"].partition("of raw ones x = ")
    assert prose.startswith("The model takes standardized features")
    formula = code.partition(", by the client's")[0]
    for i, client in enumerate(manifest["clients"]):
        assert client["name"] == "abcd"[i]
        x = raw.client(i, "test")[0]
        known = {
            k: torch.tensor(client[k], dtype=torch.float64)
            for k in ("mean", "deviation")
        }
        model = normed_model()
        model.load_state_dict(safetensors.load_file(tmp_path / client["file"]))
        equals(model.eval()(eval(formula, {"raw": x, **known})), history.model(i)(x))


@pytest.mark.parametrize("standardized", [True, False])
def test_an_export_says_of_scaling_what_is_true(tmp_path, standardized):
    pytest.importorskip("safetensors.torch")
    raw = raw_images()
    data = raw.standardize() if standardized else raw
    simulation("apfl", data, rounds=1).run().export(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert ("raw" in manifest["predict"]) is standardized
    assert ("mean" in manifest["clients"][0]) is standardized


def test_runs_for_each_client_leave_models_of_raw_features(tmp_path):
    pytest.importorskip("safetensors.torch")
    raw = replace(raw_images(), names=tuple("abcd"))
    data = raw.standardize()
    history = run_each_target(Waffle(do=2.0), tiny_model(), data, TRAINING, rounds=2)
    accuracy = history.rounds[-1]["eval"]["accuracy"]
    for i in range(raw.n):
        x, y = raw.client(i, "test")
        assert (history.predict(i, x) == y).double().mean().item() == pytest.approx(
            accuracy[i]
        )
    history.export(tmp_path)
    clients = json.loads((tmp_path / "manifest.json").read_text())["clients"]
    assert [c["name"] for c in clients] == list("abcd")
    assert [c["mean"] for c in clients] == data.scaling.mean.tolist()


# client and server in processes of their own --------------------------------------
@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize(
    "algorithm", swept(quick=("fedavg", "ditto", "apfl", "knnper"))
)
def test_a_client_apart_serves_raw_features(algorithm):
    raw = raw_images((12, 20, 31))
    data = raw.standardize()
    server = Server(algorithm, normed_model, 3, rounds=2)
    parts = [
        Client(algorithm, normed_model, data.subset([i]), TRAINING) for i in range(3)
    ]
    for _ in range(2):
        server.aggregate({i: parts[i].train(server.download(i)) for i in range(3)})
    for i in range(3):
        download = server.download(i, "evaluation")
        model, (x, y) = parts[i].model(download), raw.client(i, "test")
        equals(model(x), without_scaling(model)(data.client(i, "test")[0]))
        accuracy = (model.predict(x) == y).double().mean().item()
        assert accuracy == pytest.approx(parts[i].evaluate(download)["accuracy"])


def test_a_client_apart_with_raw_samples_has_no_scaling():
    raw = raw_images((12, 20))
    server = Server("fedavg", tiny_model(), 2, rounds=1)
    client = Client("fedavg", tiny_model(), raw.client(0), TRAINING)
    assert client.model(server.download(0, "evaluation")).scaling is None


def test_images_and_numbers_as_targets_are_scaled_alike():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 2, 3, generator=gen) * 5 + 100
    y = x.mean((2, 3), keepdim=False)[..., None] / 10
    raw = (
        type(images())
        .from_clients(list(zip(x, y, strict=True)), classes=None)
        .split(test=0.3)
    )
    model = layers("Flatten, Linear 6 1")
    run = Simulation("ditto", model, raw.standardize(), TRAINING, rounds=2)
    history = run.run()
    for i in range(3):
        x, y = raw.client(i, "test")
        loss = (history.predict(i, np.asarray(x)) - y[:, 0]).square().mean().item()
        assert loss == pytest.approx(history.rounds[-1]["eval"]["loss"][i], rel=1e-5)
