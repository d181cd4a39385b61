"""What every algorithm owes its users, as checks for one's own: `pflcore.testing.check(MyAlgorithm())`.

Four small clients play three rounds in float64: all of them, two, all. The checks read that one play, and what is played once more is
what has to be played otherwise. The first fault ends it with one sentence that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from inspect import get_annotations
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pflcore.algorithms.base import Cohort, FedAvg, Pool, State, Tensors
from pflcore.algorithms.lookup import algorithm_of
from pflcore.data.federation import Federation
from pflcore.data.roles import held_out
from pflcore.ops import kinds
from pflcore.simulation.round import Outcome, begin, buffers_of, evaluate, sample, step
from pflcore.train import Training
from pflcore.train.bridge import Engine, Local, Setting
from pflcore.train.losses import default_loss
from pflcore.train.net import Net

__all__ = ["CHECKS", "Case", "Fault", "check"]

ALL, PART = (0, 1, 2, 3), (1, 2)
COHORTS = (ALL, PART, ALL)  # of the recorded play; who is required joins every round
TRAINING = Training(lr=0.1, batch_size=8)
HOOKS = ("init", "send", "client", "server", "personal", "report")
READ = {"send": ["g"], "client": ["down"], "personal": ["down", "own"], "report": ["g"]}  # not the hook's own
PAIRS = {
    "init": "(the server's state, one client's fresh state), two dicts of tensors",
    "client": "(the clients' new state, their upload), two dicts of tensors",
}
CLOSE = 1e-7, 1e-9


class Fault(AssertionError):
    """What an algorithm does wrong, in one sentence."""


class Play(NamedTuple):
    """What the rounds of a play left behind."""

    last: State
    states: list[Tensors]  # before the first round, and after each
    done: list[Outcome]
    unfit: dict[str, int]  # what the server would have held, or somebody held, and is not finite: since which round
    uploads: list[Tensors]


@kinds.takes(
    model=kinds.FUNCTION,
    data=kinds.a(Federation),
    skip=kinds.a(Collection, words="a list of checks"),
)
def check(
    algorithm: FedAvg | type[FedAvg] | str,
    *,
    model: Callable[[], nn.Module] | None = None,
    data: Federation | None = None,
    skip: Collection[str] = (),
) -> None:
    """Puts an instance, a class, a name or "package.module:Class" through all of `CHECKS` but those in `skip`.

    `model` and `data` replace a small MLP and three Gaussian classes, where the algorithm asks for something else: of the
    federation the first four clients are used, everything in float64. Raises Fault, an AssertionError, with one sentence that
    names what is wrong; ValueError for an unknown name in `skip` or fewer than four clients.
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
    """An algorithm, every hook of which is watched, with what it is tried on and the play that the checks read."""

    given: FedAvg
    model: Callable[[], nn.Module] | None = None
    federation: Federation | None = None
    dtype: torch.dtype = torch.float64

    @cached_property
    def data(self) -> Federation:
        """Four clients with the splits train, val and test."""
        data = self.federation
        if data is None:
            statistics = next((self.model or _mlp)().buffers(), None) is not None
            data = _gaussians(10 if statistics else 9)  # 9: a last batch of one sample, which batch norm has no use for
        if data.n < len(ALL):
            raise ValueError(f"data: expected a federation of at least {len(ALL)} clients, got {data.n}.")
        data = data.subset(ALL)
        data = held_out(data) if self.given.needs_val else data
        x, y = (t.to(self.dtype) if t.is_floating_point() else t for t in (data.x, data.y))
        return replace(data, x=x, y=y)

    @cached_property
    def net(self) -> Net:
        """The model that is tried on."""
        made = lambda: (self.model or _mlp)().to(self.dtype)  # noqa: E731
        return self.given.prepare(Net(made, default_loss(self.data.y), seed=1))

    @cached_property
    def watched(self) -> FedAvg:
        """The algorithm with a check of what goes into and comes out of each hook."""
        return _watched(self.given)

    def moved_to(self, target: int) -> FedAvg:
        """The algorithm for another target, where it has one."""
        return _watched(self.given, target=target) if hasattr(self.given, "target") else self.watched

    def setting(self, data: Federation | None = None, engine: str = "loop", workers: int = 1, **more: Any) -> Setting:
        """What a run on this case, or on other data, keeps the same."""
        return Setting(self.net, data or self.data, TRAINING, Engine(engine, workers), rounds=6)._replace(**more)

    def breaking(self, clients: Sequence[int]) -> Federation:
        """The same data, on which these clients' training overflows."""
        x = self.data.x.clone()
        rows = torch.cat([of[i] for split, of in self.data.index.items() if split != "test" for i in clients])
        x[rows] *= 5e307 / x.abs().max()
        return replace(self.data, x=x)

    def otherwise_tested(self) -> Federation:
        """The same data, but every client has another's samples in the split "test", and one less."""
        index = {k: [rows[1:] for rows in (*v[1:], v[0])] if k == "test" else v for k, v in self.data.index.items()}
        return replace(self.data, index=index)

    def play(self, s: Setting, cohorts: Sequence[Sequence[int]] = COHORTS, alg: FedAvg | None = None) -> Play:
        """Some rounds, by default those of the recorded play; Fault where one fails."""
        alg = alg or self.watched
        state = begin(alg, s.net, s.data.n)
        uploads = alg._uploads  # type: ignore[attr-defined]
        uploads.clear()
        play = Play(state, [_state(state)], [], {}, [])
        for some in cohorts:
            ids = sorted({*some, *alg.required})
            with _named("round", f" in round {state.round + 1} with {len(ids)} of {s.data.n} clients"):
                state, done = step(alg, state, s, torch.tensor(ids))
            play.states.append(_state(state))
            play.done.append(done)
            for key in [*(f"g[{k!r}]" for k in done.spoilt), *_unfit(play.states[-1])]:
                play.unfit.setdefault(key, state.round)
        return play._replace(last=state, uploads=[*uploads])

    @cached_property
    def recorded(self) -> Play:
        """The play that the checks read."""
        return self.play(self.setting())

    @cached_property
    def found(self) -> Tensors:
        """Everything that the recorded play leaves."""
        return self.results(self.recorded.last)

    @cached_property
    def again(self) -> Tensors:
        """The same of a play with three worker threads and other test samples: nobody may notice."""
        return self.left(self.setting(self.otherwise_tested(), workers=3))

    def evaluate(self, state: State, s: Setting, alg: FedAvg | None = None) -> Tensors:
        """What an evaluation finds; Fault where it fails."""
        with _named("predict"):
            found = evaluate(alg or self.watched, state, s, "test" if "test" in s.data.index else "train")
        return {f"the evaluation's {k}": v for k, v in found.items()}

    def results(self, state: State) -> Tensors:
        """Everything that a run leaves."""
        return _state(state) | self.evaluate(state, self.setting()) | self.watched.report(state.g)

    def left(self, s: Setting) -> Tensors:
        """Everything that such a run of as many rounds leaves."""
        return self.results(self.play(s).last)

    def repeats(self, s: Setting, alg: FedAvg | None = None) -> bool:
        """Whether such a run is the recorded one; most are another after one round."""
        states = self.recorded.states
        return not any(_other(self.play(s, COHORTS[:k], alg).states[k], states[k]) for k in (1, 3))


# what goes into and comes out of the hooks --------------------------------------------------------


def _watched(alg: FedAvg, **changed: Any) -> FedAvg:
    cls = type(alg)
    uploads: list[Tensors] = []
    new = copy(alg)
    watched = type(cls.__name__, (cls,), {name: _hook(cls, name, uploads) for name in HOOKS})
    for key, value in {"__class__": watched, "_uploads": uploads, **changed}.items():
        object.__setattr__(new, key, value)
    return new


def _hook(cls: type[FedAvg], name: str, uploads: list[Tensors]) -> Callable[..., Any]:
    def hook(self: FedAvg, *args: Any) -> Any:
        kept = list(zip(READ.get(name, ()), args, strict=False))
        before = [_copies(given) for _, given in kept]
        count, where = None, ""
        for cohort in args:
            if isinstance(cohort, (Cohort, Local)):
                count = len(cohort.ids)
                where = f" with {count} of {cohort.n if isinstance(cohort, Cohort) else cohort.setting.data.n} clients"
        with _named(name, where):
            out = getattr(cls, name)(self, *args)
        for (what, given), old in zip(kept, before, strict=True):
            fault = f"{name}: {what}[{{!r}}] was changed in place; it is not the hook's own, so work on a copy."
            _same(_copies(given), old, fault)
        _check_form(name, out, args[1] if name == "client" else {}, count)
        if name == "client":
            uploads.append(_copies(out[1]))
        return out

    return hook


def _check_form(name: str, out: Any, own: Mapping[str, Tensor], count: int | None) -> None:
    """What a hook gives has the form that the protocol asks for."""
    parts = out if name in PAIRS else (out,)
    words = ("state", "upload") if name in PAIRS else ("result",)
    if not (isinstance(parts, tuple) and len(parts) == len(words) and all(isinstance(d, dict) for d in parts)):
        raise Fault(f"{name}: expected {PAIRS.get(name, 'a dict of tensors')}, got {type(out).__name__}.")
    for part, tensors in zip(words, parts, strict=True):
        for key, value in tensors.items():
            if isinstance(value, Pool) and name == "send":
                value = value.index
            if not isinstance(value, Tensor):
                got = type(value).__name__
                raise Fault(f"{name}: expected a tensor for {key!r} of its {part}, got {got}; what is kept or sent is counted in bytes.")
            if name in ("send", "client", "personal") and (not value.dim() or len(value) != count):
                shape = list(value.shape)
                raise Fault(f"{name}: expected one row for each of the {count} clients in {key!r} of its {part}, got shape {shape}.")
    for key, value in parts[0].items() if name == "client" else ():
        if key not in own:
            raise Fault(f"client: its new state has {key!r}, which init gave no fresh client; there are {', '.join(own) or 'none'}.")
        old, new = (f"{list(v.shape[1:])} {v.dtype}" for v in (own[key], value))
        if old != new:
            raise Fault(f"client: the state {key!r} of a client was {old} and became {new}; a state keeps its shape and dtype.")


@contextmanager
def _named(hook: str, where: str = "") -> Iterator[None]:
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        said = str(error).strip().splitlines()
        raise Fault(f"{hook}: raised {type(error).__name__}{where}: {said[0] if said else 'without a message'}") from error


def _copies(payload: Mapping[str, Any]) -> Tensors:
    return {k: (v.rows if isinstance(v, Pool) else v).clone() for k, v in payload.items()}


def _equal(a: Tensor, b: Tensor, rtol: float = 0.0, atol: float = 0.0) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.allclose(a.double(), b.double(), rtol, atol, equal_nan=True)


def _other(a: Tensors, b: Tensors, rtol: float = 0.0, atol: float = 0.0) -> str | None:
    """What differs first."""
    return next((k for k in {**a, **b} if k not in a or k not in b or not _equal(a[k], b[k], rtol, atol)), None)


def _same(a: Tensors, b: Tensors, fault: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Fault, whose `{}` is what differs first, unless both hold the same."""
    key = _other(a, b, rtol, atol)
    if key is not None:
        raise Fault(fault.format(key))


def _state(state: State) -> Tensors:
    """A copy of what is kept."""
    parts = {"g": state.g, "own": state.own}
    kept = {f"{part}[{k!r}]": v for part, of in parts.items() for k, v in of.items()}
    return _copies(kept | {"own statistics": state.buffers})


def _unfit(tensors: Tensors) -> list[str]:
    return [k for k, v in tensors.items() if not v.isfinite().all()]


def _words(code: CodeType) -> set[str]:
    """The names that a function speaks of."""
    return set(code.co_names).union(*(_words(c) for c in code.co_consts if isinstance(c, CodeType)))


# the checks ---------------------------------------------------------------------------------------


def names_are_known(case: Case) -> None:
    """Fields are options, and what nearly has the name of a hook is none only where it is called."""
    cls = type(case.given)
    methods = {name: f.__code__ for name, f in vars(cls).items() if isinstance(f, FunctionType) and name[:2] != "__"}
    for name, kind in get_annotations(cls).items():
        if "__dataclass_fields__" not in vars(cls) and "ClassVar" not in str(kind):
            raise Fault(f"{name}: it is no option, because {cls.__name__} has no @dataclass(frozen=True) above it.")
    known = {*dir(FedAvg), *dir(cls.__base__)}
    for name in methods.keys() - known.union(*map(_words, methods.values())):
        for meant in get_close_matches(name, known, 1, 0.8):
            raise Fault(f"{name}: no hook has this name, and no method calls it; did you mean {meant!r}?")


def clients_start_alike(case: Case) -> None:
    """Fresh clients have equal states, in memory of their own."""
    fresh, more = begin(case.watched, case.net, 4), case.watched.init(case.net, 5)[1]
    fault = "init: {} is not the same in two calls; draw from net.init(seed) or pflcore's own generators."
    _same(_state(fresh), case.recorded.states[0], fault)
    for key, value in fresh.own.items():
        if value.dim() > 2 and (value.shape[1], len(more[key])) == (4, 5):
            raise Fault(f"init: the fresh state {key!r} has a row for each of the 4 clients; give one client's, and each gets its own.")


def shapes_stay(case: Case) -> None:
    """Hooks give what the protocol asks for, with everybody and with some; a client's upload keeps its shapes."""
    first, *rest = ({k: (v.shape[1:], v.dtype) for k, v in up.items()} for up in case.recorded.uploads)
    for key in (k for later in rest for k in {**first, **later} if first.get(k) != later.get(k)):
        raise Fault(f"client: its upload {key!r} is not of the same shape and dtype in every round; send what is always the same.")


def stays_finite(case: Case) -> None:
    """On well-behaved data everything stays finite, and no client is dropped."""
    for round, done in enumerate(case.recorded.done, 1):
        for client in done.dropped:
            raise Fault(f"client: the upload or new state of client {client} is not finite on well-behaved data, in round {round}.")
    for what, round in case.recorded.unfit.items():
        raise Fault(f"server: {what} is not finite on well-behaved data, after round {round}.")
    for key in _unfit(case.evaluate(case.recorded.last, case.setting())):
        raise Fault(f"personal or predict: {key} is not finite on well-behaved data.")


def absent_clients_rest(case: Case) -> None:
    """Clients that take no part in a round keep their state."""
    _, before, after, _ = case.recorded.states
    absent = [i for i in ALL if i not in case.recorded.done[1].ids]
    averaged = buffers_of(case.given, case.net) == "average"  # then the statistics are everybody's
    for key, value in before.items():
        if key.startswith("own[" if averaged else "own") and not _equal(after[key][absent], value[absent]):
            raise Fault(f"server: {key} of the absent clients {absent} changed in a round without them.")


def evaluation_changes_nothing(case: Case) -> None:
    """Evaluating leaves the state as it was, and gives the same twice."""
    first, again = case.found, case.results(case.recorded.last)
    _same(_state(case.recorded.last), case.recorded.states[-1], "personal: {} changed by an evaluation.")
    _same(first, again, "personal or predict: {} of two evaluations of one state differ.")


def runs_repeat(case: Case) -> None:
    """One seed gives the same bits in every run, with any number of workers."""
    faults = {
        1: "{} differs between two runs of one seed: something draws from the global generator, or the algorithm remembers something "
        "between rounds outside its state.",
        3: "{} differs between 1 and 3 worker threads; hooks and losses must not share what they change.",
    }
    for workers, fault in faults.items() if _other(case.found, case.again) else ():
        _same(case.found, case.left(case.setting(workers=workers)), fault)


def nobody_trains_on_test(case: Case) -> None:
    """Nothing that is trained looks at the split "test"."""
    if _other(case.found, case.again):
        fault = "client or server: {} depends on the split 'test', which is there for the evaluation; choose by 'val'."
        _same(case.found, case.left(case.setting(case.otherwise_tested())), fault)


def engines_agree(case: Case) -> None:
    """Client after client, or all at once by vmap: the same results up to rounding."""
    fault = "{} differs between the engines 'loop' and 'vmap': a loss or an update mixes clients or branches on values."
    _same(case.found, case.left(case.setting(engine="vmap")), fault, 1e-6, 1e-8)


def numbers_of_clients_play_no_part(case: Case) -> None:
    """Renumbered clients give renumbered results; with one whole batch an epoch, so that shuffles play no part.

    Nothing is asked of a method whose results are another seed's even so: which draws a client has belongs to its number.
    """
    order = [2, 0, 3, 1]
    if case.given.required and not hasattr(case.given, "target"):
        return
    training = replace(TRAINING, batch_size=int(case.data.size("train").max()), epochs=2)

    def left(numbers: Sequence[int], seed: int = 0) -> Tensors:
        """What the clients keep, and what an evaluation finds, where the client `numbers[i]` is number i."""
        s, alg = case.setting(case.data.subset(numbers), training=training, seed=seed), case.moved_to(numbers.index(1))
        last = case.play(s, [[numbers.index(i) for i in ids] for ids in COHORTS], alg).last
        return {f"own[{k!r}]": v for k, v in last.own.items()} | case.evaluate(last, s, alg)

    first, again = left(ALL), left(order)
    expected = {k: v[order] for k, v in first.items()}
    for k, v in expected.items():
        if v.shape[1:] == (4,) and not _equal(v, again[k], *CLOSE):  # a column for every other client
            expected[k] = v[:, order]
    if _other(expected, again, *CLOSE) and not _other(first, left(ALL, seed=1), *CLOSE):
        fault = "server: {} depends on the clients' numbers: renumbered clients give other results than the same ones renumbered."
        _same(expected, again, fault, *CLOSE)


def seeds_differ(case: Case) -> None:
    """Another seed gives another run."""
    if case.repeats(case.setting(seed=1)):
        raise Fault("client: another seed gives the same run, so nothing that is trained on shuffled batches is kept or sent.")


def one_client_suffices(case: Case) -> None:
    """A federation of one client runs."""
    s, alg = case.setting(case.data.subset([2])), case.moved_to(0)
    play = case.play(s, [[0], [0]], alg)
    if any(d.void for d in play.done) or _unfit(case.evaluate(play.last, s, alg)):
        raise Fault("server or personal: a federation of one client gives results that are not finite.")


def float32_runs(case: Case) -> None:
    """What runs in float64 runs in float32, too."""
    case = replace(case, dtype=torch.float32)
    s = case.setting()
    try:
        case.evaluate(case.play(s, COHORTS[:2]).last, s)
    except Fault as fault:
        raise Fault(f"in float32, as runs are by default, {fault}") from fault


def broken_clients_are_absent(case: Case) -> None:
    """A client whose training overflows harms nobody: the others' results are as if it had not come."""
    if not case.data.x.is_floating_point() or 1 in case.given.required:
        return
    s = case.setting(case.breaking([1]))
    play = case.play(s, COHORTS[:2])
    for what in play.unfit:
        raise Fault(f"server: {what} is not finite after a client's update overflowed; nothing but checked uploads may reach it.")
    others = {i for done in play.done for i in done.dropped} - {1}
    if others:
        raise Fault(f"client: the update of client 1 overflowed, and {others} were dropped with it; no row may see another client's.")
    if all(done.dropped for done in play.done):
        rest = case.play(s, [[i for i in ids if i != 1] for ids in COHORTS[:2]])
        fault = "server: {} depends on a client that was dropped because its update was not finite."
        _same(play.states[-1], rest.states[-1], fault, 1e-12, 1e-14)


def void_rounds_change_nothing(case: Case) -> None:
    """A round in which everybody breaks changes neither state."""
    if case.data.x.is_floating_point():
        play = case.play(case.setting(case.breaking(ALL)), [ALL])
        if play.done[0].void:
            fault = "send or client: {} changed in a round that is void, because no client's update was finite."
            _same(play.states[1], play.states[0], fault)


def bytes_are_counted(case: Case) -> None:
    """No parameter's columns travel, and are counted, that are always zero."""
    uploads, plain = case.recorded.uploads, replace(case, given=FedAvg())  # who moves what training moves at all
    for key in (k for k, v in uploads[0].items() if v.shape[1:] == (case.net.size,)):
        for name, columns in case.net.slices.items():
            if any(up[key][:, columns].any() for up in uploads):
                continue
            if plain.play(case.setting(), [ALL]).uploads[0]["delta"][:, columns].abs().max() > 1e-9:
                raise Fault(
                    f"client: the columns of {name!r} in the upload {key!r} are always zero, but are counted as sent; "
                    "send the shared columns only, by net.split and net.join."
                )


def required_clients_are_sampled(case: Case) -> None:
    """Cohorts hold the required clients, each client once, in ascending order."""
    required, s = case.given.required, case.setting()
    for round in range(1, 20):
        ids = sample(case.given, s, round, 0.25).tolist()
        if ids != sorted({*ids, *required}) or len(ids) != max(1, len(required)):
            raise Fault(f"required: the cohort {ids} of a quarter of four clients does not hold {required} and no more.")


def options_play_a_part(case: Case) -> None:
    """Another `server_lr` and another `weighting` give another run, unless they are declared as `unused`."""
    alg = case.given
    others = {"server_lr": alg.server_lr / 2 or 1.0, "weighting": "uniform" if alg.weighting == "samples" else "samples"}
    for name, other in others.items():
        if name not in alg.unused and case.repeats(case.setting(), _watched(alg, **{name: other})):
            raise Fault(
                f"{name}: another value gives the same run to the bit, so nobody should be offered it; declare what plays no part: "
                f"unused: ClassVar[tuple[str, ...]] = ({name!r},)."
            )


CHECKS = {
    f.__name__: f
    for f in (
        names_are_known,
        clients_start_alike,
        shapes_stay,
        stays_finite,
        absent_clients_rest,
        evaluation_changes_nothing,
        runs_repeat,
        nobody_trains_on_test,
        engines_agree,
        numbers_of_clients_play_no_part,
        seeds_differ,
        one_client_suffices,
        float32_runs,
        bytes_are_counted,
        broken_clients_are_absent,
        void_rounds_change_nothing,
        required_clients_are_sampled,
        options_play_a_part,
    )
}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def _gaussians(first: int) -> Federation:
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
