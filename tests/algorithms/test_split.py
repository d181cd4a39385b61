"""Split models against a plain torch program of each paper's algorithm, which shares no code with
them, and their laws."""

import copy
import runpy

import pytest
import torch
import torch.nn as nn
from doors import Split, views
from methods import FedBABU, FedBN, FedPer, FedRep, LGFedAvg, LocalOnly
from parts.split import COHORTS, EPOCHS, LR, TRAINING, federation, normed
from places import ROOT
from small import images, make_setting, play, tiny_model

from pflcore import Clients, Net, Objective, Training, evaluate
from pflcore.algorithms import ALGORITHMS, FedAvg
from pflcore.simulation.round import Setup
from pflcore.testing import check

BODY, HEAD, NORM = (
    ("0.weight", "0.bias", "1.weight", "1.bias"),
    ("3.weight", "3.bias"),
    ("1.weight", "1.bias"),
)
ENGINES = pytest.mark.parametrize("engine", ["loop", "vmap"])


def descend(model, x, y, names, epochs):
    """Whole-batch SGD of the parameters `names`."""
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD([params[n] for n in names], LR)
    for _ in range(epochs):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def program(name, start, data):
    """The method by whole modules: the server's parameters and each client's model for
    evaluation."""
    private = {"lg_fedavg": BODY, "fedbn": NORM}.get(name, HEAD)
    shared = tuple(n for n in (*BODY, *HEAD) if n not in private)
    server = {n: p.detach().clone() for n, p in start.named_parameters() if n in shared}
    clients = [copy.deepcopy(start) for _ in range(3)]
    stays = name in ("lg_fedavg", "fedbn")  # batch norm's statistics

    def receive(i):
        clients[i].load_state_dict(server, strict=False)

    for cohort in COHORTS:
        for i in cohort:
            receive(i)
            model, (x, y) = clients[i].train(), data.client(i)
            if name == "fedrep":
                kept = {n: b.clone() for n, b in model.named_buffers()}
                descend(model, x, y, HEAD, 3)
                model.load_state_dict(kept, strict=False)
                descend(model, x, y, BODY, EPOCHS)
            else:
                descend(model, x, y, BODY if name == "fedbabu" else (*BODY, *HEAD), EPOCHS)
        even = name in ("fedrep", "fedbn")
        n = torch.tensor(
            [1 if even else len(data.client(i)[1]) for i in cohort], dtype=torch.float64
        )
        states = [clients[i].state_dict() for i in cohort]
        mean = {
            k: sum(w * s[k] for w, s in zip(n / n.sum(), states, strict=True)) for k in states[0]
        }
        server = {k: mean[k] for k in shared}
        if not stays:
            for c in clients:
                c.load_state_dict({k: v for k, v in mean.items() if "running" in k}, strict=False)
    for i, model in enumerate(clients):
        receive(i)
        if name == "fedbabu":
            descend(model.train(), *data.client(i), (*BODY, *HEAD), 4)
    return server, [c.eval() for c in clients]


@ENGINES
@pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedrep", "fedbabu", "fedbn"])
def test_golden_presets(name, engine):
    """Three rounds, of which two lack somebody: the shared columns, the private ones and every
    client's own scores."""
    options = {"fedrep": {"private_epochs": 3}, "fedbabu": {"finetune_epochs": 4}}.get(name, {})
    alg, net, data = ALGORITHMS[name](**options), Net(normed, seed=5), federation()
    s = make_setting(net, data, TRAINING, 3, engine)
    state = play(alg, s, ids=lambda r: COHORTS[r - 1])[-1][0]
    server, clients = program(name, net.module, data)
    torch.testing.assert_close(
        state.server["x"], torch.cat([v.flatten() for v in server.values()]), rtol=1e-10, atol=1e-12
    )
    view, local = views(alg, state, s, torch.arange(3))
    for i, model in enumerate(clients):
        torch.testing.assert_close(view["w"][i], net.row(model), rtol=1e-10, atol=1e-12)
        scores = local.scores(view, "test", alg.predict)[i][0]
        torch.testing.assert_close(scores, model(data.client(i, "test")[0]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_the_kernels_of_a_chain_train_the_same(name):
    net, data = Net(lambda: tiny_model()().double()), federation()
    runs = [
        play(ALGORITHMS[name](), make_setting(net, data, TRAINING, 2, engine))[-1][0]
        for engine in ("loop", "chain")
    ]
    for one, other in zip(runs[0].server.values(), runs[1].server.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_documents_fedper_is_ours():
    theirs = runpy.run_path(str(ROOT / "examples" / "own_algorithm.py"))["FedPer"]
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=4), 3)
    (one, done), (other, also) = (
        play(a, s, ids=lambda r: [0, r % 3] if r % 3 else [0])[-1] for a in (FedPer(), theirs())
    )
    assert (
        torch.equal(one.server["x"], other.server["x"])
        and torch.equal(one.clients["h"], other.clients["head"])
        and done == also
    )


# laws -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alg", "width"),
    [
        (FedPer(), 45),
        (FedRep(), 45),
        (FedBABU(), 45),
        (LGFedAvg(), 24),
        (FedBN(), 59),
        (Split(private="?.bias"), 55),
    ],
)
def test_private_columns_never_travel(alg, width):
    """Counted are the shared columns, and batch norm's statistics where they are averaged."""
    s = make_setting(Net(normed), federation(), TRAINING, 1)
    _, done = play(alg, s, ids=lambda _: [0, 2])[-1]
    statistics = s.net.b0.numel() if alg.traits.batch_norm[0] == "average" else 0
    assert done.bytes_down == done.bytes_up == 2 * 8 * (width + statistics)


def test_with_everything_private_it_is_local_and_with_nothing_private_fedavg():
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=4), 3)
    with pytest.warns(
        UserWarning, match=r"^private: the whole model is private, so nothing is shared\.$"
    ):
        alone = play(Split(private=("0.*", "2.*")), s)[-1][0]
    assert torch.equal(alone.clients["h"], play(LocalOnly(), s)[-1][0].clients["w"])
    with pytest.warns(
        UserWarning,
        match=r"^private: the model has no batch_norm parameter, so all of it is shared\.$",
    ):
        all_of_it = play(FedBN(), s)[-1][0]
    assert torch.equal(
        all_of_it.server["x"], play(FedAvg(weighting="uniform"), s)[-1][0].server["x"]
    ) and all_of_it.clients["h"].shape == (
        3,
        0,
    )


def test_a_frozen_part_never_moves_not_even_by_adamw():
    t = Training(lr=0.01, batch_size=4, local_optimizer="adamw", weight_decay=0.1)
    s = make_setting(Net(normed), federation(), t, 2)
    state = play(FedBABU(finetune_epochs=0), s)[-1][0]
    x, h = s.net.split(s.net.w0)
    assert not state.clients and (state.server["x"] != x).all()
    view, _ = views(FedBABU(finetune_epochs=0), state, s, torch.arange(3))
    assert torch.equal(view["w"], s.net.join(state.server["x"], h.expand(3, -1)))
    # the body never moves: the heads have seen it alone
    state = play(FedRep(server_lr=0.0), s)[-1][0]
    assert torch.equal(state.server["x"], x) and (state.clients["h"] != h).all()


def test_heads_are_trained_before_bodies():
    """FedRep's head has not seen the body that its own round makes; trained the other way round it
    would have."""
    s = make_setting(Net(tiny_model()), images(), TRAINING, 1)
    local, w0 = Clients(s, torch.arange(3), 1, s.net.b0.expand(3, -1)), s.net.w0.expand(3, -1)
    x, h = s.net.split(w0)
    new, _ = FedRep().train({"x": x}, {"h": h}, local)[:2]
    assert torch.equal(
        new["h"],
        s.net.split(local.fit(w0, Objective(mask=s.net.mask("2.*")), stream="private").w)[1],
    )


@pytest.mark.parametrize("alg", [FedPer(), FedRep(), LGFedAvg(), FedBN()])
def test_who_never_took_part_has_the_initial_private_part_and_others_statistics(alg):
    s = make_setting(Net(normed), federation(), TRAINING, 2)
    state = play(alg, s, ids=lambda _: [0, 2])[-1][0]
    view, local = views(alg, state, s, torch.tensor([1]))
    assert torch.equal(view["w"][0, alg.columns(s.net)], s.net.w0[alg.columns(s.net)])
    torch.testing.assert_close(local.buffers[0], state.batch_norm[[0, 2]].mean(0))
    assert evaluate(Setup(alg, s), state)["loss"].isfinite().all()


# with batch norm, beside the table of contracts


def small_normed():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


def test_the_contract_with_batch_norm():
    check(FedBN(), model=small_normed, data=images((10, 20, 31, 20)))  # no batch of a single sample


def test_names_with_brackets_are_no_patterns():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"a[0]": nn.Linear(6, 5), "b": nn.Linear(5, 4)})

        def forward(self, x):
            return self.parts["b"](self.parts["a[0]"](x).tanh())

    net = Net(Odd, head="parts.b")
    assert LGFedAvg().columns(net).sum() == 35 and FedPer().columns(net).sum() == 24


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (
            lambda: Split(private="fc*").initial(Net(tiny_model())),
            r"patterns: 'fc\*' matches no parameter; the names are 0.weight",
        ),
        (lambda: FedPer().initial(Net(nn.Conv2d(1, 1, 1))), "model: found no trainable head"),
    ],
)
def test_models_without_such_parts_are_one_sentence(make, word):
    with pytest.raises(ValueError, match=f"^{word}.*\\.$"):
        make()
