"""What every algorithm owes its users, as checks for one's own: `pflcore.testing.check(MyAlgorithm())`.

Each check plays a few rounds with four small clients, in float64. The first fault ends it with one sentence that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pflcore.algorithms.base import FedAvg, Pool, State, Stop, Tensors
from pflcore.algorithms.lookup import algorithm_of
from pflcore.data.federation import Federation
from pflcore.data.roles import held_out
from pflcore.local import Engine, Setting, Training
from pflcore.local.losses import default_loss
from pflcore.local.net import Net
from pflcore.ops import kinds
from pflcore.simulation.round import Outcome, begin, buffers_of, evaluate, nbytes, sample, step

__all__ = ["CHECKS", "Case", "Fault", "check"]

ALL = (0, 1, 2, 3)
ENGINES = (Engine().name, "vmap")  # one client after another, and all at once
TRAINING = Training(lr=0.1, batch_size=8, epochs=2)
HOOKS = ("init", "send", "client", "server", "personal", "report")
HUGE = 5e307


class Fault(AssertionError):
    """What an algorithm does wrong, in one sentence."""


@kinds.takes(model=kinds.FUNCTION, data=kinds.a(Federation), skip=kinds.a(Collection, words="a list of checks"))
def check(
    algorithm: FedAvg | type[FedAvg] | str,
    *,
    model: Callable[[], nn.Module] | None = None,
    data: Federation | None = None,
    skip: Collection[str] = (),
) -> None:
    """Plays the algorithm (an instance, a class, a name or "package.module:Class") through all of `CHECKS` but those in `skip`.

    `model` and `data` replace a small MLP and three Gaussian classes, where the algorithm asks for something else: of the federation the
    first four clients are used, everything in float64. Raises Fault, an AssertionError, with one sentence that names what is wrong;
    ValueError for an unknown name in `skip` or fewer than four clients.
    """
    unknown = sorted(set(skip) - set(CHECKS))
    if unknown:
        raise ValueError(f"skip: expected some of {', '.join(CHECKS)}, got {unknown[0]!r}.")
    case = Case(algorithm_of(algorithm), model, data)
    for name, one in CHECKS.items():
        if name not in skip:
            one(case)


@kinds.takes(given=kinds.a(FedAvg), model=kinds.FUNCTION, federation=kinds.a(Federation))
@dataclass(frozen=True)
class Case:
    """An algorithm, every hook of which is watched, with what it is tried on."""

    given: FedAvg
    model: Callable[[], nn.Module] | None = None
    federation: Federation | None = None

    @cached_property
    def data(self) -> Federation:
        """Four clients in float64 with the splits train, val and test."""
        if self.federation is None:
            statistics = next((self.model or _mlp)().buffers(), None) is not None
            return _gaussians(10 if statistics else 9)  # 9: a last batch of one sample, which batch norm has no use for
        data = self.federation
        if data.n < len(ALL):
            raise ValueError(f"data: expected a federation of at least {len(ALL)} clients, got {data.n}.")
        data = held_out(data.subset(ALL)) if self.given.needs_val else data.subset(ALL)
        x, y = (t.double() if t.is_floating_point() else t for t in (data.x, data.y))
        return replace(data, x=x, y=y)

    @cached_property
    def net(self) -> Net:
        """The model that is tried on, in float64."""
        return self.given.prepare(Net(lambda: (self.model or _mlp)().double(), default_loss(self.data.y), seed=1))

    @property
    def split(self) -> str:
        """The split that is evaluated on."""
        return "test" if "test" in self.data.index else "train"

    @cached_property
    def watched(self) -> FedAvg:
        """The algorithm with a check of what goes into and comes out of each hook."""
        return _watched(self.given)

    def moved_to(self, target: int) -> FedAvg:
        """The algorithm for another target, where it has one."""
        has = any(f.name == "target" for f in fields(self.given))
        return _watched(replace(self.given, **{"target": target})) if has else self.watched  # type: ignore[arg-type]

    def setting(
        self, data: Federation | None = None, engine: str = ENGINES[0], workers: int = 2, training: Training = TRAINING, seed: int = 0
    ) -> Setting:
        """What a run on this case, or on other data, keeps the same."""
        return Setting(self.net, self.data if data is None else data, training, Engine(engine, workers), seed, 6)

    def breaking(self, clients: Sequence[int]) -> Federation:
        """The same data, on which these clients' training overflows."""
        x = self.data.x.clone()
        rows = torch.cat([self.data.index[s][i] for s in self.data.index if s != "test" for i in clients])
        x[rows] *= HUGE / x.abs().max()
        return replace(self.data, x=x)

    def play(self, s: Setting, rounds: int = 3, ids: Sequence[int] | None = None, alg: FedAvg | None = None) -> tuple[State, list[Outcome]]:
        """The state after so many rounds with the clients `ids` (default: all), and what each round did."""
        alg = alg or self.watched
        state, done = begin(alg, s.net, s.data.n), []
        for _ in range(rounds):
            state, outcome = self.step(state, s, range(s.data.n) if ids is None else ids, alg)
            done.append(outcome)
        return state, done

    def step(self, state: State, s: Setting, ids: Sequence[int], alg: FedAvg | None = None) -> tuple[State, Outcome]:
        """The state after one round with the clients `ids`, and what the round did; Fault where it fails."""
        with _named("round", f" in round {state.round + 1} with {len(ids)} of {s.data.n} clients"):
            return step(alg or self.watched, state, s, torch.tensor(ids))

    def evaluate(self, state: State, s: Setting, alg: FedAvg | None = None) -> Tensors:
        """What an evaluation finds; Fault where it fails."""
        with _named("predict"):
            return evaluate(alg or self.watched, state, s, self.split)

    def results(self, state: State, s: Setting) -> Tensors:
        """Everything that a run leaves."""
        parts = {"g": state.g, "own": state.own, "evaluation": self.evaluate(state, s), "report": self.watched.report(state.g)}
        return {f"{part}[{k!r}]": v for part, tensors in parts.items() for k, v in tensors.items()}


# what goes into and comes out of the hooks ------------------------------------------------------------------------------------------


def _watched(alg: FedAvg) -> FedAvg:
    cls = type(alg)
    new: Any = object.__new__(type(cls.__name__, (cls,), {name: _hook(cls, name) for name in HOOKS}))
    for key, value in {
        **getattr(alg, "__dict__", {}),
        **({f.name: getattr(alg, f.name) for f in fields(alg)} if is_dataclass(alg) else {}),
    }.items():
        object.__setattr__(new, key, value)
    return new  # type: ignore[no-any-return]


def _hook(cls: type[FedAvg], name: str) -> Callable[..., Any]:
    def hook(self: FedAvg, *args: Any) -> Any:
        kept = {"send": {"g": 0}, "client": {"down": 0}, "personal": {"down": 0, "own": 1}, "report": {"g": 0}}.get(name, {})
        before = {what: _copies(args[i]) for what, i in kept.items()}
        ids = next((a.ids for a in args if hasattr(a, "ids")), None)
        n = next((a.n if hasattr(a, "n") else a.setting.data.n for a in args if hasattr(a, "ids")), None)
        with _named(name, "" if ids is None else f" with {len(ids)} of {n} clients"):
            out = getattr(cls, name)(self, *args)
        for what, i in kept.items():
            for key, tensor in _copies(args[i]).items():
                if key not in before[what] or not _equal(tensor, before[what][key]):
                    raise Fault(f"{name}: {what}[{key!r}] was changed in place; it is not the hook's own, so work on a copy.")
        _check_form(name, out, args[1] if name == "client" else {}, None if ids is None else len(ids))
        return out

    return hook


def _check_form(name: str, out: Any, own: Mapping[str, Tensor], count: int | None) -> None:
    """What a hook gives has the form that the protocol asks for."""
    pair = name in ("init", "client")
    if pair and not (isinstance(out, tuple) and len(out) == 2 and all(isinstance(d, dict) for d in out)):
        what = "(the server's state, one client's fresh state)" if name == "init" else "(the clients' new state, their upload)"
        raise Fault(f"{name}: expected {what}, two dicts of tensors, got {_kind(out)}.")
    if not pair and not isinstance(out, dict):
        raise Fault(f"{name}: expected a dict of tensors, got {_kind(out)}.")
    parts = {"state": out[0], "upload": out[1]} if pair else {"result": out}
    for part, tensors in parts.items():
        for key, value in tensors.items():
            if isinstance(value, Pool) and name == "send":
                value = value.index
            if not isinstance(value, Tensor):
                raise Fault(
                    f"{name}: expected a tensor for {key!r} of its {part}, got {_kind(value)}; what is kept or sent is counted in bytes."
                )
            if name in ("send", "client", "personal") and (not value.dim() or len(value) != count):
                shape = list(value.shape)
                raise Fault(f"{name}: expected one row for each of the {count} clients in {key!r} of its {part}, got shape {shape}.")
    for key, value in parts["state"].items() if name == "client" else ():
        if key not in own:
            raise Fault(f"client: its new state has {key!r}, which init gave no fresh client; there are {', '.join(own) or 'none'}.")
        if value.shape != own[key].shape or value.dtype != own[key].dtype:
            old, new = (f"{list(v.shape[1:])} {v.dtype}" for v in (own[key], value))
            raise Fault(f"client: the state {key!r} of a client was {old} and became {new}; a state keeps its shape and dtype.")


@contextmanager
def _named(hook: str, where: str = "") -> Iterator[None]:
    try:
        yield
    except (Fault, Stop):
        raise
    except Exception as error:
        said = str(error).strip().splitlines()
        raise Fault(f"{hook}: raised {type(error).__name__}{where}: {said[0] if said else 'without a message'}") from error


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _copies(payload: Mapping[str, Any]) -> Tensors:
    return {k: (v.rows if isinstance(v, Pool) else v).clone() for k, v in payload.items()}


def _copied(state: State) -> State:
    return State(_copies(state.g), _copies(state.own), state.buffers.clone(), state.round, state.void, moments=_copies(state.moments))


def _equal(a: Tensor, b: Tensor, rtol: float = 0.0, atol: float = 0.0) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol, atol, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)


def _same(a: Tensors, b: Tensors, fault: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Fault, whose `{}` is what differs first, unless both hold the same."""
    for key in [*a, *(k for k in b if k not in a)]:
        if key not in a or key not in b or not _equal(a[key], b[key], rtol, atol):
            raise Fault(fault.format(key))


def _state(state: State) -> Tensors:
    return {f"{part}[{k!r}]": v for part, tensors in (("g", state.g), ("own", state.own)) for k, v in tensors.items()}


# the checks -------------------------------------------------------------------------------------------------------------------------


def shapes_stay(case: Case) -> None:
    """Hooks give what the protocol asks for, with everybody and with some; a client's state and upload keep their shapes."""
    s = case.setting()
    state = begin(case.watched, s.net, s.data.n)
    shapes = {k: (v.shape, v.dtype) for k, v in state.own.items()}
    uploads: list[Tensors] = []
    for ids in (ALL, (0, 2), (0, 1, 3)):
        with _uploads(case, uploads):
            state, _ = case.step(state, s, [*sorted({*ids, *case.given.required})])
        first, last = ({k: (v.shape[1:], v.dtype) for k, v in up.items()} for up in (uploads[0], uploads[-1]))
        if first != last:
            key = next(k for k in [*first, *last] if first.get(k) != last.get(k))
            raise Fault(f"client: its upload {key!r} is not of the same shape and dtype in every round; send what is always the same.")
        if {k: (v.shape, v.dtype) for k, v in state.own.items()} != shapes:
            raise Fault("client: the clients' state is not of the same shape and dtype after every round.")


def stays_finite(case: Case) -> None:
    """On well-behaved data everything stays finite, and no client is dropped."""
    s = case.setting()
    state = begin(case.watched, s.net, s.data.n)
    for round in (1, 2, 3):
        state, done = case.step(state, s, ALL)
        if done.dropped:
            raise Fault(
                f"client: the upload or new state of client {done.dropped[0]} is not finite on well-behaved data, in round {round}."
            )
        unfit = [f"g[{k!r}]" for k in done.spoilt]  # the round was void for it
        unfit += [k for k, v in _state(state).items() if v.is_floating_point() and not v.isfinite().all()]
        if unfit:
            raise Fault(f"server: {unfit[0]} is not finite on well-behaved data, after round {round}.")
    for key, value in case.evaluate(state, s).items():
        if not value.isfinite().all():
            raise Fault(f"personal or predict: the evaluation's {key} is not finite on well-behaved data.")


def absent_clients_rest(case: Case) -> None:
    """Clients that take no part in a round keep their state."""
    s = case.setting()
    state, _ = case.play(s, 1)
    before, there = _copied(state), sorted({0, 2, *case.given.required})
    absent = [i for i in ALL if i not in there]
    state, done = case.step(state, s, there)
    for key, value in state.own.items():
        if not _equal(value[absent], before.own[key][absent]):
            raise Fault(f"server: own[{key!r}] of the absent clients {absent} changed in a round without them.")
    averaged = buffers_of(case.given, s.net) == "average"  # then they are everybody's
    if done.ids != there or not (averaged or _equal(state.buffers[absent], before.buffers[absent])):
        raise Fault(f"client: a round with the clients {there} changed the statistics of the clients {absent}.")


def numbers_of_clients_play_no_part(case: Case) -> None:
    """Renumbered clients give renumbered results; with one whole batch an epoch, so that shuffles play no part.

    Nothing is asked of a method whose results are another seed's even so: which draws a client has belongs to its number.
    """
    order = [2, 0, 3, 1]
    if case.given.required and not hasattr(case.given, "target"):
        return
    training = replace(TRAINING, batch_size=int(case.data.size("train").max()))
    one, two = case.moved_to(1), case.moved_to(order.index(1))

    def left(alg: FedAvg, data: Federation | None = None, seed: int = 0) -> tuple[Tensors, Tensors]:
        """What the clients keep, and what an evaluation finds."""
        s = case.setting(data, training=training, seed=seed)
        state = case.play(s, 4, alg=alg)[0]
        found = case.evaluate(state, s, alg)
        return {f"own[{k!r}]": v for k, v in state.own.items()}, {f"the evaluation's {k}": v for k, v in found.items()}

    (own, seen), drawn = left(one), left(one, seed=1)
    if not all(_equal(v, drawn[i][k], 1e-7, 1e-9) for i, part in enumerate((own, seen)) for k, v in part.items()):
        return
    again = left(two, case.data.subset(order))

    def moved(v: Tensor, w: Tensor) -> Tensor:
        """The rows in the new order, and the columns where a client's state has one for every other client."""
        both = v[order][:, order] if v.shape[1:] == (4,) else v[order]
        return both if _equal(both, w, 1e-7, 1e-9) else v[order]

    fault = "server: {} depends on the clients' numbers: renumbered clients give other results than the same ones renumbered."
    expected = {k: moved(v, again[0][k]) for k, v in own.items()} | {k: v[order] for k, v in seen.items()}
    _same(expected, again[0] | again[1], fault, 1e-7, 1e-9)


def runs_repeat(case: Case) -> None:
    """One seed gives the same bits in every run, with any number of workers, by both engines."""
    for engine in ENGINES:
        runs = []
        for workers in (1, 1, 3):
            s = case.setting(engine=engine, workers=workers)
            runs.append(case.results(case.play(s)[0], s))
        _same(
            runs[0],
            runs[1],
            "{} differs between two runs of one seed: something draws from the global generator, or the algorithm remembers something "
            "between rounds outside its state.",
        )
        _same(runs[0], runs[2], "{} differs between 1 and 3 worker threads; hooks and losses must not share what they change.")


def seeds_differ(case: Case) -> None:
    """Another seed gives another run."""
    rows = [torch.cat([v.double().flatten() for v in _state(case.play(case.setting(seed=seed))[0]).values()]) for seed in (0, 1)]
    if rows[0].shape == rows[1].shape and torch.equal(*rows):
        raise Fault("client: another seed gives the same run, so nothing that is trained on shuffled batches is kept or sent.")


def engines_agree(case: Case) -> None:
    """Client after client, or all at once by vmap: the same results up to rounding."""
    runs = []
    for engine in ENGINES:
        s = case.setting(engine=engine)
        runs.append(case.results(case.play(s)[0], s))
    fault = f"{{}} differs between the engines {ENGINES[0]!r} and {ENGINES[1]!r}: "
    _same(runs[0], runs[1], fault + "a loss or an update mixes clients or branches on values.", 1e-6, 1e-8)


def one_client_suffices(case: Case) -> None:
    """A federation of one client runs."""
    s = case.setting(case.data.subset([2]))
    alg = case.moved_to(0)
    state, done = case.play(s, alg=alg)
    if any(d.void or d.dropped for d in done) or not all(v.isfinite().all() for v in case.evaluate(state, s, alg).values()):
        raise Fault("server or personal: a federation of one client gives results that are not finite.")


def broken_clients_are_absent(case: Case) -> None:
    """A client whose training overflows harms nobody: the others' results are as if it had not come."""
    if not case.data.x.is_floating_point() or 1 in case.given.required:
        return
    s = case.setting(case.breaking([1]))
    state, done = case.play(s, 2)
    before = begin(case.watched, s.net, s.data.n)
    unfit = [f"g[{k!r}]" for d in done for k in d.spoilt]
    unfit += [k for k, v in _state(state).items() if v.is_floating_point() and not v.isfinite().all()]
    if unfit:
        raise Fault(f"server: {unfit[0]} is not finite after a client's update overflowed; nothing but checked uploads may reach it.")
    if all(d.dropped == [1] for d in done):
        for key, value in state.own.items():
            if not _equal(value[1], before.own[key][1]):
                raise Fault(f"server: own[{key!r}] of a client that was dropped in every round changed.")
        rest = case.play(case.setting(case.breaking([1])), 2, [0, 2, 3])[0]
        fault = "server: {} depends on a client that was dropped because its update was not finite."
        _same(_state(state), _state(rest), fault, 1e-12, 1e-14)


def void_rounds_change_nothing(case: Case) -> None:
    """A round in which everybody breaks changes neither state."""
    if not case.data.x.is_floating_point():
        return
    s = case.setting(case.breaking(ALL))
    state = begin(case.watched, s.net, s.data.n)
    before = _state(_copied(state))
    for _ in range(3):
        state, done = case.step(state, s, ALL)
        if done.void:
            _same(_state(state), before, "send or client: {} changed in a round that is void, because no client's update was finite.")
        before = _state(_copied(state))


def bytes_are_counted(case: Case) -> None:
    """What is counted as sent is what clients get and give, and no parameter's columns travel that are always zero."""
    s, uploads, downs = case.setting(), list[Tensors](), list[dict[str, Any]]()
    state, ids = begin(case.watched, s.net, s.data.n), sorted({0, 1, 3, *case.given.required})
    statistics = nbytes({"": s.net.b0.expand(len(ids), -1)}) if buffers_of(case.given, s.net) == "average" else 0  # beside the dicts
    for _ in range(3):
        with _uploads(case, uploads, downs):
            state, done = case.step(state, s, ids)
        if (done.bytes_down - statistics, done.bytes_up - statistics) != (nbytes(downs[-1]), nbytes(uploads[-1])):
            raise Fault("send or client: what travels is not what is counted; put everything that is sent in the dicts.")
    for key, value in uploads[-1].items():
        if value.shape[1:] == (s.net.size,):
            for name, columns in s.net.slices.items():
                if not any(up[key][:, columns].any() for up in uploads):
                    raise Fault(
                        f"client: the columns of {name!r} in the upload {key!r} are always zero, but are counted as sent; "
                        "send the shared columns only, by net.split and net.join."
                    )


def evaluation_changes_nothing(case: Case) -> None:
    """Evaluating leaves the state as it was, and gives the same twice."""
    s = case.setting()
    state, _ = case.play(s, 2)
    before = _state(_copied(state))
    first, second = case.evaluate(state, s), case.evaluate(state, s)
    _same(_state(state), before, "personal: {} changed by an evaluation.")
    _same(first, second, "personal or predict: the {} of two evaluations of one state differ.")
    if any(first[k].shape != (s.data.n,) for k in first):
        raise Fault("predict: expected scores [B, ...] for a batch [B, ...], from which each client gets one value.")


def clients_start_alike(case: Case) -> None:
    """Fresh clients have equal states, in memory of their own."""
    s = case.setting()
    first, second = begin(case.watched, s.net, s.data.n), begin(case.watched, s.net, s.data.n)
    _same(_state(first), _state(second), "init: {} is not the same in two calls; draw from net.init(seed) or pflcore's own generators.")


def required_clients_are_sampled(case: Case) -> None:
    """Cohorts hold the required clients, each client once, in ascending order."""
    s = case.setting()
    for round in range(1, 20):
        ids = sample(case.given, s, round, 0.25).tolist()
        if not set(case.given.required) <= set(ids) or ids != sorted(set(ids)) or len(ids) != max(1, len(case.given.required)):
            raise Fault(f"required: the cohort {ids} of a quarter of four clients does not hold {case.given.required} and no more.")


@contextmanager
def _uploads(case: Case, uploads: list[Tensors], downs: list[dict[str, Any]] | None = None) -> Iterator[None]:
    """Keeps what goes to and comes from `client` inside."""
    cls = type(case.watched)
    client = cls.client

    def spy(self: FedAvg, down: Any, own: Any, local: Any) -> Any:
        new, up = client(self, down, own, local)
        uploads.append(up)
        if downs is not None:
            downs.append(down)
        return new, up

    cls.client = spy  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.client = client  # type: ignore[method-assign]


CHECKS: dict[str, Callable[[Case], None]] = {
    f.__name__: f
    for f in (
        clients_start_alike,
        shapes_stay,
        stays_finite,
        absent_clients_rest,
        evaluation_changes_nothing,
        runs_repeat,
        engines_agree,
        numbers_of_clients_play_no_part,
        seeds_differ,
        one_client_suffices,
        bytes_are_counted,
        broken_clients_are_absent,
        void_rounds_change_nothing,
        required_clients_are_sampled,
    )
}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def _gaussians(first: int = 9) -> Federation:
    """Four clients, three Gaussian classes, every second client with its labels turned."""
    gen = torch.Generator().manual_seed(4)
    centre = 2 * torch.randn(3, 6, generator=gen, dtype=torch.float64)
    clients = []
    for i, n in enumerate((first, 20, 31, 20)):  # two of one size: such clients take every step together
        splits = {}
        for split in ("train", "val", "test"):
            y = torch.randint(0, 3, (n,), generator=gen)
            splits[split] = (centre[y] + torch.randn(n, 6, generator=gen, dtype=torch.float64), (y + i % 2) % 3)
        clients.append(splits)
    return Federation.from_arrays(clients, classes=3, dtype=None)
