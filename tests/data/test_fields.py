"""Inputs of several tensors, and sequences of several lengths."""

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

WORDS = 11
STEPS = 6
CLASSES = 3


class Tagger(nn.Module):
    """Model with scores of each step, or of the whole sequence.

    The mask keeps padding out of the context.
    """

    def __init__(self, per_step):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(5, CLASSES)
        self.per_step = per_step

    def forward(self, x):
        assert [v.dtype for v in x.values()] == [torch.int64, torch.bool, torch.float32]
        mask = x["mask"].float()[..., None]
        age = x["age"][:, None]
        z = self.embed(x["tokens"]) * mask
        context = z.sum(1) / mask.sum(1)
        if not self.per_step:
            return self.head(torch.cat([context, age], 1))
        every = [z + context[:, None], age[:, None].expand(-1, z.shape[1], 1)]
        return self.head(torch.cat(every, 2)).movedim(-1, 1)  # [B, C, T]


def sequences(n):
    """Fields of n sequences, their labels, and labels of each step."""
    texts = [torch.randint(1, WORDS, (t,)) for t in torch.randint(1, STEPS + 1, (n,))]
    tokens, mask = pad_sequences(texts, length=STEPS)
    fields = {"tokens": tokens, "mask": mask, "age": torch.rand(n)}
    return fields, tokens.sum(1) % CLASSES, tokens % CLASSES


def federation(per_step):
    samples = [sequences(8 + 3 * i) for i in range(4)]
    clients = [(x, steps if per_step else y) for x, y, steps in samples]
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
    for row, values, is_step in zip(rows, out, mask, strict=True):
        assert values[is_step].tolist() == row[:length] and bool(
            (values[~is_step] == -1).all()
        )


def run_of(algorithm, per_step, **options):
    training = Training(lr=0.3, batch_size=8, epochs=3)
    return Simulation(
        algorithm, Tagger(per_step), federation(per_step), training, **options
    )


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(
    "algorithm, per_step", [("fedavg", True), ("apfl", True), ("ditto", False)]
)
def test_a_run_counts_the_steps_that_are_there(algorithm, per_step):
    seen = {"share": lambda scores, y: float((scores.argmax(-1) == y).double().mean())}
    run = run_of(algorithm, per_step, rounds=5, evaluation=Evaluation(metrics=seen))
    history = run.run()
    data = run.data
    last = history.rounds[-1]["eval"]
    together = evaluate(RunConfig.of(run.algorithm, run.config), run.state)
    for i in range(data.n):
        rows, y = data.client(i, "test")
        x = data.fields.split_fields(rows)
        labels = history.predict(i, x)
        assert labels.shape == y.shape
        equals(labels, history.model(i).predict(rows))
        is_step = y != IGNORED
        each = (labels == y).double()
        if per_step:
            equals(is_step, x["mask"])
            assert not is_step.all()
            assert last["share"][i] == pytest.approx(float(each[is_step].mean()))
            each = torch.stack(
                [r[t].mean() for r, t in zip(each, is_step, strict=True)]
            )
        assert last["accuracy"][i] == pytest.approx(float(each.mean()))
        # A client that is evaluated alone has the same results.
        alone = evaluate(
            RunConfig.of(run.algorithm, run.config),
            run.state,
            clients=torch.tensor([i]),
        )
        for key in ("loss", "accuracy"):
            torch.testing.assert_close(together[key][i], alone[key][i])
        counts = torch.bincount(y[is_step], minlength=CLASSES)
        assert data.counts("test")[i].tolist() == counts.tolist()


def test_every_constructor_makes_the_same_federation():
    x, y, _ = sequences(12)
    halves = [slice(0, 5), slice(5, 12)]

    def samples(at):
        return {k: v[at] for k, v in x.items()}, y[at]

    one = Federation.from_clients([samples(half) for half in halves])
    numbers = [range(12)[half] for half in halves]
    items = [list(map(samples, half)) for half in numbers]
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
    incomplete = {k: v for k, v in x.items() if k != "age"}
    message = r"expected (inputs of shape )?tokens \[6\] \(int64\), .*, got [^\n]*\.$"
    with sentence(f"samples: {message}"):
        history.adapt((incomplete, y))
    with sentence(f"x: {message}"):
        history.predict(0, incomplete)


# Fields, targets, part of the error message. A field "c" asks for a second client.
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
    x = {name: torch.tensor(v) for name, v in x.items()}
    y = torch.tensor(y)
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
    data = federation(per_step)
    module = Tagger(per_step)
    training = Training(lr=0.3, batch_size=100)
    hardware = Hardware(engine, workers=1)
    setting = Simulation(
        "fedavg", Net(module), data, training, hardware=hardware
    ).config
    got = at_work(setting).fit(setting.net.w0.expand(data.n, -1)).w
    for i in range(data.n):
        rows, y = data.client(i)
        x = data.fields.split_fields(rows)
        model = Tagger(per_step)
        model.load_state_dict(module.state_dict())
        sgd = torch.optim.SGD(model.parameters(), 0.3)
        each = []
        # One sequence at a time, cut to its length, without padding and mask.
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
