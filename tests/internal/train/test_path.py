"""The path that trains a model is the model: what may be written out, what must not, and what is
said where it may not."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from parts.path import Own, federation, hooked, same_as_by_hand
from torch.nn.utils import parametrizations, spectral_norm

from pflcore import Federation, Net, Training
from pflcore.nn import Dropout
from pflcore.train import Engine, clients, prepared
from pflcore.train.chain import NoChain, compiled, find_chain
from pflcore.train.choose import choose, trials
from pflcore.train.losses import CRITERIA, loss_of, squared


class Scaled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class LowRank(nn.Linear):
    def __init__(self):
        super().__init__(6, 4)
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        return super().forward(x) + x @ (self.a @ self.b).T


class Leaky(nn.ReLU):
    def forward(self, x):
        return F.leaky_relu(x, 0.3)


def repeated():
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(6, 5), relu, nn.Linear(5, 5), relu, nn.Linear(5, 4))


def twice():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 4))


Case = tuple[Callable[[], nn.Module], str, str]
VECTORS: dict[str, Case] = {  # model, engine, form
    "linear": (lambda: nn.Linear(6, 4), "vmap", "chain"),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), "vmap", "chain"),
    "an activation twice": (repeated, "vmap", "chain"),
    "a layer twice": (twice, "vmap", "vmap"),
    "a subclass": (lambda: Scaled(6, 4), "vmap", "vmap"),
    "low rank": (LowRank, "vmap", "vmap"),
    "a subclass of ReLU": (lambda: nn.Sequential(nn.Linear(6, 4), Leaky()), "vmap", "vmap"),
    "forward hook": (lambda: nn.Sequential(hooked(nn.Linear(6, 4))), "vmap", "vmap"),
    "pre-hook": (
        lambda: nn.Sequential(
            hooked(nn.Linear(6, 4), "register_forward_pre_hook", lambda m, x: (2 * x[0],))
        ),
        "vmap",
        "vmap",
    ),
    "hook of the whole": (lambda: hooked(nn.Sequential(nn.Linear(6, 4))), "vmap", "vmap"),
    "training only": (
        lambda: Own(lambda m, x: m.relu(m.layer(x)) if m.training else m.layer(x)),
        "vmap",
        "vmap",
    ),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4))),
        "vmap",
        "vmap",
    ),
    "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(6, 4))), "loop", "module"),
    "if": (
        lambda: Own(lambda m, x: m.layer(x) if x.mean() > 0 else 2 * m.layer(x)),
        "loop",
        "module",
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_what_trains_is_the_model(name):
    build, engine, form = VECTORS[name]
    with warnings.catch_warnings():
        # a form that does not apply is no form that differs
        warnings.filterwarnings("error", "pflcore")
        run = same_as_by_hand(build, federation())
    assert (run.header()["path"]["engine"], run.header()["path"]["form"]) == (engine, form)
    assert (
        run.header()["path"] == {"engine": engine, "form": form, "why": run.header()["path"]["why"]}
        and run.header()["engine"] == engine
    )


# the proof itself -----------------------------------------------------------


def test_a_wrong_form_is_found_told_and_not_used(monkeypatch):
    right = clients.chain_grad
    monkeypatch.setattr(clients, "chain_grad", lambda *a: (1.001 * right(*a)[0], right(*a)[1]))
    build = lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))  # noqa: E731
    with pytest.warns(
        UserWarning,
        match="^pflcore: the chain found for this model is not the model: its gradient is another",
    ):
        run = same_as_by_hand(build, federation())
    assert (
        run.header()["path"]["form"] == "vmap"
        and "not the model" in run.header()["path"]["why"]
        and run.setting.engine.chain is None
    )


@pytest.mark.parametrize("size", [1e-6, 1e-3])
def test_the_trial_sees_small_differences(size):
    net, data = (
        Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))),
        federation(),
    )
    chain = find_chain(net, data)
    engines = Engine("loop"), Engine("vmap"), Engine("loop", chain)
    exact, own = trials(net, data)
    assert exact.w.dtype == torch.float64 and own.w.dtype == torch.float32
    assert all(t.difference(e) is None for t in (exact, own) for e in engines)
    for what, answers in (("loss", exact.losses), ("gradient", exact.grads)):
        for mode in ("training", "evaluation"):
            right = answers[mode]
            answers[mode] = right + size
            assert f"its {what} is another in {mode} mode" in exact.difference(engines[0])
            answers[mode] = right


def test_the_chain_names_what_it_calls():
    # a repeated layer stands twice
    assert [int(kind) for kind in compiled(Net(repeated()), (6,)).program[:, 0]] == [0, 3, 0, 3, 0]
    torch.nn.modules.module.register_module_forward_hook(handle := lambda m, x, y: None)
    try:
        with pytest.raises(NoChain, match="a hook"):
            compiled(Net(repeated()), (6,))
    finally:
        torch.nn.modules.module._global_forward_hooks.clear()
        del handle


@pytest.mark.parametrize(("width", "engine"), [(64, "vmap"), (1024, "loop")])
def test_wide_models_train_client_after_client_on_a_cpu(width, engine):
    net = Net(
        lambda: nn.Sequential(
            nn.Linear(6, width),
            nn.BatchNorm1d(width),
            nn.Linear(width, 300),
            nn.ReLU(),
            nn.Linear(300, 4),
        )
    )
    found = prepared(net, federation(), Training()).engine
    assert found.name == engine and (f"{net.size} weights" in found.why) is (engine == "loop")
    assert prepared(net, federation(), Training(), "vmap").engine.name == "vmap"


def test_the_global_generators_are_left_alone():
    net, data = Net(nn.Linear(6, 4)), federation()
    before = torch.get_rng_state()
    prepared(net, data, Training())
    assert torch.equal(before, torch.get_rng_state())


def test_a_chain_with_dropout_is_a_chain():
    model = nn.Sequential(nn.Linear(6, 5), Dropout(0.5), nn.Linear(5, 4))
    data = Federation(
        torch.ones(24, 6), torch.arange(24) % 4, {"train": list(torch.arange(24).split(8))}, 4
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(Net(model), data, Training())[1].chain is not None


def test_what_a_forward_keeps_is_no_symbol():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.h = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x):
            self.kept = torch.tanh(self.a(x))
            return self.h(self.kept)

    net = Net(Keeps())
    compiled(net, (6,))
    assert "kept" not in vars(net.module) and net.module.training
    assert net.module(torch.ones(2, 6)).shape == (2, 4)


def test_torchs_losses_with_default_options_take_the_fast_path():
    assert loss_of(nn.CrossEntropyLoss()) is CRITERIA["cross_entropy"] and loss_of(
        nn.MSELoss()
    ) is squared is loss_of(F.mse_loss)
    for loss in (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.ones(4)),
        nn.CrossEntropyLoss(ignore_index=1),
    ):
        assert loss_of(loss) is loss
    scores, y = torch.randn(5, 1), torch.randn(5)
    assert loss_of(nn.MSELoss())(scores, y) == F.mse_loss(scores[:, 0], y)  # not [5, 1] against [5]
