"""FedDWA: golden values, properties of its weights, and its rounds."""

from types import SimpleNamespace

import pytest
import torch
from entry_points import spread
from parts.edges import normal
from parts.rivals import GOLDEN
from small import (
    ENGINES,
    F64,
    after,
    at_work,
    double,
    make_setting,
    near,
    some,
    t,
    tiny,
)
from small import near as close
from torch import nn

from pflcore import Federation, Net, Training, ops
from pflcore.algorithms import FedDWA, FedDWAQP


def mixed(alg, w, g):
    """The server's models and weights [N, N] after uploads `w` and `g`."""
    changes, mix = alg.update(alg.init(w[0], len(w)), {"w": w, "g": g}, some(len(w)))
    return changes["x"].rows, spread(mix.weight, mix.index, len(w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1e4, 1e8, 1e13, 1e17, 1e25])
def test_no_length_of_a_model_turns_the_exact_mix(dtype, length):
    """A mix of the convex hull is at most as far from the guide as the nearest model.

    A model that is very far away moves the others' weights by less than they weigh.
    """
    gen = torch.Generator().manual_seed(0)
    base = torch.randn(1, 200, generator=gen).to(dtype)
    w = base + 0.3 * torch.randn(6, 200, generator=gen).to(dtype)
    guide = w + 0.3 * torch.randn(6, 200, generator=gen).to(dtype)
    far = -length * (base + 0.3 * torch.randn(1, 200, generator=gen).to(dtype))
    models = torch.cat([w, far])

    weight, index = FedDWAQP(k=7).mixing_weights(guide, models)
    weights = spread(weight, index, 7)
    alone = spread(*FedDWAQP(k=6).mixing_weights(guide, w), 6)

    gap = (weights @ models.double() - guide.double()).norm(dim=1)
    nearest = (guide - w).double().norm(dim=1)
    assert (gap <= nearest * (1 + 1e-6)).all()
    torch.testing.assert_close(weights[:, :6], alone, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("guidance", "name"), [("epoch", "epoch"), ("full_grad", "fullgrad")]
)
def test_golden_guidance_epoch_against_full_gradient(guidance, name):
    """An epoch ahead and a gradient step ahead can choose opposite neighbours."""
    a9 = GOLDEN["A9_guidance_epoch_vs_fullgrad"]

    class Ordered:  # local training in the order that the golden values have
        lr = a9["eta"]
        context = SimpleNamespace(training=Training())

        def fit(self, start, *, epochs=1, **_):
            w = start.clone()
            for i, batches in enumerate(a9["batches"]):
                for b in batches * epochs:
                    w[i] -= self.lr * (w[i] - t(b).mean())
            return SimpleNamespace(w=w)

        def after(self, fit):
            return self

        def grad(self, w):
            return w - t([[sum(map(sum, b)) / sum(map(len, b))] for b in a9["batches"]])

    down = {"x": torch.zeros(2, 1, dtype=F64)}
    _, up, _ = FedDWA(guidance=guidance).train(down, {}, Ordered())
    close(up["w"][:, 0], a9["w_hat"])
    close(up["g"][:, 0], a9[f"g_{name}"])
    close(mixed(FedDWA(), up["w"], up["g"])[1], a9[f"P_{name}"])


@pytest.mark.parametrize("seed", range(15))
def test_qp_satisfies_kkt(seed):
    torch.manual_seed(seed)
    m = int(torch.randint(1, 45, ()))
    dim = int(torch.randint(1, 60, ()))
    scale = 10.0 ** float(torch.randint(-6, 4, ()))
    models = 1 + scale * torch.randn(m, dim, dtype=F64)
    length = 0.1 if seed % 2 else 2
    g = 1 + scale * torch.randn(1, dim, dtype=F64) * length
    if seed % 5 == 0 and m > 3:
        # These models are affinely dependent.
        models[1] = models[0]
        models[2] = (models[0] + models[3]) / 2
    if seed % 7 == 0:
        g = models[-1:].clone()
    p = spread(*FedDWAQP(k=m).mixing_weights(g, models), m)[0]
    gap = g - models
    slope = gap @ (p @ gap) / gap.square().sum(1).max()
    mu = p @ slope
    assert (slope > mu - 1e-8).all() and ((slope - mu).abs() * (p > 1e-9)).max() < 1e-8
    assert (p > -1e-8).all() and abs(float(p.sum()) - 1) < 1e-8


def test_qp_bridge_runs_from_eq15_to_eq12():
    w, g = torch.randn(2, 12, 30, dtype=F64)
    start = mixed(FedDWAQP(k=4, theta=0.0, ridge=0.0), w, g)[1]
    near(start, mixed(FedDWA(k=4), w, g)[1], 1e-8, 1e-10)
    near(mixed(FedDWAQP(k=4, theta=0.0), w, g)[1], start, 1e-6, 1e-8)
    distances = []
    for theta in (0.0, 0.5, 1.0):
        x = mixed(FedDWAQP(k=4, theta=theta), w, g)[0]
        distances.append(float(((x - g) ** 2).sum()))
    eq15, between, eq12 = distances
    assert eq15 > between > eq12


# properties of the weights ----------------------------------------------------


@pytest.mark.parametrize("long", [1, 1000], ids=["groups", "blocks"])
@pytest.mark.parametrize("k", [1, 5, 99])
def test_a_search_by_groups_changes_no_bit(k, long, monkeypatch):
    """The bits are the same for clusters, copies of models, and others' models.

    A large cohort is searched by groups without being told to.
    """
    w = torch.randn(5, 67).repeat(8, 1) + 1e-3 * torch.randn(40, 67)
    w[30:35] = w[5:10]
    guide = w + 1e-3 * torch.randn(40, 67)
    guide[:20] = w[torch.randint(0, 40, (20,))]
    guide[20:34] = w[20:34]
    want = FedDWA(k=k, search="exact").mixing_weights(guide, w)
    assert all(
        map(torch.equal, FedDWA(k=k, search="groups").mixing_weights(guide, w), want)
    )
    monkeypatch.setattr("pflcore.algorithms._feddwa.GROUP_SEARCH_MIN_CLIENTS", 40)
    monkeypatch.setattr("pflcore.algorithms._feddwa.GROUP_SEARCH_MIN_COLUMNS", long)
    monkeypatch.setattr(ops, "pairwise_sqdist", None)  # not all pairs
    assert all(map(torch.equal, FedDWA(k=k).mixing_weights(guide, w), want))


# rounds -----------------------------------------------------------------------

SIZES = (8, 11, 14, 17, 20, 23)


@pytest.mark.deep("together they take seconds", quick=2)
@ENGINES
def test_look_ahead_leaves_no_trace(engine):
    """Training, statistics and later shuffles are those of a run without look ahead."""
    s = normal(SIZES, engine, momentum=0.5, batch_size=6)
    found = []
    for guidance in ("previous", "epoch", "steps", "full_grad"):
        local = at_work(s, round=3)
        down = {"x": s.net.w0.expand(6, -1)}
        _, up, done = FedDWA(guidance=guidance, lookahead=2).train(down, {}, local)
        later = local.after(done).fit(up["w"], stream="later")
        found.append([up["w"], done.buffers, later.w])
        # The look ahead has its own shuffles, not those of more training.
        twice = local.after(done).fit(up["w"], epochs=2).w
        assert "g" not in up or not any(
            map(torch.equal, (up["g"],) * 2, (up["w"], twice))
        )
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


def test_the_full_gradient_guidance_decays_as_training_does():
    """With one batch a client, the guidance is one more epoch of training a step.

    Its momentum starts at zero, and weight decay counts.
    """
    s = double(tiny((6, 7), batch_size=32, momentum=0.5, weight_decay=0.3))
    w = s.net.w0.expand(2, -1)
    ahead = FedDWA(guidance="full_grad", lookahead=3).look_ahead(w, at_work(s))
    near(ahead, at_work(s).fit(w, epochs=3).w)


def test_a_last_model_kept_by_the_client_is_the_servers_copy_and_is_uploaded():
    """Case i of App. C.6 gives the models of case ii, and uploads one model more."""
    s = tiny(SIZES)
    cohorts = ([0, 1, 2, 3], [1, 2, 5], [0, 1, 2, 3, 4, 5])
    guides = "kept", "epoch", "previous", "current"
    found = [after(FedDWA(guidance=guidance, k=3), s, cohorts) for guidance in guides]
    assert torch.equal(found[0][0].server["x"], found[2][0].server["x"])
    one = 6 * 4 * s.net.size
    assert [done.bytes_up for _, done in found] == [2 * one, 2 * one, one, one]
    assert [done.bytes_down for _, done in found] == [one] * 4


class Counting(nn.Module):
    """A line that becomes steeper by one with each batch that it is trained on."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False, dtype=F64)
        nn.init.ones_(self.line.weight)
        self.register_buffer("passes", torch.zeros((), dtype=F64))

    def forward(self, x):
        self.passes = self.passes + self.training
        return self.line(x * (1 + self.passes))


def test_the_look_ahead_goes_on_from_the_buffers_of_the_training():
    x = t([[1.0], [2.0]])
    y = t([[1.0], [1.0]])
    data = Federation.from_clients([(x, y), (2 * x, y)], classes=None, dtype=None)
    s = make_setting(Net(Counting, "half_squared"), data, Training(lr=0.01))
    clients = at_work(s)
    _, up, _ = FedDWA().train({"x": s.net.w0.expand(2, -1)}, {}, clients)
    w = torch.ones(2, 1, dtype=F64)
    for steep, key in ((2, "w"), (3, "g")):
        for row, z in zip(w, (steep * x, steep * 2 * x), strict=True):
            row -= 0.01 * ((row * z - y) * z).mean()
        close(up[key], w)
