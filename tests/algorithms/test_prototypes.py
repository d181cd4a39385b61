"""Methods that share features: what they are at their limits, and their parts."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from small import (
    after,
    at_work,
    classed,
    double,
    equals,
    near,
    normed_model,
    t,
    tiny,
)
from torch import nn

from pflcore import Federation, Hardware, Net, Simulation, Training
from pflcore.algorithms import (
    FedAS,
    FedAvg,
    FedDBE,
    FedPAC,
    FedPer,
    FedProto,
    FedRep,
    LocalOnly,
)

NAMES = ["fedproto", "fedpac", "fedas", "feddbe"]
W0 = [0.5, -0.8, 0.1, 0.2, 0.7, -0.6, 0.3, 0.4, -0.5, 0.2, 0.05, -0.1, 0.0]


def two_equal_clients(pair, **options):
    """Two clients with the same samples for training and tests."""
    return Federation.from_clients([{"train": pair, "test": pair}] * 2, **options)


# limits -----------------------------------------------------------------------


@pytest.mark.parametrize("predict_by", ["prototypes", "head"])
def test_fedproto_without_a_pull_is_local(predict_by):
    s = tiny(batch_size=8, epochs=2)
    ours, _ = after(FedProto(lam=0, predict_by=predict_by), s, 3)
    theirs, _ = after(LocalOnly(), s, 3)
    assert torch.equal(ours.clients["w"], theirs.clients["w"])


def test_fedpac_without_pull_and_mix_is_fedrep():
    s = tiny(batch_size=8, epochs=2)
    cohorts = [[0, 1, 2], [1], [0, 2]]
    ours, _ = after(FedPAC(lam=0, mix_heads=False), s, cohorts)
    theirs, _ = after(FedRep(weighting="samples", private_epochs=1), s, cohorts)
    assert torch.equal(ours.server["x"], theirs.server["x"])
    assert torch.equal(ours.server["head"], theirs.clients["h"])
    mixed, _ = after(FedPAC(lam=0), s, cohorts)
    assert not torch.equal(mixed.server["x"], theirs.server["x"])


def test_fedas_of_equal_clients_without_alignment_is_fedper():
    sample = ([1.0, -0.5, 2.0], [0, 2, 1])
    s = classed([sample] * 3, W0, lr=0.4, epochs=2)
    ours, _ = after(FedAS(align_lr=0), s, 3)
    theirs, _ = after(FedPer(), s, 3)
    near(ours.server["x"], theirs.server["x"], 1e-12)
    # The features of a client's own body do not move it, where each class has one.
    aligned, _ = after(FedAS(align_lr=0.5), s, 1)
    once, _ = after(FedPer(), s, 1)
    near(aligned.server["x"], once.server["x"], 1e-12)


def test_feddbe_without_pull_and_offset_is_fedavg_after_its_first_round():
    s = double(tiny(batch_size=100, epochs=2))
    ours, _ = after(FedDBE(kappa=0, offset=False), s, 3)
    theirs, _ = after(FedAvg(), s, 2)
    near(ours.server["x"], theirs.server["x"], 1e-12)
    assert not ours.clients["v"].any()
    # What moves the running mean is no part of the loss that is recorded.
    _, first = after(FedDBE(kappa=0, offset=False), s, 1)
    _, same = after(FedAvg(), s, 1)
    near(first.train_loss, same.train_loss)


# rules ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_fedass_traces_are_of_evaluation_mode(engine):
    """The traces of a model with batch norm and dropout, by torch alone."""
    torch.manual_seed(0)
    pairs = [(torch.randn(n, 5).double(), torch.arange(n) % 3) for n in (9, 12, 7)]
    samples = [{"train": pair, "test": pair} for pair in pairs]
    data = Federation.from_clients(samples, dtype=None)
    layers = (
        nn.Linear(5, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Dropout(),
        nn.Linear(4, 3),
    )
    model = nn.Sequential(*layers).double()
    training = Training(lr=0.3, batch_size=100)
    hardware = Hardware(engine=engine)
    run = Simulation("fedas", model, data, training, rounds=1, hardware=hardware)
    history = run.run()

    traces = []
    for client, (x, y) in enumerate(pairs):
        module = history.model(client).module().eval()
        module.requires_grad_()
        loss = nn.functional.cross_entropy(module(x), y)
        slopes = torch.autograd.grad(loss, [*module.parameters()])
        traces.append(sum(float(slope.square().sum()) for slope in slopes))

    shares = t(traces) / sum(traces)
    near(t(history.rounds[0]["report"]["weights"]), shares, 1e-6)


def test_fedproto_never_predicts_a_class_without_a_prototype():
    s = classed([([1.0, -1.0], [0, 1]), ([0.5], [2])], W0)
    model = {"w": t(W0), "prototypes": t([[5.0, 5], [6, 6], [0, 0]])}
    x = t([[1.0], [-1.0]])
    near_zero = FedProto().predict({**model, "known": t([1.0, 1, 0])}, s.net, x)
    assert near_zero.argmax(1).tolist() == [0, 0]
    everything = FedProto().predict({**model, "known": t([1.0, 1, 1])}, s.net, x)
    assert everything.argmax(1).tolist() == [2, 2]
    nothing = FedProto().predict({**model, "known": torch.zeros(3)}, s.net, x)
    equals(nothing, s.net(t(W0), x))


@pytest.mark.parametrize("alg", [FedProto(), FedPAC()], ids=["fedproto", "fedpac"])
def test_prototypes_are_the_trained_models_with_its_statistics(alg):
    s = double(replace(tiny(), net=Net(normed_model)))
    state, _ = after(alg, s, [[1]])
    if isinstance(alg, FedProto):
        row = state.clients["w"][1]
    else:
        row = s.net.join(state.server["x"], state.server["head"][1])
    module = s.net.load(deepcopy(s.net.module), row, state.buffers[1]).eval()

    x, y = s.data.client(1)
    z = module[:-1](x)
    want = [z[y == label].mean(0) for label in range(4)]

    assert len(y.unique()) == 4
    near(state.server["prototypes"], torch.stack(want))


# parts ------------------------------------------------------------------------


def test_class_features_are_sums_over_a_clients_samples():
    s = classed([([1.0, -0.5, 2.0], [0, 2, 0]), ([0.3], [1])], W0)
    w = t(W0).repeat(2, 1)
    found = at_work(s).class_features(w)
    z = torch.tanh(t([[1.0], [-0.5], [2.0]]) * t(W0[:2]) + t(W0[2:4]))
    near(found.sums[0], torch.stack([z[0] + z[2], torch.zeros(2), z[1]]))
    near(found.means[0, 0], (z[0] + z[2]) / 2)
    near(found.square[0], z.square().sum())
    assert found.counts.tolist() == [[2, 0, 1], [0, 1, 0]]


def test_others_change_no_bit_of_class_features():
    s = tiny((7, 20, 31))
    w = s.net.w0 + torch.linspace(-1, 1, 3)[:, None]
    together = at_work(s).class_features(w)
    alone = at_work(s, [1]).class_features(w[1:2])
    for one, all_clients in zip(alone, together, strict=True):
        assert torch.equal(one[0], all_clients[1])


def test_samples_without_a_label_count_in_no_class():
    x = torch.linspace(-1, 1, 6)[:, None]
    y = torch.tensor([0, 255, 1, 0, 255, 2])
    data = two_equal_clients((x, y), ignored_label=255)
    for name in NAMES:
        run = Simulation(name, nn.Linear(1, 3), data, Training(batch_size=2), rounds=2)
        state = run.run().state
        if name == "fedproto":
            mean = state.server["prototypes"]
            near(mean[1], x[2], 1e-6)


def test_a_newcomer_of_fedpac_keeps_the_head_that_it_trained():
    data = two_equal_clients((torch.randn(12, 3), torch.arange(12) % 3))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    history = Simulation("fedpac", model, data, Training(batch_size=4), rounds=1).run()

    newcomer = history.adapt((torch.randn(9, 3), torch.arange(9) % 3), rounds=1)

    assert not torch.equal(newcomer.module()[2].weight, model[2].weight)


NEEDS_LABELS = "^(loss|data): .*(prototypes are of classes|one label for each sample)"


@pytest.mark.parametrize("name", ["fedproto", "fedpac", "fedas"])
def test_regression_has_no_class_to_share(name):
    x = torch.linspace(-1, 1, 8)[:, None]
    data = two_equal_clients((x, x))
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    with pytest.raises(ValueError, match=NEEDS_LABELS):
        Simulation(name, model, data, rounds=1).run()
    Simulation("feddbe", model, data, rounds=2).run()


def test_a_head_of_several_layers_has_no_number_of_features():
    head = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))
    net = Net(nn.Sequential(nn.Linear(3, 4), head), head="1")
    with pytest.raises(ValueError, match=r"^model: expected an nn\.Linear as its head"):
        _ = net.num_features


def test_feddbes_first_round_measures_features_alone():
    s = tiny()
    state, _ = after(FedDBE(), s, 1)
    assert torch.equal(state.server["x"], s.net.w0) and not state.clients["v"].any()
    mean = state.server["mean"]
    state, _ = after(FedDBE(), s, 1, state)
    assert not torch.equal(state.server["x"], s.net.w0) and state.clients["v"].any()
    assert torch.equal(state.server["mean"], mean)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_with_test_samples_alone_is_served(name):
    pair = (torch.randn(12, 3), torch.arange(12) % 3)
    entries = [{"train": pair, "test": pair}, {"test": pair}, {"train": pair}]
    data = Federation.from_clients(entries)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    history = Simulation(name, model, data, Training(batch_size=4), rounds=3).run()
    loss = history.last_evaluation["loss"]
    assert torch.tensor(loss[1]).isfinite()
