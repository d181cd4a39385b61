"""Inputs of several tensors, and sequences of several lengths: what the model and the loss get of
them."""

import pytest
import torch
import torch.nn.functional as F
from doors import IGNORED
from parts.fields import CLASSES, STEPS, TWO, Tagger, federation, sequences

from pflcore import Clients, Net, Training
from pflcore.data.inputs import Fields, joined
from pflcore.train import prepared
from pflcore.train.losses import cross_entropy


def test_fields_come_back_as_they_were():
    x, _, _ = sequences(20, torch.Generator().manual_seed(0))
    rows, fields = joined(x, torch.float32)
    assert rows.shape == (20, 2 * STEPS + 1)
    for name, back in fields.apart(rows).items():
        assert back.dtype == x[name].dtype and torch.equal(back, x[name])
    assert all(torch.equal(v, x[k][[3, 1]]) for k, v in fields.apart(rows[[3, 1]]).items())


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_training_is_a_loop_over_the_sequences_as_they_are(per_step, engine):
    data = federation(per_step)
    torch.manual_seed(0)
    module, training = Tagger(per_step), Training(lr=0.3, batch_size=100, epochs=2)
    setting = prepared(Net(module), data, training, engine, workers=1)
    got = (
        Clients(setting, torch.arange(data.n), 1, torch.zeros(data.n, 0))
        .fit(setting.net.w0.expand(data.n, -1))
        .w
    )
    for i in range(data.n):
        rows, y = data.client(i)
        assert data.fields is not None
        x, model = data.fields.apart(rows), Tagger(per_step)
        model.load_state_dict(module.state_dict())
        for _ in range(2):
            model.zero_grad()
            each = []
            # one sequence at a time, cut to its length: no padding, no mask
            for j in range(len(y)):
                t = int(x["mask"][j].sum())
                one = {k: v[j : j + 1, :t] if v.dim() > 1 else v[j : j + 1] for k, v in x.items()}
                each.append(
                    F.cross_entropy(model(one), y[j : j + 1, :t] if per_step else y[j : j + 1])
                )
            torch.stack(each).mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.3 * p.grad
        torch.testing.assert_close(got[i], setting.net.row(model), rtol=1e-4, atol=1e-6)


def test_cross_entropy_of_whole_sequences_is_torchs():
    scores, y = (
        torch.randn(5, CLASSES, STEPS, dtype=torch.float64),
        torch.randint(CLASSES, (5, STEPS)),
    )
    torch.testing.assert_close(cross_entropy(scores, y), F.cross_entropy(scores, y))
    y[2, 1:] = IGNORED
    want = torch.stack(
        [F.cross_entropy(s[None], t[None]) for s, t in zip(scores, y, strict=True)]
    ).mean()
    torch.testing.assert_close(cross_entropy(scores, y), want)
    y[3] = IGNORED  # a sequence without a step has no loss, and no gradient that is none
    assert bool(cross_entropy(scores.requires_grad_(), y).isfinite())


def test_fields_are_a_value():
    assert joined({"a": TWO}, torch.float32)[1] == Fields(joined({"a": TWO}, torch.float32)[1])
