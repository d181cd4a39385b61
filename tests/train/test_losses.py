"""Losses and the meaning of scores: in training, metrics and predictions.

A model gives one score for each label, one for each class, or a number.
"""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from entry_points import sentence
from parts.user import simulation
from small import (
    at_work,
    crossed,
    double,
    equals,
    layers,
    near,
    tiny,
    tiny_model,
    with_test,
)
from torch import nn
from ugly import randn

from pflcore import Federation, Net, Training
from pflcore.interop import Client, Server

X = randn(0, 3, 24, 3, dtype=torch.float32)
COUNTS = (2 * X[:, :, 0].exp()).floor()


def trained(model, data, rounds=20, loss=None, algorithm="fedavg", **options):
    """The last evaluation of a run, and the first client's model."""
    defaults = {
        "model": model,
        "training": Training(lr=0.5, batch_size=10),
        "every": 1000,
    }
    run = simulation(
        algorithm, data, rounds=rounds, loss=loss, **defaults, **options
    ).run()
    return run.rounds[-1]["eval"], run.model(0)


def evaluated(loss, model, y, **options):
    parts = list(zip(X, y, strict=True))
    data = Federation.from_clients(with_test(parts, parts))
    return trained(model, data, 1, loss, **options)[0]


def column():
    return nn.Linear(3, 1)


def zero():
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    return model


def flat():
    return layers("Linear 3 1, Flatten 0")


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("model", [column, zero])
@pytest.mark.parametrize(
    "loss",
    [nn.HuberLoss(), F.l1_loss, partial(F.huber_loss, delta=2.0), nn.PoissonNLLLoss()],
)
def test_a_column_of_scores_trains_as_a_row(loss, model):
    torch.manual_seed(0)
    template = model()
    want = evaluated(
        loss, lambda: nn.Sequential(deepcopy(template), nn.Flatten(0)), COUNTS
    )
    got = evaluated(loss, lambda: deepcopy(template), COUNTS)
    assert got["loss"] == pytest.approx(want["loss"])


def test_a_client_elsewhere_has_its_column_of_scores_in_the_targets_shape():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    x = X[0]
    y = X[0].sum(1) + 50
    losses = []
    for targets in (y, y[:, None]):
        client = Client(
            "fedavg",
            deepcopy(model),
            {"train": (x, targets), "test": (x, targets)},
            loss=nn.L1Loss(),
        )
        server = Server("fedavg", deepcopy(model), 1)
        server.aggregate({"a": client.train(server.download("a"))})
        losses.append(client.evaluate(server.download("a", "evaluation"))["loss"])
    assert losses[0] == pytest.approx(losses[1])


def test_a_loss_of_pairs_gets_the_targets_shape():
    def ranks(s, y):
        """Loss of the order of each pair of samples."""
        assert s.shape == y.shape
        column, targets = s.reshape(-1, 1), y.reshape(-1, 1)
        return (1 - (column - column.mT) * (targets - targets.mT).sign()).relu().mean()

    torch.manual_seed(0)
    want = evaluated(ranks, column, COUNTS[:, :, None])["loss"]
    torch.manual_seed(0)
    assert evaluated(ranks, column, COUNTS)["loss"] == want
    assert want[0] > 0


def test_a_metric_gets_scores_in_the_targets_shape():
    functions = {
        "mean": lambda s, y: (s - y).abs().mean(),
        "arrays": lambda s, y: abs(s.numpy() - y.numpy()).mean(),
    }
    torch.manual_seed(0)
    got = evaluated("squared", column, COUNTS + 1000, metrics=functions)
    torch.manual_seed(0)
    want = evaluated("squared", column, COUNTS + 1000, metrics=["mae"])["mae"]
    for name in functions:
        assert got[name] == pytest.approx(want)
    right = {"right": lambda s, y: ((s > 0) == (y > 0)).float().mean()}
    got = evaluated("binary_cross_entropy", column, (COUNTS > 1).long(), metrics=right)
    assert got["right"] == pytest.approx(got["accuracy"])


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("scores", [1, 4])
@pytest.mark.parametrize("labels", [torch.long, torch.float32])
def test_weights_of_yes_or_no_labels_stay(scores, labels):
    weight = torch.full((scores,), 5.0)
    y = (COUNTS > 1).to(labels)
    y = y if scores == 1 else y[:, :, None].expand(-1, -1, scores)
    torch.manual_seed(0)
    model = nn.Linear(3, scores)

    got = trained(
        lambda: deepcopy(model),
        Federation.from_clients(with_test(*[list(zip(X, y, strict=True))] * 2)),
        loss=nn.BCEWithLogitsLoss(pos_weight=weight),
        metrics=["f1", "auc"] if (scores, labels) == (1, torch.long) else [],
    )[1]

    by_hand = F.binary_cross_entropy_with_logits(
        got(X[0]).reshape(y[0].shape), y[0].float(), pos_weight=weight
    )
    plain = F.binary_cross_entropy_with_logits(
        got(X[0]).reshape(y[0].shape), y[0].float()
    )
    assert by_hand < 5 * plain and got(X[0]).mean() > model(X[0]).mean()


@pytest.mark.parametrize("loss", ["squared", "binary_cross_entropy"])
def test_axes_in_another_order_are_no_targets(loss):
    y = torch.rand(3, 24, 3, 2)

    def wrong():
        return layers("Linear 3 6, Unflatten 1 [2,3]")

    fits = layers("Linear 3 6")
    with sentence(r"loss: .* scores \[\d+, 2, 3\] for targets \[\d+, 3, 2\]; give one"):
        evaluated(loss, wrong, y)
    assert evaluated(loss, fits, y)["loss"][0] > 0


def test_the_mean_over_a_batch_of_a_divergence_is_a_loss():
    y = torch.rand(3, 24, 4).softmax(-1)
    model = layers("Linear 3 4, LogSoftmax 1")
    data = Federation.from_clients(with_test(*[list(zip(X, y, strict=True))] * 2))
    evaluation, trained_model = trained(
        model, data, 1, nn.KLDivLoss(reduction="batchmean")
    )
    want = F.kl_div(trained_model(X[0]), y[0], reduction="batchmean")
    assert evaluation["loss"][0] == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, y: ((s - y) ** 2).mean(),
        lambda s, y: ((s.view(y.shape) - y) ** 2).mean(),
        F.mse_loss,
        nn.MSELoss(reduction="mean"),
    ],
)
def test_a_loss_that_brings_them_together_itself_is_taken(loss):
    torch.manual_seed(0)
    want = evaluated("squared", column, COUNTS)["loss"]
    assert evaluated(loss, column, COUNTS)["loss"] == pytest.approx(want)


@pytest.mark.parametrize(
    "loss", [nn.PoissonNLLLoss(), F.l1_loss, F.smooth_l1_loss, nn.L1Loss()]
)
def test_whole_numbers_have_no_accuracy_and_may_have_an_error(loss):
    got = evaluated(loss, flat, COUNTS.long(), metrics=["mae"])
    assert "accuracy" not in got and min(got["mae"]) > 0


@pytest.mark.parametrize(
    "loss, model, classes",
    [
        ("binary_cross_entropy", column, True),
        ("hinge", column, True),
        (lambda s, y: F.cross_entropy(s, y), lambda: nn.Linear(3, 2), True),
        # The sign of a probability tells no class.
        (
            lambda s, y: F.binary_cross_entropy(s, y.float()),
            lambda: layers("Linear 3 1, Sigmoid, Flatten 0"),
            False,
        ),
    ],
)
def test_scores_of_classes_have_an_accuracy(loss, model, classes):
    assert ("accuracy" in evaluated(loss, model, (COUNTS > 1).long())) is classes


class Steps(nn.Module):
    """Model with scores for every step of a sequence.

    One score gives [B, T] or [B, T, 1]; C classes give [B, C, T].
    """

    def __init__(self, scores=1, last=False):
        super().__init__()
        self.l = nn.Linear(4, scores)
        self.last = last

    def forward(self, d):
        out = self.l(d["x"] if isinstance(d, dict) else d)
        return (
            out
            if self.last
            else out[..., 0]
            if out.shape[-1] == 1
            else out.transpose(1, 2)
        )


def steps(classes=2, length=5, left_out=""):
    """A federation of sequences.

    Some steps are left out, by a "mask" or by "labels" of -100.
    """
    torch.manual_seed(1)
    clients = []
    for _ in range(3):
        x = torch.randn(40, length, 4)
        y = x[..., :classes].argmax(-1) if classes > 2 else (x[..., 0] > 0).long()
        seen = torch.arange(length) < torch.randint(1, length + 1, (40, 1))
        y = y.masked_fill(~seen, -100) if left_out == "labels" else y
        clients.append(({"x": x, "mask": seen} if left_out == "mask" else x, y))
    return Federation.from_clients(clients).split(test=0.25)


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("loss", ["binary_cross_entropy", "hinge"])
@pytest.mark.parametrize("shape", [False, True])
def test_one_score_a_step_is_measured_and_predicted_by_its_sign(loss, shape):
    evaluation, model = trained(
        lambda: Steps(last=shape), steps(), loss=loss, metrics=["f1"]
    )
    assert min(evaluation["accuracy"]) > 0.9 and min(evaluation["f1"]) > 0.9
    x = torch.randn(7, 5, 4)
    equals(model.predict(x), (model(x).reshape(7, 5) > 0).long())
    assert model.returns == "logits"


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("classes, length", [(4, 4), (3, 5), (3, 1)])
def test_metrics_of_steps_are_those_of_their_labels(classes, length):
    names = ["auc", "f1", "balanced_accuracy"]
    data = steps(classes, length)
    evaluation, model = trained(lambda: Steps(classes), data, 40, metrics=names)
    assert all(min(evaluation[k]) > 0.85 for k in ("accuracy", *names)), evaluation
    assert model.predict(torch.randn(6, length, 4)).shape == (6, length)


@pytest.mark.parametrize("loss", ["squared", "half_squared", "hinge"])
def test_steps_that_a_mask_leaves_out_count_in_no_loss(loss):
    with sentence(r"loss: '\w+' would count the steps that the mask leaves out; "):
        trained(Steps, steps(left_out="mask"), loss=loss)


def test_labels_that_are_left_out_need_no_mask():
    one, other = (
        trained(lambda: Steps(3), steps(3, left_out=left_out), 2)[0]["loss"]
        for left_out in ("mask", "labels")
    )
    assert one == pytest.approx(other)


def void(number, length=5, seed=1):
    """Clients of whose labels about half are `number`.

    The labels are those of steps, or of samples where `length` is 0.
    """
    gen = torch.Generator().manual_seed(seed)
    clients = []
    for _ in range(3):
        shape = (40, length) if length else (40,)
        x = torch.randn(*shape, 4, generator=gen)
        y = (x[..., 0] > 0).long()
        clients.append(
            (x, y.masked_fill(torch.rand(shape, generator=gen) < 0.5, number))
        )
    return clients


WEIGHT = torch.tensor([1.0, 2.0])
IGNORING = {
    "module": lambda k: nn.CrossEntropyLoss(ignore_index=k),
    "weighted": lambda k: nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=k),
    "function": lambda k: partial(F.cross_entropy, ignore_index=k),
    "likelihood": lambda k: nn.NLLLoss(ignore_index=k),
}


def scorer(length, normal=False):
    model = Steps(2) if length else nn.Linear(4, 2)
    return nn.Sequential(model, nn.LogSoftmax(1)) if normal else model


def by_hand(model, x, y, number):
    """Accuracy and balanced accuracy over the labels that count.

    Accuracy is the mean over samples; balanced accuracy is the mean over both classes.
    """
    right = (model(x).argmax(1) == y).float()
    counts = y != number
    each = [right[i][counts[i]].mean() for i in range(len(y)) if bool(counts[i].any())]
    balanced = torch.stack([right[y == c].mean() for c in (0, 1)]).nanmean()
    return float(sum(each) / len(each)), float(balanced)


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize(
    "loss, length, number", crossed(IGNORING, [5, 0], [255, 2, -100])
)
@pytest.mark.unless(lambda number, length, loss: number == -100 and not length)
def test_labels_that_the_loss_leaves_out_count_in_nothing(loss, length, number):
    clients = void(number, length)
    torch.manual_seed(0)
    model = scorer(length, loss == "likelihood")
    data = Federation.from_clients(clients, classes=max(2, number + 1)).split(test=0.25)
    options = {
        "training": Training(lr=2.0, batch_size=10),
        "metrics": ["f1", "balanced_accuracy"],
    }

    run = simulation(
        data=data, model=model, loss=IGNORING[loss](number), rounds=8, **options
    )
    evaluation = run.run().rounds[-1]["eval"]

    for i in range(3):
        want = by_hand(run.history.model(i), *data.client(i, "test"), number)
        got = evaluation["accuracy"][i], evaluation["balanced_accuracy"][i]
        assert got == pytest.approx(want, abs=1e-6) and got[0] > 0.8
    assert run.config.data.classes == 2
    counted = sum(int((y != number).sum()) for _, y in map(data.client, range(3)))
    assert int(run.config.data.counts().sum()) == counted


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("length", [5, 0])
@pytest.mark.parametrize("algorithm", ["fedavg", "knnper", "fedrod"])
@pytest.mark.unless(lambda length, algorithm: length and algorithm != "fedavg")
def test_a_newcomer_and_a_client_elsewhere_know_what_the_loss_leaves_out(
    algorithm, length
):
    loss = nn.CrossEntropyLoss(ignore_index=255)
    model = scorer(length)
    data = Federation.from_clients(void(255, length), classes=256).split(test=0.25)
    options = {"training": Training(lr=0.5, batch_size=10), "rounds": 5, "loss": loss}
    history = simulation(algorithm, data, model=deepcopy(model), **options).run()
    x, y = void(255, length, 2)[0]
    assert by_hand(history.adapt((x, y)), x, y, 255)[0] > 0.8
    one = Federation.from_clients([{"train": (x, y), "test": (x + 0, y)}], classes=256)
    client = Client(algorithm, deepcopy(model), one, loss=loss)
    server = Server(algorithm, deepcopy(model), 1)
    server.aggregate({"a": client.train(server.download("a"))})
    download = server.download("a", "evaluation")
    want = by_hand(client.model(download), x, y, 255)[0]
    assert client.evaluate(download)["accuracy"] == pytest.approx(want, abs=1e-6)


def test_what_to_do_about_labels_of_no_class_is_said():
    clients = void(255)
    words = r"y: expected .*; of a label that counts in nothing give ignored_label="
    with sentence(words + "255, got"):
        Federation.from_clients(clients, classes=2)
    data = Federation.from_clients(clients).split(test=0.25)
    with sentence(
        r"data: there are labels 255, and the model has 2 outputs; .*ignore_index=255"
    ):
        trained(
            Steps(2), data, loss=lambda s, y: F.cross_entropy(s, y, ignore_index=255)
        )
    evaluation = trained(Steps(2), data, 20, nn.CrossEntropyLoss(ignore_index=255))[0]
    assert min(evaluation["accuracy"]) > 0.8
    with sentence(words + "-1, got"):
        Federation.from_clients(void(-1), classes=2)
    assert Federation.from_clients(void(-100), classes=2).classes == 2


def pixels(void_label, classes=21):
    """Three clients with images, whose label maps [n, 4, 4] have void pixels.

    The first image of each client, and all of the last client's training images, have
    void pixels alone.
    """
    gen = torch.Generator().manual_seed(0)
    clients = []
    for i in range(3):
        x = torch.randn(20, 3, 4, 4, generator=gen)
        y = torch.randint(0, classes, (20, 4, 4), generator=gen)
        y[torch.rand(y.shape, generator=gen) < 0.3] = void_label
        y[0] = void_label
        train = y.masked_fill(torch.tensor(i == 2), void_label)
        clients.append({"train": (x, train), "test": (x + 0.1, y)})
    return clients


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("void_label", [255, -1])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.unless(lambda engine, void_label: engine == "vmap" and void_label == -1)
def test_void_pixels_are_as_if_they_were_not_there(engine, void_label):
    clients = pixels(void_label)
    data = Federation.from_clients(clients, classes=21, ignored_label=void_label)
    assert data.size().tolist() == [20, 20, 20]  # with those of void pixels alone
    size = data.size(labelled=True).tolist()
    left_out = "samples without a label that counts: {'train': 22, 'test': 3}"
    assert left_out in data.summary()
    labelled = []
    for client in clients:
        pairs = {}
        for split, (x, y) in client.items():
            has_label = (y != void_label).flatten(1).any(1)
            pairs[split] = (x[has_label], y[has_label])
        labelled.append(pairs)
    without = Federation.from_clients(labelled, classes=21, ignored_label=void_label)
    loss = nn.CrossEntropyLoss(ignore_index=void_label)
    torch.manual_seed(0)
    model = nn.Conv2d(3, 21, 3, padding=1)
    options = {"loss": loss, "rounds": 2, "metrics": ["f1"], "engine": engine}
    options["training"] = Training(lr=0.5, batch_size=8)

    run = simulation(data=data, model=model, **options).run()
    assert run.header["size"] == size == [19, 19, 0]
    want = simulation(data=without, model=model, **options).run()

    evaluation = run.rounds[-1]["eval"]
    assert evaluation == want.rounds[-1]["eval"]
    assert run.rounds[-1]["train_loss"] == want.rounds[-1]["train_loss"]
    assert run.rounds[-1]["cohort"] == [0, 1]
    assert evaluation["size"] == [19, 19, 19]
    for i in range(3):
        x, y = clients[i]["test"]
        by_torch = float(loss(run.model(i)(x), y))
        assert evaluation["loss"][i] == pytest.approx(by_torch, abs=1e-5)
    counted = sum(int((c["train"][1] != void_label).sum()) for c in clients)
    assert int(data.counts().sum()) == counted and data.classes == 21


def test_samples_without_a_label_change_no_bit():
    x = torch.randn(40, 4)
    y = (x[:, 0] > 0).long()
    void_labels = y.clone()
    void_labels[::3] = 9
    is_labelled = void_labels != 9
    test = (x + 0.1, y)
    data = Federation.from_clients(
        [{"train": (x, void_labels), "test": test}], ignored_label=9
    )
    labelled = (x[is_labelled], y[is_labelled])
    same = Federation.from_clients([{"train": labelled, "test": test}])
    model = nn.Linear(4, 2)
    got = trained(model, data)[0]
    assert data.classes == 2 and got == trained(model, same)[0]
    with sentence("data: no client has training samples with a label that counts"):
        only_void = torch.full_like(y, -100)
        nothing = [{"train": (x, only_void), "test": test}]
        trained(nn.Linear(4, 2), Federation.from_clients(nothing, classes=2))
    with sentence("ignored_label: expected None, as these targets are numbers"):
        Federation.from_clients([(x, x[:, 0])], ignored_label=9)


def test_labels_turned_by_client_cannot_be_left_out():
    data = Federation.from_clients(void(2, 0)).split(test=0.25)
    data = replace(data, relabel=torch.arange(3).expand(3, -1))
    with sentence("relabel: expected None, as label 2 counts in nothing"):
        trained(nn.Linear(4, 3), data, loss=nn.CrossEntropyLoss(ignore_index=2))


def test_what_a_model_predicts_is_what_its_targets_were():
    x = torch.randn(80, 3)
    labels = (x > 0).long()
    ratings = (3 * x[:, 0]).round().clamp(-9, 9).long() + 9
    data = Federation.from_clients([(x, labels)]).split(test=0.25)
    evaluation, model = trained(nn.Linear(3, 3), data, loss="binary_cross_entropy")
    equals(model.predict(x), (model(x) > 0).long())
    assert min(evaluation["accuracy"]) > 0.8
    data = Federation.from_clients([(x, ratings)]).split(test=0.25)
    evaluation, model = trained(nn.Linear(3, 1), data, loss="squared", metrics=["mae"])
    torch.testing.assert_close(model.predict(x), model(x)[:, 0])
    assert model.returns == "values" and evaluation["mae"][0] < 1
    assert model.predict(x.numpy()[::-1]).shape == (80,)
    assert model.double().predict(x.double()).dtype == torch.float64
    with sentence(
        r"x: expected samples \[B, ...\], got shape \[3\]; for one sample give "
        r"x\[None\]"
    ):
        model.predict(x[0])
    with sentence(
        r"x: expected samples \[B, ...\], got shape \[2, 5\]; the model says '.*2x5"
    ):
        model.predict(torch.randn(2, 5))
    with sentence("x: expected numbers in one array .*, got 'a'"):
        model.predict("a")


def test_neighbours_vote_with_one_label_a_sample():
    with sentence("data: kNN-Per's neighbours vote .* or one for each step"):
        trained(lambda: Steps(3), steps(3), 1, algorithm="knnper")
    x = torch.randn(60, 3)
    data = Federation.from_clients([(x, x[:, 0])] * 2).split(test=0.25)
    assert trained(nn.Linear(3, 1), data, 1, algorithm="knnper")[1].returns == "values"


def test_losses_of_double_models_are_double():
    s = double(tiny(engine="vmap"))
    losses = at_work(s).loss(s.net.w0.expand(3, -1))
    want = [s.net.loss(s.net.w0, *s.data.client(i)).item() for i in range(3)]
    near(losses, want, 1e-13, 1e-15)


def test_a_loss_is_a_name_a_function_or_a_module():
    def played(loss=None):
        run = simulation(loss=loss)
        return run.run().series("loss")[1], run.header()["loss"]

    want, name = played()
    assert name == "cross_entropy"
    for loss in (
        "cross_entropy",
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        lambda scores, y: F.cross_entropy(scores, y),
    ):
        assert torch.allclose(played(loss)[0], want, rtol=1e-5)
    weighted, name = played(
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 1.0, 1.0]))
    )
    assert not torch.allclose(weighted, want, rtol=1e-2) and name.startswith(
        "CrossEntropyLoss "
    )


@pytest.mark.parametrize(
    "loss, words",
    [
        ("entropy", "expected one of cross_entropy, .* got 'entropy'"),
        (
            nn.CrossEntropyLoss,
            r"expected a loss, got the class CrossEntropyLoss; write "
            r"CrossEntropyLoss\(\)",
        ),
        (
            nn.CrossEntropyLoss(reduction="none"),
            r"expected the mean over a batch, got CrossEntropyLoss\(reduction='none'\)",
        ),
        (
            partial(F.cross_entropy, reduction="sum"),
            "expected the mean over a batch, got a function with reduction='sum'",
        ),
        (nn.Linear(2, 1), "Linear has parameters, which nothing would train"),
        (0.5, "expected one of cross_entropy, .* got 0.5"),
    ],
)
def test_what_is_no_loss_is_one_sentence(loss, words):
    with sentence(f"loss: {words}", (ValueError, TypeError)):
        Net(tiny_model(), loss)
    with sentence(f"loss: {words}", (ValueError, TypeError)):
        simulation(loss=loss)


def test_a_net_has_its_own_loss():
    with sentence("loss: this Net has a loss of its own"):
        simulation(model=Net(tiny_model()), loss="cross_entropy")
