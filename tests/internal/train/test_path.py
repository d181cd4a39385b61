"""Tests of the engine that trains a model.

The probe proves that the engine computes the model itself. Other tests name the models
that a fast engine trains.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from parts.path import (
    BODIES,
    Own,
    body,
    federation,
    mlp,
    played,
    repeated,
    same_as_by_hand,
)
from small import at_work, equals, fit, images, make_setting

import pflcore
from pflcore import Net, Training
from pflcore.nn import Dropout
from pflcore.nn.models import model_for
from pflcore.ops._chain_program import KINDS
from pflcore.train import _clients as clients
from pflcore.train import _evaluate as evaluation
from pflcore.train import _optimizers as optimizers
from pflcore.train import _probe
from pflcore.train._chain import NotAChain, compile_chain, find_chain
from pflcore.train._engines import Engine
from pflcore.train._losses import LOSSES, resolve_loss, squared
from pflcore.train._probe import Mismatch, first_mismatch, make_probe, make_probes
from pflcore.train._select_engine import make_context


def test_a_wrong_form_is_found_told_and_not_used(monkeypatch):
    right = evaluation.chain_grad
    monkeypatch.setattr(
        evaluation, "chain_grad", lambda *a: (1.001 * right(*a)[0], *right(*a)[1:])
    )
    said = "the chain found for this model is not the model: its gradient in evaluation"
    with pytest.warns(UserWarning, match=f"^pflcore: {said}"):
        _, form, why = same_as_by_hand(mlp)
    assert form == "vmap" and said in why


@pytest.mark.skipif(not pflcore.backend().kernels, reason="the kernels are not loaded")
@pytest.mark.parametrize(
    "model, optimizer",
    [
        ("mlp", {"momentum": 0.5}),
        ("conv", {"local_optimizer": "adamw", "lr": 0.01}),
        ("dropout", {"momentum": 0.5}),
        ("batch norm", {"momentum": 0.5}),
        ("mlp", {"local_optimizer": "adamw", "betas": (0.5, 0.9), "eps": 1e-3}),
    ],
)
def test_where_no_kernel_trains_a_chain_its_gradients_do(monkeypatch, model, optimizer):
    words, shape = BODIES[model]
    how = {"epochs": 2, "weight_decay": 0.1, "clip_grad": 0.4, **optimizer}
    data = images((7, 20, 31), shape)
    data = replace(data, x=data.x.double())
    setting = make_setting(
        Net(lambda: body(words).double()), data, Training(**how), engine="chain"
    )
    start = setting.net.w0 + 0.01 * torch.randn(
        3, setting.net.size, dtype=torch.float64
    )
    found = []
    for kernels in (True, False):
        for module in (optimizers, clients):
            monkeypatch.setattr(
                module, "has_kernels", lambda device, kernels=kernels: kernels
            )
        done = fit(at_work(setting), start, prox=(0.3, start + 1), mean_grad=True)
        found.append(
            (
                done.w,
                done.grad,
                done.loss,
                done.buffers,
                *at_work(setting).evaluate({"w": start}, "train"),
            )
        )
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1e-6, 1e-3])
def test_the_trial_sees_small_differences(size):
    net = Net(mlp)
    data = federation()
    chain = find_chain(net, data, batch_size=20)
    engines = Engine("loop"), Engine("vmap"), Engine("loop", chain)
    exact, own = make_probes(net, data)
    assert exact.w.dtype == torch.float64 and own.w.dtype == torch.float32
    assert all(t.difference(e) is None for t in (exact, own) for e in engines)
    for name, right in exact.expected.items():
        exact.expected[name] = right + size
        assert f"its {name} is another" in exact.difference(engines[0]).words
        exact.expected[name] = right


@pytest.mark.parametrize("error, fits", [(0.0, True), (0.1, False)])
def test_a_number_next_to_a_tie_is_no_difference(error, fits):
    """A slope that rounding switches on or off is allowed, and nothing more."""
    net = Net(mlp)
    probe = make_probe(net, federation())
    data = probe.clients.context.data
    sample = data.x[data.lists("train")[0][0]]
    weight = probe.w[0, net.slices["0.weight"]].view(5, 6)
    bias = net.slices["0.bias"].start
    probe.w[0, bias] = -weight[0] @ sample  # so that its first ReLU gets about 0
    other = probe.w.clone()
    other[0, bias] -= 1e-6
    probe.w[0, bias] += 1e-6
    probe.expected = probe.reference(other)
    name = "gradient in training mode"
    gap = probe.reference(probe.w)[name] - probe.expected[name]
    assert gap.abs().max() > 0.005 * probe.expected[name].abs().max()
    probe.expected[name][1] += error

    assert (probe.difference(Engine("loop")) is None) == fits


def test_an_error_in_the_models_own_dtype_is_raised(monkeypatch):
    def fail_in_float32(net, data, **options):
        if net.dtype == torch.float32:
            raise ValueError("no probe")
        return make_probe(net, data)

    monkeypatch.setattr(_probe, "make_probe", fail_in_float32)

    with pytest.raises(ValueError, match="no probe"):
        make_probes(Net(mlp), federation())


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_without_message_is_a_mismatch_in_every_probe(monkeypatch, failing):
    class Silent(Exception):
        def __str__(self):
            return ""

    probes = make_probes(Net(mlp), federation())

    def fail(self, engine, graphs=None):
        if self is probes[failing]:
            raise Silent
        return None

    monkeypatch.setattr(_probe.EngineProbe, "difference", fail)

    assert first_mismatch(probes, Engine("vmap")) == Mismatch("Silent")


def test_a_hook_on_every_module_is_no_part_of_a_chain():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, x, y: None)
    try:
        with pytest.raises(NotAChain, match="a hook"):
            compile_chain(Net(repeated()), (6,))
    finally:
        handle.remove()


def test_an_even_kernel_with_same_padding_is_no_part_of_a_chain():
    conv = nn.Conv2d(1, 2, 2, padding="same")
    net = Net(nn.Sequential(conv, nn.Flatten(), nn.Linear(32, 4)))

    with pytest.raises(NotAChain, match="an even kernel with padding='same'"):
        compile_chain(net, (1, 4, 4))


def test_batch_norm_of_the_batch_alone_is_no_part_of_a_chain():
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    net = Net(nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 4)))

    with pytest.raises(NotAChain, match="batch norm without running statistics"):
        compile_chain(net, (6,))


class Block(nn.Module):
    """A residual block in torchvision's style, with two changes in place."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


def small_resnet():
    stem = (nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(True))
    top = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), Block(4), Block(4), *top)


RESIDUAL = {
    "resnet8": lambda: model_for("resnet8", (3, 16, 16), 4),
    "resnet18": lambda: model_for("resnet18", (3, 16, 16), 4, width=8),
    "group norm": lambda: model_for("resnet18", (3, 16, 16), 4, width=8, norm="group"),
    "blocks of torchvision": small_resnet,
}


@pytest.mark.deep("it takes a second")
@pytest.mark.skipif(not pflcore.backend().kernels, reason="the kernels are not loaded")
@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_networks_train_as_chains(name):
    data = images((7, 20), (3, 16, 16))
    models = []
    for engine, form in (("auto", "chain"), ("loop", "loop")):
        torch.manual_seed(0)
        model = RESIDUAL[name]()
        run = played(model, data, engine, training=Training(lr=0.01, batch_size=8))
        assert run.config.engine.kind == form, run.config.engine.reason
        run.run()
        models.append(run.state.server["x"])

    torch.testing.assert_close(*models, rtol=1e-3, atol=1e-4)


def test_residual_networks_that_torch_computes_faster_are_no_chains():
    net = Net(lambda: model_for("resnet18", (3, 16, 16), 4, width=16))

    with pytest.raises(NotAChain, match="64 x 128 channels, where torch is faster"):
        compile_chain(net, (3, 16, 16))


def change_in_place(m, x):
    first = m.layer(x)
    kept = first.view(-1, 4)
    return m.relu(first.add_(first)) + kept


@pytest.mark.parametrize(
    "forward, reason",
    [
        (lambda m, x: m.layer(x) + 1, "add of something else"),
        (lambda m, x: m.layer(x) + m.layer.bias, "add of something else"),
        (lambda m, x: m.layer(x) + x[:, :4], "__getitem__"),
        (lambda m, x: torch.add(m.layer(x), m.layer(x), alpha=2), "two places"),
        (lambda m, x: (y := m.layer(x)).add(y, alpha=2), "of a multiple"),
        (lambda m, x: (y := m.layer(x)).add(other=y), "arguments by their places"),
        (lambda m, x: [y := m.layer(x), m.relu(y)][0], "not the last layer's"),
        (
            lambda m, x: [y := m.layer(x), m.relu(y), torch.tanh(y)][2],
            "an output that no layer takes",
        ),
        (change_in_place, "what changed in place"),
    ],
)
def test_an_addition_that_the_kernels_lack_is_no_part_of_a_chain(forward, reason):
    with pytest.raises(NotAChain, match=reason):
        compile_chain(Net(Own(forward)), (6,))


@pytest.mark.parametrize("count", [True, False])
def test_a_mean_with_padding_has_one_divisor(count):
    pool = nn.AvgPool2d(2, 2, 1, count_include_pad=count)
    net = Net(nn.Sequential(nn.Conv2d(1, 2, 1), pool, nn.Flatten(), nn.Linear(18, 4)))

    if count:
        assert compile_chain(net, (1, 4, 4)).classes == 4
        return
    with pytest.raises(NotAChain, match="leaves their padding out"):
        compile_chain(net, (1, 4, 4))


def test_dropout_may_be_added_to_its_input():
    model = nn.Sequential(nn.Linear(6, 5), Around(Dropout(0.5)), nn.Linear(5, 4))
    kinds = compile_chain(Net(model), (6,)).program[:, 0]

    assert [KINDS[int(kind)] for kind in kinds] == [
        "linear",
        "dropout",
        "add",
        "linear",
    ]


def test_batch_norm_of_large_batches_is_no_part_of_a_chain():
    net = Net(body("Linear 6 9999, BatchNorm1d 9999, Linear 9999 K"))
    data = images((600, 2), (6,))
    small = make_context(net, data, Training(batch_size=20)).engine
    large = make_context(net, data, Training(batch_size=580)).engine

    assert small.kind == "chain"
    assert "batch norm on batches of 580 samples, where torch is faster" in large.reason


def test_a_batch_norm_in_evaluation_mode_trains_as_a_chain():
    model = body(BODIES["batch norm"][0])
    model[1].eval()
    setting = make_context(Net(model), federation(), Training())
    assert setting.engine.kind == "chain"


def test_the_trial_sees_other_running_statistics():
    net = Net(body(BODIES["batch norm"][0]))
    data = federation()
    chain = find_chain(net, data, batch_size=20)
    engines = Engine("loop"), Engine("vmap"), Engine("loop", chain)
    exact, own = make_probes(net, data)
    assert all(t.difference(e) is None for t in (exact, own) for e in engines)
    exact.expected["row of running statistics"] += 1e-6

    for engine in engines:
        words = exact.difference(engine).words
        assert "its row of running statistics is another" in words


def test_the_global_generators_are_left_alone():
    net = Net(mlp)
    before = torch.get_rng_state()
    make_context(net, federation(), Training())
    equals(before, torch.get_rng_state())


class Around(nn.Module):
    """The sum of a layer's input and output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + self.layer(x)


class Keeps(nn.Sequential):
    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


def test_what_a_forward_keeps_is_no_part_of_the_net():
    net = Net(Keeps(nn.Linear(6, 5), nn.Linear(5, 4)))
    compile_chain(net, (6,))
    assert "kept" not in vars(net.module) and net.module.training


def test_torchs_losses_with_default_options_take_the_fast_path():
    for default in (nn.CrossEntropyLoss(), F.cross_entropy):
        assert resolve_loss(default) is LOSSES["cross_entropy"]
    assert resolve_loss(nn.MSELoss()) is squared is resolve_loss(F.mse_loss)
    for options in (
        {"label_smoothing": 0.1},
        {"weight": torch.ones(4)},
        {"ignore_index": 1},
    ):
        loss = nn.CrossEntropyLoss(**options)
        assert resolve_loss(loss) is loss
