"""Models know what their inputs need: in a history, and in a folder of files."""

import csv
import json
from dataclasses import dataclass, replace
from types import MethodType

import numpy as np
import pytest
import torch
from entry_points import sentence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts.user import TRAINING, simulation
from small import SIX, equals, images, layers, normed_model, swept, tiny_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from pflcore import (
    Adversary,
    Client,
    Evaluation,
    FedAvg,
    Federation,
    Net,
    Robustness,
    Server,
    Simulation,
    run_each_target,
)
from pflcore.algorithms import APFL, Waffle
from pflcore.robust import FLTrust
from pflcore.simulation import load_model

pd = pytest.importorskip("pandas")
from parts.hospitals import (  # noqa: E402
    CLASSES,
    FEATURES,
    HOSPITALS,
    hospitals,
    table,
    test_rows,
)

OFTEN = (*SIX, "finetune", "fedbn", "fedrod", "knnper", "factorized_waffle", "ensemble")
MODEL = tiny_model(3, 3)


@pytest.fixture(scope="module")
def history():
    """A run whose federation has all names and a scaling."""
    return simulation("ditto", hospitals().standardize(), model=MODEL).run()


def own_head():
    """A model of this module's own class."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 5)
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    return Own()


# predictions ------------------------------------------------------------------
@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("algorithm", swept(quick=OFTEN))
def test_predictions_by_name_are_what_was_evaluated(tmp_path, algorithm):
    """Raw rows of a table, their columns in another order, give the run's accuracy.

    So do the models after a restore, and those in files.
    """
    data = hospitals().standardize()
    run = simulation(algorithm, data, model=MODEL, rounds=2)
    history = run.run()
    run.save(tmp_path / "checkpoint")
    restored = simulation(algorithm, data, model=MODEL, rounds=2)
    restored.restore(tmp_path / "checkpoint")
    again = restored.run()
    history.export(tmp_path / "models")
    accuracy = history.rounds[-1]["eval"]["accuracy"]
    for i, name in enumerate(HOSPITALS):
        rows = test_rows(data, name)
        other_order = rows[["hospital", "visits", "age", "answer", "income"]]
        loaded = load_model(tmp_path / "models", name)
        for model in (history.model(name), again.model(name), loaded):
            predicted = model.predict(other_order)
            got = (predicted == rows["answer"].to_numpy()).mean()
            assert got == pytest.approx(accuracy[i])
            equals(model.scores(rows), history.model(i).scores(rows))


@pytest.mark.parametrize("algorithm", swept(quick=("ditto", "apfl")))
def test_scaling_in_a_model_has_the_bits_of_standardize(algorithm):
    raw = hospitals()
    data = raw.standardize()
    model = simulation(algorithm, data, model=MODEL, rounds=1).run().model("H11")
    for split in raw.splits:
        got = model.scaling(raw.client("H11", split)[0])
        assert torch.equal(got, data.client("H11", split)[0])


@given(order=st.permutations(FEATURES), extra=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_order_of_columns_changes_no_prediction(history, order, extra):
    rows = table(seed=1)
    model = history.model("north")
    want = model.scores(rows[list(FEATURES)].to_numpy())

    frame = rows[[*order, "hospital"]] if extra else rows[list(order)]
    columns = {name: rows[name].tolist() for name in order}

    equals(model.scores(frame), want)
    equals(model.scores(columns), want)
    assert model.predict(frame).tolist() == model.predict(columns).tolist()


def test_a_table_without_a_column_is_one_sentence(history):
    with sentence("x: expected the columns age, income, visits, got a table without"):
        history.predict("H03", table()[["income", "age"]])
    with sentence(r"x: expected columns of numbers .*got words, .* in \['age'\]"):
        history.predict("H03", table().assign(age="old"))
    with sentence(r"x: expected samples \[B"):
        history.predict("H03", torch.ones(4, 2))


def test_answers_are_names_where_classes_have_names(history):
    model = history.model("H03")
    rows = table()
    names = model.predict(rows)
    numbers = model.predict(rows, class_numbers=True)
    assert names.shape == (len(rows),) and set(names) <= set(CLASSES)
    assert numbers.dtype == torch.int64
    assert [CLASSES[k] for k in numbers] == names.tolist()
    rows.loc[3, "age"] = np.nan
    assert history.predict("H03", rows)[3] is None
    plain = replace(hospitals(), class_names=None)
    labels = simulation(data=plain, model=MODEL, rounds=1).run().predict(0, rows)
    assert labels.dtype == torch.int64 and labels[3] == -1


def test_numbers_and_steps_are_answered_in_their_shape():
    x = torch.randn(20, 2, 4)
    y = torch.randint(0, 2, (20, 4))
    data = Federation.from_clients([(x, y)] * 2, classes=["off", "on"])
    steps = simulation(
        data=data, model=nn.Conv1d(2, 2, 1), rounds=1, evaluation=Evaluation(every=0)
    ).run()
    assert steps.predict(0, x).shape == (20, 4)
    numbers = Federation.from_table(
        table().drop(columns="answer"), "income", "hospital"
    ).split(test=0.3)
    run = simulation(data=numbers, model=nn.Linear(2, 1), rounds=1).run()
    assert run.predict("H03", table()).is_floating_point()


def test_a_name_takes_the_place_of_a_number_everywhere():
    data = hospitals()
    bad = Adversary("sign_flip", ["H11"])
    run = Simulation(
        Waffle(target="north"),
        MODEL,
        data,
        TRAINING,
        rounds=1,
        clients=["north", "H03"],
        evaluation=Evaluation(clients=["north"]),
        robustness=Robustness(adversary=bad),
    )
    assert run.algorithm.target == 2
    assert run.eligible_clients.tolist() == [0, 2]
    assert run.eval_clients.tolist() == [2]
    assert run.robustness.adversary.clients == (1,)
    history = run.run()
    assert history.rounds[0]["cohort"] == [0, 2]
    assert history.model("north").name == "north"
    trusted = FedAvg(mean=FLTrust("H11"))
    assert simulation(trusted, data, model=MODEL).algorithm.mean.trusted_client == 1


def test_a_wrong_name_is_one_sentence(history):
    with sentence("client: got 'H04', did you mean 'H03'"):
        history.model("H04")
    with sentence("client: expected a number from 0 to 2, or a name such as 'H03'"):
        history.model(3)
    names = r"\('H03', 'H11', 'north'\)"
    with sentence(f"target: expected the name of a client {names}, got 'x'"):
        simulation(Waffle(target="x"), hospitals(), model=MODEL)
    with sentence("target: expected a number from 0 to 2, got 'x'"):
        simulation(Waffle(target="x"), images())
    with sentence("target: expected a client's number, where no federation"):
        Server(Waffle(target="x"), MODEL, 3, rounds=1)
    with sentence(f"evaluation.clients: expected the name of a client {names}"):
        simulation(data=hospitals(), model=MODEL, evaluation=Evaluation(clients=["x"]))


def test_runs_for_each_client_are_found_by_name():
    data = hospitals().standardize()
    history = run_each_target(Waffle(), MODEL, data, TRAINING, rounds=1)
    rows = test_rows(data, "H11")
    equals(history.model("H11").scores(rows), history.model(1).scores(rows))


def test_records_have_the_clients_names(history, tmp_path):
    assert history.header["names"] == list(HOSPITALS)
    frame = history.to_pandas(per="client")
    assert frame["name"].tolist() == list(HOSPITALS) * 3
    history.to_csv(tmp_path / "clients.csv", per="client")
    with open(tmp_path / "clients.csv") as file:
        assert [row["name"] for row in csv.DictReader(file)][:3] == list(HOSPITALS)
    without = simulation(rounds=1).run()
    assert "names" not in without.header
    assert "name" not in without.to_pandas(per="client")


def test_names_decide_no_result(tmp_path):
    """A checkpoint of a federation without names of columns and classes is restored."""
    data = hospitals()
    plain = replace(data, columns=None, class_names=None)
    run = simulation("ditto", plain, model=MODEL, rounds=2)
    history = run.run()
    run.save(tmp_path)
    named = simulation("ditto", data, model=MODEL, rounds=2)
    named.restore(tmp_path)
    again = named.run()
    assert again.rounds[-1]["eval"] == history.rounds[-1]["eval"]
    equals(
        again.model(0).scores(table()),
        history.model(0).scores(table()[list(FEATURES)].to_numpy()),
    )


# newcomers --------------------------------------------------------------------
@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("algorithm", swept(quick=("ditto", "finetune")))
def test_a_newcomers_table_is_read_by_name(algorithm):
    data = hospitals().standardize()
    history = simulation(algorithm, data, model=MODEL, rounds=1).run()
    rows = table(seed=2)
    x = rows[list(FEATURES)]
    labels = torch.tensor([CLASSES.index(word) for word in rows["answer"]])

    by_name = history.adapt((x[["visits", "income", "age"]], rows["answer"]), 1)
    by_place = history.adapt((x.to_numpy(), labels), 1)
    named = Federation.from_clients(
        {"new": (x[["income", "visits", "age"]], rows["answer"])}, classes=CLASSES
    )

    equals(by_name.scores(x), by_place.scores(x))
    equals(by_name.scaling.mean, by_place.scaling.mean)
    newcomer = history.adapt(named, 1)
    equals(newcomer.scores(x), by_place.scores(x))
    assert newcomer.name == "new" and by_name.name is None
    assert by_name.columns == FEATURES and by_name.class_names == CLASSES


def test_a_newcomer_without_a_column_is_one_sentence(history):
    with sentence(r"client 0 \(train\): expected the columns \['age', 'income'"):
        history.adapt((table()[["age", "income"]], table()["answer"]))


def test_a_client_apart_predicts_by_name():
    data = hospitals().standardize()
    server = Server("fedavg", MODEL, 3, rounds=1)
    client = Client("fedavg", MODEL, data.subset(["H11"]), TRAINING)
    model = client.model(server.download(0, "evaluation"))
    assert model.name == "H11" and model.columns == FEATURES
    assert set(model.predict(table())) <= set(CLASSES)


# the module -------------------------------------------------------------------
@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("model", [MODEL, lambda: layers("Linear 3 4, Linear 4 3")])
def test_torch_exports_a_module_with_its_scaling(model):
    data = hospitals().standardize()
    history = simulation("ditto", data, model=model, rounds=1).run()
    module = history.model("H11").module()
    x = torch.tensor(table()[list(FEATURES)].to_numpy(), dtype=torch.float32)
    batch = torch.export.Dim("batch")
    five = torch.randn(5, 3)
    program = torch.export.export(module, (five,), dynamic_shapes=({0: batch},))
    equals(program.module()(x), history.model("H11").scores(x))


def test_onnx_has_the_scaling(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    data = hospitals().standardize()
    model = simulation("ditto", data, model=MODEL, rounds=1).run().model("H11")
    x = torch.tensor(table()[list(FEATURES)].to_numpy(), dtype=torch.float32)
    program = torch.onnx.export(model.module(), (x,), dynamo=True)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    name = session.get_inputs()[0].name
    (scores,) = session.run(None, {name: x.numpy()})
    torch.testing.assert_close(
        torch.tensor(scores), model.scores(x), rtol=1e-4, atol=1e-5
    )


# files ------------------------------------------------------------------------
def test_a_manifest_has_what_inputs_need(history, tmp_path):
    history.export(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["columns"] == list(FEATURES)
    assert manifest["class_names"] == list(CLASSES)
    assert manifest["classes"] == 3
    assert manifest["head"] == history.model("north").net.head_name is not None
    assert [entry["name"] for entry in manifest["clients"]] == list(HOSPITALS)
    assert all(len(entry["mean"]) == 3 for entry in manifest["clients"])
    assert "in the order of columns" in manifest["use"]
    plain = simulation(rounds=1).run()
    plain.export(tmp_path / "plain")
    manifest = json.loads((tmp_path / "plain" / "manifest.json").read_text())
    assert manifest["columns"] is manifest["class_names"] is None
    assert "columns" not in manifest["use"]


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("algorithm", swept(quick=("fedbn", "apfl", "fedrod")))
@pytest.mark.parametrize("model", [normed_model, tiny_model()])
def test_a_loaded_model_has_the_scores_of_the_run(tmp_path, algorithm, model):
    data = images()
    history = simulation(algorithm, data, model=model, rounds=2).run()
    history.export(tmp_path)
    x = data.client(1, "test")[0]
    for i in range(data.n):
        loaded = load_model(tmp_path, i)
        equals(loaded(x), history.model(i)(x))
        equals(loaded.predict(x), history.predict(i, x))
        assert loaded.returns == history.model(i).returns


@pytest.mark.parametrize("algorithm", ["fedavg", "apfl", "knnper"])
def test_a_model_of_ones_own_class_is_asked_for(tmp_path, algorithm):
    data = hospitals().standardize()
    history = simulation(algorithm, data, model=own_head, rounds=1).run()
    history.export(tmp_path)
    with sentence("model: expected a model, as the manifest cannot rebuild this one"):
        load_model(tmp_path, "H03")
    rows = table()
    for model in (own_head, own_head()):
        loaded = load_model(tmp_path, "H03", model)
        equals(loaded.scores(rows), history.model("H03").scores(rows))
    with sentence("model: expected the run's architecture"):
        load_model(tmp_path, "H03", tiny_model(3, 3))


def test_frozen_weights_come_with_the_model(tmp_path):
    """A file of an algorithm with several models has the trained tensors alone."""

    def frozen():
        torch.manual_seed(3)
        model = layers("Linear 6 5, Linear 5 4")
        model[0].requires_grad_(False)
        return model

    history = simulation(APFL(), images(), model=frozen(), rounds=1).run()
    history.export(tmp_path)
    with sentence("model: expected a model, as the manifest cannot rebuild"):
        load_model(tmp_path, 0)
    x = torch.randn(5, 6)
    equals(load_model(tmp_path, 0, frozen())(x), history.model(0)(x))
    history = simulation("fedavg", images(), model=frozen(), rounds=1).run()
    history.export(tmp_path / "one")
    equals(load_model(tmp_path / "one", 0)(x), history.model(0)(x))


def test_an_algorithm_of_ones_own_that_mixes_is_asked_for(tmp_path):
    @dataclass(frozen=True)
    class Doubled(FedAvg):
        def predict(self, model, net, x):
            return 2 * net(model["w"], x)

    history = simulation(Doubled(), images(), rounds=1).run()
    history.export(tmp_path)
    x = torch.randn(5, 6)
    with sentence("algorithm: expected one of pflcore's algorithms, got 'Doubled'"):
        load_model(tmp_path, 0)
    equals(load_model(tmp_path, 0, algorithm=Doubled())(x), history.model(0)(x))


@pytest.mark.parametrize("loss", ["hinge", "binary_cross_entropy"])
def test_a_score_that_stands_alone_keeps_its_meaning(tmp_path, loss):
    data = images(classes=2)
    net = Net(nn.Linear(6, 1), loss)
    history = Simulation("ditto", net, data, TRAINING, rounds=1).run()
    history.export(tmp_path)
    x = data.client(0, "test")[0]
    equals(load_model(tmp_path, 0).predict(x), history.predict(0, x))


def test_fields_of_samples_are_kept(tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x["a"] + x["b"])

    x = {"a": torch.randn(12, 3), "b": torch.randn(12, 3)}
    data = Federation.from_clients([(x, torch.arange(12) % 2)] * 2)
    evaluation = Evaluation(split="train")
    history = simulation(data=data, model=Sum(), rounds=1, evaluation=evaluation).run()
    history.export(tmp_path)
    loaded = load_model(tmp_path, 0, Sum())
    equals(loaded.predict(x), history.predict(0, x))


def test_a_folder_without_models_is_one_sentence(tmp_path, history):
    with sentence("folder: expected a folder that history.export has written, got"):
        load_model(tmp_path, 0)
    (tmp_path / "manifest.json").write_text("{")
    with sentence("folder: expected .*, which is no JSON"):
        load_model(tmp_path, 0)
    (tmp_path / "manifest.json").write_text("{}")
    with sentence("folder: expected .* without method, clients"):
        load_model(tmp_path, 0)
    history.export(tmp_path)
    with sentence("client: got 'H33', did you mean 'H03'"):
        load_model(tmp_path, "H33")
    (tmp_path / "client-0.safetensors").write_bytes(b"short")
    with sentence("folder: .* is no whole safetensors file"):
        load_model(tmp_path, "H03")
    text = (tmp_path / "manifest.json").read_text().replace("nn.Tanh", "nn.Bilinear")
    (tmp_path / "manifest.json").write_text(text)
    with sentence("model: the manifest's layers cannot be built"):
        load_model(tmp_path, "H11")


READ_KEYS = (
    "method",
    "options",
    "clients",
    "columns",
    "classes",
    "class_names",
    "fields",
    "loss",
    "head",
    "dtype",
    "state_dict",
    "layers",
)
ENTRY_KEYS = ("file", "mean", "deviation")


def damage(values, key):
    """Copies of a dict of JSON whose value of a key is missing, or of another kind."""
    yield {name: value for name, value in values.items() if name != key}
    for other in (2.5, [1]):
        yield {**values, key: other}


@pytest.mark.parametrize("key", READ_KEYS)
def test_a_damaged_manifest_is_one_sentence(tmp_path, history, key):
    history.export(tmp_path)
    path = tmp_path / "manifest.json"
    whole = json.loads(path.read_text())
    for manifest in damage(whole, key):
        path.write_text(json.dumps(manifest))
        with sentence(f"folder: expected .* (without|damaged at) {key}"):
            load_model(tmp_path, 0)


@pytest.mark.parametrize("key", ENTRY_KEYS)
def test_a_damaged_entry_of_a_client_is_one_sentence(tmp_path, history, key):
    history.export(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    for entry in damage(manifest["clients"][0], key):
        others = manifest["clients"][1:]
        path.write_text(json.dumps({**manifest, "clients": [entry, *others]}))
        with sentence("folder: expected .* damaged at clients"):
            load_model(tmp_path, 1)


# models that a manifest cannot tell --------------------------------------------


def three_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def with_forward_hook():
    model = three_layers()
    model[1].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return model


def with_pre_hook():
    model = three_layers()
    model[2].register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0],))
    return model


def with_keyword_hook():
    model = three_layers()
    model.register_forward_pre_hook(
        lambda layer, inputs, options: ((2 * inputs[0],), options), with_kwargs=True
    )
    return model


def with_patched_forward():
    model = three_layers()
    model[1].forward = MethodType(lambda layer, x: 2 * x.relu(), model[1])
    return model


def with_own_buffer():
    model = three_layers()
    model[0].register_buffer("factor", torch.tensor(2.0), persistent=False)
    return model


def with_weight_norm():
    model = three_layers()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def with_other_padding():
    model = nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()
    )
    model[1].padding_mode = "circular"
    model[1]._reversed_padding_repeated_twice = [1, 1]
    return model.append(nn.Linear(3, 3))


UNTOLD = (
    with_forward_hook,
    with_pre_hook,
    with_keyword_hook,
    with_patched_forward,
    with_own_buffer,
    with_weight_norm,
    with_other_padding,
)


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("make", UNTOLD)
@pytest.mark.parametrize("algorithm", ["finetune", "apfl"])
def test_a_model_that_a_manifest_cannot_tell_needs_its_code(tmp_path, make, algorithm):
    data = hospitals().standardize()
    history = simulation(algorithm, data, model=make(), rounds=1).run()
    history.export(tmp_path)
    with sentence("model: expected a model, as the manifest cannot rebuild this one"):
        load_model(tmp_path, 0)
    x = torch.randn(5, 3)
    equals(load_model(tmp_path, 0, make).scores(x), history.model(0).scores(x))


def test_a_hook_of_all_modules_needs_its_code(tmp_path):
    data = hospitals().standardize()
    history = simulation("finetune", data, model=three_layers(), rounds=1).run()
    hook = register_module_forward_hook(lambda layer, inputs, output: 2 * output)
    try:
        history.export(tmp_path)
    finally:
        hook.remove()
    with sentence("model: expected a model, as the manifest cannot rebuild this one"):
        load_model(tmp_path, 0)


def test_settings_that_were_changed_later_come_back(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Linear(4, 3))
    model[1].negative_slope = 0.7
    history = simulation("apfl", hospitals(), model=model, rounds=1).run()
    history.export(tmp_path)
    x = torch.randn(5, 3)
    equals(load_model(tmp_path, 0).scores(x), history.model(0).scores(x))


@pytest.mark.parametrize("algorithm", ["finetune", "apfl"])
def test_a_layer_of_several_fields_comes_back(tmp_path, algorithm):
    x = {"input1": torch.randn(12, 3), "input2": torch.randn(12, 2)}
    data = Federation.from_clients([(x, torch.arange(12) % 2)] * 2)
    evaluation = Evaluation(split="train")
    model = nn.Bilinear(3, 2, 2)
    run = simulation(algorithm, data, model=model, rounds=1, evaluation=evaluation)
    history = run.run()
    history.export(tmp_path)
    equals(load_model(tmp_path, 0).scores(x), history.model(0).scores(x))


def test_a_frozen_head_that_was_named_is_exported(tmp_path):
    model = three_layers()
    model[2].requires_grad_(False)
    data = hospitals().standardize()
    net = Net(model, head="2")
    history = Simulation("apfl", net, data, TRAINING, rounds=1).run()
    history.export(tmp_path)
    x = torch.randn(5, 3)
    equals(load_model(tmp_path, 0, model).scores(x), history.model(0).scores(x))
