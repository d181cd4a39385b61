"""Properties of MOON, FedNTD, FedDyn and FedNova, whose rounds have golden values.

SCAFFOLD's and WAFFLE's option II stands beside FedNova: it divides by the same steps.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import (
    F64,
    after,
    double,
    layers,
    make_setting,
    near,
    normed_model,
    quadratics,
    some,
    t,
    tiny,
    tiny_model,
    wide,
)

from examples import examples
from pflcore import (
    ALGORITHMS,
    FedAvg,
    Federation,
    Net,
    Robustness,
    Training,
    step,
)
from pflcore.algorithms import MOON, FedDyn, FedNova, FedNTD, QFedAvg
from pflcore.simulation.round import RunConfig, initial_state


def uneven_steps(round, client, generator):
    """Steps that differ from client to client and from round to round."""
    return 1 + 2 * client + round


def constant_gradients(momentum):
    """Three clients with the gradients 1, -2 and 4 at every model."""
    entries = [(torch.ones(2, 1), torch.full((2, 1), g)) for g in (1.0, -2.0, 4.0)]
    pairs = [{"train": pair, "test": pair} for pair in entries]
    data = Federation.from_clients(pairs, classes=None)
    training = Training(lr=0.1, momentum=momentum, steps=uneven_steps)
    net = Net(
        lambda: layers("Linear 1 1 false").double(),
        loss=lambda scores, y: (scores * y).mean(),
    )
    return make_setting(net, wide(replace(data, y=data.y.double())), training)


# MOON and FedNTD ----------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_moons_first_round_is_fedavgs_with_batch_norm(engine):
    """The reference models are equal then, and leave the statistics as they are."""
    s = double(replace(tiny(engine=engine), net=Net(normed_model)))

    ours = after(MOON(mu=5.0), s)[0]
    theirs = after(FedAvg(), s)[0]

    near(ours.server["x"], theirs.server["x"])
    near(ours.buffers, theirs.buffers)


def test_features_and_scores_are_of_one_pass():
    net = Net(tiny_model())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

    z, scores = net.features_and_scores(net.w0, x)

    assert torch.equal(scores, net(net.w0, x))
    assert torch.equal(scores, net.head(net.w0, z))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_fedntds_shared_model_is_in_evaluation_mode(engine):
    """One step by hand: its own batch norm moves the statistics, once."""
    s = double(replace(tiny(engine=engine, batch_size=100), net=Net(normed_model)))
    x, y = s.data.client(1)
    module = s.net.load(deepcopy(s.net.module), s.net.w0, s.net.b0)
    scores = module.train()(x)
    # The client's statistics, as the pass has moved them, serve both models.
    q_shared = not_true(deepcopy(module).eval()(x), y, 1.5).softmax(1)
    log_q = not_true(scores, y, 1.5).log_softmax(1)
    divergence = (q_shared * (q_shared.log() - log_q)).sum(1).mean()
    loss = torch.nn.functional.cross_entropy(scores, y) + 2 * 1.5**2 * divergence
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters()])

    state, _ = after(FedNTD(beta=2.0, temperature=1.5), s, [[1]])

    near(state.server["x"], s.net.w0 - 0.1 * gradient)
    statistics = [module[1].running_mean, module[1].running_var]
    near(state.buffers[1], torch.cat(statistics))


def not_true(scores, y, temperature):
    """The scores [B, C - 1] of the classes that are not a sample's own."""
    others = torch.arange(scores.shape[1]) != y[:, None]
    return scores[others].view(len(y), -1) / temperature


def test_fedntd_of_two_classes_is_fedavg():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 6, generator=generator)
    pair = {"train": (x, torch.arange(12) % 2), "test": (x, torch.arange(12) % 2)}
    net = Net(tiny_model(classes=2))
    training = Training(lr=0.1, batch_size=4)
    s = double(make_setting(net, Federation.from_clients([pair, pair]), training))

    got = after(FedNTD(), s, 2)[0].server["x"]

    near(got, after(FedAvg(), s, 2)[0].server["x"])


def test_fedntd_leaves_out_steps_without_a_label():
    """Scores are [B, C, T]; steps with the label -100 count in no mean."""
    net = Net(lambda: layers("Conv1d 2 3 1").double())
    x = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    shared = {"x": net.w0 + 0.5}
    loss = FedNTD(beta=2.0, temperature=1.5).loss

    got = loss(net, net.w0, x, torch.tensor([[2, 0, -100, -100]]), shared)

    near(got, loss(net, net.w0, x[..., :2], torch.tensor([[2, 0]]), shared))


def test_fedntd_refuses_losses_without_classes():
    with pytest.raises(ValueError, match=r"^loss: FedNTD compares .* got squared\.$"):
        FedNTD().server_init_args(Net(tiny_model(), "squared"))


# FedDyn -------------------------------------------------------------------------


def test_feddyns_h_is_the_mean_of_all_clients_gradients():
    s = double(tiny(momentum=0.5))

    state, _ = after(FedDyn(alpha=0.3), s, [[0, 1, 2], [0, 2], [1], [0, 1]])

    near(state.server["h"], state.clients["g"].mean(0))


def test_feddyns_h_is_the_mean_over_clients_that_train():
    s = double(tiny())
    train = list(s.data.index["train"])
    train[1] = train[1][:0]
    s = replace(s, data=replace(s.data, index={**s.data.index, "train": train}))

    state, _ = after(FedDyn(alpha=0.3), s, [[0, 2], [0], [2]])

    near(state.server["h"], state.clients["g"][[0, 2]].mean(0))


def test_feddyns_gradients_follow_updates_that_are_clipped():
    s = double(tiny((7, 200, 31), epochs=2))
    alg = FedDyn(alpha=0.3)
    config = RunConfig.of(alg, s, robustness=Robustness(clip=0.5))
    state = initial_state(alg, s.net, s.data.n)
    for _ in range(2):
        state, outcome = step(config, state, torch.arange(s.data.n))
        assert outcome.clipped

    near(state.server["h"], state.clients["g"].mean(0))


def test_feddyn_ends_where_the_whole_loss_is_least():
    """FedAvg ends elsewhere: at the mean of models that stop between two minima."""
    a, b = [[4.0, 1.0], [1.0, 2.0], [0.5, 3.0]], [[1.0, -1.0], [2.0, 0.5], [-3.0, 0.0]]
    s = quadratics(a, b, lr=0.1, epochs=5)
    least = (t(a) * t(b)).sum(0) / t(a).sum(0)

    near(after(FedDyn(alpha=3.0), s, 20)[0].server["x"], least, 1e-5, 1e-5)

    mean = after(FedAvg(weighting="uniform"), s, 20)[0].server["x"]
    assert (mean - least).abs().max() > 0.1


# The steps that clients really took -----------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_fednova_goes_along_the_mean_gradient_whatever_the_steps(momentum):
    s = constant_gradients(momentum)

    state, _ = after(FedNova(), s)

    counts = [uneven_steps(1, client, None) for client in range(3)]
    weights = [
        sum((1 - momentum**k) / (1 - momentum) for k in range(1, count + 1))
        for count in counts
    ]
    mean_gradient = (1.0 - 2.0 + 4.0) / 3
    near(state.server["x"] - s.net.w0, t([-0.1 * sum(weights) / 3 * mean_gradient]))


@pytest.mark.parametrize("name", ["scaffold", "waffle"])
def test_option_two_divides_by_the_steps_that_were_taken(name):
    """So it is the mean gradient, however many steps a client took."""
    s = double(tiny(steps=uneven_steps))

    got = after(ALGORITHMS[name](option="II"), s, 2)[0]
    want = after(ALGORITHMS[name](option="mean_grad"), s, 2)[0]

    near(got.clients["c"], want.clients["c"], 1e-9, 1e-11)
    near(got.server["x"], want.server["x"], 1e-9, 1e-11)


def test_scaffolds_option_two_divides_by_the_steps_with_momentum():
    s = constant_gradients(momentum=0.7)

    state, _ = after(ALGORITHMS["scaffold"](option="II"), s)

    near(state.clients["c"], t([[1.0], [-2.0], [4.0]]))


# q-FedAvg ---------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.0, 10.0, 1e3])
def test_any_q_is_played(q):
    state, outcome = after(QFedAvg(q=q), tiny())
    assert not outcome.void and state.server["x"].isfinite().all()


@examples(100)
@given(
    q=st.floats(0.01, 5),
    lr=st.floats(1e-3, 1),
    losses=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5),
    shares=st.floats(0.01, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_shortened_update_has_the_term_of_what_is_left(q, lr, losses, shares, seed):
    """However long it was: else one long update would stop the step of all."""
    n = len(losses)
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(n, 6, dtype=F64, generator=generator)
    loss = t(losses)

    def update(given):
        h = q * loss ** (q - 1) * given.square().sum(1) / lr + loss**q
        up = {"delta": delta, "weight": loss**q, "h": h}
        cohort = some(n)._replace(training=Training(lr=lr))
        return QFedAvg(q=q).update({"x": torch.zeros(6, dtype=F64)}, up, cohort)[0]["x"]

    want = update(delta)
    near(update(delta / shares), want, 1e-6, 1e-12)
