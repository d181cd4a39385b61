"""Motley's protocols and the search of options.

Splits leak nothing, grids cannot see test data, and records resume.
"""

import math
import re
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from entry_points import sentence
from parts.memory import fails
from parts.tuning import (
    PROTOCOLS,
    TRAINING,
    federation,
    model,
    pretended_optuna,
)
from parts.user import simulation
from places import ROOT, tabled
from small import crossed, equals, layers, make_setting
from torch.nn.functional import binary_cross_entropy_with_logits

from pflcore import (
    Adversary,
    Evaluation,
    FedAvg,
    Federation,
    Hardware,
    Net,
    Robustness,
    Simulation,
    Training,
    cross_device,
    cross_silo,
    evaluate,
    metrics,
    tune,
)
from pflcore.algorithms import FineTune, KnnPer, Traits, Waffle
from pflcore.simulation import round as by_hand
from pflcore.simulation.checkpoint import load
from pflcore.simulation.round import RunConfig, initial_state


def regression():
    """A protocol whose labels are numbers, and a model for them."""
    p = PROTOCOLS["silo"]()
    data = replace(p.data, y=p.data.y.float(), classes=None)
    return replace(p, data=data), Net(lambda: layers("Linear 4 1"), "squared")


def search(
    alg="fedavg", grid=None, rounds=1, p=None, net=None, training=TRAINING, **options
):
    grid = {"training.lr": [1e-4, 0.3]} if grid is None else grid
    return tune(
        p or PROTOCOLS["silo"](), net or model(), alg, training, grid, rounds, **options
    )


def confidence(scores, y):
    """The mean of the largest score.

    It grows with the number of training steps.
    """
    return scores.max(1).values.mean().item()


def doubt(scores, y):
    return -confidence(scores, y)


def scores(tuned):
    return [t.score for t in tuned.trials]


# splits ---------------------------------------------------------------------
def test_cross_device_roles_and_halves():
    data = federation()
    p = cross_device(data, 6, 3, 3)
    assert [
        len(ids) for ids in (p.train_clients, p.tuning_clients, p.report_clients)
    ] == [6, 3, 3]
    for i in range(12):
        train, val, test = (
            p.data.index[s][i].tolist() for s in ("train", "val", "test")
        )
        assert sorted(train + val + test) == sorted(data.index["train"][i].tolist())
        assert bool(val) == (i in p.tuning_clients) and bool(test) == (
            i in p.report_clients
        )
        assert i in p.train_clients or len(train) == data.size()[i] // 2
    kept_sizes = p.keep(0.5).data.size()
    size = p.data.size()
    equals(kept_sizes[p.train_clients], size[p.train_clients])
    equals(kept_sizes[p.report_clients], (size[p.report_clients] + 1) // 2)


def test_cross_silo_sizes_and_what_blind_hides():
    """Cross-silo splits have their sizes, and tuning sees no test split.

    A client of one sample does not stop the others.
    """
    parts = [(torch.randn(m, 4), torch.arange(m) % 3) for m in (1, 2, 20, 22)]
    p = cross_silo(Federation.from_clients(parts, classes=3))
    # Of 22 samples, ceil(3.3) are test samples, and ceil(18 * .15 / .85) of the rest
    # validate.
    sizes = [p.data.size(s).tolist() for s in ("train", "val", "test")]
    assert sizes == [[1, 1, 14, 14], [0, 0, 3, 4], [0, 1, 3, 4]]
    assert "clients without val samples: 2" in p.data.summary()
    equals((p.train_clients, p.train_clients), (torch.arange(4), p.report_clients))
    assert (
        p.without_test.splits == ("train", "val") and cross_silo(p.data).data is p.data
    )
    setup = RunConfig.of(FedAvg(), make_setting(model(), p.without_test, TRAINING, 1))
    with sentence(".*test"):
        evaluate(setup, initial_state(FedAvg(), model(), 4), "test")
    equals(
        by_hand.sample_cohort(setup, 1, 1.0, p.train_clients.flip(0)), p.train_clients
    )


@pytest.mark.parametrize(
    "make, roles", [(cross_silo, [0.2, 0.2, 3]), (cross_device, [2, 2, 2])]
)
def test_statistics_of_what_is_held_out_never_shape_the_features(make, roles):
    """Features are standardized by the personalization samples alone.

    That happens after the split.
    """
    fed = federation(n=6, size=24)
    data = make(fed, *roles, standardize=True).data
    for x, _ in map(data.client, range(6)):
        torch.testing.assert_close(x.mean(0), torch.zeros(4), atol=1e-6, rtol=0)
        torch.testing.assert_close(x.std(0, correction=0), torch.ones(4))
    with sentence("data: .*not standardized"):
        make(fed.standardize())


# grids ----------------------------------------------------------------------
KNN = {"lam": [0.0, 0.4, 0.8], "server_lr": [0.5, 1.0]}
GRIDS = {
    "training": (FedAvg(), {"training.lr": [0.001, 0.3]}),
    "finetune": (
        FineTune(),
        {"finetune_lr": [0.05, 0.5], "finetune_epochs": [0, 1, 4]},
    ),
    "knn": (KnnPer(k=3), KNN),
}


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("setting, name", crossed(PROTOCOLS, GRIDS))
def test_poisoned_test_labels_change_no_choice(setting, name):
    p = PROTOCOLS[setting]()
    alg, grid = GRIDS[name]
    y = p.data.y.clone()
    for rows in p.data.index["test"]:
        y[rows] = (y[rows] + 1) % 3
    poisoned = replace(p, data=replace(p.data, y=y))
    a, b = (search(alg, grid, 4, q) for q in (p, poisoned))
    assert a.best.candidate.options == b.best.candidate.options and scores(a) == scores(
        b
    )
    clean = a.report()["accuracy"][p.report_clients]
    wrong = b.report()["accuracy"][p.report_clients]
    assert not clean.isnan().any() and not torch.equal(clean, wrong)
    assert a.report()["accuracy"].isfinite().sum() == len(p.report_clients)
    assert a.states(a.best.candidate, 0)[0].data.splits == ("train", "val")


def test_the_choice_is_the_best_on_validation_and_the_report_is_its_test_result():
    p = PROTOCOLS["device"]()
    lrs = [0.001, 0.3]
    tuned = search("fedavg", {"training.lr": lrs}, 4, p)
    validated = []
    results = []
    for lr in lrs:
        options = {
            "rounds": 4,
            "clients": p.train_clients,
            "evaluation": Evaluation(every=9),
        }
        run = Simulation(FedAvg(), model(), p.data, replace(TRAINING, lr=lr), **options)
        run.run()
        validated.append(
            run.evaluate("val")["accuracy"][p.tuning_clients].mean().item()
        )
        results.append(run.evaluate("test")["accuracy"])
    assert scores(tuned) == pytest.approx(validated) and validated[0] != validated[1]
    best = max(range(2), key=validated.__getitem__)
    torch.testing.assert_close(
        tuned.report()["accuracy"], results[best], equal_nan=True
    )
    assert tuned.best.candidate.options == {"training.lr": lrs[best]}
    assert "chosen" in tuned.table().splitlines()[2]


@pytest.mark.deep("it takes a second")
def test_a_choice_at_an_end_of_its_grid_is_named():
    p = PROTOCOLS["device"]()
    lrs = [0.3, 0.001, 0.1]
    tuned = search("fedavg", {"training.lr": lrs}, 4, p)
    assert tuned.best.candidate.options == {"training.lr": 0.001}
    assert tuned.edges == {"training.lr": "least"}
    assert "the grid: training.lr 0.001 (least); widen it there." in tuned.table()

    tuned = search("fedavg", {"training.lr": [*lrs, 1e-12]}, 4, p)
    assert not tuned.edges and "edge" not in tuned.table()

    # Neither one value, nor a choice between names, has ends.
    grid = {"training.lr": [0.1], "weighting": ["samples", "uniform"]}
    tuned = search("fedavg", grid, 2, p)
    assert not tuned.edges and "edge" not in tuned.table()


@pytest.mark.deep("it takes a second")
def test_late_options_share_a_state_and_others_do_not(tmp_path):
    """Candidates that differ in late options share a trained state.

    Six candidates have two states, and late options vary fastest. The value of each
    candidate is that of a separate evaluation.
    """
    tuned = search(KnnPer(k=3), KNN, 2, folder=tmp_path)
    named = [
        (t.candidate.algorithm.server_lr, t.candidate.algorithm.lam)
        for t in tuned.trials
    ]
    assert named == [(s, lam) for s in (0.5, 1.0) for lam in (0.0, 0.4, 0.8)]
    assert len(list(tmp_path.glob("state-*"))) == 2
    for t in tuned.trials:
        setup, state = tuned.states(t.candidate, 0)
        assert setup.algorithm == t.candidate.algorithm
        equals(t.values[0], evaluate(setup, state, "val")["accuracy"])
    a, b, c = (tuned.trials[i].candidate for i in (0, 1, 3))
    assert a.trained == b.trained != c.trained and a.training.batch_size == 8


@pytest.mark.deep("it takes a second")
def test_a_diverged_candidate_is_recorded_and_loses(tmp_path):
    p, net = regression()
    lrs = [1e30, 0.01]
    tuned = search("fedavg", {"training.lr": lrs}, 6, p, net, folder=tmp_path)
    first, second = tuned.trials
    assert (
        tuned.best is second
        and first.score == -math.inf
        and first.stopped in tuned.table()
    )
    lines = load(tmp_path)[1]["lines"].values()
    assert [line["stopped"] for line in lines] == [first.stopped, None]
    slow = replace(TRAINING, lr=0.01)
    unstable = search("mocha", {"lam": [30.0, 0.01]}, 6, p, net, slow)
    assert "MOCHA is unstable" in unstable.trials[0].stopped
    assert unstable.best is unstable.trials[1]
    with sentence("grid: every candidate diverged"):
        search("fedavg", {"training.lr": [1e30]}, 6, p, net)


def test_a_candidate_that_loses_clients_cannot_win():
    """A candidate with non-finite clients loses.

    It would be the best one if only its surviving clients counted.
    """

    class Selective(KnnPer):
        def model(self, down, client_state, clients):
            w = down["x"].clone()
            w[clients.ids < 5] = torch.nan if self.lam > 0.5 else 10.0
            return {"w": w}

        predict = FedAvg.predict
        traits = Traits(evaluation_only=("k", "lam"))

    p, net = regression()
    tuned = search(
        Selective(), {"lam": [0.0, 1.0]}, 3, p, net, replace(TRAINING, lr=0.01)
    )
    good, lost = tuned.trials
    survivors = lost.values[0][~lost.values[0].isnan()]
    assert len(survivors) == 7 and survivors.mean() > good.score  # it looks better
    assert (
        tuned.best is good and lost.score == -math.inf and lost.stopped in tuned.table()
    )
    assert lost.stopped == "The validation values of 5 of 12 clients are not finite."


def test_a_client_without_a_value_loses_no_candidate():
    def low(scores, y):
        """Minus the largest score, or NaN for clients with many samples."""
        return math.nan if len(y) > 4 else -scores.max().item()

    p = PROTOCOLS["silo"]()
    tuned = search(p=p, metric=low, higher_is_better=True)
    without = p.data.size("val") > 4
    assert without.any() and not without.all()
    for trial in tuned.trials:
        (values,) = trial.values
        assert torch.equal(values.isnan(), without)
        assert trial.stopped is None and trial.score == values[~without].mean().item()


def test_without_an_accuracy_the_loss_chooses():
    p = PROTOCOLS["silo"]()
    p = replace(p, data=replace(p.data, y=p.data.y % 2, classes=2, relabel=None))

    def own(scores, y):  # the meaning of one score is unknown
        return binary_cross_entropy_with_logits(scores, y)

    tuned = search(p=p, net=Net(lambda: layers("Linear 4 1"), own))
    assert tuned.best.candidate.options == {"training.lr": 0.3}
    assert all(score < 0 for score in scores(tuned))


def test_a_candidate_with_an_infinite_value_is_lost():
    def worst(scores, y):
        return -math.inf if len(y) > 4 else 1.0

    with sentence(
        "grid: every candidate diverged, the first one with: The validation values of"
    ):
        search(metric=worst, higher_is_better=True)


def test_a_grid_goes_on_where_it_stopped(tmp_path):
    alg = KnnPer(k=3)
    a = tmp_path / "a"
    b = tmp_path / "b"
    whole = search(alg, KNN, 3, folder=a)
    file = b / "checkpoint.safetensors"
    with pytest.raises(KeyboardInterrupt):
        search(alg, KNN, 3, folder=b, log=fails(print, 4, KeyboardInterrupt()))
    again = search(alg, KNN, 3, folder=b)
    assert scores(again) == scores(whole)
    assert load(b)[1] == load(a)[1]
    equals(again.report()["accuracy"], whole.report()["accuracy"])
    file.unlink()  # the states remain, but belong to another search
    assert scores(search(alg, KNN, 1, folder=b)) == scores(search(alg, KNN, 1))


@pytest.mark.deep("it takes a second")
def test_an_interrupted_candidate_is_played_anew(tmp_path, monkeypatch):
    grid = {"training.lr": [0.05, 0.1]}
    whole = search("fedavg", grid, 3)

    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "train", fails(FedAvg.train, 5, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            search("fedavg", grid, 3, folder=tmp_path)

    assert scores(search("fedavg", grid, 3, folder=tmp_path)) == scores(whole)


@pytest.mark.deep("it takes a second")
def test_results_of_other_searches_are_not_used_again(tmp_path):
    def net(act="ReLU", seed=0):
        return Net(lambda: layers(f"Linear 4 5, {act}, Linear 5 3"), seed=seed)

    data = federation(relabel=True)
    grid = {"server_lr": [0.1]}
    once = {"folder": tmp_path}
    search("fedavg", grid, 1, cross_silo(data), net(), **once)
    for other, *changes in (
        (replace(data, x=data.x + 1), net()),
        (replace(data, relabel=None), net()),
        (data, net("Sigmoid")),
        (data, net(seed=1)),
        (data, net(), replace(TRAINING, lr=0.2)),
    ):
        with sentence("folder: .* another grid or other data"):
            search("fedavg", grid, 1, cross_silo(other), *changes, **once)


def test_a_folder_of_a_run_is_no_folder_of_a_search(tmp_path):
    simulation().save(tmp_path)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with sentence("folder: .* holds the results of another grid or other data"):
        search("fedavg", {"server_lr": [0.1]}, 1, folder=tmp_path)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.deep("it takes a second")
def test_several_splits_are_averaged():
    splits = [cross_silo(federation(), seed=s) for s in (100, 1100)]
    arguments = ("fedavg", {"training.lr": [0.01, 0.3]}, 3)
    both = search(*arguments, splits, seed=5)
    one, two = (search(*arguments, p, seed=5 + j) for j, p in enumerate(splits))
    means = [(a + b) / 2 for a, b in zip(scores(one), scores(two), strict=True)]
    assert scores(both) == pytest.approx(means)
    assert two.best.candidate.options == both.best.candidate.options
    equals(two.report()["accuracy"], both.report(1)["accuracy"])
    assert scores(search(*arguments, splits, seed=[5, 6])) == scores(both)
    with sentence("seed and net: .*2"):
        search(*arguments, splits, seed=[5])


NOT = """\
{"grid": {"learning": [1]}} | grid: .*options of LocalOnly
{"grid": {"server_lr": [0.1]}} | grid: .*options of LocalOnly
{"grid": {"lr": [0.1]}} | grid: .*training.lr
{"grid": {"training.size": [1]}} | grid: .*training.lr
{"grid": {"training.lr": []}} | grid: .*a list of values for 'training.lr'
{"grid": {"training.lr": "0.1"}} | grid: expected a dict of options, each with a list
{"metric": "unknown"} | metrics: for labels there are auc
{"metric": "mae"} | metrics: for labels there are auc
{"metric": 3} | metric: expected a string or a function
{"higher_is_better": "no"} | higher_is_better: expected True or False
"""


@pytest.mark.parametrize("options, words", tabled(NOT))
def test_what_cannot_be_tuned_is_refused(options, words):
    with sentence(words):
        search("local", **options)


# studies --------------------------------------------------------------------
def played_recipe(p, net):
    """The study of docs/many_runs.md, played on these data."""
    text = (ROOT / "docs" / "many_runs.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    recipe = recipe.replace("rounds=20", "rounds=1").replace("trials=20", "trials=4")
    names = {"protocol": p, "model": net, "training": TRAINING}
    exec(recipe, names)
    return names["study"]


@pytest.mark.deep("it takes a second")
def test_the_recipe_with_a_study_plays_what_it_proposes(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", pretended_optuna())
    p, net = PROTOCOLS["silo"](), model()

    study = played_recipe(p, net)

    assert len(study.results) == 4
    for options, score in study.results:
        grid = {"lam": [options["lam"]], "training.lr": [options["lr"]]}
        assert scores(search("ditto", grid, p=p, net=net)) == [score]


def test_the_recipe_with_optuna_itself():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    studies = [played_recipe(PROTOCOLS["silo"](), model()) for _ in range(2)]
    assert studies[0].best_params == studies[1].best_params


# metrics that select --------------------------------------------------------
@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize(
    "metric, up, lr",
    [
        *(
            ("loss", None, 0.3),
            ("loss", True, 1e-4),
            ("f1", None, 0.3),
            ("f1", False, 1e-4),
        ),
        *((confidence, True, 0.3), (confidence, False, 1e-4)),
        *((doubt, True, 1e-4), (doubt, False, 0.3)),
    ],
)
def test_a_metric_and_its_direction_choose(metric, up, lr):
    pytest.importorskip("sklearn")
    options = {
        "metric": metric,
        "higher_is_better": up,
        "hardware": Hardware(workers=1),
    }
    tuned = search(rounds=3, **options)
    assert tuned.best.candidate.training.lr == lr
    measures = {"confidence": confidence, "doubt": doubt, "f1": metrics.METRICS["f1"]}
    measured = evaluate(*tuned.states(tuned.best.candidate, 0), "val", metrics=measures)
    sign = -1 if up is False or (metric == "loss" and not up) else 1
    values = measured[getattr(metric, "__name__", metric)]
    equals(tuned.best.values[0], sign * values.double())


def test_a_metric_of_ones_own_says_its_direction():
    with sentence(
        "metric: expected one of accuracy, .*, or a metric of your own with higher_is_b"
    ):
        search(metric=doubt)


def test_integers_that_are_numbers_to_the_loss_are_measured_as_numbers():
    net = regression()[1]
    grid = {"training.lr": [0.01]}
    assert math.isfinite(search("fedavg", grid, 2, None, net, metric="mae").best.score)


def test_two_searches_in_one_folder(tmp_path):
    def another(_):
        with sentence(".*another run is writing"):
            search(folder=tmp_path)

    search(folder=tmp_path, log=another)


def test_a_grid_of_pairs_has_no_end():
    grid = {"training.lr": [0.1, 0.2], "training.betas": [[0.9, 0.99], [0.5, 0.9]]}
    training = Training(lr=0.1, local_optimizer="adamw")
    tuned = search("fedavg", grid, 1, PROTOCOLS["device"](), training=training)
    assert "training.betas" not in tuned.edges and tuned.table()


def test_a_method_with_a_target_is_searched_for_its_target():
    """The model that it makes is that client's; the others' values say nothing."""
    p = PROTOCOLS["silo"]()
    target = int(p.tuning_clients[1])
    grid = {"do": [0.5, 8.0]}
    tuned = search(Waffle(target=target), grid, rounds=2, p=p)
    for trial in tuned.trials:
        run = Simulation(
            trial.candidate.algorithm,
            model(),
            p.without_test,
            TRAINING,
            rounds=2,
            clients=p.train_clients,
            evaluation=Evaluation(every=2, split="val", clients=[target]),
        ).run()
        assert trial.score == run.last_values("accuracy")[target]


def test_a_search_has_the_runs_clip_and_attack():
    p = PROTOCOLS["silo"]()
    grid = {"training.lr": [0.1, 0.5]}
    still = search(grid=grid, p=p, robustness=Robustness(clip=1e-9)).trials
    start = search(grid={"training.lr": [0.0]}, p=p).trials[0]
    assert [trial.score for trial in still] == [start.score] * 2
    bad = int(p.tuning_clients[0])
    attacked = search(p=p, robustness=Robustness(adversary=Adversary("noise", [bad])))
    for trial in attacked.trials:
        judged = trial.values[0].isfinite().nonzero()[:, 0]
        assert [*judged] == [i for i in p.tuning_clients if i != bad]


@pytest.mark.parametrize(
    "algorithm, warns",
    [
        ("fedfomo", True),
        (FineTune(choose="client"), True),
        (KnnPer(margin=0.0), True),
        ("finetune", False),
    ],
)
def test_a_method_that_learns_from_val_says_so(algorithm, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search(algorithm, {"training.lr": [0.1]})
    said = [w for w in caught if "learns from the split 'val'" in str(w.message)]
    assert bool(said) == warns
