"""The path that trains a model is the model: what may be written out, what must not, and what is said where it may not."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrizations, spectral_norm

from pflcore import Federation, Net, Simulation, Training
from pflcore.local import prepared
from pflcore.local.chain import NoChain, compiled
from pflcore.local.path import by_chain, by_chain_steps, by_module, choose_path, under_vmap
from pflcore.local.proof import difference, trials
from pflcore.nn import Dropout

CPU = "threads"


def federation(
    shape: tuple[int, ...] = (6,), y: Callable[[torch.Generator, int], Tensor] | None = None, tokens: bool = False
) -> Federation:
    gen = torch.Generator().manual_seed(0)
    clients = []
    for n in (9, 14, 7):
        x = torch.randint(0, 5, (n, *shape), generator=gen) if tokens else torch.randn(n, *shape, generator=gen)
        target = torch.randint(0, 4, (n,), generator=gen) if y is None else y(gen, n)
        clients.append({"train": (x, target), "test": (x[:4] + 0, target[:4])})
    return Federation.from_arrays(clients)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class LowRank(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ (self.a @ self.b).T


class Leaky(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, 0.3)


class Own(nn.Module):
    """A layer and a function of (itself, x)."""

    def __init__(self, f: Callable[[Any, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.f, self.relu = layer or nn.Linear(6, 4), f, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


class Rnn(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.body, self.head = kind(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.head = nn.Embedding(5, 6, padding_idx=0), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.e(x).mean(1))


def hooked(m: nn.Module, how: str = "register_forward_hook", hook: Any = lambda m, x, y: 2 * y) -> nn.Module:
    getattr(m, how)(hook)
    return m


def repeated() -> nn.Module:
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(6, 5), relu, nn.Linear(5, 5), relu, nn.Linear(5, 4))


def twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 4))


def pools() -> nn.Module:
    pool = hooked(nn.MaxPool2d(2))
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), pool, nn.Conv2d(2, 2, 3, padding=1), pool, nn.Flatten(), nn.Linear(8, 4))


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
    "pre-hook": (lambda: nn.Sequential(hooked(nn.Linear(6, 4), "register_forward_pre_hook", lambda m, x: (2 * x[0],))), "vmap", "vmap"),
    "hook of the whole": (lambda: hooked(nn.Sequential(nn.Linear(6, 4))), "vmap", "vmap"),
    "training only": (lambda: Own(lambda m, x: m.relu(m.layer(x)) if m.training else m.layer(x)), "vmap", "vmap"),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4))), "vmap", "vmap"),
    "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(6, 4))), "threads", "module"),
    "if": (lambda: Own(lambda m, x: m.layer(x) if x.mean() > 0 else 2 * m.layer(x)), "threads", "module"),
}


def same_as_by_hand(build: Callable[[], nn.Module], data: Federation, engine: str = "auto") -> Simulation:
    """One FedAvg round of one step of each client against the module trained by hand."""
    torch.manual_seed(1)
    model = build()
    run = Simulation("fedavg", model, data, Training(lr=0.1, batch_size=20), rounds=1, workers=1, engine=engine)
    want, size = torch.zeros(run.setting.net.size), data.size().double()
    for i in range(data.n):
        mine = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        x, y = data.client(i)
        run.setting.net.criterion(mine(x), y).backward()
        optimizer.step()
        want += run.setting.net.row(mine) * float(size[i] / size.sum())
    run.run()
    torch.testing.assert_close(run.state.g["x"], want, rtol=1e-4, atol=1e-6)
    return run


@pytest.mark.parametrize("name", VECTORS)
def test_what_trains_is_the_model(name: str) -> None:
    build, engine, form = VECTORS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "pflcore")  # a form that does not apply is no form that differs
        run = same_as_by_hand(build, federation())
    assert (run.path.engine, run.path.form) == (engine, form)
    assert run.header()["path"] == {"engine": engine, "form": form, "why": run.path.why} and run.header()["engine"] == engine


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_models_train_all_at_once(kind: type[nn.RNNBase]) -> None:
    run = same_as_by_hand(lambda: Rnn(kind), federation((7, 6)))
    assert run.path[:2] == ("vmap", "vmap")


def test_what_vmap_cannot_carry_trains_on_threads_and_the_record_says_why() -> None:
    def build() -> nn.Module:
        return Rnn(lambda i, o, **options: nn.LSTM(i, 9, proj_size=o, **options))

    run = same_as_by_hand(build, federation((7, 6)))
    assert run.path.engine == "threads" and "vmap cannot train" in run.path.why
    with pytest.raises(ValueError, match=r"^engine: 'vmap' cannot train this model: .*; take 'auto' or 'threads'\.$"):
        Simulation("fedavg", build(), federation((7, 6)), engine="vmap")


def test_a_padding_row_is_not_trained() -> None:
    data = federation((7,), tokens=True)
    run = same_as_by_hand(Tokens, data)
    assert run.path.engine == "threads" and "its gradient is another in training mode" in run.path.why
    with pytest.raises(ValueError, match=r"^engine: 'vmap' cannot train this model: its gradient"):
        Simulation("fedavg", Tokens(), data, engine="vmap")


def test_hooks_of_pooling_and_layers_used_twice_stay() -> None:
    run = same_as_by_hand(pools, federation((1, 8, 8)))
    assert run.path[:2] == ("threads", "module with kernels")


def test_sequences_into_a_linear_layer() -> None:
    run = same_as_by_hand(lambda: Own(lambda m, x: m.layer(x).mean(1)), federation((7, 6)))
    assert run.path.form == "vmap"
    run = same_as_by_hand(lambda: nn.Sequential(nn.Linear(6, 2), nn.Flatten(), nn.Linear(14, 4)), federation((7, 6)))
    assert run.path.form == "vmap"


def real(k: int | None) -> Callable[[torch.Generator, int], Tensor]:
    return lambda gen, n: torch.randn(n, *([] if k is None else [k]), generator=gen)


TARGETS: dict[str, tuple[int, str, Callable[[torch.Generator, int], Tensor]]] = {
    "numbers": (1, "squared", real(None)),
    "[n, 1]": (1, "squared", real(1)),
    "[n, 3]": (3, "squared", real(3)),
    "[n, 3], half": (3, "half_squared", real(3)),
    "several labels": (4, "binary_cross_entropy", lambda gen, n: (torch.rand(n, 4, generator=gen) < 0.5).float()),
    "several integer labels": (4, "binary_cross_entropy", lambda gen, n: torch.randint(0, 2, (n, 4), generator=gen)),
    "yes or no": (1, "binary_cross_entropy", lambda gen, n: torch.randint(0, 2, (n,), generator=gen)),
    "soft labels": (4, "cross_entropy", lambda gen, n: torch.rand(n, 4, generator=gen).softmax(1)),
}
BODIES: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda k: nn.Linear(6, k), (6,)),
    "mlp": (lambda k: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, k)), (6,)),
    "conv": (lambda k: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, k)), (1, 4, 4)),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("target", TARGETS)
def test_targets_of_every_kind_on_every_path(target: str, body: str) -> None:
    (outputs, criterion, y), (build, shape) = TARGETS[target], BODIES[body]
    data = federation(shape, y)
    ends = []
    for engine in ("threads", "vmap"):
        net = Net(lambda: build(outputs), criterion, seed=3)
        run = Simulation("fedavg", net, data, Training(lr=0.1, batch_size=4), rounds=2, workers=1, engine=engine)
        history = run.run()
        assert all(torch.tensor(history.rounds[-1]["eval"]["loss"]).isfinite())
        ends.append((run.state.g["x"], torch.tensor(history.rounds[-1]["eval"]["loss"])))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


# the proof itself ---------------------------------------------------------------------------------------------------------------------


def test_a_wrong_form_is_found_told_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from pflcore.local import path

    right = path.chain_grad
    monkeypatch.setattr(path, "chain_grad", lambda *a: (1.001 * right(*a)[0], right(*a)[1]))
    build = lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))  # noqa: E731
    with pytest.warns(UserWarning, match="^pflcore: the chain that stands for this model is not the model: its gradient is another"):
        run = same_as_by_hand(build, federation())
    assert run.path.form == "vmap" and "not the model" in run.header()["path"]["why"] and run.setting.engine.chain is None


def test_wrong_kernels_give_way_to_the_models_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from pflcore.local import swap

    right = swap.conv2d
    monkeypatch.setattr(swap, "conv2d", lambda *a: 1.001 * right(*a))
    build = lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))  # noqa: E731
    with pytest.warns(UserWarning, match="its own layers train it"):
        run = same_as_by_hand(build, federation((1, 4, 4)))
    assert run.path[:2] == ("threads", "module")


@pytest.mark.parametrize("size", [1e-6, 1e-3])
def test_the_proof_sees_small_differences(size: float) -> None:
    net, given = trials(Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))), federation())
    assert len(given) == 4 and net.dtype == torch.float64
    for form in (by_module, under_vmap, by_chain, by_chain_steps):
        assert difference(form(net), given) is None
    exact = by_module(net)

    def off(which: int, train: bool) -> Any:
        def form(t: Any) -> tuple[Tensor, Tensor]:
            found = list(exact(t))
            found[which] = found[which] + (size if t.train == train else 0)
            return found[0], found[1]

        return form

    for which, what in enumerate(("loss", "gradient")):
        for train, mode in ((True, "training"), (False, "evaluation")):
            said = difference(off(which, train), given)
            assert said is not None and f"its {what} is another in {mode} mode" in said


def test_the_chain_names_what_it_calls() -> None:
    assert [int(kind) for kind in compiled(Net(repeated()), (6,)).program[:, 0]] == [0, 3, 0, 3, 0]  # a repeated layer stands twice
    torch.nn.modules.module.register_module_forward_hook(handle := lambda m, x, y: None)
    try:
        with pytest.raises(NoChain, match="a hook"):
            compiled(Net(repeated()), (6,))
    finally:
        torch.nn.modules.module._global_forward_hooks.clear()
        del handle


@pytest.mark.parametrize(("width", "engine"), [(64, "vmap"), (1024, "threads")])
def test_wide_models_train_client_after_client_on_a_cpu(width: int, engine: str) -> None:
    net = Net(lambda: nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 300), nn.ReLU(), nn.Linear(300, 4)))
    path = prepared(net, federation(), Training())[1]
    assert path.engine == engine and (f"{net.size} weights" in path.why) is (engine == "threads")
    assert prepared(net, federation(), Training(), "vmap")[1].engine == "vmap"


def test_the_global_generators_are_left_alone() -> None:
    net, data = Net(nn.Linear(6, 4)), federation()
    before = torch.get_rng_state()
    prepared(net, data, Training())
    assert torch.equal(before, torch.get_rng_state())


def test_a_chain_with_dropout_is_a_chain() -> None:
    model = nn.Sequential(nn.Linear(6, 5), Dropout(0.5), nn.Linear(5, 4))
    data = Federation(torch.ones(24, 6), torch.arange(24) % 4, {"train": list(torch.arange(24).split(8))}, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_path(Net(model), data)[1].form == "chain"


class Average(nn.Module):
    """A running mean of the inputs, put anew into its place by every pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.h, self.how = nn.Linear(6, 4), how
        self.register_buffer("ema", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().mean(0)
            if self.how == "again":
                self.ema = 0.9 * self.ema + 0.1 * mean
            elif self.how == "data":
                self.ema.data = 0.9 * self.ema + 0.1 * mean
            else:
                self.ema.mul_(0.9).add_(0.1 * mean)
        return self.h(x - self.ema)


@pytest.mark.parametrize(
    ("how", "engine"),  # vmap knows no data of a tensor
    [(h, e) for h in ("again", "data", "in place") for e in ("auto", "threads", "vmap") if (h, e) != ("data", "vmap")],
)
def test_a_buffer_is_what_the_forward_made_of_it(how: str, engine: str) -> None:
    data, built = federation(), Average(how).double()
    data = dataclasses.replace(data, x=data.x.double())
    history = Simulation("local", built, data, Training(0.1, 100, epochs=3), rounds=1, engine=engine).run()
    model, (x, y) = copy.deepcopy(built).train(), data.client(0)
    step = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):  # all samples are one batch
        step.zero_grad()
        F.cross_entropy(model(x), y).backward()
        step.step()
    got = history.models[0].module()
    torch.testing.assert_close(got.ema, model.ema)
    torch.testing.assert_close(got.h.weight, model.h.weight)


class Counted(nn.Module):
    """Its outputs depend on how often it was called."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.h, self.where, self.k, self.last = nn.Linear(6, 4), where, 0, None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.h(x)
        if self.where == "cache":
            y = y if self.last is None else y + 0.1 * self.last
            self.last = y.detach().mean(0)
        elif self.training:
            self.k, self.calls = self.k + 1, self.calls + 1
        return y / (1 + 0.1 * (self.calls if self.where == "buffer" else self.k))


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("where", ["buffer", "attribute", "cache"])
def test_what_one_client_leaves_to_the_next_is_refused(where: str, engine: str) -> None:
    with pytest.raises(ValueError, match="nothing that another pass has changed"):
        Simulation("fedavg", Counted(where), federation(), Training(0.1, 4), rounds=1, engine=engine)


def test_what_a_forward_keeps_is_no_symbol() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = torch.tanh(self.a(x))
            return self.h(self.kept)

    net = Net(Keeps())
    compiled(net, (6,))
    assert "kept" not in vars(net.module) and net.module.training
    assert net.module(torch.ones(2, 6)).shape == (2, 4)


def test_sparse_gradients_are_refused() -> None:
    built = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(18, 4))
    with pytest.raises(ValueError, match="model: its gradients are sparse"):
        Simulation("fedavg", built, federation(tokens=True), Training(0.1, 4), rounds=1)
