"""Inputs of several tensors, and sequences of several lengths: what the model and the
loss get of them."""

import pytest
import torch
import torch.nn.functional as F
from entry_points import IGNORED, loss_called, sentence
from hypothesis import given
from hypothesis import strategies as st
from places import tabled
from small import at_work, equals
from torch import nn

from pflcore import (
    Evaluation,
    Federation,
    Hardware,
    Net,
    Simulation,
    Training,
    evaluate,
)
from pflcore.data import pad_sequences
from pflcore.simulation.round import RunConfig

WORDS, STEPS, CLASSES = 11, 6, 3


class Tagger(nn.Module):
    """A class for every step; the mask keeps padding out of the context."""

    def __init__(self, per_step):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(5, CLASSES)
        self.per_step = per_step

    def forward(self, x):
        assert [v.dtype for v in x.values()] == [torch.int64, torch.bool, torch.float32]
        mask, age = x["mask"].float()[..., None], x["age"][:, None]
        z = self.embed(x["tokens"]) * mask
        context = z.sum(1) / mask.sum(1)
        if not self.per_step:
            return self.head(torch.cat([context, age], 1))
        every = [z + context[:, None], age[:, None].expand(-1, z.shape[1], 1)]
        return self.head(torch.cat(every, 2)).movedim(-1, 1)  # [B, C, T]


def sequences(n):
    """Fields, a label of each sequence, and one of each step."""
    texts = [torch.randint(1, WORDS, (t,)) for t in torch.randint(1, STEPS + 1, (n,))]
    tokens, mask = pad_sequences(texts, length=STEPS)
    fields = {"tokens": tokens, "mask": mask, "age": torch.rand(n)}
    return fields, tokens.sum(1) % CLASSES, tokens % CLASSES


def federation(per_step):
    made = [sequences(8 + 3 * i) for i in range(4)]
    clients = [(x, steps if per_step else y) for x, y, steps in made]
    return Federation.from_clients(clients).split(test=0.25)


@given(
    st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=7), min_size=1, max_size=5
    ),
    st.integers(1, 9),
)
def test_padded_rows_hold_the_sequences(rows, length):
    out, mask = pad_sequences(rows, value=-1, length=length)
    assert out.shape == mask.shape == (len(rows), length)
    for row, values, there in zip(rows, out, mask, strict=True):
        assert values[there].tolist() == row[:length] and bool(
            (values[~there] == -1).all()
        )


def run_of(algorithm, per_step, **options):
    training = Training(lr=0.3, batch_size=8, epochs=3)
    return Simulation(
        algorithm, Tagger(per_step), federation(per_step), training, **options
    )


@pytest.mark.parametrize(
    "algorithm, per_step", [("fedavg", True), ("apfl", True), ("ditto", False)]
)
def test_a_run_counts_the_steps_that_are_there(algorithm, per_step):
    seen = {"share": lambda scores, y: float((scores.argmax(-1) == y).double().mean())}
    run = run_of(algorithm, per_step, rounds=5, evaluation=Evaluation(metrics=seen))
    history, data = run.run(), run.data
    last = history.rounds[-1]["eval"]
    together = evaluate(RunConfig(run.algorithm, run.context), run.state)
    for i in range(data.n):
        rows, y = data.client(i, "test")
        x = data.fields.split_fields(rows)
        labels = history.predict(i, x)
        assert labels.shape == y.shape
        equals(labels, history.model(i).predict(rows))
        there = y != IGNORED
        each = (labels == y).double()
        if per_step:
            equals(there, x["mask"])
            assert not there.all()
            assert last["share"][i] == pytest.approx(float(each[there].mean()))
            each = torch.stack([r[t].mean() for r, t in zip(each, there, strict=True)])
        assert last["accuracy"][i] == pytest.approx(float(each.mean()))
        # one model for all is evaluated as many are
        alone = evaluate(
            RunConfig(run.algorithm, run.context), run.state, clients=torch.tensor([i])
        )
        for key in ("loss", "accuracy"):
            torch.testing.assert_close(together[key][i], alone[key][i])
        own = torch.bincount(y[there], minlength=CLASSES)
        assert data.counts("test")[i].tolist() == own.tolist()


def test_every_constructor_makes_the_same_federation():
    x, y, _ = sequences(12)
    halves = [slice(0, 5), slice(5, 12)]
    one = Federation.from_clients(
        [({k: v[s] for k, v in x.items()}, y[s]) for s in halves]
    )
    items = [
        [({k: v[j] for k, v in x.items()}, y[j]) for j in range(12)[s]] for s in halves
    ]
    for other in (
        Federation(x, y, {"train": [torch.arange(12)[s] for s in halves]}, CLASSES),
        Federation.from_table(x, y, torch.tensor([0] * 5 + [1] * 7)),
        Federation.from_clients(items),
    ):
        assert other.fields == one.fields
        equals((other.x, other.y), (one.x, one.y))
    for name, back in one.fields.split_fields(one.x[[3, 1]]).items():
        assert back.dtype == x[name].dtype
        equals(back, x[name][[3, 1]])
    small = one.subset([1]).split(test=0.5)
    assert small.fields == one.fields
    assert "tokens [6] (int64), mask [6] (bool), age [] (float32)" in small.summary()


def test_a_newcomer_brings_the_same_fields():
    history = run_of("ditto", False, rounds=2).run()
    x, y, _ = sequences(9)
    assert history.adapt((x, y), rounds=1).predict(x).shape == (9,)
    few = {k: v for k, v in x.items() if k != "age"}
    said = r"expected (inputs of shape )?tokens \[6\] \(int64\), .*, got [^\n]*\.$"
    with sentence(f"samples: {said}"):
        history.adapt((few, y))
    with sentence(f"x: {said}"):
        history.predict(0, few)


# fields and targets, where "c" is there of a second client
BAD = """\
{} | [0, 1] | x: expected tensors by name, a row per sample
{"a": [[0, 0], [0, 0]], "b": [0, 0, 0]} | [0, 1] | x: expected tensors by name, a row per sample
{"a": [1, 16777217]} | [0, 1] | within +-16,777,216, exact in torch.float
{"a": [0, 0]} | [0, -10] | y: expected int64 labels in 0..0
{"a": [0, 0], "mask": [[true], [false]]} | [[0.5], [0.5]] | y: expected labels of the steps of which
{"a": [0, 0], "c": [0, 0]} | [0, 1] | client 1: expected inputs and targets a [] (int64), c [] (i
"""  # noqa: E501
COMPLEX = {"a": [1j, 0]}, [0, 1], "x['a']: expected a tensor of floats, int64 or b"


@pytest.mark.parametrize("x, y, words", [*tabled(BAD), COMPLEX])
def test_bad_fields_are_one_sentence(x, y, words):
    x, y = {name: torch.tensor(v) for name, v in x.items()}, torch.tensor(y)
    with pytest.raises(ValueError) as caught:
        if "c" in x:
            Federation.from_clients([(x, y), (torch.zeros(2, 3), y)])
        Federation(
            x, y, {"train": [torch.arange(2)]}, None if y.is_floating_point() else 1
        )
    assert words in str(caught.value)


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_training_is_a_loop_over_the_sequences_as_they_are(per_step, engine):
    data, module = federation(per_step), Tagger(per_step)
    training = Training(lr=0.3, batch_size=100)
    hardware = Hardware(engine, workers=1)
    setting = Simulation(
        "fedavg", Net(module), data, training, hardware=hardware
    ).context
    got = at_work(setting).fit(setting.net.w0.expand(data.n, -1)).w
    for i in range(data.n):
        rows, y = data.client(i)
        x, model = data.fields.split_fields(rows), Tagger(per_step)
        model.load_state_dict(module.state_dict())
        sgd = torch.optim.SGD(model.parameters(), 0.3)
        each = []
        # one sequence at a time, cut to its length: no padding, no mask
        for j, t in enumerate(x["mask"].sum(1).tolist()):

            def alone(v, j=j, t=t):
                return v[j : j + 1, :t] if v.dim() > 1 else v[j : j + 1]

            scores = model({name: alone(v) for name, v in x.items()})
            each.append(F.cross_entropy(scores, alone(y)))
        torch.stack(each).mean().backward()
        sgd.step()
        torch.testing.assert_close(got[i], setting.net.row(model), rtol=1e-4, atol=1e-6)


def test_a_sequence_without_a_step_has_no_loss():
    y = torch.full((2, STEPS), IGNORED)
    y[0] = 1
    assert loss_called("cross_entropy")(torch.randn(2, 3, STEPS), y).isfinite()
