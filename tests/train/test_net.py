"""Modules as functions of flat rows of parameters."""

import pytest
import torch
import torch.nn as nn
from entry_points import sentence
from parts.user import simulation
from small import equals, images, layers, tiny_model

from pflcore import Net, Server


def small():
    return layers("Conv2d 1 2 3, Tanh, Flatten, Linear 32 5, ReLU, Linear 5 3")


class Tied(nn.Module):
    """Model with a tied weight, a named head and batch norm.

    One matrix both encodes and decodes; batch norm has buffers.
    """

    def __init__(self):
        super().__init__()
        self.code = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.code.weight
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(self.decode(torch.tanh(self.code(x)))))


def inputs(build):
    return torch.randn(6, 1, 6, 6) if build is small else torch.randn(6, 4)


BOTH = pytest.mark.parametrize("build", [small, Tied])


@BOTH
def test_rows_and_modules_round_trip(build):
    net = Net(build)
    module = build().eval()
    x = inputs(build)
    row = net.row(module)
    equals(nn.utils.parameters_to_vector(module.parameters()), row)
    equals(torch.cat([row[s] for s in net.slices.values()]), row)
    copy = net.load(build(), row, net.b0).eval()
    want = module(x)
    # Neither the row nor the copy is a view of the module.
    nn.init.zeros_(next(module.parameters()))
    equals(net.row(copy), row)
    assert not torch.equal(net.row(module), row)
    equals((copy(x), net(row, x)), (want, want))


def nested():
    return nn.Sequential(nn.Linear(4, 5), layers("Linear 5 5, Tanh"), nn.Linear(5, 3))


@pytest.mark.parametrize("build", [small, nested])
def test_a_module_keeps_its_weights_and_is_drawn_anew_as_one_that_is_made(build):
    """A module keeps its weights; `init` draws as a new module does.

    Layers are drawn in the order in which they stand in the module.
    """
    module = build()
    net = Net(module)
    state = torch.random.get_rng_state()
    equals(net.w0, net.row(module))
    for seed in (0, 4):
        drawn = net.init(seed)
        equals(drawn, Net(build).init(seed))
        equals(drawn, Net(build, seed=seed).w0)
    equals(torch.random.get_rng_state(), state)


def test_a_frozen_parameter_is_no_part_of_the_row():
    module = small()
    x = inputs(small)
    module[0].weight.requires_grad_(False)
    net = Net(module)
    assert net.size == sum(p.numel() for p in module.parameters()) - 18
    assert "0.weight" not in net.slices
    equals(net(net.w0, x), module(x))


def test_masks_by_name():
    net = Net(small)
    assert net.mask("5.*").sum() == 18 and net.mask("5.*")[-18:].all()
    equals(net.mask("0.weight", "0.bias"), net.mask("0.*"))
    assert net.mask("*").all()
    with sentence(r"patterns: 'head.\*' matches no parameter; the names are 0.weight"):
        net.mask("head.*")


@BOTH
def test_features_and_head_make_the_model(build):
    net = Net(build)
    x = inputs(build)
    row = net.w0 + 0.1
    z = net.features(row, x)
    for h in (row, row[net.head_slice]):
        equals(net.head(h, z), net(row, x))


def test_the_head_may_be_named_or_be_everything():
    assert Net(small, head="3").head_slice == slice(20, 20 + 165)
    whole = Net(nn.Linear(4, 3))
    x = torch.randn(2, 4)
    equals(whole.features(whole.w0, x), x)
    equals(whole.head(whole.w0, x), whole(whole.w0, x))
    with sentence("head: the model has no submodule 'top'"):
        Net(small, head="top")
    with sentence(".*found no trainable head"):
        Net(nn.Conv2d(1, 1, 1)).head_slice  # noqa: B018


def test_what_is_no_model_is_refused_in_a_sentence():
    wide = layers("Linear 2 2, Linear 2 2")
    wide[1].double()
    cases = [
        (3, "an nn.Module"),
        (lambda: None, "got NoneType"),
        ([small(), small()], "got list"),
        (wide, "parameters of one dtype"),
        (nn.Flatten(), "parameters of one dtype, got none"),
    ]
    for build, words in cases:
        with sentence(f".*{words}", (ValueError, TypeError)):
            Net(build)


def test_what_does_not_fit_a_net_is_refused_in_a_sentence():
    net = Net(nn.Linear(2, 2))
    with sentence("row: expected 6 parameters"):
        net(torch.zeros(7), torch.zeros(1, 2))
    with sentence("module: parameter 'weight'"):
        net.row(nn.Linear(3, 2))


class Silent(nn.Module):
    """Model whose last layer starts at zero, unlike the layer's default."""

    def __init__(self):
        super().__init__()
        self.body = layers("Linear 4 5, Linear 5 5")
        self.last = nn.Linear(5, 3)

    def reset_parameters(self):
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        return self.last(self.body(x))


def test_a_parent_has_the_last_word_on_its_childrens_start():
    net = Net(Silent())
    drawn = net.init(3)
    assert (
        not drawn[net.slices["last.weight"]].any()
        and drawn[net.slices["body.1.weight"]].any()
    )


class HeadFirst(nn.Module):
    """Model that registers its classifier before its encoder.

    The classifier has 36 parameters, the encoder 56.
    """

    def __init__(self, logarithms=False):
        super().__init__()
        self.logarithms = logarithms
        self.classifier = nn.Linear(8, 4)
        self.encoder = layers("Linear 6 8, ReLU")

    def forward(self, x):
        scores = self.classifier(self.encoder(x))
        return scores.log_softmax(1) if self.logarithms else scores


class HeadLast(HeadFirst):
    """The same model with its classifier registered last."""

    def __init__(self):
        super().__init__()
        self._modules["classifier"] = self._modules.pop("classifier")


class Stem(HeadFirst):
    """Model with an attribute `head` that is not the head."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        return super().forward(self.head(x))


def played(algorithm, model, rounds=1):
    return simulation(algorithm, images((16,) * 4), model=model, rounds=rounds)


@pytest.mark.parametrize(
    "algorithm, sent, model",
    [
        *((a, 56, HeadFirst) for a in ("fedper", "fedrep", "fedbabu")),
        ("fedper", 56, HeadLast),
        ("fedper", 56, lambda: HeadFirst(True)),
        # With data, the head is found by its place, not by an attribute's name.
        ("fedper", 56 + 42, Stem),
        ("lg_fedavg", 36, HeadFirst),
        ("lg_fedavg", 36, HeadLast),
    ],
)
def test_the_part_that_travels(algorithm, sent, model):
    run = played(algorithm, model)
    assert run.run().rounds[0]["bytes_up"] == 4 * 4 * sent
    private = ("encoder", "head") if algorithm == "lg_fedavg" else "classifier"
    assert all(name.startswith(private) for name in run.header()["private"])


@pytest.mark.parametrize("algorithm", ["knnper", "fedrod"])
def test_methods_with_features_give_one_result_in_any_order(algorithm):
    def copied(build):
        model = build()
        for n, p in model.named_parameters():
            nn.init.constant_(p, 0.01 * len(n)) if p.dim() == 1 else nn.init.eye_(p)
        return model

    first, last = (played(algorithm, copied(b), 2).run() for b in (HeadFirst, HeadLast))
    assert first.rounds[-1]["eval"] == last.rounds[-1]["eval"]


def test_without_data_it_is_asked_for():
    with sentence(r"model: .* head.*name it with Net\(..., head='name'\)\.$"):
        Server("fedper", HeadFirst(), 4)
    assert Net(HeadFirst, head="classifier").head_slice == slice(0, 36)
    blocks = nn.Sequential(nn.Linear(4, 4), layers("Linear 4 4, ReLU"))
    assert Net(blocks).head_name == "1.0"  # in plain nn.Sequentials


@pytest.mark.parametrize("patterns", [(), ("0.*",), ("*.bias",), ("*",)])
def test_split_and_join_are_inverse(patterns):
    net = Net(tiny_model())
    rows = torch.randn(3, net.size)
    mask = net.mask(*(patterns or ("2.*",)))
    shared, private = net.split(rows, *patterns)
    equals((private, shared), (rows[:, mask], rows[:, ~mask]))
    one = net.join(shared[0], private, *patterns)  # one body, several heads
    equals(one, torch.where(mask, rows, rows[0]))
    again = torch.vmap(lambda r: net.join(*net.split(r, *patterns), *patterns))
    equals(again(rows), rows)


def test_join_refuses_what_does_not_fit():
    net = Net(tiny_model())
    message = (
        "shared and private: expected 35 and 24 columns, got 24 and 35; give join "
        "the patterns"
    )
    with sentence(message):
        net.join(*reversed(net.split(net.w0)))
