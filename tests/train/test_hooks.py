"""Local training: what a step is, which batches it takes, and that both engines do the same."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small import fit, images, make_setting, play, tiny_model
from torch import Tensor

from pflcore import Clients, Federation, Net, Objective, Training, ops, step
from pflcore.algorithms import FedAvg
from pflcore.nn import Dropout
from pflcore.simulation.round import Setup, begin

SIZES = (7, 20, 31)  # with batches of 20: one short batch, one whole, a whole and a short one


def federation(dtype=torch.float64, shape=(6,), sizes=SIZES):
    data = images(sizes, shape)
    return Federation(data.x.to(dtype), data.y, data.index, data.classes, data.relabel)


def cohort(s, ids=(0, 1, 2), round=1):
    return Clients(s, torch.tensor(ids), round, s.net.b0.repeat(len(ids), 1))


def mlp():
    return tiny_model()().double()


def linear():
    return nn.Sequential(nn.Linear(6, 4), nn.Identity()).double()


def conv():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 4)
    ).double()


def norm():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)).double()


def dropout():
    return nn.Sequential(
        nn.Linear(6, 8), Dropout(0.5), nn.Tanh(), Dropout(0.25), nn.Linear(8, 4)
    ).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6,)),
    "linear": (linear, (6,)),
    "conv": (conv, (1, 6, 6)),
    "batch norm": (norm, (6,)),
    "dropout": (dropout, (6,)),
}
CHAINS = [name for name in MODELS if name != "batch norm"]


def custom_loss(net, w, x, y, extra):
    """A row with two columns more than the model has; the columns and the client's own numbers
    enter the loss."""
    z = net(w[: net.size], x) * (1 + w[net.size :].square().sum())
    return F.cross_entropy(z + extra["shift"], y) + 0.01 * w[-1]


CASES: dict[str, tuple[Training, dict[str, Any]]] = {
    "plain": (Training(lr=0.1, batch_size=20, epochs=2), {}),
    "drop_last": (Training(lr=0.1, batch_size=6, epochs=2, drop_last=True), {}),
    "no reshuffle": (Training(lr=0.1, batch_size=20, epochs=3, reshuffle=False), {}),
    "schedule": (
        Training(lr=0.1, batch_size=20, schedule=lambda r, n: 0.5**r),
        {"mean_grad": True},
    ),
    "momentum": (
        Training(lr=0.1, batch_size=20, epochs=3, momentum=0.9, weight_decay=0.01),
        {"mean_grad": True},
    ),
    "steps": (Training(lr=0.1, batch_size=20), {"steps": 5, "mean_grad": True}),
    "one step": (Training(lr=0.1, batch_size=20, epochs=3), {"steps": 1}),
    "own lr and epochs": (
        Training(lr=0.1, batch_size=20),
        {"lr": 0.03, "epochs": 2, "stream": "other"},
    ),
    "mask": (Training(lr=0.1, batch_size=20), {"mask": "head"}),
    "masks": (Training(lr=0.1, batch_size=20), {"mask": "each"}),
    "shift": (Training(lr=0.1, batch_size=20), {"shift": True, "mean_grad": True}),
    "prox": (Training(lr=0.1, batch_size=20), {"prox": 0.3}),
    "prox by client": (
        Training(lr=0.1, batch_size=20, momentum=0.5),
        {"prox": torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64), "shift": True},
    ),
    "loss": (Training(lr=0.1, batch_size=20, epochs=2), {"loss": custom_loss}),
    "adamw": (
        Training(
            lr=0.01,
            batch_size=20,
            epochs=3,
            weight_decay=0.1,
            local_optimizer="adamw",
            betas=(0.8, 0.95),
            eps=1e-6,
        ),
        {"shift": True, "prox": 0.3, "mean_grad": True},
    ),
    "adamw, masked": (
        Training(lr=0.01, batch_size=20, epochs=2, local_optimizer="adamw"),
        {"mask": "each", "mean_grad": True},
    ),
    "adamw, loss": (
        Training(lr=0.01, batch_size=20, local_optimizer="adamw", clip_grad=0.4),
        {"loss": custom_loss},
    ),
    "clip": (Training(lr=0.1, batch_size=20, epochs=2, clip_grad=0.4), {}),
    "clip, all": (
        Training(lr=0.1, batch_size=20, epochs=2, clip_grad=0.4, momentum=0.5, weight_decay=0.1),
        {"shift": True, "prox": 0.3, "mask": "each", "mean_grad": True},
    ),
}


def options(given, net, n):
    """The start rows and fit's arguments, with tensors in the place of the cases' words."""
    gen = torch.Generator().manual_seed(1)
    o, width = dict(given), net.size + (2 if "loss" in given else 0)
    start = torch.cat([net.w0, torch.full((width - net.size,), 0.1, dtype=net.dtype)]).repeat(n, 1)
    start += 0.01 * torch.randn(n, width, generator=gen, dtype=torch.float64).to(net.dtype)
    if o.get("mask") == "head":
        o["mask"] = (~net.mask(f"{net.head_name}.bias")).to(net.dtype)
    if o.get("mask") == "each":
        o["mask"] = (torch.rand(n, width, generator=gen) < 0.5).to(net.dtype)
    if o.get("shift"):
        o["shift"] = 0.1 * torch.randn(n, width, generator=gen, dtype=torch.float64).to(net.dtype)
    if "prox" in o:
        o["prox"] = (o["prox"], start + 1)
    if "loss" in o:
        o["extra"] = {"shift": torch.randn(n, 4, generator=gen, dtype=torch.float64).to(net.dtype)}
    return start, o


def fitted(engine, model, case, workers=2, dtype=torch.float64):
    build, shape = MODELS[model]
    training, given = CASES[case]
    net = Net(lambda: build().to(dtype))
    start, o = options(given, net, 3)
    local = cohort(make_setting(net, federation(dtype, shape), training, 5, engine, workers))
    return fit(local, start, **o)


def same(a, b, **tolerance):
    """Two fits, or tuples of tensors."""
    for u, v in zip(
        *((*x.rows.values(), *x[1:]) if hasattr(x, "rows") else x for x in (a, b)), strict=True
    ):
        if tolerance:
            torch.testing.assert_close(u, v, **tolerance)
        else:
            assert torch.equal(u, v)


# the two engines ------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_engines_agree(model, case):
    loop = fitted("loop", model, case)
    for engine in ("vmap", "chain") if model in CHAINS else ("vmap",):
        same(loop, fitted(engine, model, case), rtol=1e-9, atol=1e-11)
    assert not torch.equal(loop.w, options(CASES[case][1], Net(MODELS[model][0]), 3)[0])


@pytest.mark.parametrize("model", MODELS)
def test_engines_agree_in_float32(model):
    loop = fitted("loop", model, "momentum", dtype=torch.float32)
    assert loop.w.dtype == torch.float32
    for engine in ("vmap", "chain") if model in CHAINS else ("vmap",):
        same(loop, fitted(engine, model, "momentum", dtype=torch.float32), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
@pytest.mark.parametrize("model", ["conv", "dropout", "mlp", "linear"])
def test_the_number_of_workers_changes_no_bit(engine, model):
    case = "momentum" if engine == "chain" else "loss"
    first, *others = [fitted(engine, model, case, workers, torch.float32) for workers in (1, 2, 3)]
    for other in others:
        same(other, first)


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
@pytest.mark.parametrize("model", ["mlp", "linear", "dropout", "batch norm"])
@pytest.mark.unless(lambda engine, model: engine == "chain" and model not in CHAINS)
def test_the_others_change_nothing(engine, model):
    build, shape = MODELS[model]
    s = make_setting(
        Net(build),
        federation(shape=shape),
        Training(lr=0.1, batch_size=20, epochs=2),
        engine=engine,
    )
    whole = cohort(s)
    every = whole.fit(s.net.w0.repeat(3, 1))
    for ids in ([1], [2, 0]):
        part = cohort(s, ids)
        found = part.fit(s.net.w0.repeat(len(ids), 1))
        same(found, [every.w[ids], *(v[ids] for v in every[1:])], rtol=1e-9, atol=1e-12)


# what a step is -------------------------------------------------------------


def recorded(s, ids=(0, 1, 2), round=1, **o):
    """The batches (x, y) that each client trains on, in order."""
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in ids]

    def loss(net, w, x, y, extra):
        seen[int(extra["at"])].append((x.clone(), y.clone()))
        return net.loss(w, x, y)

    pool = make_setting(s.net, s.data, s.training, s.rounds, engine="loop", workers=1, seed=s.seed)
    cohort(pool, ids, round).fit(
        s.net.w0.repeat(len(ids), 1),
        Objective(loss=loss, extra={"at": torch.arange(len(ids))}),
        **o,
    )
    return seen


def optimizer_of(t, module):
    if t.local_optimizer == "adamw":
        return torch.optim.AdamW(module.parameters(), t.lr, t.betas, t.eps, t.weight_decay)
    return torch.optim.SGD(module.parameters(), t.lr, t.momentum, weight_decay=t.weight_decay)


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
@pytest.mark.parametrize("model", ["mlp", "conv", "batch norm"])
@pytest.mark.parametrize(
    "case",
    ["plain", "momentum", "mask", "shift", "prox", "adamw", "adamw, masked", "clip", "clip, all"],
)
@pytest.mark.unless(lambda engine, model: engine == "chain" and model not in CHAINS)
def test_a_step_is_that_of_torch_optim(engine, model, case):
    build, shape = MODELS[model]
    training, given = CASES[case]
    net = Net(build)
    start, o = options(given, net, 3)
    s = make_setting(net, federation(shape=shape), training, engine=engine)
    local = cohort(s)
    done = fit(local, start, **o)
    mask = o.get("mask", torch.ones(net.size, dtype=torch.float64))
    for i, batches in enumerate(recorded(s)):
        module = net.load(build(), start[i], net.b0).train()
        optimizer = optimizer_of(training, module)
        total, losses, norms = torch.zeros(net.size, dtype=torch.float64), [], [0.1]
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            losses.append(float(loss.detach()))
            if training.clip_grad is not None:
                norms.append(
                    float(nn.utils.clip_grad_norm_(module.parameters(), training.clip_grad))
                )
            w = net.row(module)
            g = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
            total += g + (training.weight_decay * w if training.local_optimizer == "sgd" else 0)
            if "shift" in o:
                g = g + o["shift"][i]
            if "prox" in o:
                g = g + o["prox"][0] * (w - o["prox"][1][i])
            at = 0
            for p in module.parameters():
                p.grad = g[at : at + p.numel()].view_as(p)
                at += p.numel()
            optimizer.step()
            net.load(
                module, torch.where(mask[i] > 0 if mask.dim() > 1 else mask > 0, net.row(module), w)
            )
        torch.testing.assert_close(done.w[i], net.row(module))
        assert max(norms) > (training.clip_grad or 0)
        assert float(done.loss[i]) == pytest.approx(sum(losses) / len(losses))
        assert int(done.steps[i]) == len(batches)
        if "grad" in done.rows:
            torch.testing.assert_close(done.grad[i], total / len(batches))
        floats = [b.reshape(-1) for b in module.buffers() if b.is_floating_point()]
        torch.testing.assert_close(
            done.buffers[i], torch.cat(floats) if floats else local.buffers[i]
        )


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
@pytest.mark.parametrize("case", ["masks", "adamw, masked", "clip, all"])
def test_where_the_mask_is_zero_nothing_moves(engine, case):
    done = fitted(engine, "mlp", case)
    start, o = options(CASES[case][1], Net(mlp), 3)
    assert torch.equal(done.w[o["mask"] == 0], start[o["mask"] == 0])
    assert (done.w != start)[o["mask"] == 1].all()


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.unless(lambda engine, model: engine == "chain" and model not in CHAINS)
def test_each_batch_with_an_sgd_step_is_fit(engine, model):
    build, shape = MODELS[model]
    s = make_setting(
        Net(build),
        federation(shape=shape),
        Training(lr=0.1, batch_size=20, epochs=2),
        engine=engine,
    )
    clients = cohort(s)
    steps: list[int] = []

    def update(rows, grad, taken):
        steps.extend(taken.tolist())
        return {"w": rows["w"] - 0.1 * grad(rows["w"]), "count": rows["count"] + 1}

    start = s.net.w0.repeat(3, 1)
    found, want = (
        clients.each_batch({"w": start, "count": torch.zeros(3)}, update),
        clients.fit(start),
    )
    same([found.w, *found[1:]], want, rtol=1e-9, atol=1e-12)
    assert found.rows["count"].tolist() == [2, 2, 4] and sorted(set(steps)) == [0, 1, 2, 3]


def test_the_minibatches_of_one_step_are_drawn_apart():
    s = make_setting(Net(mlp), federation(), Training(lr=0.1, batch_size=20, epochs=2))
    seen: list[tuple[int, int, Tensor]] = []

    def loss(net, w, x, y, extra):
        seen.append((int(extra["at"]), len(y), x[:, 0].clone()))
        return net.loss(w, x, y)

    def update(rows, grad, k):
        return {"w": rows["w"] - 0.1 * (grad(rows["w"]) + grad(rows["w"], 1) + grad(rows["w"], 2))}

    cohort(s).each_batch(
        {"w": s.net.w0.repeat(3, 1)},
        update,
        Objective(loss=loss, extra={"at": torch.arange(3)}),
        batches=3,
    )
    mine = [x for at, _, x in seen if at == 2]
    assert [len(x) for x in mine] == [20] * 3 + [11] * 3 + [20] * 3 + [11] * 3
    for which in range(3):
        one_pass = torch.cat([mine[which], mine[3 + which]])
        assert torch.equal(one_pass.sort().values, s.data.client(2, "train")[0][:, 0].sort().values)
    assert not torch.equal(mine[0].sort().values, mine[1].sort().values)


# which batches --------------------------------------------------------------


def numbered(sizes=SIZES):
    """Every sample's x is its own number."""
    total = sum(sizes)
    x = torch.arange(total, dtype=torch.float64)[:, None].expand(-1, 6)
    data = Federation(
        x.clone(),
        torch.arange(total) % 4,
        {"train": list(torch.arange(total).split(list(sizes)))},
        4,
    )
    return make_setting(Net(mlp), data, Training(lr=0.0, batch_size=20, epochs=3))


def test_batches_are_cut_as_a_data_loader_cuts_them():
    s = numbered()
    for i, batches in enumerate(recorded(s)):
        pairs = list(zip(*s.data.client(i, "train"), strict=True))
        loader = torch.utils.data.DataLoader(pairs, batch_size=20, shuffle=True)
        expected = [len(y) for _ in range(3) for _, y in loader]
        assert [len(y) for _, y in batches] == expected
        per_epoch = len(expected) // 3
        own = s.data.index["train"][i].double()
        orders = [
            torch.cat([x[:, 0] for x, _ in batches[e * per_epoch : (e + 1) * per_epoch]])
            for e in range(3)
        ]
        for order in orders:
            assert torch.equal(order.sort().values, own)
            assert not torch.equal(order, own)
        assert not torch.equal(orders[0], orders[1]) and not torch.equal(orders[1], orders[2])
        assert all(torch.equal(y, x[:, 0].long() % 4) for x, y in batches)


def test_shuffles_belong_to_seed_round_client_and_stream():
    s = numbered((40, 40))

    def first(at=s, i=0, round=1, **o):
        return tuple(recorded(at, [i], round, **o)[0][0][0][:, 0].tolist())

    found = [
        first(),
        first(round=2),
        first(i=1),
        first(stream="other"),
        first(s._replace(seed=1)),
    ]
    found[2] = tuple(v - 40 for v in found[2])
    assert len(set(found)) == 5 and first() == found[0]
    still = s._replace(training=Training(lr=0.0, batch_size=20, epochs=2, reshuffle=False))
    one, two = recorded(still, [0], 1)[0], recorded(still, [0], 2)[0]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))
    assert torch.equal(one[0][0], one[2][0])  # epoch after epoch


def test_every_order_is_as_likely():
    s = numbered((3,))
    orders = [
        tuple(step[0][:, 0].tolist())
        for r in range(1, 7)
        for step in recorded(s, [0], r, epochs=100)[0]
    ]
    assert len(orders) == 600
    counts = [orders.count(o) for o in set(orders)]
    assert len(counts) == 6 and min(counts) > 70 and max(counts) < 130


def test_a_client_too_small_for_drop_last_has_one_batch():
    s = make_setting(Net(mlp), federation(), Training(batch_size=20, drop_last=True))
    steps = cohort(s).fit(s.net.w0.repeat(3, 1)).steps
    assert steps.tolist() == [max(1, n // 20) for n in s.data.size().tolist()]


def test_an_empty_client_is_refused():
    with pytest.raises(ValueError, match=r"leave out the 1 without, got .1."):
        Federation(
            torch.zeros(3, 6),
            torch.zeros(3, dtype=torch.long),
            {"train": [torch.arange(3), torch.arange(0)]},
            4,
        )


def test_training_options_are_checked():
    for bad in (
        {"lr": -1.0},
        {"batch_size": 0},
        {"epochs": 0},
        {"momentum": 1.0},
        {"weight_decay": -0.1},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Training(**bad)


# threads --------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
def test_the_callers_thread_setting_comes_back(engine):
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            inside: list[int] = []

            def loss(net, w, x, y, extra, inside=inside):
                inside.append(torch.get_num_threads())
                return net.loss(w, x, y)

            s = make_setting(Net(mlp), federation(), Training(lr=0.1, batch_size=20), engine=engine)
            cohort(s).fit(s.net.w0.repeat(3, 1), Objective(loss=loss))
            found: list[int] = [torch.get_num_threads()]
            new = threading.Thread(target=lambda found=found: found.append(torch.get_num_threads()))
            new.start()
            new.join()
            assert set(inside) == {1} and found == [threads, threads]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
def test_an_error_in_a_worker_reaches_the_caller(engine):
    s = make_setting(Net(mlp), federation(), Training(lr=0.1, batch_size=20), engine=engine)

    def loss(net, w, x, y, extra):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        cohort(s).fit(s.net.w0.repeat(3, 1), Objective(loss=loss))
    assert cohort(s).fit(s.net.w0.repeat(3, 1)).w.isfinite().all()  # the engine lives on


def test_dropout_of_channels_is_refused():
    with pytest.raises(ValueError, match=r"model: 1 is nn.Dropout1d.*pflcore.nn.Dropout"):
        Net(nn.Sequential(nn.Linear(6, 8), nn.Dropout1d(0.5), nn.Linear(8, 4)))
    Net(nn.Sequential(nn.Linear(6, 8), nn.Dropout1d(0.0), nn.Linear(8, 4)))


# float buffers --------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_training_writes_nothing_and_statistics_are_the_clients_own_or_averaged(engine):
    s = make_setting(Net(norm), federation(), Training(lr=0.1, batch_size=20), engine=engine)
    clients, start = cohort(s), s.net.w0.repeat(3, 1)
    done = clients.fit(start)
    clients.each_batch({"w": start}, lambda r, grad, taken: {"w": r["w"].sub_(0.1 * grad(r["w"]))})
    assert torch.equal(clients.buffers, s.net.b0.repeat(3, 1)) and torch.equal(
        start, s.net.w0.repeat(3, 1)
    )
    assert (
        torch.equal(clients.after(done).buffers, done.buffers)
        and (done.buffers != s.net.b0).any(1).all()
    )
    same(clients.fit(start), done)
    own, _ = step(
        Setup(FedAvg(), s, batch_norm="local"), begin(FedAvg(), s.net, 3), torch.tensor([0, 2])
    )
    assert torch.equal(own.batch_norm[1], s.net.b0) and torch.allclose(
        own.batch_norm[[0, 2]], done.buffers[[0, 2]]
    )
    shared, _ = step(
        Setup(FedAvg(), s, batch_norm="average"), begin(FedAvg(), s.net, 3), torch.tensor([0, 2])
    )
    mean = torch.tensor([7, 31], dtype=torch.float64) / 38 @ done.buffers[[0, 2]]
    torch.testing.assert_close(shared.batch_norm, mean.expand(3, -1))


# looking --------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
def test_loss_grad_features_and_scores_are_the_whole_splits(engine):
    build = mlp if engine == "chain" else norm
    s = make_setting(
        Net(build), federation(sizes=(3, 600, 31)), Training(lr=0.1, batch_size=20), engine=engine
    )
    local = cohort(s)
    done = local.fit(s.net.w0.repeat(3, 1))
    rows, local = done.w, local.after(done)
    for split in ("train", "test"):
        losses, grads, (z, labels) = (
            local.loss(rows, split),
            local.grad(rows, split),
            local.features(rows, split),
        )
        found = local.scores(
            {"w": rows, "b": torch.arange(3)},
            split,
            lambda model, net, x: net(model["w"], x) + model["b"],
        )
        for i in range(3):
            x, y = s.data.client(i, split)
            module = s.net.load(build(), rows[i], local.buffers[i]).eval()
            value = F.cross_entropy(module(x), y)
            torch.testing.assert_close(losses[i], value.detach())
            # with batch norm, the gradient on "train" is that of training
            if engine == "chain" or split == "test":
                want = torch.cat(
                    [g.reshape(-1) for g in torch.autograd.grad(value, list(module.parameters()))]
                )
                torch.testing.assert_close(grads[i], want)
            torch.testing.assert_close(z[i, : len(y)], module[:-1](x).detach())
            assert (
                torch.equal(labels[i, : len(y)], y)
                and (labels[i, len(y) :] == -1).all()
                and (z[i, len(y) :] == 0).all()
            )
            torch.testing.assert_close(found[i][0], module(x).detach() + i)
            assert torch.equal(found[i][1], y)
    with pytest.raises(ValueError, match="split: this federation has train, test, not 'val'"):
        local.loss(rows, "val")
    assert (
        torch.equal(local.size, s.data.size())
        and torch.equal(local.counts, s.data.counts())
        and not local.has("val")
    )


# an op of ours inside the model ---------------------------------------------


def factorized(net, w, x, y, extra):
    """A linear layer made of 3 factors: the row is w_a [4, 3] | lam [3] | w_b [3, 6]."""
    w_a, lam, w_b = w.split([12, 3, 18])
    return F.cross_entropy(ops.rank1_linear(x, w_a.view(4, 3), lam, w_b.view(3, 6)), y)


def dense(net, w, x, y, extra):
    w_a, lam, w_b = w.split([12, 3, 18])
    return F.cross_entropy(((x @ w_b.view(3, 6).T) * lam) @ w_a.view(4, 3).T, y)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_factorized_model_trains_in_both_engines(engine):
    s = make_setting(
        Net(mlp), federation(), Training(lr=0.1, batch_size=20, epochs=3), engine=engine
    )
    start = torch.randn(3, 33, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours, theirs = (
        cohort(s).fit(start, Objective(loss=factorized), mean_grad=True),
        cohort(s).fit(start, Objective(loss=dense), mean_grad=True),
    )
    same(ours, theirs, rtol=1e-9, atol=1e-12)
    assert (ours.w != start).all()


def test_learning_happens():
    for engine in ("loop", "vmap"):
        s = make_setting(
            Net(tiny_model()),
            images((60, 80), seed=1),
            Training(lr=0.3, batch_size=20, epochs=2),
            20,
            engine,
        )
        local = Clients(s, torch.arange(2), 1, s.net.b0.expand(2, -1))
        w = local.fit(s.net.w0.repeat(2, 1), epochs=30).w
        assert (local.loss(w) < 0.3 * local.loss(s.net.w0.repeat(2, 1))).all()
        assert play(FedAvg(), s)[-1][0].round == 20
