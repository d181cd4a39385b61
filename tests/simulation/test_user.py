"""What a user brings (an algorithm, a loss, metrics, a schedule, callbacks), and what comes out
(tables, events, models, newcomers)."""

import copy
import csv
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from methods import APFL, Ditto, Waffle
from parts.user import TRAINING, Mine, simulation
from small import SIX, images, swept, tiny_model
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from pflcore import (
    EarlyStopping,
    Evaluation,
    FedAvg,
    Federation,
    Net,
    Objective,
    Simulation,
    Stop,
    Training,
    for_everyone,
    tune,
)
from pflcore.metrics import auc, balanced_accuracy, f1, mae, r2, rmse


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("mine")
    module.Mine, module.number = Mine, 3
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def targets():
    gen = torch.Generator().manual_seed(0)
    x = [torch.randn(20, 6, generator=gen) for _ in range(3)]
    return Federation.from_arrays(
        [(v, v @ torch.arange(6.0) / 6 + 0.1 * i) for i, v in enumerate(x)], test_fraction=0.4
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "fedavgg",
            "expected one of fedavg, .* or 'package.module:Class' for one of your own, got "
            "'fedavgg'",
        ),
        ("no_such_module:Mine", "there is no module 'no_such_module' to import from here"),
        ("mine:Yours", "the module 'mine' has no 'Yours'"),
        (
            "mine:number",
            "expected 'mine:number' to be a class derived from pflcore.Algorithm, got int",
        ),
        (
            3,
            "expected a name, a class derived from pflcore.Algorithm or an instance of one, got "
            "int",
        ),
        (
            nn.Linear,
            "expected a name, a class derived from pflcore.Algorithm or an instance of one, got "
            "Linear",
        ),
    ],
)
def test_what_is_no_algorithm_is_one_sentence(package, given, sentence):
    with pytest.raises((ValueError, TypeError), match=f"^algorithm: {sentence}") as e:
        simulation(given)
    assert str(e.value).count(". ") == 0


def test_tuning_asks_for_roles():
    with pytest.raises(
        TypeError,
        match=r"protocol: expected cross_silo\(data\) or cross_device\(data\), .* got Federation",
    ):
        tune(images(), tiny_model(), "fedavg", TRAINING, {}, rounds=1)


# shared and private columns -------------------------------------------------


@pytest.mark.parametrize("patterns", [(), ("0.*",), ("*.bias",), ("*",)])
def test_split_and_join_are_inverse(patterns):
    net = Net(tiny_model())
    rows = torch.arange(3.0 * net.size).view(3, net.size)
    shared, private = net.split(rows, *patterns)
    mask = net.mask(*(patterns or ("2.*",)))
    assert torch.equal(private, rows[:, mask]) and torch.equal(shared, rows[:, ~mask])
    assert torch.equal(net.join(shared, private, *patterns), rows)
    # one body, several heads
    assert torch.equal(
        net.join(shared[0], private, *patterns)[1:, ~mask], rows[0, ~mask].expand(2, -1)
    )
    assert torch.equal(
        torch.vmap(lambda r: net.join(*net.split(r, *patterns), *patterns))(rows), rows
    )


def test_split_and_join_refuse_what_does_not_fit():
    net = Net(tiny_model())
    with pytest.raises(ValueError, match=r"patterns: 'fc\.\*' matches no parameter"):
        net.split(net.w0, "fc.*")
    with pytest.raises(
        ValueError,
        match="shared and private: expected 35 and 24 columns, got 24 and 35; "
        "give join the patterns",
    ):
        net.join(*reversed(net.split(net.w0)))


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_a_bool_mask_is_a_mask(engine):
    class Masked(FedAvg):
        def train(self, down, own, clients):
            mask = clients.net.mask("2.*")
            fit = clients.fit(down["x"], Objective(mask=mask))
            w = fit.w
            assert torch.equal(w, clients.fit(down["x"], Objective(mask=mask.to(w.dtype))).w)
            assert torch.equal(w[:, ~mask], down["x"][:, ~mask])
            assert not torch.equal(w[:, mask], down["x"][:, mask])
            return own, {"delta": w - down["x"]}, fit

    assert simulation(Masked, rounds=1, engine=engine).run().stopped is None


# a loss ---------------------------------------------------------------------


def test_a_loss_is_a_name_a_function_or_a_module():
    by_default = simulation().run()
    for loss in (
        "cross_entropy",
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        lambda scores, y: F.cross_entropy(scores, y),
    ):
        history = simulation(loss=loss).run()
        assert torch.allclose(history.series("loss")[1], by_default.series("loss")[1], rtol=1e-5)
    weighted = simulation(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 1.0, 1.0])))
    assert not torch.allclose(
        weighted.run().series("loss")[1], by_default.series("loss")[1], rtol=1e-2
    )
    assert by_default.header["criterion"] == "cross_entropy" and weighted.header()[
        "criterion"
    ].startswith("CrossEntropyLoss ")


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        ("entropy", "expected one of cross_entropy, .* got 'entropy'"),
        (
            nn.CrossEntropyLoss,
            r"expected a loss, got the class CrossEntropyLoss; write CrossEntropyLoss\(\)",
        ),
        (
            nn.CrossEntropyLoss(reduction="none"),
            r"expected the mean over a batch, got CrossEntropyLoss\(reduction='none'\)",
        ),
        (nn.Linear(2, 1), "Linear has parameters, which nothing would train"),
        (0.5, "expected one of cross_entropy, .* got 0.5"),
    ],
)
def test_what_is_no_loss_is_one_sentence(loss, sentence):
    with pytest.raises((ValueError, TypeError), match=f"^criterion: {sentence}"):
        Net(tiny_model(), loss)
    with pytest.raises((ValueError, TypeError), match=f"^(loss|criterion): {sentence}"):
        simulation(loss=loss)


def test_a_net_has_its_own_loss():
    with pytest.raises(ValueError, match="loss: this Net has a loss of its own"):
        Simulation("fedavg", Net(tiny_model()), images(), loss="cross_entropy")


# metrics --------------------------------------------------------------------


def test_metrics_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    gen = torch.Generator().manual_seed(0)
    scores, y = torch.randn(60, 3, generator=gen), torch.randint(0, 3, (60,), generator=gen)
    p, won = scores.softmax(1).double(), scores.argmax(1)
    ovr = metrics.roc_auc_score(y, p, multi_class="ovr")
    assert auc(scores, y) == pytest.approx(ovr) == auc(p, y)
    assert f1(scores, y) == metrics.f1_score(y, won, average="macro")
    assert balanced_accuracy(scores, y) == pytest.approx(metrics.balanced_accuracy_score(y, won))
    two, label = scores[:, :2], (y > 0).long()
    assert auc(two, label) == pytest.approx(metrics.roc_auc_score(label, two.softmax(1)[:, 1]))
    assert f1(two, label) == metrics.f1_score(label, two.argmax(1))
    # one score, labels -1 and 1
    assert auc(two[:, :1], 2 * label - 1) == metrics.roc_auc_score(label, two[:, 0])
    t = torch.randn(60, generator=gen)
    assert mae(scores[:, :1], t) == pytest.approx(metrics.mean_absolute_error(t, scores[:, 0]))
    assert rmse(scores[:, :1], t) == pytest.approx(
        metrics.mean_squared_error(t, scores[:, 0]) ** 0.5
    )
    assert r2(scores[:, :1], t) == pytest.approx(metrics.r2_score(t, scores[:, 0]))


def test_a_metric_without_a_value_is_nan():
    pytest.importorskip("sklearn")
    one_class = torch.zeros(4, dtype=torch.long)
    nans = (
        auc(torch.randn(4, 2), one_class),
        f1(torch.tensor([[1.0, 0.0]] * 4), one_class),
        r2(torch.randn(1), torch.randn(1)),
    )
    assert all(v != v for v in nans)
    scores = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    present = [
        auc(scores.softmax(1)[:, c : c + 1] - 0.5, (torch.tensor([0, 0, 0, 1, 1, 1]) == c).long())
        for c in (0, 1)
    ]
    # class 2, which nobody has, does not count
    assert auc(scores, torch.tensor([0, 0, 0, 1, 1, 1])) == pytest.approx(sum(present) / 2)


@pytest.mark.parametrize("algorithm", ["fedavg", "knnper", "apfl"])
def test_a_run_records_metrics_per_client(algorithm):
    pytest.importorskip("sklearn")

    def share_right(scores, y):
        return (scores.argmax(1) == y).double().mean()

    history = simulation(algorithm, metrics=["auc", share_right]).run()
    seen = history.rounds[-1]["eval"]
    assert seen["share_right"] == pytest.approx(seen["accuracy"]) and len(seen["auc"]) == 3
    assert history.header["metrics"] == ["auc", "share_right"]
    named = simulation(metrics={"zero": lambda s, y: 0}).run()
    assert named.series("zero")[1].tolist() == [[0, 0, 0]] * 3


def test_a_run_records_metrics_of_values():
    pytest.importorskip("sklearn")
    values = Simulation(
        "fedavg",
        nn.Linear(6, 1),
        targets(),
        TRAINING,
        rounds=20,
        evaluation=Evaluation(metrics=["mae", "r2"]),
    )
    assert min(values.run().rounds[-1]["eval"]["r2"]) > 0.5


def test_a_metric_that_breaks_says_for_whom():
    def broken(scores, y):
        return 1 / (len(y) - 20)

    run = simulation(metrics=[broken])
    with pytest.raises(
        ValueError,
        match="metrics: 'broken' failed for client 1 with ZeroDivisionError: division by zero",
    ):
        run.run()


# a schedule -----------------------------------------------------------------


def test_a_schedule_of_torchs_gives_its_rates():
    def rates(schedule, rounds=4, lr=0.1):
        return [Training(lr=lr, schedule=schedule).lr_at(r, rounds) for r in range(1, rounds + 1)]

    assert rates(lambda optimizer: StepLR(optimizer, 2, 0.5)) == pytest.approx(
        [0.1, 0.1, 0.05, 0.05]
    )
    assert rates(lambda o: ExponentialLR(o, 0.5)) == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    # eta_min is no multiplier
    assert rates(lambda o: CosineAnnealingLR(o, T_max=2, eta_min=0.02), 3) == pytest.approx(
        [0.1, 0.06, 0.02]
    )
    assert rates(lambda o: OneCycleLR(o, 0.4, total_steps=4, cycle_momentum=False))[
        0
    ] == pytest.approx(0.4 / 25)
    with pytest.raises(ValueError, match="schedule: torch's scheduler ends after round 4 of 5"):
        rates(lambda o: OneCycleLR(o, 0.4, total_steps=3, cycle_momentum=False), 5)
    factors = [1, 0.5, 0.25]
    # no step beyond the last
    assert rates(lambda o: LambdaLR(o, lambda step: factors[step]), 3) == pytest.approx(
        [0.1, 0.05, 0.025]
    )
    with pytest.raises(
        ValueError,
        match="schedule: torch's scheduler ends after round 3 of 4: list index out of range",
    ):
        rates(lambda o: LambdaLR(o, lambda step: factors[step]))
    assert rates(lambda r, n: 1 - r / n) == pytest.approx([0.075, 0.05, 0.025, 0])
    a = simulation().run()
    slow = Simulation(
        "fedavg",
        tiny_model(),
        images(),
        Training(lr=0.1, batch_size=8, schedule=lambda o: StepLR(o, 1, 0.0)),
        rounds=3,
    ).run()
    assert (
        slow.rounds[0]["eval"] == a.rounds[0]["eval"]
        and slow.rounds[1]["eval"] == slow.rounds[2]["eval"]
    )


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (ReduceLROnPlateau, "ReduceLROnPlateau looks at results"),
        (lambda o: ReduceLROnPlateau(o), "ReduceLROnPlateau looks at results"),
        (
            ExponentialLR,
            "expected a function of .* missing 1 required positional argument: 'gamma'",
        ),
        (
            ExponentialLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), 0.5),
            "got a ExponentialLR that has an optimizer",
        ),
        (lambda o: None, "it made NoneType"),
        (lambda r, n: None, "in round 1 it gave NoneType"),
        (
            lambda r, n: -1.0,
            "expected a finite step size >= 0 in every round, got -0.1 in round 1 of 3",
        ),
        (lambda r, n: 1 / (r - 2), "for round 2 of 3 it raised ZeroDivisionError"),
        (
            lambda o: OneCycleLR(o, 0.1, total_steps=9),
            "this scheduler of torch's moves the momentum too",
        ),
        (lambda o: OneCycleLR(o, 0.1, total_steps=-9), "torch's scheduler was not made"),
        (0.9, "expected a function of"),
    ],
)
def test_what_is_no_schedule_is_said_before_the_first_round(schedule, sentence):
    with pytest.raises(
        (ValueError, TypeError), match=f"^schedule: .*{sentence}|^schedule: {sentence}"
    ):
        Simulation("fedavg", tiny_model(), images(), Training(schedule=schedule), rounds=3)


# callbacks ------------------------------------------------------------------


def test_a_callback_that_raises_loses_nothing():
    whole = simulation(rounds=5).run()
    run, seen = simulation(rounds=5), []

    def callback(round, record):
        seen.append(round)
        if round == 3:
            raise KeyError("my own mistake")

    with pytest.raises(KeyError) as e:
        run.run([callback, lambda r, record: None])
    kept = e.value.history
    assert (
        kept is run.history
        and [r["round"] for r in kept.rounds] == [1, 2, 3]
        and "KeyError in round 3" in kept.stopped
    )
    assert kept.model(0) is not None
    rest = run.run()
    assert [r["round"] for r in rest.rounds] == [4, 5] and [
        r["eval"] for r in kept.rounds + rest.rounds
    ] == [r["eval"] for r in whole.rounds]
    with pytest.raises(TypeError, match="on_round: expected a function"):
        run.run(3)


def test_stop_ends_a_run_with_its_sentence():
    def callback(round, record):
        if round == 2:
            raise Stop("That will do.")

    history = simulation(rounds=5).run(callback)
    assert history.stopped == "That will do." and len(history.rounds) == 2


def test_early_stopping():
    stop = EarlyStopping(patience=2, key="accuracy", min_delta=0.1)
    values = iter([0.2, 0.5, 0.55, float("nan")])

    def record(value):
        return {"eval": {"accuracy": [value, None, value], "size": [1, 0, 1]}}

    for round in (1, 2, 4):
        stop(round, record(next(values)))
    stop(5, {"eval": None})
    with pytest.raises(
        Stop, match=r"Stopped early after round 6: accuracy 0\.5 of round 2 stood for 2 evaluations"
    ):
        stop(6, record(next(values)))
    stop(1, record(0.1))  # the next run
    assert stop.best == 0.1 and stop.round == 1
    with pytest.raises(ValueError, match="key: expected one of accuracy, got 'auc'"):
        EarlyStopping(key="auc")(1, record(0.3))
    frozen = Simulation("fedavg", tiny_model(), images(), Training(lr=0.0), rounds=20).run(
        EarlyStopping(patience=3)
    )
    assert len(frozen.rounds) == 4 and frozen.stopped is not None


# what comes out -------------------------------------------------------------


def test_a_history_as_a_table(tmp_path):
    history = simulation(every=2, participation=0.7).run()
    history.to_csv(tmp_path / "rounds.csv")
    history.to_csv(tmp_path / "clients.csv", per="client")
    with open(tmp_path / "rounds.csv") as file:
        rounds = list(csv.DictReader(file))
    with open(tmp_path / "clients.csv") as file:
        clients = list(csv.DictReader(file))
    assert (
        [r["round"] for r in rounds] == ["1", "2", "3"]
        and rounds[0]["mean_accuracy"] == ""
        and rounds[0]["clients"] == "2"
    )
    assert float(rounds[1]["mean_accuracy"]) == pytest.approx(history.series()[1][0].mean().item())
    assert [(c["round"], c["client"]) for c in clients] == [
        (str(r), str(i)) for r in (2, 3) for i in range(3)
    ]
    assert [c["took_part"] == "True" for c in clients[:3]] == [
        i in history.rounds[1]["cohort"] for i in range(3)
    ]
    with pytest.raises(ValueError, match="per: expected 'round' or 'client', got 'seed'"):
        history.to_csv(tmp_path / "x.csv", per="seed")
    with pytest.raises(ValueError, match="path: expected a file that can be written"):
        history.to_csv(tmp_path / "nowhere" / "x.csv")
    pandas = pytest.importorskip("pandas")
    frame = history.to_pandas("client")
    assert isinstance(frame, pandas.DataFrame) and frame.groupby("round")["accuracy"].mean()[
        3
    ] == pytest.approx(history.series()[1][1].mean().item())


@pytest.mark.parametrize("algorithm", swept(quick=(*SIX, "fedrod", "knnper", "hypcluster")))
def test_a_clients_model_is_what_was_evaluated(algorithm):
    run = simulation(algorithm, rounds=2)
    history, data = run.run(), run.data
    for i in range(data.n):
        x, y = data.client(i, "test")
        assert (history.predict(i, x.numpy()) == y).double().mean().item() == pytest.approx(
            history.rounds[-1]["eval"]["accuracy"][i]
        )
    model = history.model(1)
    assert isinstance(model, nn.Module)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


def test_a_model_of_its_own_class():
    run = simulation(Ditto, rounds=2)
    history = run.run()
    module = history.model(1).module()
    x, _ = run.data.client(1, "test")
    assert (
        isinstance(module, nn.Sequential)
        and torch.equal(module(x), history.model(1)(x))
        and not module.training
    )
    pickle.dumps(module)
    with pytest.raises(ValueError, match="module: APFL predicts with more than one model"):
        simulation(APFL, rounds=1).run().model(0).module()
    for client in (3, -1, "0", True):
        with pytest.raises(ValueError, match="client: expected a number from 0 to 2, got"):
            history.model(client)
    with pytest.raises(ValueError, match=r"x: expected samples \[B, ...\]"):
        history.predict(0, 1.0)


def test_values_are_predicted_as_values():
    data = targets()
    history = Simulation("fedavg", nn.Linear(6, 1), data, TRAINING, rounds=2).run()
    x, y = data.client(0, "test")
    assert history.predict(0, x).shape == y.shape
    labels = Federation.from_arrays([(v, (v[:, 0] > 0).long()) for v in (x, -x)], test_fraction=0.5)
    history = Simulation("fedavg", nn.Linear(6, 1), labels, TRAINING, rounds=9, loss="hinge").run()
    x, y = labels.client(0, "test")
    assert (history.predict(0, x) == y).double().mean() == history.rounds[-1]["eval"]["accuracy"][0]


def test_batch_norm_predicts_with_the_clients_statistics():
    def model():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    data = images()
    history = Simulation("ditto", model, data, TRAINING, rounds=2).run()
    for i in range(3):
        x, y = data.client(i, "test")
        assert (history.predict(i, x) == y).double().mean() == pytest.approx(
            history.rounds[-1]["eval"]["accuracy"][i]
        )
        assert torch.allclose(history.model(i).module()(x), history.model(i)(x))


def test_a_model_for_everyone():
    data = images()
    history = for_everyone(Waffle, tiny_model(), data, TRAINING, rounds=2)
    for i in range(3):
        x, y = data.client(i, "test")
        assert (history.predict(i, x) == y).double().mean() == pytest.approx(
            history.rounds[-1]["eval"]["accuracy"][i]
        )
    with pytest.raises(ValueError, match="client: expected a number from 0 to 2"):
        history.model(3)
    with pytest.raises(ValueError, match="adapt: expected the history that"):
        history.adapt(data.client(0, "train"))


@pytest.mark.parametrize("algorithm", swept(quick=(*SIX, "fedrod", "knnper", "hypcluster")))
def test_a_newcomer_leaves_the_run_as_it_was(algorithm):
    everybody = images((7, 20, 31, 24))
    run = simulation(algorithm, everybody.subset([0, 1, 2]), rounds=2)
    history = run.run()
    before = copy.deepcopy(history.state)
    x, y = everybody.client(3, "train")
    model = history.adapt((x, y), rounds=2)
    assert model.predict(x).shape == y.shape and model(x).isfinite().all()
    for part in ("server", "clients"):
        for k, v in getattr(before, part).items():
            assert torch.equal(v, getattr(history.state, part)[k]), (part, k)
    assert torch.equal(history.adapt((x, y), rounds=2)(x), model(x))


def test_a_newcomer_is_personalized_by_the_algorithms_rule():
    everybody = images((40, 40, 40, 40))  # clients 1 and 3 turn their labels
    few, (x, y) = everybody.subset([0, 2, 1]), everybody.client(3, "train")
    test = everybody.client(3, "test")

    def right(algorithm, rounds=5):
        history = Simulation(
            algorithm, tiny_model(), few, Training(lr=0.3, batch_size=8), rounds=8
        ).run()
        return (history.adapt((x, y), rounds).predict(test[0]) == test[1]).double().mean().item()

    shared = right("fedavg")
    assert right("fedavg", 0) == shared < 0.6  # it has no rule: the newcomer gets the shared model
    for algorithm in ("ditto", "local", "finetune", "feddwa", "fedrod"):
        assert right(algorithm) > shared + 0.15, algorithm


def test_a_newcomer_that_does_not_fit_is_one_sentence():
    history = simulation(rounds=1).run()
    with pytest.raises(ValueError, match=r"samples: expected inputs of shape \(6,\)"):
        history.adapt((torch.randn(9, 5), torch.zeros(9, dtype=torch.long)))
    with pytest.raises(
        ValueError, match="samples: expected those of one client, got a federation of 3"
    ):
        history.adapt(images())
    with pytest.raises(ValueError, match="rounds: expected a whole number, at least 0, got -1"):
        history.adapt(images().client(0), rounds=-1)
    with pytest.raises(ValueError, match="model: this history holds no models"):
        type(history)({}).model(0)
