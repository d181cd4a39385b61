"""Modules as functions of flat rows."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from parts.net import Buffered
from parts.user import simulation
from small import tiny_model
from torch import Tensor

from pflcore import (
    FedAvg,
    Federation,
    Net,
    Objective,
    Server,
    Simulation,
    Training,
)


def small():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 3)
    )


class Tied(nn.Module):
    """One matrix encodes and decodes; the head has a name of its own."""

    def __init__(self):
        super().__init__()
        self.code = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.code.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.decode(torch.tanh(self.code(x))))


@pytest.mark.parametrize("build", [small, Tied, Buffered])
def test_rows_and_modules_round_trip(build):
    net = Net(build)
    module = build()
    row = net.row(module)
    assert row.shape == (net.size,) == (sum(p.numel() for p in module.parameters()),)
    assert torch.equal(torch.nn.utils.parameters_to_vector(module.parameters()), row)
    copy = net.load(build(), row, net.b0)
    x = torch.randn(6, 1, 6, 6) if build is small else torch.randn(6, 4)
    assert torch.equal(copy.eval()(x), module.eval()(x))
    assert torch.equal(net.row(copy), row)
    assert torch.equal(net(row, x), module(x))
    assert torch.equal(torch.cat([row[s] for s in net.slices.values()]), row)


@pytest.mark.parametrize("build", [small, Tied])
def test_gradients_are_the_modules(build):
    net, module = Net(build), build()
    x, y = (
        (torch.randn(6, 1, 6, 6) if build is small else torch.randn(6, 4)),
        torch.randint(0, 2, (6,)),
    )
    w = net.row(module).requires_grad_()
    (g,) = torch.autograd.grad(net.loss(w, x, y), w)
    F.cross_entropy(module(x), y).backward()
    torch.testing.assert_close(
        g, torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    )


def test_row_and_load_copy():
    module = nn.Linear(2, 2)
    net = Net(module)
    before = net.w0.clone()
    with torch.no_grad():
        module.weight.add_(1)
    assert torch.equal(net.w0, before)
    row = net.row(module)
    with torch.no_grad():
        module.weight.add_(1)
    assert not torch.equal(net.row(module), row)


def test_init_is_seeded_and_leaves_the_global_state():
    for net in (Net(small), Net(small())):
        state = torch.random.get_rng_state()
        assert torch.equal(net.init(3), net.init(3)) and not torch.equal(net.init(3), net.init(4))
        assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(Net(small).w0, Net(small).init(0)) and torch.equal(
        Net(small, seed=5).w0, Net(small).init(5)
    )
    module = small()
    assert torch.equal(Net(module).w0, Net(small).row(module))  # a module keeps its weights


def test_a_frozen_parameter_is_no_part_of_the_row():
    module = small()
    module[0].weight.requires_grad_(False)
    net = Net(module)
    assert (
        net.size == sum(p.numel() for p in module.parameters()) - 18
        and "0.weight" not in net.slices
    )
    x = torch.randn(2, 1, 6, 6)
    assert torch.equal(net(net.w0, x), module(x))


def test_masks_by_name():
    net = Net(small)
    assert net.mask("5.*").sum() == 18 and net.mask("5.*")[-18:].all()
    assert torch.equal(net.mask("0.weight", "0.bias"), net.mask("0.*")) and net.mask("*").all()
    assert net.mask("*.bias").sum() == 2 + 5 + 3
    with pytest.raises(
        ValueError, match=r"patterns: 'head.\*' matches no parameter; the names are 0.weight"
    ):
        net.mask("head.*")


@pytest.mark.parametrize("build", [small, Tied])
def test_features_and_head_make_the_model(build):
    net = Net(build)
    x = torch.randn(6, 1, 6, 6) if build is small else torch.randn(6, 4)
    z = net.features(net.w0, x)
    assert z.shape == (6, 5 if build is small else 4)
    assert torch.equal(net.head(net.w0, z), net(net.w0, x))
    assert torch.equal(net.head(net.w0[net.head_slice], z), net(net.w0, x))
    assert net.classes == (3 if build is small else 2)
    assert net.has_conv == (build is small)


def test_the_head_may_be_named_or_be_everything():
    net = Net(small, head="3")
    assert (net.head_slice.start, net.head_slice.stop) == (20, 20 + 165)
    whole = Net(nn.Linear(4, 3))
    x = torch.randn(2, 4)
    assert torch.equal(whole.features(whole.w0, x), x) and torch.equal(
        whole.head(whole.w0, x), whole(whole.w0, x)
    )
    with pytest.raises(ValueError, match="head: the model has no submodule 'top'"):
        Net(small, head="top")
    with pytest.raises(ValueError, match="found no trainable head"):
        Net(nn.Conv2d(1, 1, 1)).head_slice  # noqa: B018


def test_a_net_is_a_function_under_vmap():
    net = Net(small)
    rows, x = torch.stack([net.init(i) for i in range(3)]), torch.randn(3, 4, 1, 6, 6)
    torch.testing.assert_close(
        torch.vmap(net)(rows, x), torch.stack([net(r, xi) for r, xi in zip(rows, x, strict=True)])
    )


def test_what_is_no_model_is_refused_in_a_sentence():
    for build, words in (
        (3, "build: expected an nn.Module"),
        (nn.Flatten(), "no trainable parameter"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "dtypes"),
        (nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout()), "pflcore.nn.Dropout"),
        (nn.Sequential(nn.Linear(2, 2), nn.RReLU()), "RReLU"),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5), "set its dropout to 0"),
        (nn.BatchNorm1d(2, momentum=None), "give it a momentum"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            Net(build)
    with pytest.raises(ValueError, match="criterion"):
        Net(nn.Linear(2, 2), criterion="nll")
    net = Net(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="row: expected 6 parameters"):
        net(torch.zeros(7), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="module: parameter 'weight'"):
        net.row(nn.Linear(3, 2))


class Silent(nn.Module):
    """Its last layer starts at zero, whatever the layer's own start."""

    def __init__(self):
        super().__init__()
        self.body, self.last = (
            nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)),
            nn.Linear(5, 3),
        )
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        return self.last(self.body(x))


def test_a_parent_has_the_last_word_on_its_childrens_start():
    net = Net(Silent())
    assert (
        not net.init(3)[net.slices["last.weight"]].any()
        and net.init(3)[net.slices["body.2.weight"]].any()
    )
    plain = nn.Sequential(
        nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 3)
    )
    torch.manual_seed(7)
    for m in (plain[0], plain[1][0], plain[2]):
        m.reset_parameters()
    # in the order in which they stand
    assert torch.equal(Net(plain).init(7), Net(plain).row(plain))


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: None, TypeError, "one that makes NoneType"),
        (lambda: nn.LazyLinear(3), ValueError, "lazy layers"),
        (nn.LazyLinear(3), ValueError, "lazy"),
    ],
)
def test_what_is_no_finished_model_is_one_sentence(build, error, words):
    with pytest.raises(error, match=f"^build: .*{words}"):
        Net(build)


class HeadFirst(nn.Module):
    """The classifier (36 parameters) is registered before the encoder (56)."""

    def __init__(self, logarithms=False):
        super().__init__()
        self.logarithms = logarithms
        self.classifier, self.encoder = nn.Linear(8, 4), nn.Sequential(nn.Linear(6, 8), nn.ReLU())

    def forward(self, x):
        scores: Tensor = self.classifier(self.encoder(x))
        return F.log_softmax(scores, 1) if self.logarithms else scores


class HeadLast(HeadFirst):
    """The same in the usual order."""

    def __init__(self):
        super().__init__()
        first = self._modules.pop("classifier")
        self._modules["classifier"] = first


class Stem(HeadFirst):
    """An attribute `head` that is not the head."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        return super().forward(self.head(x))


def federation():
    gen = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(20, 6, generator=gen), torch.arange(20) % 4) for _ in range(4)]
    return Federation.from_clients(pairs, classes=4).split(test=0.2)


@pytest.mark.parametrize(
    ("algorithm", "sent"), [("fedper", 56), ("fedrep", 56), ("fedbabu", 56), ("lg_fedavg", 36)]
)
@pytest.mark.parametrize("model", [HeadFirst, HeadLast, lambda: HeadFirst(True)])
def test_the_part_that_travels(algorithm, sent, model):
    simulation = Simulation(algorithm, model, federation(), Training(), rounds=1)
    assert simulation.run().rounds[0]["bytes_up"] == 4 * 4 * sent
    private = "encoder" if algorithm == "lg_fedavg" else "classifier"
    assert all(name.startswith(private) for name in simulation.header()["private"])


@pytest.mark.parametrize("algorithm", ["knnper", "fedrod"])
def test_methods_with_features_give_one_result_in_any_order(algorithm):
    def copied(build):
        model = build()
        for n, p in model.named_parameters():
            nn.init.constant_(p, 0.01 * len(n)) if p.dim() == 1 else nn.init.eye_(p)
        return model

    results = [
        Simulation(algorithm, copied(build), federation(), Training(), rounds=2)
        .run()
        .rounds[-1]["eval"]
        for build in (HeadFirst, HeadLast)
    ]
    assert results[0] == results[1]


def test_an_attribute_of_that_name_is_believed_only_until_the_model_has_met_data():
    assert Simulation("fedper", Stem, federation(), Training(), rounds=1).run().rounds[0][
        "bytes_up"
    ] == 4 * 4 * (56 + 42)


def test_without_data_it_is_asked_for():
    with pytest.raises(
        ValueError, match=r"^model: .* head.*name it with Net\(..., head='name'\)\.$"
    ):
        Server("fedper", HeadFirst(), 4)
    assert Net(HeadFirst, head="classifier").head_slice == slice(0, 36)


@pytest.mark.parametrize("patterns", [(), ("0.*",), ("*.bias",), ("*",)])
def test_split_and_join_are_inverse(patterns):
    net = Net(tiny_model())
    rows = torch.arange(3.0 * net.size).view(3, net.size)
    shared, private = net.split(rows, *patterns)
    mask = net.mask(*(patterns or ("2.*",)))
    assert torch.equal(private, rows[:, mask]) and torch.equal(shared, rows[:, ~mask])
    assert torch.equal(net.join(shared, private, *patterns), rows)
    # one body, several heads
    assert torch.equal(
        net.join(shared[0], private, *patterns)[1:, ~mask], rows[0, ~mask].expand(2, -1)
    )
    assert torch.equal(
        torch.vmap(lambda r: net.join(*net.split(r, *patterns), *patterns))(rows), rows
    )


def test_split_and_join_refuse_what_does_not_fit():
    net = Net(tiny_model())
    with pytest.raises(ValueError, match=r"patterns: 'fc\.\*' matches no parameter"):
        net.split(net.w0, "fc.*")
    with pytest.raises(
        ValueError,
        match="shared and private: expected 35 and 24 columns, got 24 and 35; "
        "give join the patterns",
    ):
        net.join(*reversed(net.split(net.w0)))


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_a_bool_mask_is_a_mask(engine):
    class Masked(FedAvg):
        def train(self, down, own, clients):
            mask = clients.net.mask("2.*")
            fit = clients.fit(down["x"], Objective(mask=mask))
            w = fit.w
            assert torch.equal(w, clients.fit(down["x"], Objective(mask=mask.to(w.dtype))).w)
            assert torch.equal(w[:, ~mask], down["x"][:, ~mask])
            assert not torch.equal(w[:, mask], down["x"][:, mask])
            return own, {"delta": w - down["x"]}, fit

    assert simulation(Masked, rounds=1, engine=engine).run().stopped is None
