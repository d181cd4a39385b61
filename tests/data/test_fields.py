"""Inputs of several tensors, and sequences of several lengths: what the model and the loss get of
them."""

from typing import Any

import pytest
import torch
from doors import IGNORED
from hypothesis import given
from hypothesis import strategies as st
from parts.fields import CLASSES, LABELS, TWO, Tagger, federation, sequences

from pflcore import Evaluation, Federation, Simulation, Training, evaluate
from pflcore.data import padded
from pflcore.simulation.round import Setup


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=7), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_padded_rows_hold_the_sequences(rows, length):
    out, mask = padded(rows, value=-1, length=length)
    assert out.shape == mask.shape == (len(rows), length)
    for row, values, there in zip(rows, out, mask, strict=True):
        assert values[there].tolist() == row[:length] and bool((values[~there] == -1).all())


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("algorithm", ["fedavg", "ditto", "apfl", "fedrod"])
@pytest.mark.unless(lambda per_step, algorithm: per_step and algorithm == "fedrod")
def test_a_run_counts_the_steps_that_are_there(per_step, algorithm):
    data = federation(per_step)
    seen = {"share": lambda scores, y: float((scores.argmax(-1) == y).double().mean())}
    run = Simulation(
        algorithm,
        Tagger(per_step),
        data,
        Training(lr=0.3, batch_size=8, epochs=3),
        rounds=5,
        evaluation=Evaluation(metrics=seen),
    )
    history = run.run()
    assert history.rounds[-1]["train_loss"] < history.rounds[0]["train_loss"]
    last = history.rounds[-1]["eval"]
    assert data.fields is not None
    for i in range(data.n):
        rows, y = data.client(i, "test")
        x = data.fields.apart(rows)
        labels = history.predict(i, x)
        assert labels.shape == y.shape and torch.equal(labels, history.model(i).predict(rows))
        right, there = (labels == y).double(), (y != IGNORED)
        if per_step:
            assert torch.equal(there, x["mask"])
            assert last["share"][i] == pytest.approx(float(right[there].mean()))
            each = torch.stack([r[t].mean() for r, t in zip(right, there, strict=True)])
            assert last["accuracy"][i] == pytest.approx(float(each.mean()))
        else:
            assert last["accuracy"][i] == pytest.approx(float(right.mean()))


def test_one_model_for_all_is_evaluated_as_many():
    data = federation(True)
    run = Simulation("fedavg", Tagger(True), data, Training(lr=0.3, batch_size=8), rounds=2)
    run.run()
    together = evaluate(Setup(run.algorithm, run.setting), run.state)
    apart = [
        evaluate(Setup(run.algorithm, run.setting), run.state, clients=torch.tensor([i]))
        for i in range(data.n)
    ]
    for key in ("loss", "accuracy"):
        torch.testing.assert_close(
            together[key], torch.stack([a[key][i] for i, a in enumerate(apart)])
        )


def test_made_by_all_doors_it_is_the_same():
    x, y, _ = sequences(12, torch.Generator().manual_seed(1))
    halves = [slice(0, 5), slice(5, 12)]
    clients = [({k: v[s] for k, v in x.items()}, y[s]) for s in halves]
    one = Federation.from_clients(clients)
    index = {"train": [torch.arange(12)[s] for s in halves]}
    items = [[({k: v[j] for k, v in x.items()}, y[j]) for j in range(12)[s]] for s in halves]
    others = [
        Federation(x, y, index, CLASSES),
        Federation.from_table(x, y, torch.tensor([0] * 5 + [1] * 7)),
        Federation.from_clients(items),
    ]
    for other in others:
        assert (
            other.fields == one.fields
            and torch.equal(other.x, one.x)
            and torch.equal(other.y, one.y)
        )
    small = one.subset([1])
    assert (
        small.fields == one.fields
        and "tokens [6] (int64), mask [6] (bool), age [] (float32)" in small.summary()
    )
    assert one.to("cpu").split(test=0.5, seed=100, of=None).fields == one.fields


def test_labels_that_are_left_out_are_counted_nowhere():
    data = federation(True)
    counts = data.counts()
    for i in range(data.n):
        y = data.labels(i)
        assert counts[i].tolist() == torch.bincount(y[y >= 0], minlength=CLASSES).tolist() and bool(
            (y == IGNORED).any()
        )


def test_a_newcomer_brings_the_same_fields():
    data = federation(False)
    history = Simulation(
        "ditto", Tagger(False), data, Training(lr=0.1, batch_size=8), rounds=2
    ).run()
    x, y, _ = sequences(9, torch.Generator().manual_seed(9))
    assert history.adapt((x, y), rounds=1).predict(x).shape == (9,)
    with pytest.raises(
        ValueError,
        match=r"^samples: expected inputs of shape tokens \[6\] \(int64\), .*, got [^\n]*\.$",
    ):
        history.adapt(({k: v for k, v in x.items() if k != "age"}, y))
    with pytest.raises(
        ValueError,
        match=r"^x: expected tokens \[6\] \(int64\), .*, got the fields tokens [^\n]*\.$",
    ):
        history.predict(0, {k: v for k, v in x.items() if k != "age"})


BAD: list[tuple[Any, Any, str]] = [
    ({}, LABELS, "x: expected tensors by name"),
    ({"a": TWO, "b": torch.zeros(3)}, LABELS, "each with a row for every sample"),
    ({"a": TWO.to(torch.complex64)}, LABELS, "x['a']: expected a tensor of floats, int64 or bool"),
    ({"a": torch.tensor([1, 2**24 + 1])}, LABELS, "within +-16,777,216, exact in torch.float32"),
    ({"a": TWO, "mask": TWO > 0}, TWO, "y: expected labels of the steps of which x has a mask"),
    ({"a": TWO}, torch.tensor([0, IGNORED]), "y: expected int64 labels in 0..0"),
]


@pytest.mark.parametrize(("x", "y", "words"), BAD)
def test_bad_fields_are_one_sentence(x, y, words):
    classes = None if y.is_floating_point() else 1 if int(y.min()) < 0 else 2
    with pytest.raises((ValueError, TypeError)) as caught:
        Federation(x, y, {"train": [torch.arange(2)]}, classes)
    assert words in str(caught.value)


def test_clients_with_other_fields_are_named():
    with pytest.raises(
        ValueError,
        match=r"^client 1: expected inputs and targets a \[3\] \(float32\) .*, as client 0 has, "
        r"got 'a \[2\] \(float32\)",
    ):
        Federation.from_clients([({"a": TWO}, LABELS), ({"a": TWO[:, :2]}, LABELS)])
    with pytest.raises(ValueError, match=r"client 1: expected inputs and targets a \[3\]"):
        Federation.from_clients([({"a": TWO}, LABELS), (TWO, LABELS)])
