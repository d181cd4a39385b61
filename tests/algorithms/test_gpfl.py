"""GPFL: golden rounds, and the parts of its rule.

The numbers are made by tests/golden/make/gpfl.py, and compared in float64.
"""

import pytest
import torch
from entry_points import sentence
from places import golden
from small import ENGINES, after, at_work, double, layers, make_setting, near, t, tiny

from pflcore import Federation, Net, Training
from pflcore.algorithms import GPFL
from pflcore.simulation.round import initial_state

CASE = golden("gpfl")


@ENGINES
def test_golden_rounds(engine):
    pairs = [(t(c["x"]), torch.tensor(c["y"])) for c in CASE["clients"]]
    entries = [{"train": pair, "test": pair} for pair in pairs]
    data = Federation.from_clients(entries, classes=3, dtype=None)
    net = Net(lambda: layers("Linear 3 2, Tanh, Linear 2 3").double())
    training = Training(lr=CASE["lr"], epochs=CASE["epochs"], batch_size=100)
    s = make_setting(net, data, training, 10, engine)
    alg = GPFL(lam=CASE["lam"], mu=CASE["mu"])
    state = initial_state(alg, s.net, 3)
    x0 = [t(CASE["body"]), t(CASE["valve"]), t(CASE["embedding"]).flatten()]
    state.server["x"] = torch.cat(x0)
    state.clients["h"] = t(CASE["head"]).repeat(3, 1)
    state.participated[:] = True
    for cohort, want in zip(CASE["cohorts"], CASE["then"], strict=True):
        state, _ = after(alg, s, [cohort], state)
        near(state.server["x"], want["x"])
        near(state.clients["h"], want["h"])


def test_a_client_predicts_by_its_personal_features():
    s = double(tiny())
    alg = GPFL()
    state, _ = after(alg, s, 2)
    down = {"x": state.server["x"].expand(3, -1)}
    model = alg.model(down, dict(state.clients), at_work(s, round=3))
    net, x = s.net, s.data.x[:5]
    one = {key: rows[1] for key, rows in model.items()}
    scores = alg.predict(one, net, x)
    z = net.features(one["w"], x)
    # A valve of zeros lets features through, but for their negative numbers.
    through = {**one, "valve": torch.zeros_like(one["valve"])}
    near(alg.predict(through, net, x), net.head(one["w"], z.relu()))
    # The global and the personal features differ, and so do the clients' own.
    embedding = state.server["x"][-4 * 5 :].view(4, 5)
    general = alg.predict({**one, "condition": embedding.mean(0)}, net, x)
    assert (general - scores).abs().max() > 1e-6
    near(
        one["condition"],
        s.data.counts("train", torch.tensor([1]))[0].double() @ embedding / 20,
    )


def test_samples_without_a_label_pull_no_features():
    s = double(tiny())
    alg = GPFL(lam=3.0)
    x0 = alg.server_init_args(s.net)["x0"][None]
    (row,), (embedding,) = alg._whole_rows(x0, s.net.w0[None, s.net.head_slice], s.net)
    fixed = {"embedding": embedding, "general": embedding[0], "personal": embedding[1]}
    x = s.data.x[:3]

    got = alg.loss(s.net, row, x, torch.tensor([2, 0, -100]), fixed)

    near(got, alg.loss(s.net, row, x[:2], torch.tensor([2, 0]), fixed))


def test_a_loss_that_is_none_of_classes_is_refused():
    net = Net(layers("Linear 3 2, Tanh, Linear 2 1"), "squared")
    with sentence("loss: GPFL embeds classes; expected a loss of several classes'"):
        GPFL().server_init_args(net)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_valve_follows_the_seed_of_the_model(seed):
    make = lambda: layers("Linear 3 2, Tanh, Linear 2 3")  # noqa: E731
    first = GPFL().server_init_args(Net(make, seed=seed))["x0"]
    again = GPFL().server_init_args(Net(make, seed=seed))["x0"]
    other = GPFL().server_init_args(Net(make, seed=seed + 1))["x0"]
    assert torch.equal(first, again) and not torch.equal(first[-6:], other[-6:])
