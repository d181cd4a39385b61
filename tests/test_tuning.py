"""Motley's protocol: splits that leak nothing, grids that cannot see test data, records that
resume."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from methods import Ditto, FineTune, KnnPer, Mocha
from parts.tuning import PROTOCOLS, TRAINING, federation, model
from small import images, make_setting, tiny_model

from pflcore import (
    Evaluation,
    FedAvg,
    Federation,
    Hardware,
    Net,
    Simulation,
    cross_device,
    cross_silo,
    evaluate,
    step,
    tune,
)
from pflcore.algorithms import Traits
from pflcore.simulation.round import Setup, begin, sample


def poisoned(p):
    """The same protocol with every test label wrong."""
    y = p.data.y.clone()
    for rows in p.data.index["test"]:
        y[rows] = (y[rows] + 1) % 3
    return replace(p, data=replace(p.data, y=y))


# splits ---------------------------------------------------------------------
def test_cross_device_roles_and_halves():
    data = federation()
    p = cross_device(data, 6, 3, 3)
    everyone = torch.cat([p.train, p.choose, p.report])
    assert sorted(everyone.tolist()) == list(range(12)) and (
        len(p.train),
        len(p.choose),
        len(p.report),
    ) == (6, 3, 3)
    for i in range(12):
        n, own = data.size()[i], set(data.index["train"][i].tolist())
        lists = {s: p.data.index[s][i].tolist() for s in ("train", "val", "test")}
        assert {j for rows in lists.values() for j in rows} == own and sum(
            map(len, lists.values())
        ) == n
        role = "train" if i in p.train else "val" if i in p.choose else "test"
        if role == "train":
            assert lists["val"] == lists["test"] == []
        else:
            assert len(lists["train"]) == n // 2 and lists["test" if role == "val" else "val"] == []
    again = cross_device(data, 6, 3, 3)
    assert all(
        torch.equal(a, b)
        for s in p.data.splits
        for a, b in zip(p.data.index[s], again.data.index[s], strict=True)
    )


def test_cross_silo_sizes_and_what_blind_hides():
    p = cross_silo(federation(size=22))
    # ceil(3.3), ceil(18 * .15 / .85)
    assert (p.data.size("test")[0], p.data.size("val")[0], p.data.size("train")[0]) == (4, 4, 14)
    assert torch.equal(p.train, torch.arange(12)) and torch.equal(p.train, p.report)
    assert p.blind.splits == ("train", "val")
    with pytest.raises(ValueError, match="test"):
        setting = make_setting(model(), p.blind, TRAINING, 1, engine="vmap", workers=1)
        evaluate(Setup(FedAvg(), setting), begin(FedAvg(), model(), 12), "test")
    assert cross_silo(p.data).data is p.data


def test_a_client_of_one_sample_does_not_stop_the_others():
    fed = Federation.from_clients(
        [(torch.randn(m, 2), torch.arange(m) % 3) for m in (1, 2, 20)], classes=3
    )
    p = cross_silo(fed)
    assert [p.data.size(s).tolist() for s in ("train", "val", "test")] == [
        [1, 1, 14],
        [0, 0, 3],
        [0, 1, 3],
    ]
    assert "clients without val samples: 2" in p.data.summary()
    run = Simulation(
        FineTune(choose="client", margin=-1.0),
        Net(lambda: nn.Linear(2, 3)),
        p.data,
        TRAINING,
        rounds=1,
    ).run()
    accuracy = torch.tensor(run.rounds[0]["eval"]["accuracy"])
    assert accuracy.isnan().tolist() == [True, False, False]
    with pytest.raises(ValueError, match="expected a client with enough samples"):
        cross_silo(fed.subset([0]))


def test_statistics_of_what_is_held_out_never_shape_the_features():
    """Poisoned evaluation samples move nobody's features: they are standardised after the split, by
    personalization samples alone."""
    fed = federation(n=6, size=24)
    for make in (
        lambda f: cross_silo(f, seed=3, standardize=True),
        lambda f: cross_device(f, 2, 2, 2, standardize=True),
    ):
        p = make(fed)
        x = fed.x.clone()
        for split in ("val", "test"):
            for rows in p.data.index[split]:
                x[rows] = 1e6
        again = make(replace(fed, x=x))
        for i in range(6):
            assert torch.equal(p.data.client(i)[0], again.data.client(i)[0])
            torch.testing.assert_close(
                p.data.client(i)[0].mean(0), torch.zeros(4), atol=1e-6, rtol=0
            )
    for split in (cross_silo, cross_device):
        with pytest.raises(ValueError, match=r"^data: .*not standardized.*\.$"):
            split(fed.standardize())


def test_smaller_personalization_sets_are_nested_and_leave_the_evaluation_halves():
    p = PROTOCOLS["device"]()
    sets = [p.keep(f).data for f in (1.0, 0.5, 0.25)]
    for i in p.report.tolist():
        a, b, c = (s.index["train"][i].tolist() for s in sets)
        assert a[: len(b)] == b and b[: len(c)] == c and len(b) == math.ceil(len(a) / 2)
        assert all(torch.equal(s.index["test"][i], p.data.index["test"][i]) for s in sets)
    assert all(
        torch.equal(sets[2].index["train"][i], p.data.index["train"][i]) for i in p.train.tolist()
    )


def test_only_some_clients_train_and_are_evaluated():
    p = PROTOCOLS["device"]()
    run = Simulation(
        Ditto(),
        model(),
        p.data,
        TRAINING,
        rounds=3,
        participation=0.5,
        clients=p.train,
        evaluation=Evaluation(clients=p.report),
    )
    history = run.run()
    assert {i for r in history.rounds for i in r["cohort"]} <= set(p.train.tolist()) and len(
        history.rounds[0]["cohort"]
    ) == 3
    accuracy = torch.tensor(history.rounds[-1]["eval"]["accuracy"])
    assert accuracy.isnan().logical_not().nonzero().flatten().tolist() == p.report.tolist()
    assert int(run.state.seen.sum()) >= 3 and not run.state.seen[p.report].any()
    everybody = sample(run.setup, 1, 1.0, p.train.flip(0))
    assert torch.equal(everybody, p.train)


def test_a_client_without_samples_to_test_on_is_nan_and_the_others_as_ever():
    fed = federation(4)
    p = cross_silo(fed)
    setting = make_setting(model(), p.data, TRAINING, 1, engine="vmap", workers=1)
    state, _ = step(Setup(FedAvg(), setting), begin(FedAvg(), setting.net, 4), torch.arange(4))
    whole = evaluate(Setup(KnnPer(), setting), state)
    lists = list(p.data.index["test"])
    lists[2] = lists[2][:0]
    other = setting._replace(data=replace(p.data, index={**p.data.index, "test": lists}))
    part = evaluate(Setup(KnnPer(), other), state)
    for k in ("loss", "accuracy"):
        assert part[k][2].isnan() and torch.equal(part[k][[0, 1, 3]], whole[k][[0, 1, 3]])
    assert part["size"].tolist() == [whole["size"][0], whole["size"][1], 0, whole["size"][3]]


GRIDS = {
    "training": (FedAvg(), {"training.lr": [0.001, 0.3]}),
    "finetune": (FineTune(), {"finetune_lr": [0.05, 0.5], "finetune_epochs": [0, 1, 4]}),
    "knn": (KnnPer(k=3), {"lam": [0.0, 0.4, 0.8], "server_lr": [0.5, 1.0]}),
}


@pytest.mark.parametrize("setting", PROTOCOLS)
@pytest.mark.parametrize("name", GRIDS)
def test_poisoned_test_labels_change_no_choice(setting, name):
    p, (alg, grid) = PROTOCOLS[setting](), GRIDS[name]
    a, b = (tune(q, model(), alg, TRAINING, grid, 4) for q in (p, poisoned(p)))
    assert a.best.candidate.options == b.best.candidate.options and [t.score for t in a.trials] == [
        t.score for t in b.trials
    ]
    clean, wrong = a.report()["accuracy"][p.report], b.report()["accuracy"][p.report]
    assert not clean.isnan().any() and not torch.equal(clean, wrong)
    outside = torch.ones(12, dtype=torch.bool).index_fill(0, p.report, False)
    assert a.report()["accuracy"][outside].isnan().all()


def test_the_choice_is_the_best_on_validation_and_the_report_is_its_test_result():
    p = PROTOCOLS["device"]()
    tuned = tune(p, model(), FedAvg(), TRAINING, {"training.lr": [0.001, 0.3]}, 4)
    scores, results = [], []
    for lr in (0.001, 0.3):
        run = Simulation(
            FedAvg(),
            model(),
            p.data,
            replace(TRAINING, lr=lr),
            rounds=4,
            clients=p.train,
            evaluation=Evaluation(every=9),
        )
        run.run()
        scores.append(evaluate(run.setup, run.state, "val")["accuracy"][p.choose].mean().item())
        results.append(evaluate(run.setup, run.state, "test")["accuracy"])
    assert [t.score for t in tuned.trials] == pytest.approx(scores) and scores[0] != scores[1]
    best = max(range(2), key=scores.__getitem__)
    torch.testing.assert_close(tuned.report()["accuracy"], results[best], equal_nan=True)
    assert (
        tuned.best.candidate.options == {"training.lr": (0.001, 0.3)[best]}
        and "chosen" in tuned.table()
    )


def test_a_diverged_candidate_is_recorded_and_loses(tmp_path):
    p = PROTOCOLS["silo"]()
    net = Net(lambda: nn.Linear(4, 1), "squared")
    data = replace(p.data, y=p.data.y.float(), classes=None)
    p = replace(p, data=data)
    tuned = tune(p, net, FedAvg(), TRAINING, {"training.lr": [1e30, 0.01]}, 6, folder=tmp_path)
    assert (
        tuned.best.candidate.training.lr == 0.01
        and tuned.trials[0].score == -math.inf
        and tuned.trials[0].stopped
    )
    lines = [json.loads(line) for line in (tmp_path / "tuning.jsonl").read_text().splitlines()]
    assert (
        "header" in lines[0]
        and lines[1]["stopped"] == tuned.trials[0].stopped
        and lines[2]["stopped"] is None
    )
    unstable = tune(p, net, Mocha(), replace(TRAINING, lr=0.01), {"lam": [30.0, 0.01]}, 6)
    assert (
        "MOCHA is unstable" in unstable.trials[0].stopped
        and unstable.best.candidate.algorithm.lam == 0.01
    )
    with pytest.raises(ValueError, match=r"^grid: every candidate diverged"):
        tune(p, net, FedAvg(), TRAINING, {"training.lr": [1e30]}, 6)


def test_a_candidate_that_loses_clients_cannot_win():
    """It would be the best of all where only those count that survived it."""
    p = PROTOCOLS["silo"]()
    p = replace(p, data=replace(p.data, y=p.data.y.float(), classes=None, relabel=None))

    class Selective(KnnPer):
        def model(self, down, own, clients):
            w = down["x"].clone()
            w[clients.ids < 5] = torch.nan if self.lam > 0.5 else 10.0
            return {"w": w}

        predict = FedAvg.predict
        traits = Traits(late=("k", "lam"))

    tuned = tune(
        p,
        Net(lambda: nn.Linear(4, 1), "squared"),
        Selective(),
        replace(TRAINING, lr=0.01),
        {"lam": [0.0, 1.0]},
        3,
    )
    lost = tuned.trials[1]
    survivors = lost.values[0][~lost.values[0].isnan()]
    assert len(survivors) == 7 and survivors.mean() > tuned.trials[0].score  # so it looked better
    assert tuned.best is tuned.trials[0] and lost.score == -math.inf
    assert (
        lost.stopped == "The validation values of 5 of 12 clients are not finite."
        and lost.stopped in tuned.table()
    )


def test_what_tuning_trains_on_has_no_test_split():
    tuned = tune(PROTOCOLS["silo"](), model(), FedAvg(), TRAINING, {"training.lr": [0.1]}, 1)
    assert tuned.states(tuned.best.candidate, 0)[0].setting.data.splits == ("train", "val")


def test_a_grid_goes_on_where_it_stopped(tmp_path):
    p, (alg, grid) = PROTOCOLS["silo"](), GRIDS["knn"]
    whole = tune(p, model(), alg, TRAINING, grid, 3, folder=tmp_path / "a")
    seen = []
    file = tmp_path / "b" / "tuning.jsonl"

    def stop(text):
        seen.append(text)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(p, model(), alg, TRAINING, grid, 3, folder=tmp_path / "b", say=stop)
    text = file.read_text()
    file.write_text(text[:-20])  # and its last line was cut off
    again = tune(p, model(), alg, TRAINING, grid, 3, folder=tmp_path / "b")
    assert [t.score for t in again.trials] == [t.score for t in whole.trials]
    assert file.read_text() == (tmp_path / "a" / "tuning.jsonl").read_text()
    assert torch.equal(again.report()["accuracy"], whole.report()["accuracy"])
    before = file.stat().st_mtime_ns, len(list(file.parent.glob("state-*")))
    assert before[1] == 2  # two trained states serve six candidates
    for changed in (replace(TRAINING, lr=0.2), TRAINING):
        if changed is TRAINING:
            tune(p, model(), alg, changed, grid, 3, folder=tmp_path / "b")
        else:
            with pytest.raises(ValueError, match=r"^folder: .*\.$"):
                tune(p, model(), alg, changed, grid, 3, folder=tmp_path / "b")


def test_results_of_other_data_or_models_are_not_used_again(tmp_path):
    def shallow(act):
        return Net(lambda: nn.Sequential(nn.Linear(4, 5), act(), nn.Linear(5, 3)))

    data = federation(relabel=True)
    tune(
        cross_silo(data),
        shallow(nn.ReLU),
        FedAvg(),
        TRAINING,
        {"training.lr": [0.1]},
        1,
        folder=tmp_path,
    )
    for other, net in (
        (replace(data, x=data.x + 1), shallow(nn.ReLU)),
        (replace(data, relabel=None), shallow(nn.ReLU)),
        (data, shallow(nn.Sigmoid)),
    ):
        with pytest.raises(ValueError, match="holds the results of another grid or other data"):
            tune(
                cross_silo(other),
                net,
                FedAvg(),
                TRAINING,
                {"training.lr": [0.1]},
                1,
                folder=tmp_path,
            )


def test_several_splits_are_averaged():
    splits = [cross_silo(federation(), seed=s) for s in (100, 1100)]
    both = tune(splits, model(), FedAvg(), TRAINING, {"training.lr": [0.01, 0.3]}, 3, seed=5)
    alone = [
        tune(p, model(), FedAvg(), TRAINING, {"training.lr": [0.01, 0.3]}, 3, seed=5 + j)
        for j, p in enumerate(splits)
    ]
    for i in range(2):
        assert both.trials[i].score == pytest.approx(sum(a.trials[i].score for a in alone) / 2)
    for j, a in enumerate(alone):
        if a.best.candidate.options == both.best.candidate.options:
            assert torch.equal(a.report()["accuracy"], both.report(j)["accuracy"])
    seeds = tune(splits, model(), FedAvg(), TRAINING, {"training.lr": [0.01, 0.3]}, 3, seed=[5, 6])
    assert [t.score for t in seeds.trials] == [t.score for t in both.trials]
    with pytest.raises(ValueError, match=r"^seed and net: .*2.*\.$"):
        tune(splits, model(), FedAvg(), TRAINING, {"training.lr": [0.1]}, 1, seed=[5])


# the criterion --------------------------------------------------------------
def confidence(scores, y):
    """Mean of the largest score: grows with the steps that training takes."""
    return scores.max(1).values.mean().item()


@pytest.mark.parametrize(
    ("metric", "maximize", "lr"),
    [("loss", None, 0.3), (confidence, True, 0.3), (confidence, False, 1e-4)],
)
def test_a_metric_and_its_direction_choose(metric, maximize, lr):
    tuned = tune(
        PROTOCOLS["silo"](),
        model(),
        "fedavg",
        TRAINING,
        {"training.lr": [1e-4, 0.3]},
        3,
        metric=metric,
        maximize=maximize,
        hardware=Hardware(workers=1),
    )
    assert tuned.best.candidate.training.lr == lr
    found = evaluate(
        *tuned.states(tuned.best.candidate, 0), "val", metrics={"confidence": confidence}
    )
    want = -found["loss"] if metric == "loss" else found["confidence"] * (1 if maximize else -1)
    assert torch.equal(tuned.best.values[0], want.double())


def test_a_named_metric_is_scikit_learns():
    pytest.importorskip("sklearn")
    tuned = tune(
        PROTOCOLS["silo"](),
        model(),
        "fedavg",
        TRAINING,
        {"training.lr": [1e-4, 0.3]},
        3,
        metric="f1",
        hardware=Hardware(workers=1),
    )
    assert 0 < tuned.best.score <= 1 and tuned.best.candidate.training.lr == 0.3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "unknown"}, "metrics: for labels there are auc"),
        ({"metric": "mae"}, "metrics: for labels there are auc"),
        ({"metric": 3}, "metric: expected a name or a function"),
        ({"metric": confidence}, "maximize: expected True or False"),
        ({"metric": "auc", "maximize": False}, "maximize: expected nothing"),
        ({"maximize": True}, "metric: expected a name or a function"),
    ],
)
def test_an_unknown_criterion_is_refused(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        tune(PROTOCOLS["silo"](), model(), "fedavg", TRAINING, {"training.lr": [0.1]}, 1, **options)


def test_states_of_another_search_are_not_taken(tmp_path):
    p, (alg, grid) = PROTOCOLS["silo"](), GRIDS["knn"]
    tune(p, model(), alg, TRAINING, grid, 1, folder=tmp_path)
    (tmp_path / "tuning.jsonl").unlink()  # its states stay behind
    again, fresh = (
        tune(p, model(), alg, TRAINING, grid, 3, folder=tmp_path),
        tune(p, model(), alg, TRAINING, grid, 3),
    )
    assert [t.score for t in again.trials] == [t.score for t in fresh.trials]


def test_integers_that_are_numbers_to_the_loss_are_measured_as_numbers():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data = Federation.from_clients([(x, (3 * x[:, 0]).round().long() + 9)] * 3)
    net = Net(lambda: nn.Linear(3, 1), "squared")
    assert math.isfinite(
        tune(
            cross_silo(data), net, "fedavg", TRAINING, {"training.lr": [0.01]}, 2, metric="mae"
        ).best.score
    )


def test_two_searches_in_one_folder(tmp_path):
    search = {"grid": {"training.lr": [0.1]}, "rounds": 1, "folder": tmp_path}
    p = PROTOCOLS["silo"]()

    def another(_):
        with pytest.raises(ValueError, match="another run is writing"):
            tune(p, model(), FedAvg(), TRAINING, **search)

    tune(p, model(), FedAvg(), TRAINING, **search, say=another)


def test_tuning_asks_for_roles():
    with pytest.raises(
        TypeError,
        match=r"protocol: expected cross_silo\(data\) or cross_device\(data\), .* got Federation",
    ):
        tune(images(), tiny_model(), "fedavg", TRAINING, {}, rounds=1)
