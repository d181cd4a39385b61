"""APFL, FedALA, FedFomo and L2C: golden values and properties.

Each property is one that a known fault of other programs breaks.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from entry_points import views
from parts.edges import normal
from parts.rivals import GOLDEN, close, fomo
from small import (
    ENGINES,
    F64,
    after,
    alike,
    at_work,
    images,
    joined,
    near,
    play,
    quadratics,
    some,
    t,
    tiny,
    tiny_model,
    validated,
)

from pflcore import Simulation, Training, evaluate
from pflcore.algorithms import APFL, L2C, FedALA, FedAvg, FedFomo, SharedRows
from pflcore.simulation.round import RunConfig

MIXES = pytest.mark.parametrize("mix", ["weights", "logits"])

# APFL -------------------------------------------------------------------------


@MIXES
def test_what_is_evaluated(mix):
    s = tiny()
    alg = APFL(mix=mix, alpha_lr=1.0)
    state, _ = after(alg, s, 3)
    losses = evaluate(RunConfig.of(alg, s), state)["loss"]
    w = state.server["x"]
    own = state.clients
    for i, (v, a) in enumerate(zip(own["v"], own["alpha"], strict=True)):
        x, y = s.data.client(i, "test")
        mixed = s.net(a * v + (1 - a) * w, x)
        scores = mixed if mix == "weights" else a * s.net(v, x) + (1 - a) * s.net(w, x)
        near(losses[i], F.cross_entropy(scores, y), 1e-5)


@ENGINES
def test_the_statistics_of_batch_norm_are_the_mixtures(engine):
    s = normal((8, 8, 8), engine)  # one batch each
    w0 = s.net.w0.expand(3, -1)
    own = {
        "v": w0 + torch.randn(3, s.net.size),
        "alpha": torch.full((3, 1), 0.5, dtype=F64),
    }
    fit = APFL().train({"x": w0}, own, at_work(s))[2]
    mixed = at_work(s).fit((own["v"] + w0) / 2)
    near(fit.buffers, mixed.buffers)


@ENGINES
@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_mixed_scores_move_the_statistics_once(engine, alpha):
    """They are the mixture of those after a pass of v and after a pass of w."""
    s = normal((8, 8, 8), engine)  # one batch each
    w = s.net.w0.expand(3, -1)
    v = w + torch.randn(3, s.net.size)
    own = {"v": v, "alpha": torch.full((3, 1), alpha, dtype=F64)}

    got = APFL(mix="logits").train({"x": w}, own, at_work(s))[2].buffers

    after_v = at_work(s).fit(v).buffers
    after_w = at_work(s).fit(w).buffers
    near(got, alpha * after_v + (1 - alpha) * after_w)


# FedALA -----------------------------------------------------------------------


def test_who_never_took_part_is_served_the_global_model():
    s = tiny()
    state, _ = after(FedALA(), s, [[0, 2], [0, 2]])
    assert torch.equal(
        views(FedALA(), state, s, torch.tensor([1]))[0]["w"][0], state.server["x"]
    )
    assert state.clients["begun"][:, 0].tolist() == [1, 0, 1]


def test_the_first_time_ends():
    """It ends after `max_epochs` epochs, even if losses never settle."""
    calls: list[int] = []

    class Counted(FedALA):
        def loss(self, *args):
            calls.append(1)
            return super().loss(*args)

    after(Counted(threshold=0.0, max_epochs=12, sample=1.0), tiny(), 2)
    assert len(calls) == 12 * sum(-(-n // 8) for n in (7, 20, 31))


# FedFomo ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "previous, candidates, before, after, want, raw", GOLDEN["fedfomo"]
)
def test_golden_fedfomo(previous, candidates, before, after, want, raw):
    """A client goes on from its own trained model where no other one counts.

    A model does not count that is not better, that is at distance 0, or that has no
    finite loss.
    """
    new, up = fomo(FedFomo(), previous, candidates, before, after)
    for key in ("w", "old"):
        close(new[key], [want])
    close(up["a"][0, : len(raw)], raw)


def test_fedfomo_downloads_the_best_models_and_explores():
    participated = torch.tensor([1, 1, 1, 1, 1, 0]).bool()
    g = {
        "w": torch.zeros(6, 3),
        "p": torch.zeros(6, 6, dtype=torch.float64),
    }
    g["p"][0] = t([9.0, 1.0, 3.0, 2.0, -1.0, 99.0])

    def sent(alg, ids, seed=0, round=1):
        return alg.send(
            g, some(6, round, ids)._replace(seed=seed, participated=participated)
        )["w"]

    rows, index = sent(FedFomo(m=2, epsilon=0.0), [0])
    assert index.tolist() == [[2, 3]] and rows is g["w"]
    picks = [
        sent(FedFomo(m=2, epsilon=0.0), [1], i).index[0].tolist() for i in range(60)
    ]
    # Equals are drawn, never the client itself or one that has not taken part.
    assert torch.tensor(picks).unique().tolist() == [0, 2, 3, 4]
    assert all(a != b for a, b in picks)
    bold = [sent(FedFomo(m=2, epsilon=1.0, decay=1.0), [0], i).index for i in range(60)]
    assert set(torch.cat(bold).flatten().tolist()) == {1, 2, 3, 4}
    later = sent(FedFomo(m=2, epsilon=1.0, decay=1.0), [0], round=2)
    assert later.index.tolist() == [[2, 3]]
    alone = sent(FedFomo(m=2), [3]).index[-1]
    # A client's draw does not depend on the rest of the cohort.
    for ids in ([0, 3], [1, 2, 3]):
        assert torch.equal(sent(FedFomo(m=2), ids).index[-1], alone)
    # With an m larger than the federation, each client gets all models that it may.
    index = sent(FedFomo(m=50), [0, 5]).index
    assert index.sort().values.tolist() == [[-1, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_fedfomo_does_not_take_a_model_that_was_not_sent():
    """Row 0 would be best for both clients, but client 1 was sent -1: no model."""
    s = quadratics([[1.0], [1]], [[0.0], [0]], lr=0.0, rows=4)
    index = {"train": s.data.index["train"], "val": s.data.index["test"]}
    s = replace(s, data=replace(s.data, index=index))
    own = {"w": t([[4.0], [4]]), "old": t([[4.0], [4]])}
    down = {"w": SharedRows(t([[0.0], [2]]), torch.tensor([[1], [-1]]))}
    own, up, _ = FedFomo().train(down, own, at_work(s))
    assert own["w"][:, 0].tolist() == [2, 4] and up["a"][1].tolist() == [0, 0]


# L2C --------------------------------------------------------------------------


def test_golden_l2c():
    e1 = GOLDEN["E1_l2c"]
    centre = t(e1["val_center"])
    zero = torch.zeros(1, 3, dtype=F64)
    local = SimpleNamespace(
        grad=lambda w, split: w - centre, fit=lambda w: SimpleNamespace(w=w.clone())
    )
    moments = {"m": zero, "v": zero, "t": zero[:, :1]}
    own = {"w": t([e1["theta_old"]]), "a": t([e1["alpha"]]), **moments}
    everybody = torch.arange(3)[None]
    down = {"delta": SharedRows(-t(e1["Delta"]), everybody), "who": everybody}
    close(L2C().mixed_models(down, own)[1][0], e1["w"])
    new = L2C().train(down, own, local)[0]
    close(new["w"][0], e1["theta_new"])
    close(new["m"][0] / 0.1 - 0.01 * t(e1["alpha"]), e1["dL_dalpha"])
    close(new["a"][0], e1["alpha_after_Adam_step"])
    close(new["a"].softmax(1)[0], e1["w_after"])


def test_l2c_mixes_the_updates_of_a_clients_own_last_round():
    """However long a client is absent, it mixes all updates of its last round.

    Its model stays as it is meanwhile. In the first round all weights are equal, which
    is FedAvg.
    """
    s = validated()
    alg = L2C()
    state = joined(alg, s)
    mixed = [s.net.w0] * 4
    met = [[]] * 4
    for round, ids in enumerate(([0, 1, 2, 3], [0, 1], [0, 2], [0, 2], [1, 3]), 1):
        down = alg.send(state.server, some(4, round))
        before = alg.model(down, state.clients, None)["w"]
        logits = state.clients["a"].clone()
        alike(before, torch.stack(mixed))
        who = alg.send(state.server, some(4, round, ids))["who"]
        state, done = after(alg, s, [ids], state)
        assert (
            done.bytes_down
            == 4 * s.net.size * sum(len(met[i]) for i in ids) + who.nbytes
        )
        assert torch.equal(state.clients["w"][ids], before[ids])  # a round starts there
        newest = state.server["delta"][-len(ids) :]
        for i in ids:
            unmet = [j for j in range(4) if j not in met[i]]
            assert torch.equal(state.clients["a"][i, unmet], logits[i, unmet])
            met[i] = ids
            share = state.clients["a"][i, ids].softmax(0).float()
            mixed[i] = state.clients["w"][i] + share @ newest
        if round == 1:
            plain, _ = after(FedAvg(weighting="uniform"), s)
            alike(mixed[0], plain.server["x"])
    # The server keeps only updates of rounds that are some client's last.
    assert (
        set(state.server["round"].tolist()) == {4, 5}
        and len(state.server["delta"]) == 4
    )
    assert state.clients["t"][:, 0].tolist() == [3, 2, 2, 1]


@pytest.mark.parametrize("alg", [FedFomo(m=2), L2C()])
def test_a_simulation_holds_validation_data_out_by_itself(alg):
    data = images((20, 25, 30))
    run = Simulation(alg, tiny_model(), data, Training(lr=0.1, batch_size=8), rounds=2)
    assert run.header()["facts"] == {"held out for validation": 0.2}
    assert "val" not in data.index
    held_out = run.config.data
    again = Simulation(alg, tiny_model(), held_out, run.training)
    assert again.config.data is held_out
    again = Simulation(alg, tiny_model(), data).config.data.index["val"]
    assert all(map(torch.equal, again, held_out.index["val"]))


@pytest.mark.parametrize("alg", [FedFomo(m=2), L2C()])
def test_without_validation_data_nobody_is_drawn_anywhere(alg):
    """With an empty validation split, a client keeps its model or its logits.

    FedFomo keeps the trained model, L2C the logits.
    """
    s = validated(3)
    val = [rows[:0] if i == 1 else rows for i, rows in enumerate(s.data.index["val"])]
    s = replace(s, data=replace(s.data, index={**s.data.index, "val": val}))
    (one, _), (state, done) = play(alg, s, 2)
    assert not done.dropped
    if isinstance(alg, FedFomo):
        assert torch.equal(state.clients["old"][1], one.clients["w"][1])
        assert not state.server["p"][1].any()
    else:
        assert not state.clients["a"][1].any() and state.clients["a"][0].abs().max() > 0
    with pytest.raises(ValueError, match=r"^split: .*'val'"):
        after(alg, tiny(), 2)
