"""What every algorithm owes its users, as checks for one's own:
`pflcore.testing.check(MyAlgorithm())`.

Four small clients play three rounds in float64: all of them, two, all. The checks
compare that one play with plays of the same rounds otherwise. The first fault ends it
with one sentence that names it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cached_property
from inspect import get_annotations, unwrap
from types import CodeType, FunctionType, MemberDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pflcore.algorithms import algorithm_of
from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._protocol import Algorithm, Cohort, SharedRows, Tensors, Traits
from pflcore.check import checked, summarize
from pflcore.data._federation import Federation
from pflcore.data._protocols import with_validation
from pflcore.simulation._evaluate import evaluate
from pflcore.simulation._models import adapt
from pflcore.simulation._uploads import RoundOutcome
from pflcore.simulation.round import (
    RunConfig,
    State,
    flatten_state,
    initial_state,
    step,
)
from pflcore.train import Clients, Fit, Net, Training
from pflcore.train._clients import TrainContext
from pflcore.train._engines import Engine
from pflcore.train._losses import default_loss
from pflcore.train._workers import Workers

__all__ = ["CHECKS", "Case", "Fault", "check"]

ALL = (0, 1, 2, 3)
PART = (1, 2)
COHORTS = (ALL, PART, ALL)  # of the recorded play; who is required joins every round
TRAINING = Training(lr=0.1, batch_size=8)
HOOKS = {  # what each is given that is not its own to change
    "init": (),
    "init_client": ("down",),
    "send": ("state",),
    "train": ("down", "client_state"),
    "update": ("state",),
    "model": ("down", "client_state"),
    "report": ("state",),
}
HOOK_NAMES = [
    k for k, v in vars(Algorithm).items() if isinstance(v, FunctionType) and k[0] != "_"
]
HOOK_NAMES.remove("require_default")  # is called by an algorithm
# names of attributes of what hooks are given
OTHER_ATTRIBUTES = {*Traits._fields}.union(
    *map(dir, (Clients, Cohort, Fit, Net, SharedRows))
)
BY_CLIENT = ("send", "train", "model")  # give a row for each
CLOSE = 1e-7, 1e-9
MISSING = torch.empty(0, 0, 0)


class Fault(AssertionError):
    """A fault of an algorithm, named in one sentence."""


class Play(NamedTuple):
    """What the rounds of a play left behind."""

    last: State
    states: list[Tensors]  # before the first round, and after each
    done: list[RoundOutcome]
    uploads: list[Tensors]
    unfit: list[tuple[str, int]]  # what was not finite, and after which round


@checked
def check(
    algorithm: Algorithm | type[Algorithm] | str,
    *,
    model: Callable[[], nn.Module] | None = None,
    data: Federation | None = None,
    skip: Collection[str] = (),
) -> None:
    """Puts an instance, a class, a name or "package.module:Class" through all of
    `CHECKS` but those in `skip`.

    `model` and `data` replace a small MLP and three Gaussian classes, where the
    algorithm asks for something else: of the federation the first four clients are
    used, everything in float64. Raises Fault, an AssertionError, with one sentence that
    names what is wrong; ValueError for fewer than four clients.
    """
    case = Case(algorithm_of(algorithm), model, data)
    for name, one in CHECKS.items():
        if name not in skip:
            one(case)


@checked
@dataclass(frozen=True)
class Case:
    """An algorithm, every hook of which is watched, with what it is tried on and the
    play that the checks read."""

    given: Algorithm
    model: Callable[[], nn.Module] | None = None
    federation: Federation | None = None
    dtype: torch.dtype = torch.float64

    @cached_property
    def data(self) -> Federation:
        """Four clients with the splits train, val and test."""
        data = self.federation or _gaussians()
        data = data.subset(ALL)
        data = with_validation(data) if self.given.traits.needs_val else data
        x, y = (
            t.to(self.dtype) if t.is_floating_point() else t for t in (data.x, data.y)
        )
        return replace(data, x=x, y=y)

    @cached_property
    def net(self) -> Net:
        """The model that is tried on."""
        loss = default_loss(self.data.y)
        return self.given.prepare(
            Net(lambda: (self.model or _mlp)().to(self.dtype), loss, seed=1)
        )

    @cached_property
    def watched(self) -> Algorithm:
        """The algorithm with a check of what goes into and comes out of each hook."""
        return _watched(self.given)

    def config(self, algorithm: Algorithm | None = None, **changed: Any) -> RunConfig:
        """What a run on this case, or on a changed one, keeps the same."""
        context = TrainContext(
            self.net, self.data, TRAINING, Engine("loop"), Workers(1), rounds=6
        )
        return RunConfig(algorithm or self.watched, context._replace(**changed))

    def renumbered(
        self, numbers: Sequence[int], target: int = 1, **changed: Any
    ) -> RunConfig:
        """The same with some clients, in another order; a target stays who it is."""
        alg: Any = self.given
        if hasattr(alg, "target"):
            alg = replace(alg, target=numbers.index(target))
        return self.config(_watched(alg), data=self.data.subset(numbers), **changed)

    def breaking(self, clients: Sequence[int]) -> RunConfig:
        """The same where these clients' training overflows."""
        x = self.data.x.clone()
        index = self.data.index
        rows = [
            of[i] for split, of in index.items() if split != "test" for i in clients
        ]
        x[torch.cat(rows)] *= 5e307 / x.abs().max()
        return self.config(data=replace(self.data, x=x))

    def otherwise_tested(self) -> RunConfig:
        """The same, but every client has another's samples in the split "test", and
        one less."""
        index = dict(self.data.index)
        if "test" in index:
            first, *others = (rows[1:] for rows in index["test"])
            index["test"] = [*others, first]
        return self.config(data=replace(self.data, index=index))

    def play(
        self, config: RunConfig, cohorts: Sequence[Sequence[int]] = COHORTS
    ) -> Play:
        """Some rounds, by default those of the recorded play; Fault where one fails."""
        alg = config.algorithm
        n = config.context.data.n
        state = initial_state(alg, config.context.net, n)
        play = Play(state, [_state(state)], [], [], [])
        # the hooks of `train` add theirs
        object.__setattr__(alg, "_uploads", play.uploads)
        for some in cohorts:
            ids = torch.tensor(sorted({*some, *alg.traits.required_clients}))
            with _named("round", f" in round {state.round + 1}{_of(len(ids), n)}"):
                state, done = step(config, state, ids)
            play.states.append(_state(state))
            play.done.append(done)
            unfit = [
                *(f"server.{k}" for k in done.non_finite_state),
                *_unfit(play.states[-1]),
            ]
            play.unfit.extend((key, state.round) for key in unfit)
        return play._replace(last=state)

    @cached_property
    def recorded(self) -> Play:
        """The play that the checks read."""
        return self.play(self.config())

    @cached_property
    def found(self) -> Tensors:
        """Everything that the recorded play leaves."""
        return self.results(self.recorded)

    def evaluate(self, state: State, config: RunConfig) -> Tensors:
        """What an evaluation finds; Fault where it fails."""
        split = "test" if "test" in config.context.data.index else "train"
        with _named("predict"):
            found = evaluate(config, state, split)
        return {f"the evaluation's {k}": v for k, v in found.items()}

    def results(self, play: Play) -> Tensors:
        """Everything that a run leaves."""
        found = _state(play.last) | self.evaluate(play.last, self.config())
        done = play.done[-1]
        if done.void or done.cohort is None:
            return found
        return found | self.watched.report(play.last.server, done.mix, done.cohort)

    def left(self, config: RunConfig) -> Tensors:
        """Everything that such a run of as many rounds leaves."""
        return self.results(self.play(config))


# what goes into and comes out of the hooks ------------------------------------


def _watched(alg: Algorithm) -> Algorithm:
    cls = type(alg)
    new = copy(alg)
    watched = type(cls.__name__, (cls,), {name: _hook(cls, name) for name in HOOKS})
    object.__setattr__(new, "__class__", watched)
    return new


def _hook(cls: type[Algorithm], name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(HOOKS[name], args, strict=False))
        before = {what: _copies(payload) for what, payload in given.items()}
        count = 0
        where = ""
        for who in (v for v in args if isinstance(v, Cohort | Clients)):
            count = len(who.ids)
            where = _of(count, who.n if isinstance(who, Cohort) else who.context.data.n)
        with _named(name, where):
            out = getattr(cls, name)(self, *args, **kwargs)
        for what, payload in given.items():
            fault = (
                f"{name}: {what}[{{!r}}] was changed in place; it is not the hook's "
                "own, so work "
                "on a copy."
            )
            _same(_copies(payload), before[what], fault)
        if name in BY_CLIENT:
            for part in out[:2] if name == "train" else [out]:
                _check_rows(name, part, count)
        if name == "train":
            _check_own(args[1], out[0])
            self._uploads.append(_copies(out[1]))
        return out

    return hook


def _check_rows(name: str, given: Mapping[str, Any], count: int) -> None:
    """What a hook gives are tensors, which are counted in bytes, with a row for each
    client."""
    for key, value in given.items():
        rows = value.index if isinstance(value, SharedRows) else value
        if not isinstance(rows, Tensor) or rows.shape[:1] != (count,):
            raise Fault(
                f"{name}: expected a tensor with one row for each of the {count} "
                "clients as "
                f"{key!r}, got {summarize(rows)}."
            )


def _check_own(own: Tensors, new: Tensors) -> None:
    """What a client keeps is what `init_client` gave it, of the same shapes and
    dtypes."""
    for key, value in new.items():
        old = own.get(key)
        if old is None or (old.shape, old.dtype) != (value.shape, value.dtype):
            raise Fault(
                f"train: the clients' state {key!r} was {summarize(old)} and became "
                f"{summarize(value)}; "
                "init_client gives a state, which keeps its shape and dtype."
            )


@contextmanager
def _named(hook: str, where: str = "") -> Iterator[None]:
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        said = [*str(error).strip().splitlines(), "without a message"][0]
        raise Fault(f"{hook}: raised {type(error).__name__}{where}: {said}") from error


def _of(count: int, n: int) -> str:
    return f" with {count} of {n} clients"


def _copies(payload: Mapping[str, Any]) -> Tensors:
    return {
        k: (v.rows if isinstance(v, SharedRows) else v).clone()
        for k, v in payload.items()
    }


def _state(state: State) -> Tensors:
    """A copy of what is kept."""
    return _copies(flatten_state(state))


def _other(a: Tensors, b: Tensors, rtol: float = 0.0, atol: float = 0.0) -> str | None:
    """What differs first."""
    for key in {**a, **b}:
        one = a.get(key, MISSING)
        other = b.get(key, MISSING)
        alike = one.shape == other.shape and one.dtype == other.dtype
        if not alike or not torch.allclose(
            one.double(), other.double(), rtol, atol, True
        ):
            return key
    return None


def _same(
    a: Tensors, b: Tensors, fault: str, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Fault, whose `{}` is what differs first, unless both hold the same."""
    key = _other(a, b, rtol, atol)
    if key is not None:
        raise Fault(fault.format(key))


def _unfit(tensors: Tensors) -> list[str]:
    return [k for k, v in tensors.items() if not v.isfinite().all()]


# what a class brings ----------------------------------------------------------


def _words(code: CodeType) -> set[str]:
    """The names that a function speaks of."""
    inside = (_words(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inside)


def _code_of_member(member: Any) -> CodeType | None:
    """The code of a method or a property; None for a value."""
    # a class method, a property, a cached property
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, member)
    return getattr(unwrap(member), "__code__", None)


def _foreign_classes(alg: Algorithm) -> list[type]:
    """The classes of the algorithm that are not pflcore's own, the class itself
    first."""
    outside = (
        c for c in type(alg).__mro__ if c.__module__.partition(".")[0] != "pflcore"
    )
    return [c for c in outside if c is not object]


def _added_members(alg: Algorithm) -> dict[str, Any]:
    """The public members that no class of pflcore has, and that are no options."""
    theirs = _foreign_classes(alg)
    known = {f.name for f in fields(alg)}
    known = known.union(*(vars(c) for c in type(alg).__mro__ if c not in theirs))
    found = {k: v for c in reversed(theirs) for k, v in vars(c).items()}
    return {k: v for k, v in found.items() if k not in known and not k.startswith("_")}


def _reachable_members(alg: Algorithm, members: Mapping[str, Any]) -> set[str]:
    """Those of `members` that the hooks' code speaks of, with any options. A value's
    name may be that of another object's attribute there, `fit.buffers`, which proves
    nothing."""
    reached = [
        _code_of_member(v)
        for b in type(alg).__mro__
        for k, v in vars(b).items()
        if k not in members
    ]
    found = set[str]()
    words = set[str]()
    while reached:
        code = reached.pop()
        if code is not None:
            words |= _words(code)
        new = {
            k
            for k in words & members.keys()
            if _has_code(members[k]) or k not in OTHER_ATTRIBUTES
        }
        new -= found
        found |= new
        reached += [_code_of_member(members[k]) for k in new]
    return found


def _has_code(member: Any) -> bool:
    return isinstance(member, type) or _code_of_member(member) is not None


def _attributes_read(case: Case) -> set[str]:
    """The names that a run reads from the algorithm: newcomers, clients that are
    absent, an evaluation before and after, the record, and a client that comes after
    the run."""
    read, cls = set[str](), type(case.watched)

    def record_read(self: Any, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    alg = copy(case.watched)
    object.__setattr__(
        alg, "__class__", type(cls.__name__, (cls,), {"__getattribute__": record_read})
    )
    config = case.config(alg)
    with suppress(Exception):  # the other checks tell it
        alg.__post_init__()
        play = case.play(config, [PART])
        case.evaluate(play.last, config)
        play = case.play(config)
        case.evaluate(play.last, config)
        done = play.done[-1]
        if done.cohort is not None:
            alg.report(play.last.server, done.mix, done.cohort)
        adapt(config, play.last, case.data.subset([0]), rounds=1)
    return read


# the checks -------------------------------------------------------------------


def names_are_known(case: Case) -> None:
    """Every public name that the class brings is an option, a hook, or what hooks
    use."""
    cls = type(case.given)
    options = {f.name for f in fields(case.given)}
    for name, kind in get_annotations(cls).items():
        if "__dataclass_fields__" not in vars(cls) and "ClassVar" not in str(kind):
            raise Fault(
                f"{name}: it is no option, because {cls.__name__} has no "
                "@dataclass(frozen=True) "
                "above it."
            )
    for one in _foreign_classes(case.given):
        for name in (options & vars(one).keys()) - get_annotations(one).keys():
            value = vars(one)[name]
            if not isinstance(value, MemberDescriptorType):  # a slot
                raise Fault(
                    f"{name}: {one.__name__}'s default {value!r} is not taken, because "
                    "it has no "
                    f"annotation; write {name}: {type(value).__name__} = {value!r}."
                )
    brought = _added_members(case.given)
    strangers = brought.keys() - _reachable_members(case.given, brought)
    if strangers:
        strangers -= _attributes_read(case)
    for name in (k for k in brought if k in strangers):
        if _has_code(brought[name]):
            near = get_close_matches(name, HOOK_NAMES, 1, 0.8)
            meant = (
                f"did you mean {near[0]!r}"
                if near
                else f"the hooks are {', '.join(HOOK_NAMES)}"
            )
            raise Fault(
                f"{name}: no hook has this name, and no run calls it; {meant}, and the "
                "name of a "
                "helper begins with an underscore."
            )
        raise Fault(
            f"{name}: no run reads this attribute of {cls.__name__}; an option has an "
            "annotation, "
            "facts that a run has to know stand in traits = "
            f"Traits({', '.join(Traits._fields)}), "
            "and the name of a constant begins with an underscore."
        )


def stays_finite(case: Case) -> None:
    """On well-behaved data everything stays finite, and no client is dropped."""
    fine = "is not finite on well-behaved data"
    for round, done in enumerate(case.recorded.done, 1):
        for client in done.dropped:
            raise Fault(
                f"train: the upload or new state of client {client} {fine}, in round "
                f"{round}."
            )
    for what, round in case.recorded.unfit:
        raise Fault(f"update: {what} {fine}, after round {round}.")
    for key in _unfit(case.evaluate(case.recorded.last, case.config())):
        raise Fault(f"model or predict: {key} {fine}.")


def runs_repeat(case: Case) -> None:
    """One seed gives the same bits in every run, with any number of workers."""
    faults = {
        1: "{} differs between two runs of one seed: something draws from the global "
        "generator, or "
        "the algorithm remembers something between rounds outside its state.",
        3: "{} differs between 1 and 3 worker threads; hooks and losses must not share "
        "what they "
        "change.",
    }
    for workers, fault in faults.items():
        _same(case.found, case.left(case.config(workers=Workers(workers))), fault)


def nobody_trains_on_test(case: Case) -> None:
    """Nothing that is trained looks at the split "test"."""
    fault = (
        "train or update: {} depends on the split 'test', which is there for the "
        "evaluation; "
        "choose by 'val'."
    )
    _same(case.found, case.left(case.otherwise_tested()), fault)


def engines_agree(case: Case) -> None:
    """Client after client, or all at once by vmap: the same results up to rounding."""
    fault = (
        "{} differs between the engines 'loop' and 'vmap': a loss or an update mixes "
        "clients or "
        "branches on values."
    )
    _same(case.found, case.left(case.config(engine=Engine("vmap"))), fault, 1e-6, 1e-8)


def numbers_of_clients_play_no_part(case: Case) -> None:
    """Renumbered clients give renumbered results; with one whole batch an epoch, so
    that shuffles play no part.

    Nothing is asked of a method whose results are another seed's even so: which draws a
    client has belongs to its number.
    """
    order = [2, 0, 3, 1]
    if case.given.traits.required_clients and not hasattr(case.given, "target"):
        return
    size = int(case.data.size("train").max())
    training = replace(TRAINING, batch_size=size, epochs=2)

    def left(numbers: Sequence[int], seed: int = 0) -> Tensors:
        """What the clients keep, and what an evaluation finds, where `numbers[i]` is
        number i."""
        config = case.renumbered(numbers, training=training, seed=seed)
        last = case.play(
            config, [[numbers.index(i) for i in ids] for ids in COHORTS]
        ).last
        own = {f"clients.{k}": v for k, v in last.clients.items()}
        return own | case.evaluate(last, config)

    first = left(ALL)
    again = left(order)
    expected = {k: v[order] for k, v in first.items()}
    for k, v in expected.items():
        if v.shape[1:] == (4,) and _other({k: v}, {k: again[k]}, *CLOSE):
            expected[k] = v[:, order]  # a column for every client
    if _other(expected, again, *CLOSE) and not _other(first, left(ALL, seed=1), *CLOSE):
        fault = (
            "update: {} depends on the clients' numbers: renumbered clients give other "
            "results "
            "than the same ones renumbered."
        )
        _same(expected, again, fault, *CLOSE)


def seeds_differ(case: Case) -> None:
    """Another seed gives another run."""
    if not _other(case.play(case.config(seed=1)).states[-1], case.recorded.states[-1]):
        raise Fault(
            "train: another seed gives the same run, so nothing that is trained on "
            "shuffled "
            "batches is kept or sent."
        )


def one_client_suffices(case: Case) -> None:
    """A federation of one client runs."""
    config = case.renumbered([2], target=2)
    play = case.play(config, [[0], [0]])
    if any(d.void for d in play.done) or _unfit(case.evaluate(play.last, config)):
        raise Fault(
            "update or model: a federation of one client gives results that are not "
            "finite."
        )


def float32_runs(case: Case) -> None:
    """What runs in float64 runs in float32, too."""
    case = replace(case, dtype=torch.float32)
    try:
        case.evaluate(case.play(case.config(), COHORTS[:2]).last, case.config())
    except Fault as fault:
        raise Fault(f"in float32, as runs are by default, {fault}") from fault


def broken_clients_are_absent(case: Case) -> None:
    """A client whose training overflows harms nobody: the others' results are as if it
    had not come."""
    if not case.data.x.is_floating_point() or 1 in case.given.traits.required_clients:
        return
    config = case.breaking([1])
    play = case.play(config, COHORTS[:2])
    for what, _ in play.unfit:
        raise Fault(
            f"update: {what} is not finite after a client's update overflowed; nothing "
            "but checked "
            "uploads may reach it."
        )
    if all(done.dropped for done in play.done):
        rest = case.play(config, [[i for i in ids if i != 1] for ids in COHORTS[:2]])
        fault = "train or update: {} depends on a client whose update was not finite."
        _same(play.states[-1], rest.states[-1], fault, 1e-12, 1e-14)


def bytes_are_counted(case: Case) -> None:
    """No parameter's columns travel, and are counted, that are always zero."""
    uploads = case.recorded.uploads
    plain = replace(case, given=FedAvg())
    # all that moves at all
    moved = plain.play(plain.config(), [ALL]).uploads[0]["delta"].abs()
    whole = [
        key for key, first in uploads[0].items() if first.shape[1:] == (case.net.size,)
    ]
    for key in whole:
        for name, columns in case.net.slices.items():
            sent = any(up[key][:, columns].any() for up in uploads)
            if not sent and moved[:, columns].max() > 1e-9:
                raise Fault(
                    f"train: the columns of {name!r} in the upload {key!r} are always "
                    "zero, but "
                    "are counted as sent; send the shared columns only, by net.split "
                    "and net.join."
                )


# The checks by name, in their order; each raises a Fault where its case has one.
CHECKS: dict[str, Callable[[Case], None]] = {
    f.__name__: f
    for f in (
        names_are_known,
        stays_finite,
        runs_repeat,
        nobody_trains_on_test,
        engines_agree,
        numbers_of_clients_play_no_part,
        seeds_differ,
        one_client_suffices,
        float32_runs,
        bytes_are_counted,
        broken_clients_are_absent,
    )
}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def _gaussians() -> Federation:
    """Four clients, three Gaussian classes, every second client with its labels
    turned."""
    gen = torch.Generator().manual_seed(4)
    centre = 2 * torch.randn(3, 6, generator=gen, dtype=torch.float64)

    def samples(n: int, turn: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 3, (n,), generator=gen)
        return centre[y] + torch.randn(n, 6, generator=gen, dtype=torch.float64), (
            y + turn
        ) % 3

    # two of one size: such clients take every step together
    clients = [
        {split: samples(n, i % 2) for split in ("train", "val", "test")}
        for i, n in enumerate((10, 20, 31, 20))
    ]
    return Federation.from_clients(clients, classes=3, dtype=None)
