"""Models that are adapted to each client at evaluation.

They are those of fine-tuning, kNN-Per and Per-FedAvg.
"""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn as nn
from parts.edges import normal
from parts.rivals import GOLDEN, QUERY, Z, close
from places import golden
from small import (
    ENGINES,
    F64,
    after,
    alike,
    at_work,
    crossed,
    double,
    images,
    layers,
    near,
    points,
    quadratics,
    t,
    tiny,
    tiny_model,
    validated,
)

from pflcore import (
    Evaluation,
    Federation,
    Hardware,
    Net,
    Simulation,
    Training,
    evaluate,
)
from pflcore.algorithms import FedAvg, FineTune, KnnPer, PerFedAvg, PFedMe
from pflcore.simulation.round import RunConfig


def served(s, rounds=3):
    """FedAvg's state after some rounds, and its download for all clients."""
    state, _ = after(FedAvg(), s, rounds)
    return state, {"x": state.server["x"].expand(s.data.n, -1)}


def adapted(alg, down, s):
    """The clients' models for evaluation."""
    return alg.model(down, {}, at_work(s, round=3))["w"]


def with_index(s, **index):
    return replace(s, data=replace(s.data, index={**s.data.index, **index}))


# Per-FedAvg -------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize(
    ("variant", "name"), [("fo", "FO"), ("hf", "HF"), ("exact", "exact")]
)
def test_golden_per_fedavg(variant, name, engine):
    h1 = GOLDEN["H1_perfedavg_quadratic"]
    h2 = GOLDEN["H2_perfedavg_quartic"]
    for h, loss, delta in (
        (h1, lambda w, y: (h1["a"] * (w - h1["c"]) ** 2 / 2).mean(), 1e-3),
        (h2, lambda w, y: (w**4 / 4 - w).mean(), h2["delta"]),
    ):
        s = points([0.0], h["beta"], h["w"], engine, loss)
        alg = PerFedAvg(
            variant=variant, alpha=h["alpha"], delta=delta, scale_delta=False
        )
        down = {"x": s.net.w0[None]}
        close(alg.train(down, {}, at_work(s))[1]["delta"], [[h[name] - h["w"]]])
        close(adapted(alg, down, s), [[h["inner_steps"]]])


def test_scaled_differences_are_right_in_float32():
    """A scaled delta gives the right product where the paper's delta does not.

    With small gradients, the two points of the paper's delta are equal in float32.
    """

    def flat(scores, y):
        return 1e-5 * nn.functional.cross_entropy(scores, y)

    s = replace(tiny((12, 9), lr=1e4, batch_size=4), net=Net(tiny_model(), flat))

    def played(s, **options):
        return after(PerFedAvg(alpha=5e4, **options), s)[0].server["x"].double()

    want = played(double(s), variant="exact")
    close(played(double(s), variant="hf"), want, 1e-3, 1e-4)
    right = (played(s, variant="hf", scale_delta=True) - want).norm()
    wrong = (played(s, variant="hf", scale_delta=False) - want).norm()
    assert right < 0.05 * wrong


@ENGINES
def test_exact_products_with_batch_norm(engine):
    """Gradients of gradients through batch norm agree with finite differences."""
    algs = (PerFedAvg(variant=how, alpha=0.3, delta=1e-6) for how in ("exact", "hf"))
    s = normal(engine=engine)
    close(*(after(alg, s)[0].server["x"] for alg in algs), 1e-6, 1e-7)


def test_the_minibatches_of_per_fedavg_are_independent():
    """Two orders for D and two for D' make four results; D' = D would make two.

    There are two samples with different optima, one a minibatch.
    """
    s = quadratics([[1.0]], [[0.0]], lr=0.3, start=[3.0], rows=2, noise=1.0)
    ways = set()
    for r in range(1, 60):
        up = PerFedAvg().train({"x": s.net.w0[None]}, {}, at_work(s, round=r))[1]
        ways.add(round(float(up["delta"]), 9))
    assert len(ways) == 4


@pytest.mark.parametrize("alg", [PerFedAvg(steps=3), PFedMe()])
def test_momentum_that_plays_no_part_is_said(alg):
    """A warning says so, and the models for evaluation are the same without it."""
    views = []
    for options in ({}, {"momentum": 0.9, "weight_decay": 0.5}):
        training = Training(lr=0.3, batch_size=4, **options)
        run = Simulation(alg, tiny_model(), images(), training, rounds=1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            views.append(run.run().model(1).get_buffer("view_w"))
        end = "momentum=0.9 and weight_decay=0.5 play no part."
        assert any(str(w.message).endswith(end) for w in said) == bool(options)
    assert torch.equal(*views)


# fine-tuning ------------------------------------------------------------------


GRID = FineTune(choose="client", lr_grid=(0.05, 0.5), finetune_epochs=4)


@pytest.mark.parametrize("alg", [PerFedAvg(), FineTune(finetune_epochs=1), GRID])
def test_nobody_adapts_on_test_data(alg):
    """Other test samples and labels do not change the adapted models."""
    s = validated()
    _, down = served(s)
    x = s.data.x.clone()
    y = s.data.y.clone()
    rows = torch.cat(list(s.data.index["test"]))
    x[rows] += 3.0
    y[rows] = 1
    other = replace(s, data=replace(s.data, x=x, y=y))
    one = alg.model(down, {}, at_work(s))["w"]
    two = alg.model(down, {}, at_work(other))["w"]
    assert torch.equal(one, two) and not torch.equal(one, down["x"])


LOSSES = (
    "cross_entropy",
    nn.CrossEntropyLoss(label_smoothing=0.3),
    nn.CrossEntropyLoss(torch.tensor([1.0, 5, 5, 1])),
)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "alg", [FineTune(finetune_epochs=0), PerFedAvg(steps=0), KnnPer(lam=0.0)]
)
def test_not_adapted_it_is_fedavg_by_any_loss(alg, loss):
    s = replace(tiny(), net=Net(tiny_model(), loss))
    state, _ = served(s)
    ours = evaluate(RunConfig.of(alg, s), state)
    plain = evaluate(RunConfig.of(FedAvg(), s), state)
    rtol = 1e-5 if isinstance(alg, KnnPer) else 0
    torch.testing.assert_close(ours, plain, rtol=rtol, atol=0)


def test_the_last_layer_alone_is_trained():
    s = tiny()
    _, down = served(s, 1)
    moved = (adapted(FineTune(layers="last"), down, s) != down["x"]).any(0)
    assert torch.equal(
        moved.nonzero()[:, 0], torch.arange(s.net.size)[s.net.head_slice]
    )


def candidates(s, state, down):
    """Each candidate's validation accuracies [C, N] and models [C, N, P].

    The first candidate is no fine-tuning. Then comes each step size with each number of
    epochs.
    """
    tried = [FineTune(finetune_epochs=0)]
    for lr in (0.05, 0.5):
        for epochs in range(1, 5):
            tried.append(FineTune(finetune_lr=lr, finetune_epochs=epochs))
    rows = [adapted(alg, down, s) for alg in tried]
    values = [evaluate(RunConfig.of(alg, s), state, "val")["accuracy"] for alg in tried]
    return torch.stack(values), torch.stack(rows)


def first_best(values):
    return int((values == values.max()).nonzero()[0, 0])


@pytest.mark.deep("it takes a second")
def test_each_client_gets_its_best_candidate_on_validation():
    """Of candidates with equal accuracies, the earliest is taken."""
    s = validated(6)
    state, down = served(s)
    values, rows = candidates(s, state, down)
    best = [first_best(values[:, i]) for i in range(6)]
    assert ((values == values.max(0).values).sum(0) > 1).any() and len(set(best)) > 1
    got = adapted(GRID, down, s)
    alike(got, torch.stack([rows[c, i] for i, c in enumerate(best)]))
    wild = FineTune(choose="client", lr_grid=(3e38,), finetune_epochs=2)
    assert torch.equal(adapted(wild, down, s), down["x"])


@pytest.mark.deep("it takes a second")
def test_a_client_without_validation_samples_takes_what_is_best_for_the_others():
    s = validated()
    state, down = served(s)
    val = s.data.index["val"]
    lacking = at_work(with_index(s, val=[val[0], val[1][:0], *val[2:]]), round=3)
    values, rows = candidates(s, state, down)
    best = first_best(values[:, [0, 2, 3]].mean(1))
    alike(GRID.model(down, {}, lacking)["w"][1], rows[best, 1])
    # Without validation samples it cannot show that it is better.
    assert torch.equal(
        FineTune(margin=-2.0).model(down, {}, lacking)["w"][1], down["x"][1]
    )
    nobody = at_work(with_index(s, val=[rows[:0] for rows in val]))
    for none, what in ((nobody, "these clients lack"), (at_work(tiny()), "'val'")):
        x = {"x": down["x"][: len(none.ids)]}
        with pytest.raises(ValueError, match=rf"^choose: .*{what}.*\.$"):
            GRID.model(x, {}, none)


def one_lacks(engine, model, **how):
    """A run of five clients after two rounds; the second has no validation samples."""
    gen = torch.Generator().manual_seed(0)

    def samples(n, turn):
        y = torch.randint(0, 2, (n,), generator=gen)
        return torch.randn(n, 4, generator=gen), (y + turn) % 2

    clients = [
        {"train": samples(30, i), "test": samples(20, i), "val": samples(20, i)}
        for i in range(5)
    ]
    del clients[1]["val"]
    data = Federation.from_clients(clients)
    where = Hardware(engine=engine)
    alg = FineTune(choose="client", finetune_epochs=4, lr_grid=(0.01, 0.5))
    net = Net(lambda: layers(model), seed=0)
    run = Simulation(
        alg, net, data, Training(lr=0.1, batch_size=8), 2, hardware=where, **how
    )
    run.run()
    return run


PARTS = ([1], [1, 3], [0, 1], [0, 1, 2, 4], [2, 3])


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize(
    "path, statistics",
    crossed(
        [
            ("chain", "Linear 4 2"),
            ("loop", "Linear 4 5, SiLU, Linear 5 2"),
            ("loop", "Linear 4 5, BatchNorm1d 5, SiLU, Linear 5 2"),
        ],
        ["local", "average"],
    ),
)
def test_what_is_best_for_the_others_does_not_depend_on_who_is_evaluated(
    path, statistics
):
    engine, model = path
    run = one_lacks(engine, model, batch_norm=statistics)
    whole = evaluate(run.config, run.state)
    for ids in map(torch.tensor, PARTS):
        part = evaluate(run.config, run.state, "test", ids)
        for key, values in part.items():
            assert torch.equal(values[ids], whole[key][ids]), (ids, key)


@pytest.mark.deep("it takes a second")
def test_a_run_that_evaluates_some_gives_them_the_numbers_that_all_would_give():
    whole = one_lacks("chain", "Linear 4 2").history.rounds[-1]["eval"]
    for ids in PARTS:
        run = one_lacks("chain", "Linear 4 2", evaluation=Evaluation(clients=ids))
        found = run.history.rounds[-1]["eval"]
        for key in ("loss", "accuracy"):
            seen = [found[key][i] for i in ids] if len(found[key]) == 5 else found[key]
            assert seen == [whole[key][i] for i in sorted(ids)]


# kNN-Per ----------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["exp", "inverse", "gauss_dim"])
def test_a_client_of_few_samples_votes_alike_beside_clients_of_many(kernel):
    sizes = (3, 40, 7, 25)
    model = Net(lambda: layers("Linear 6 5, SiLU, Linear 5 4"))
    s = replace(tiny(sizes), net=model)
    alg = KnnPer(k=10, kernel=kernel)
    x = model.w0.expand(4, -1)
    whole = alg.model({"x": x}, {}, at_work(s))
    queries = torch.randn(17, 6)
    for i in range(4):
        alone = alg.model({"x": x[:1]}, {}, at_work(s, [i]))
        view_alone = {k: v[0] for k, v in alone.items()}
        view_of_whole = {k: v[i] for k, v in whole.items()}
        one = alg.predict(view_alone, model, queries)
        other = alg.predict(view_of_whole, model, queries)
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("scores", "loss", "y", "options", "expected"),
    golden("votes"),
)
def test_the_mixture_with_the_shared_model(scores, loss, y, options, expected):
    """The mixture of votes and scores has golden values.

    The model's scores do not depend on x, so that only the vote does.
    """
    net = Net(nn.Linear(2, len(scores), dtype=F64), loss)
    w = torch.cat([torch.zeros(2 * len(scores)), t(scores)])
    labels = torch.from_numpy(np.array(y))
    view = {"w": w, "z": Z, "y": labels, "n": torch.tensor(5)}
    near(KnnPer(k=3, **options).predict(view, net, QUERY)[0], expected, 1e-7, 5e-10)


@pytest.mark.parametrize("margin", [None, 0.0, 0.2])
def test_knnper_is_accepted_where_it_beats_the_shared_model(margin):
    """Small clients, and those that it does not help, keep FedAvg's model."""
    s = validated(6)
    state, _ = served(s, 1)
    knn = KnnPer(k=3, lam=0.8)
    algs = FedAvg(), knn, replace(knn, min_size=21, margin=margin)
    on = {}
    for split in ("val", "test"):
        values = [evaluate(RunConfig.of(alg, s), state, split) for alg in algs]
        on[split] = [of_alg["accuracy"] for of_alg in values]
    taken = s.data.size("train") >= 21
    taken &= True if margin is None else on["val"][1] - on["val"][0] > margin
    assert not taken.all() and taken.any()
    for old, new, got in on.values():
        assert torch.equal(got, torch.where(taken, new, old))


@pytest.mark.parametrize("alg", [KnnPer(margin=0.0), FineTune(margin=0.0)])
def test_a_margin_without_validation_samples_names_itself(alg):
    run = Simulation(alg, tiny_model(), images(), rounds=1)
    with pytest.raises(ValueError, match=r"^margin: .*'val' split, which these"):
        run.run()


def test_knnper_takes_few_samples_and_no_probabilities():
    def ran(y, **options):
        clients = [dict.fromkeys(("train", "test"), (torch.randn(len(y), 6), y))]
        data = Federation.from_clients(clients)
        model = nn.Linear(6, 2)
        return Simulation(KnnPer(k=10, lam=1.0), model, data, rounds=1, **options).run()

    assert math.isfinite(ran(torch.tensor([0, 1])).rounds[0]["eval"]["loss"][0])
    with pytest.raises(
        ValueError, match=r"^data: kNN-Per's neighbours vote with a label"
    ):
        ran(torch.randn(9, 2).softmax(-1), loss="cross_entropy")
