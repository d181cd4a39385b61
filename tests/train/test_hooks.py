"""Local training: steps, batches, and agreement of all engines."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from entry_points import sentence
from parts import company
from parts.path import BODIES, body
from places import golden
from small import at_work, crossed, equals, fit, images, make_setting, near, t
from tolerance import F64

from pflcore import Federation, Net, Objective, Training, evaluate, step
from pflcore.algorithms import FedAvg
from pflcore.simulation.round import RunConfig, initial_state

# Batches of 20 samples: one short batch, one whole batch, a whole and a short one.
SIZES = (7, 20, 31)
ENGINES = pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
NO_CHAIN = pytest.mark.unless(
    lambda engine, model: (engine, model) == ("chain", "batch norm")
)


def build(model, dtype=F64):
    return body(BODIES[model][0]).to(dtype)


def federation(model="mlp", dtype=F64, sizes=SIZES):
    data = images(sizes, BODIES[model][1])
    return replace(data, x=data.x.to(dtype))


def made(model="mlp", engine="loop", data=None, workers=2, dtype=F64, **training):
    factor = training.pop("schedule", 1.0)
    options = {
        "lr": 0.1,
        "batch_size": 20,
        "schedule": lambda r, n: factor**r,
        **training,
    }
    settings = Training(**options)
    net = Net(lambda: build(model, dtype))
    data = data or federation(model, dtype)
    return make_setting(net, data, settings, 5, engine, workers)


def custom_loss(net, w, x, y, extra):
    """Loss of a row with two columns more than the model has.

    The additional columns and the client's own numbers enter the loss.
    """
    z = net(w[: net.size], x) * (1 + w[net.size :].square().sum())
    return F.cross_entropy(z + extra["shift"], y) + 0.01 * w[-1]


CASES = golden("fits")  # pairs: options of Training, options of fit


def options(given, net, n=3):
    """Start rows and arguments of fit, with tensors for the cases' words."""
    gen = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.randn(*shape, generator=gen, dtype=F64).to(net.dtype)

    o = dict(given)
    width = net.size + (2 if "loss" in given else 0)
    start = torch.cat(
        [net.w0, torch.full((width - net.size,), 0.1, dtype=net.dtype)]
    ).repeat(n, 1)
    start += 0.01 * noise(n, width)
    if o.get("mask") == "head":
        o["mask"] = ~net.mask(f"{net.head_name}.bias")
    if o.get("mask") == "each":
        o["mask"] = (torch.rand(n, width, generator=gen) < 0.5).to(net.dtype)
    if "shift" in o:
        o["shift"] = 0.1 * noise(n, width)
    if "prox" in o:
        mu = o["prox"] if isinstance(o["prox"], float) else t(o["prox"])
        o["prox"] = (mu, start + 1)
    if "loss" in o:
        o["loss"] = custom_loss
        o["extra"] = {"shift": noise(n, 4)}
    return start, o


def fitted(engine, model, case, workers=2, dtype=F64):
    training, terms = CASES[case]
    s = made(model, engine, None, workers, dtype, **training)
    start, o = options(terms, s.net)
    done = fit(at_work(s), start, **o)
    assert done.w.dtype == dtype and not torch.equal(done.w, start)
    return done


def same(a, b, rtol=0.0, atol=0.0):
    """Asserts that two fits, or two tuples of tensors, are equal."""
    one, two = (
        [*x.rows.values(), *x[1:]] if hasattr(x, "rows") else [*x] for x in (a, b)
    )
    torch.testing.assert_close(one, two, rtol=rtol, atol=atol)


def starts(s):
    """The model's initial row for each of three clients."""
    return s.net.w0.repeat(3, 1)


@pytest.mark.parametrize("model, case", crossed(BODIES, [*CASES, "float32"], one_in=1))
def test_engines_agree(model, case):
    single = case == "float32"
    arguments = ("momentum", 2, torch.float32) if single else (case,)
    loop = fitted("loop", model, *arguments)
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if single else {"rtol": 1e-9, "atol": 1e-11}
    )
    for engine in ("vmap",) if model == "batch norm" else ("vmap", "chain"):
        same(loop, fitted(engine, model, *arguments), **tolerance)


@pytest.mark.deep("together they take seconds", quick=8)
@ENGINES
@pytest.mark.parametrize("model", ["conv", "dropout", "mlp", "linear"])
def test_the_number_of_workers_changes_no_bit(engine, model):
    case = "momentum" if engine == "chain" else "loss"
    first, *others = [
        fitted(engine, model, case, workers, torch.float32) for workers in (1, 2, 3)
    ]
    for other in others:
        same(other, first)


COMPANY = [
    ("loop", "mlp", "SiLU"),
    ("loop", "batch norm", "Sigmoid"),
    ("loop", "conv", "ELU"),
    ("chain", "mlp", "Tanh"),
    ("chain", "conv", "ReLU"),
]


def company_cases():
    """Cases of every body with every activation that the engine trains.

    Most of them belong to the deep suite or to the long one.
    """
    cases = list(COMPANY)
    for kind, activation in product(company.BODIES, company.ACTIVATIONS):
        cases.append(("loop", kind, activation))
        if kind != "batch norm" and activation in ("Tanh", "ReLU"):
            cases.append(("chain", kind, activation))
    deep = pytest.mark.deep("every activation and body", one_in=2)
    return [
        pytest.param(*case, marks=() if case in COMPANY else deep)
        for case in dict.fromkeys(cases)
    ]


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("engine, body, activation", company_cases())
def test_the_others_change_no_bit(engine, body, activation, optimizer):
    s = company.simulation(engine, body, activation, local_optimizer=optimizer).config
    whole = company.of_hooks(s, company.EVERYBODY)
    for ids in ([3], [0, 2, 3, 7, 9]):
        at = torch.tensor(ids)
        assert company.differing(company.of_hooks(s, at), whole, at) == []


def test_the_others_change_no_bit_of_many_steps_of_adamw():
    """AdamW's powers of its betas do not depend on the other clients.

    Torch's vectorized power has other last digits than the power of a single number.
    """
    settings = {"dtype": F64, "local_optimizer": "adamw", "epochs": 24}
    s = company.simulation("chain", "mlp", "Tanh", **settings).config
    whole, one = (
        at_work(s, ids).fit(s.net.w0.repeat(len(ids), 1)).w
        for ids in (company.EVERYBODY.tolist(), [3])
    )
    assert torch.equal(one[0], whole[3])


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("body", company.BODIES)
def test_under_vmap_the_others_change_last_digits_alone(body):
    s = company.simulation("vmap", body, "SiLU", dtype=F64).config
    whole = company.of_hooks(s, company.EVERYBODY)
    at = torch.tensor([0, 2, 3, 7, 9])
    for name, rows in company.of_hooks(s, at).items():
        near(rows, whole[name][at], 1e-9, 1e-12)


@pytest.mark.parametrize("body", company.BODIES)
@pytest.mark.deep("several whole runs")
def test_the_size_of_blocks_changes_last_digits_alone(body):
    s = company.simulation("vmap", body, "SiLU", dtype=F64).config
    whole = company.of_hooks(s, company.EVERYBODY)
    for count in (1, 3, 64):
        for name, rows in company.of_hooks(
            replace(s, clients_per_block=count), company.EVERYBODY
        ).items():
            near(rows, whole[name], 1e-9, 1e-12)


def test_neighbours_share_the_batches_of_a_common_model(monkeypatch):
    """Clients with a common model are evaluated in common batches.

    A batch for each of many small clients would take several times as long.
    """
    run = company.simulation("loop", "mlp", "SiLU", dtype=F64)
    whole = evaluate(run.config, run.state)["loss"]
    batches = []
    forward = Net.__call__
    monkeypatch.setattr(
        Net, "__call__", lambda net, w, x: batches.append(len(x)) or forward(net, w, x)
    )
    ids = torch.tensor([0, 2, 3, 7, 9])
    near(evaluate(run.config, run.state, "test", ids)["loss"][ids], whole[ids])
    assert batches == [sum(company.SIZES[i] for i in ids)]


# steps ----------------------------------------------------------------------


def recording(n):
    """An objective that records batches, and the list of each client's batches.

    The batches (x, y) are in the order in which they were seen.
    """
    seen = [[] for _ in range(n)]

    def loss(net, w, x, y, extra):
        seen[int(extra["at"])].append((x.clone(), y.clone()))
        return net.loss(w, x, y)

    return Objective(loss=loss, extra={"at": torch.arange(n)}), seen


def recorded(s, ids=(0, 1, 2), round=1, **o):
    """The batches (x, y) that each client trains on, in order."""
    pool = make_setting(s.net, s.data, s.training, s.rounds, workers=1, seed=s.seed)
    objective, seen = recording(len(ids))
    at_work(pool, ids, round).fit(s.net.w0.repeat(len(ids), 1), objective, **o)
    return seen


def optimizer_of(t, module):
    if t.local_optimizer == "adamw":
        moments = {
            k: getattr(t, k) for k in ("betas", "eps") if getattr(t, k) is not None
        }
        return torch.optim.AdamW(
            module.parameters(), t.lr, weight_decay=t.weight_decay, **moments
        )
    return torch.optim.SGD(
        module.parameters(), t.lr, t.momentum, weight_decay=t.weight_decay
    )


OF_TORCH = (
    *("plain", "momentum", "mask", "shift", "prox", "clip", "clip, all"),
    *("adamw", "adamw, masked", "adamw, betas", "adamw, eps"),
)


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize(
    "engine, model, case",
    [
        *crossed(["loop", "vmap", "chain"], ["mlp", "conv"], OF_TORCH),
        *crossed(["loop", "vmap"], ["batch norm"], OF_TORCH),
    ],
)
def test_a_step_is_that_of_torch_optim(engine, model, case):
    s = made(model, engine, **CASES[case][0])
    net = s.net
    t = s.training
    start, o = options(CASES[case][1], net)
    done = fit(at_work(s), start, **o)
    same(fit(at_work(s), start, **o), done)  # no moments of another round
    masks = o.get("mask", torch.ones(net.size)).expand(3, -1) > 0
    for i, batches in enumerate(recorded(s)):
        module = net.load(build(model), start[i], net.b0).train()
        optimizer = optimizer_of(t, module)
        params = list(module.parameters())
        total = torch.zeros(net.size, dtype=F64)
        losses = []
        norms = [0.1]
        for x, y in batches:
            loss = F.cross_entropy(module(x), y)
            w = net.row(module)
            g = torch.cat([p.reshape(-1) for p in torch.autograd.grad(loss, params)])
            losses.append(float(loss.detach()))
            if t.clip_grad is not None:
                norms.append(float(g.norm()))
                g = g * min(1.0, t.clip_grad / (norms[-1] + 1e-6))  # as torch does
            total += g + (t.weight_decay * w if t.local_optimizer == "sgd" else 0)
            g = g + o["shift"][i] if "shift" in o else g
            g = g + o["prox"][0] * (w - o["prox"][1][i]) if "prox" in o else g
            for p, part in zip(params, g.split(net.sizes), strict=True):
                p.grad = part.view_as(p)
            optimizer.step()
            net.load(module, torch.where(masks[i], net.row(module), w))
        near(done.w[i], net.row(module), 1e-7, 1e-7)
        assert max(norms) > (t.clip_grad or 0)
        near(done.loss[i], sum(losses) / len(losses), 1e-6)
        assert int(done.steps[i]) == len(batches)
        if "grad" in done.rows:
            near(done.grad[i], total / len(batches), 1e-7, 1e-7)
        floats = [b.reshape(-1) for b in module.buffers() if b.is_floating_point()]
        near(done.buffers[i], torch.cat([net.b0[:0], *floats]), 1e-7, 1e-7)


@ENGINES
@pytest.mark.parametrize("model", BODIES)
@NO_CHAIN
def test_each_batch_with_an_sgd_step_is_fit(engine, model):
    s = made(model, engine, epochs=2)
    clients = at_work(s)
    start = starts(s)
    steps = set()

    def update(rows, grad, taken):
        steps.update(taken.tolist())
        return {"w": rows["w"] - 0.1 * grad(rows["w"]), "count": rows["count"] + 1}

    result = clients.each_batch({"w": start, "count": torch.zeros(3)}, update)
    same([result.w, *result[1:]], clients.fit(start), rtol=1e-9, atol=1e-12)
    assert result.rows["count"].tolist() == [2, 2, 4] and steps == {0, 1, 2, 3}


def three_at_once(rows, grad, k):
    return {
        "w": rows["w"]
        - 0.1 * (grad(rows["w"]) + grad(rows["w"], 1) + grad(rows["w"], 2))
    }


@pytest.mark.parametrize("engine", ["vmap", "chain"])
def test_every_engine_takes_the_same_minibatches_in_one_step(engine):
    each = [made(engine=e, epochs=2) for e in ("loop", engine)]
    one, other = (
        at_work(s).each_batch({"w": starts(s)}, three_at_once, batches=3).w
        for s in each
    )
    near(one, other, 1e-9, 1e-11)


def test_the_minibatches_of_one_step_are_drawn_apart():
    s = made(epochs=2)
    objective, batches = recording(3)
    at_work(s).each_batch({"w": starts(s)}, three_at_once, objective, batches=3)
    seen = [x[:, 0] for x, _ in batches[2]]
    samples = s.data.client(2)[0][:, 0]
    assert [len(x) for x in seen] == ([20] * 3 + [11] * 3) * 2
    for which in range(3):
        one_pass = torch.cat(seen[which:6:3])
        equals(one_pass.sort().values, samples.sort().values)
    # The six whole minibatches of both epochs have different samples.
    assert len({tuple(x.sort().values.tolist()) for x in seen if len(x) == 20}) == 6


# batches --------------------------------------------------------------------


def numbered(sizes=SIZES, **training):
    """A setting in which every sample's x is the sample's number."""
    at = torch.arange(sum(sizes))
    x = at.double()[:, None].repeat(1, 6)
    data = Federation(x, at % 4, {"train": list(at.split(list(sizes)))}, 4)
    return made(data=data, **{"lr": 0.0, "epochs": 3, **training})


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_cut_as_a_data_loader_cuts_them(drop_last):
    s = numbered(drop_last=drop_last)
    for i, batches in enumerate(recorded(s)):
        samples = s.data.index["train"][i].double()
        loader = torch.utils.data.DataLoader(
            samples, 20, True, drop_last=drop_last and len(samples) >= 20
        )
        cuts = [len(x) for x in loader]  # a smaller client has one batch
        assert [len(y) for _, y in batches] == 3 * cuts
        x = [x[:, 0] for x, _ in batches]
        orders = [torch.cat(x[e * len(cuts) : (e + 1) * len(cuts)]) for e in range(3)]
        equals([y for _, y in batches], [x[:, 0].long() % 4 for x, _ in batches])
        if not drop_last:
            equals([order.sort().values for order in orders], [samples] * 3)
        for a, b in ((samples, orders[0]), orders[:2], orders[1:]):
            assert not torch.equal(a[: len(b)], b)


def test_shuffles_belong_to_seed_round_client_and_stream():
    s = numbered((40, 40))

    def first(at=s, i=0, round=1, batch=0, **o):
        return tuple(
            (recorded(at, [i], round, **o)[0][batch][0][:, 0] - 40 * i).tolist()
        )

    others = [
        first(round=2),
        first(i=1),
        first(stream="other"),
        first(replace(s, seed=1)),
    ]
    assert len({first(), *others}) == 5 and first() == first()
    still = numbered((40, 40), reshuffle=False)
    assert len({first(still), first(still, round=2), first(still, batch=2)}) == 1


@pytest.mark.deep("it takes a second")
def test_every_order_is_as_likely():
    s = numbered((3,))
    orders = []
    for r in range(1, 7):
        orders += [
            tuple(x[:, 0].tolist()) for x, _ in recorded(s, [0], r, epochs=100)[0]
        ]
    counts = [orders.count(o) for o in set(orders)]
    assert (
        len(orders) == 600
        and len(counts) == 6
        and min(counts) > 70
        and max(counts) < 130
    )


# threads --------------------------------------------------------------------


@ENGINES
def test_the_callers_thread_setting_comes_back(engine):
    before = torch.get_num_threads()
    inside = set()
    settings = []

    def loss(net, w, x, y, extra):
        inside.add(torch.get_num_threads())
        return net.loss(w, x, y)

    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            s = made(engine=engine)
            at_work(s).fit(starts(s), Objective(loss=loss))
            settings.append(torch.get_num_threads())
            with ThreadPoolExecutor() as new:
                settings.append(new.submit(torch.get_num_threads).result())
    finally:
        torch.set_num_threads(before)
    assert inside == {1} and settings == [2, 2, 3, 3]


@ENGINES
def test_an_error_in_a_worker_reaches_the_caller(engine):
    def loss(net, w, x, y, extra):
        raise ZeroDivisionError("mine")

    s = made(engine=engine)
    with pytest.raises(ZeroDivisionError, match="mine"):
        at_work(s).fit(starts(s), Objective(loss=loss))
    assert at_work(s).fit(starts(s)).w.isfinite().all()  # the engine still works


# float buffers --------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_training_writes_nothing_and_statistics_are_the_clients_own(engine):
    s = made("batch norm", engine)
    clients = at_work(s)
    start = starts(s)
    done = clients.fit(start)
    clients.each_batch(
        {"w": start}, lambda r, grad, taken: {"w": r["w"].sub_(0.1 * grad(r["w"]))}
    )
    same((clients.buffers, start), (s.net.b0.repeat(3, 1), starts(s)))
    assert clients.after(done).buffers is done.buffers
    assert (done.buffers != s.net.b0).any(1).all()
    same(clients.fit(start), done)
    setup = RunConfig.of(FedAvg(), s, batch_norm="local")
    state = initial_state(FedAvg(), s.net, 3)
    want = torch.stack([done.buffers[0], s.net.b0, done.buffers[2]])
    near(step(setup, state, torch.tensor([0, 2]))[0].buffers, want)


# evaluation -----------------------------------------------------------------


@ENGINES
def test_loss_grad_features_and_scores_are_the_whole_splits(engine):
    model = "mlp" if engine == "chain" else "batch norm"
    s = made(model, engine, federation(sizes=(3, 600, 31)))
    local = at_work(s)
    done = local.fit(starts(s))
    rows = done.w
    local = local.after(done)
    for split in ("train", "test"):
        losses = local.loss(rows, split)
        grads = local.grad(rows, split)
        z, labels = local.features(rows, split)
        plus = lambda model, net, x: net(model["w"], x) + model["b"]  # noqa: E731
        scored = local.scores({"w": rows, "b": torch.arange(3)}, split, plus)
        for i in range(3):
            x, y = s.data.client(i, split)
            module = s.net.load(build(model), rows[i], local.buffers[i]).eval()
            value = F.cross_entropy(module(x), y)
            # With batch norm, the gradient on "train" is computed in training mode.
            if engine == "chain" or split == "test":
                want = torch.autograd.grad(value, list(module.parameters()))
                near(grads[i], torch.cat([g.reshape(-1) for g in want]), 1e-7, 1e-7)
            with torch.no_grad():
                seen = module[:-1](x)
                scores = module(x)
            same(
                (losses[i], scored[i][0]),
                (value.detach(), scores + i),
                rtol=1e-7,
                atol=1e-7,
            )
            rest = len(labels[i]) - len(y)
            near(z[i], F.pad(seen, (0, 0, 0, rest)), 1e-7, 1e-7)
            same((labels[i], scored[i][1]), (F.pad(y, (0, rest), value=-1), y))
    with sentence("split: this federation has train, test, not 'val'"):
        local.loss(rows, "val")
    same((local.num_samples, local.class_counts), (s.data.size(), s.data.counts()))
    assert not local.has_split("val")
