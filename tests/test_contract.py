"""What every algorithm of the registry owes its users, whatever it does inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
from small import copied
from torch import Tensor

from pflcore.algorithms import ALGORITHMS, FedAvg, Pool, State
from pflcore.data.federation import Federation
from pflcore.local.net import Net
from pflcore.local.settings import Setting
from pflcore.local.training import Training
from pflcore.local.workers import Engine
from pflcore.round import Outcome, begin, evaluate, sample, step

OPTIONS: dict[str, dict[str, Any]] = {  # where the defaults do not fit a federation of four small clients
    "knnper": {"k": 3},
}
SIZES = (9, 20, 31, 12)
RANDOM_CHOICES: set[str] = set()  # the server draws clients by number, so renumbering them changes the draw
COLUMNS = {"l2c"}  # a client's state has a column for every other client
WEIGHTS = {"waffle", "weight_erosion"}  # with mixing weights in the record
MODELS_SENT = {"fedavg": (1, 1), "fedprox": (1, 1), "scaffold": (2, 2), "waffle": (2, 2), "apfl": (1, 1), "local": (0, 0)}  # down, up

every = pytest.mark.parametrize("name", sorted(ALGORITHMS))


def federation(order: Sequence[int] | None = None, broken: Sequence[int] = (), sizes: Sequence[int] = SIZES) -> Federation:
    """Gaussian classes, every second client with its labels turned; in another order of the clients; `broken` ones overflow."""
    gen = torch.Generator().manual_seed(4)
    centre = 2 * torch.randn(3, 6, generator=gen, dtype=torch.float64)
    clients = []
    for i, n in enumerate(sizes):
        splits = {}
        for split in ("train", "val", "test"):
            y = torch.randint(0, 3, (n,), generator=gen)
            x = centre[y] + torch.randn(n, 6, generator=gen, dtype=torch.float64)
            splits[split] = (x * 1e307 if i in broken else x, (y + i % 2) % 3)
        clients.append(splits)
    return Federation.from_arrays([clients[i] for i in (order or range(len(sizes)))], classes=3, dtype=None)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def setting(
    data: Federation | None = None, engine: str = "threads", workers: int = 2, training: Training | None = None, seed: int = 0
) -> Setting:
    t = Training(lr=0.1, batch_size=8, epochs=2) if training is None else training
    return Setting(Net(model, seed=1), federation() if data is None else data, t, Engine(engine, workers), seed, 6)


def algorithm(name: str, **more: Any) -> FedAvg:
    return ALGORITHMS[name](**OPTIONS.get(name, {}), **more)


def play(alg: FedAvg, s: Setting, rounds: int = 3, ids: Sequence[int] | None = None) -> tuple[State, list[Outcome]]:
    state, done = begin(alg, s.net, s.data.n), []
    for _ in range(rounds):
        state, outcome = step(alg, state, s, torch.arange(s.data.n) if ids is None else torch.tensor(ids))
        done.append(outcome)
    return state, done


def tensors(alg: FedAvg, state: State, s: Setting) -> dict[str, Tensor]:
    """Everything a run leaves."""
    seen = evaluate(alg, state, s)
    parts = {"g": state.g, "own": state.own, "seen": seen, "report": alg.report(state.g)}
    return {f"{part}.{k}": v for part, found in parts.items() for k, v in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> None:
    assert a.keys() == b.keys()
    for k in a:
        if tolerance:
            torch.testing.assert_close(a[k], b[k], **tolerance, equal_nan=True, msg=lambda m, k=k: f"{k}: {m}")
        else:
            assert a[k].dtype == b[k].dtype and torch.equal(a[k].nan_to_num(7), b[k].nan_to_num(7)), k


@every
def test_absent_clients_do_not_change(name: str) -> None:
    alg, s = algorithm(name), setting()
    state, _ = play(alg, s, 1)
    before = copied(state)
    there = [0, 2]
    state, done = step(alg, state, s, torch.tensor(there))
    assert done.ids == there and not done.dropped
    for k, v in state.own.items():
        assert torch.equal(v[[1, 3]], before.own[k][[1, 3]]), k
    assert torch.equal(state.buffers[[1, 3]], before.buffers[[1, 3]])


@every
def test_shapes_and_dtypes_stay(name: str) -> None:
    ups: list[dict[str, Tensor]] = []

    class Spy(ALGORITHMS[name]):  # type: ignore[misc, name-defined]
        def client(self, down: Any, own: Any, local: Any) -> Any:
            new, up = super().client(down, own, local)
            assert new.keys() <= own.keys() and all(len(v) == len(local.ids) for v in [*new.values(), *up.values()])
            ups.append(up)
            return new, up

    alg, s = Spy(**OPTIONS.get(name, {})), setting()
    state = begin(alg, s.net, 4)
    shapes = {k: (v.shape, v.dtype) for k, v in state.own.items()}
    assert all(shape[0] == 4 for shape, _ in shapes.values())
    for ids in ([0, 1, 2, 3], [0, 2], [0, 1, 3]):
        state, _ = step(alg, state, s, torch.tensor(ids))
        assert {k: (v.shape, v.dtype) for k, v in state.own.items()} == shapes
        assert {k: (v.shape[1:], v.dtype) for k, v in ups[-1].items()} == {k: (v.shape[1:], v.dtype) for k, v in ups[0].items()}


@every
def test_renumbered_clients_give_renumbered_results(name: str) -> None:
    """With one whole batch an epoch, the clients' shuffles play no role."""
    if name in RANDOM_CHOICES:
        pytest.skip("the server draws clients by number")
    order = [2, 0, 3, 1]
    t = Training(lr=0.1, batch_size=100, epochs=2)
    target = {"target": 1} if hasattr(algorithm(name), "target") else {}
    moved = {"target": order.index(1)} if target else {}
    one, two = algorithm(name, **target), algorithm(name, **moved)
    s1, s2 = setting(training=t), setting(federation(order), training=t)
    a, b = play(one, s1, 4)[0], play(two, s2, 4)[0]

    def moved_rows(v: Tensor) -> Tensor:
        return v[order][:, order] if name in COLUMNS and v.shape[1:] == (4,) else v[order]

    same(
        {k: moved_rows(v) for k, v in a.own.items()} | {k: v[order] for k, v in evaluate(one, a, s1).items()},
        b.own | evaluate(two, b, s2),
        rtol=1e-7,
        atol=1e-9,
    )
    if name in WEIGHTS:
        torch.testing.assert_close(one.report(a.g)["weights"][order], two.report(b.g)["weights"], rtol=1e-7, atol=1e-9)


@every
@pytest.mark.parametrize("engine", ["threads", "vmap"])
def test_the_same_seed_gives_the_same_bits_for_any_number_of_workers(name: str, engine: str) -> None:
    alg, found = algorithm(name), []
    for workers in (1, 2, 3):
        s = setting(engine=engine, workers=workers)
        found.append(tensors(alg, play(alg, s)[0], s))
    same(found[0], found[1])
    same(found[0], found[2])


@every
def test_another_seed_gives_another_run(name: str) -> None:
    alg = algorithm(name)
    a, b = (play(alg, setting(seed=seed))[0] for seed in (0, 1))
    found = [torch.cat([v.double().flatten() for v in [*st.g.values(), *st.own.values()]]) for st in (a, b)]
    assert found[0].shape != found[1].shape or not torch.equal(*found)


@every
def test_both_engines_agree(name: str) -> None:
    alg = algorithm(name)
    found = []
    for engine in ("threads", "vmap"):
        s = setting(engine=engine)
        found.append(tensors(alg, play(alg, s)[0], s))
    same(*found, rtol=1e-6, atol=1e-8)


@every
def test_one_client_alone(name: str) -> None:
    alg, s = algorithm(name), setting(federation(sizes=(20,)))
    state, done = play(alg, s)
    found = evaluate(alg, state, s)
    assert all(v.isfinite().all() for v in found.values()) and not any(d.void or d.dropped for d in done)
    if name in WEIGHTS:
        assert alg.report(state.g)["weights"].tolist() == [1]


@every
def test_a_client_that_breaks_is_absent_and_counted(name: str) -> None:
    alg, s = algorithm(name), setting(federation(broken=[1]))
    state = begin(alg, s.net, 4)
    before = copied(state)
    for _ in range(2):
        state, done = step(alg, state, s, torch.arange(4))
        assert done.dropped == [1] and not done.void and done.ids == [0, 1, 2, 3]
        assert done.train_loss is None or torch.tensor(done.train_loss).isfinite()
    for k, v in state.own.items():
        assert torch.equal(v[1], before.own[k][1]), k
        assert v.isfinite().all(), k
    assert all(v.isfinite().all() for v in state.g.values() if v.is_floating_point())
    assert evaluate(alg, state, s)["loss"][[0, 2, 3]].isfinite().all()


@every
def test_a_broken_client_is_as_good_as_not_there(name: str) -> None:
    alg = algorithm(name)
    with_it, without = setting(federation(broken=[1])), setting(federation(broken=[1]))
    a, b = play(alg, with_it, 2)[0], play(alg, without, 2, [0, 2, 3])[0]
    same(a.g | a.own, b.g | b.own, rtol=1e-12, atol=1e-14)


@every
def test_where_everybody_breaks_the_round_is_void(name: str) -> None:
    alg, s = algorithm(name), setting(federation(broken=range(4)))
    state = begin(alg, s.net, 4)
    before = copied(state)
    for r in range(1, 4):
        state, done = step(alg, state, s, torch.arange(4))
        assert done.void and done.dropped == [0, 1, 2, 3] and (state.void, state.round) == (r, r)
    same(state.g | state.own, before.g | before.own)


@every
def test_bytes_are_counted(name: str) -> None:
    seen: dict[str, Any] = {}

    class Spy(ALGORITHMS[name]):  # type: ignore[misc, name-defined]
        def client(self, down: Any, own: Any, local: Any) -> Any:
            new, up = super().client(down, own, local)
            seen.update(down=down, up=up)
            return new, up

    alg, s = Spy(**OPTIONS.get(name, {})), setting()
    _, (done,) = play(alg, s, 1, [0, 1, 3])

    def size(v: Tensor | Pool) -> int:
        if isinstance(v, Pool):
            return 3 * v.index.shape[1] * v.rows.shape[1] * v.rows.element_size()
        return v.numel() * v.element_size()

    assert done.bytes_down == sum(size(v) for v in seen["down"].values())
    assert done.bytes_up == sum(size(v) for v in seen["up"].values())
    if name in MODELS_SENT:
        one = 3 * s.net.size * 8
        assert (done.bytes_down, done.bytes_up) == tuple(one * m for m in MODELS_SENT[name])


@every
def test_evaluation_changes_nothing(name: str) -> None:
    alg, s = algorithm(name), setting()
    state, _ = play(alg, s, 2)
    before = copied(state)
    first = evaluate(alg, state, s)
    same(first, evaluate(alg, state, s))
    same(state.g | state.own, before.g | before.own)
    assert first["loss"].shape == first["size"].shape == first["accuracy"].shape == (4,)


@every
def test_a_fresh_run_starts_from_one_client_state(name: str) -> None:
    alg, s = algorithm(name), setting()
    state = begin(alg, s.net, 4)
    for k, v in state.own.items():
        assert all(torch.equal(v[0], v[i]) for i in range(4)), k
        v[0].fill_(5 if v.dtype != torch.bool else True)  # rows share no memory
        assert k not in state.g or not torch.equal(state.g[k], v)
    assert torch.equal(begin(alg, s.net, 4).own[k], begin(alg, s.net, 4).own[k]) if state.own else True


@every
def test_required_clients_are_always_sampled(name: str) -> None:
    alg, s = algorithm(name), setting()
    for r in range(1, 20):
        ids = sample(alg, s, r, 0.25).tolist()
        assert set(alg.required) <= set(ids) and ids == sorted(set(ids)) and len(ids) == 1
