"""Checks that an algorithm keeps its contract: `pflcore.testing.check(MyAlgorithm())`.

A play is some rounds of the algorithm on four small clients in float64. In the recorded
play all clients take part in the first round, two in the second and all in the third.
Each check compares it with another play, in which one thing is different. The first
fault ends the checks with one sentence that names it.
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
from pflcore.simulation._state import RunConfig, State, flatten_state, initial_state
from pflcore.simulation._uploads import RoundOutcome
from pflcore.simulation.round import step
from pflcore.train import Clients, Fit, Net, Training
from pflcore.train._clients import TrainContext
from pflcore.train._engines import Engine
from pflcore.train._losses import default_loss
from pflcore.train._workers import Workers

__all__ = ["CHECKS", "Case", "Fault", "check"]

ALL = (0, 1, 2, 3)
PART = (1, 2)
# The recorded play. Clients that the algorithm requires are added to every cohort.
COHORTS = (ALL, PART, ALL)
TRAINING = Training(lr=0.1, batch_size=8)
HOOKS = {  # the hooks, and their first arguments, which a hook must not change
    "init": (),
    "init_client": ("down",),
    "send": ("state",),
    "train": ("down", "client_state"),
    "update": ("state",),
    "model": ("down", "client_state"),
    "report": ("state",),
}
HOOK_NAMES = [
    name
    for name, member in vars(Algorithm).items()
    if isinstance(member, FunctionType) and not name.startswith("_")
]
HOOK_NAMES.remove("require_default")  # algorithms call it, so it is no hook
# Names of the attributes that the arguments of hooks have.
OTHER_ATTRIBUTES = {*Traits._fields}.union(
    *map(dir, (Clients, Cohort, Fit, Net, SharedRows))
)
BY_CLIENT = ("send", "train", "model")  # hooks that return a row for each client
MISSING = torch.empty(0, 0, 0)  # stands for a tensor that one of two states lacks


class Tolerance(NamedTuple):
    """The differences up to which two results are the same, as in `torch.allclose`."""

    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)
CLOSE = Tolerance(1e-7, 1e-9)  # sums over clients in another order


class Fault(AssertionError):
    """A fault of an algorithm, named in one sentence."""


class Play(NamedTuple):
    """The results of a play's rounds."""

    last: State
    states: list[Tensors]  # before the first round, and after each
    done: list[RoundOutcome]  # one per round
    uploads: list[Tensors]  # one per call of `train`
    # Names of tensors of the state that were not finite, each with the round.
    unfit: list[tuple[str, int]]


@checked
def check(
    algorithm: Algorithm | type[Algorithm] | str,
    *,
    model: Callable[[], nn.Module] | None = None,
    data: Federation | None = None,
    skip: Collection[str] = (),
) -> None:
    """Checks that an algorithm keeps its contract, and raises Fault where it does not.

    Fault is an AssertionError with one sentence that names what is wrong.

    Args:
        algorithm: An instance, a class, a name or "package.module:Class".
        model: Makes the model, for an algorithm that cannot train a small MLP.
        data: A federation, for an algorithm that cannot take three Gaussian classes.
            Its first four clients are used, in float64.
        skip: Names of `CHECKS` that are left out.

    Raises ValueError for a federation of fewer than four clients.
    """
    case = Case(algorithm_of(algorithm), model, data)
    for name, run_check in CHECKS.items():
        if name not in skip:
            run_check(case)


@checked
@dataclass(frozen=True)
class Case:
    """An algorithm with a model and data, and the recorded play of it."""

    given: Algorithm  # as it is; see `watched`
    model: Callable[[], nn.Module] | None = None
    federation: Federation | None = None
    dtype: torch.dtype = torch.float64

    @cached_property
    def data(self) -> Federation:
        """Four clients with the splits train, val and test."""
        data = self.federation or _gaussians()
        data = data.subset(ALL)
        if self.given.traits.needs_val:
            data = with_validation(data)
        return replace(data, x=self._converted(data.x), y=self._converted(data.y))

    def _converted(self, values: Tensor) -> Tensor:
        """Floating-point values in the case's dtype; whole numbers as they are."""
        return values.to(self.dtype) if values.is_floating_point() else values

    @cached_property
    def net(self) -> Net:
        """The model of the plays, in the case's dtype."""
        make_model = self.model or _mlp
        loss = default_loss(self.data.y)
        net = Net(lambda: make_model().to(self.dtype), loss, seed=1)
        return self.given.prepare(net)

    @cached_property
    def watched(self) -> Algorithm:
        """The algorithm, whose hooks check their arguments and what they return."""
        return _watched(self.given)

    def config(self, algorithm: Algorithm | None = None, **changed: Any) -> RunConfig:
        """The configuration of a play.

        Args:
            algorithm: Takes the place of the watched algorithm.
            changed: Fields of the `TrainContext` that are different.
        """
        context = TrainContext(
            self.net, self.data, TRAINING, Engine("loop"), Workers(1), rounds=6
        )
        return RunConfig(algorithm or self.watched, context._replace(**changed))

    def renumbered(
        self, numbers: Sequence[int], target: int = 1, **changed: Any
    ) -> RunConfig:
        """A configuration in which client `numbers[i]` has the number i.

        Clients that are not in `numbers` are left out.

        Args:
            target: The old number of the client that is the algorithm's target, if it
                has one.
        """
        alg: Any = self.given
        if hasattr(alg, "target"):
            alg = replace(alg, target=numbers.index(target))
        return self.config(_watched(alg), data=self.data.subset(numbers), **changed)

    def breaking(self, clients: Sequence[int]) -> RunConfig:
        """A configuration in which the training of these clients overflows."""
        rows = []
        for split, index in self.data.index.items():
            if split != "test":
                rows += [index[client] for client in clients]
        x = self.data.x.clone()
        x[torch.cat(rows)] *= 5e307 / x.abs().max()  # nearly the largest float64
        return self.config(data=replace(self.data, x=x))

    def otherwise_tested(self) -> RunConfig:
        """A configuration in which each client has another one's test samples.

        Each has one sample less than the other one, too.
        """
        index = dict(self.data.index)
        if "test" in index:
            shorter = [rows[1:] for rows in index["test"]]
            index["test"] = [*shorter[1:], shorter[0]]
        return self.config(data=replace(self.data, index=index))

    def play(
        self, config: RunConfig, cohorts: Sequence[Sequence[int]] = COHORTS
    ) -> Play:
        """Plays one round for each cohort; raises Fault where one fails."""
        alg = config.algorithm
        n = config.context.data.n
        state = initial_state(alg, config.context.net, n)
        play = Play(state, [_state(state)], [], [], [])
        # The watched hook `train` appends to it; the algorithm is frozen otherwise.
        object.__setattr__(alg, "_uploads", play.uploads)
        for cohort in cohorts:
            ids = torch.tensor(sorted({*cohort, *alg.traits.required_clients}))
            place = f" in round {state.round + 1}{_of(len(ids), n)}"
            with _named("round", place):
                state, outcome = step(config, state, ids)
            play.states.append(_state(state))
            play.done.append(outcome)
            unfit = [f"server.{key}" for key in outcome.non_finite_state]
            unfit += _unfit(play.states[-1])
            play.unfit.extend((key, state.round) for key in unfit)
        return play._replace(last=state)

    @cached_property
    def recorded(self) -> Play:
        """The play that the checks compare with others."""
        return self.play(self.config())

    @cached_property
    def found(self) -> Tensors:
        """The results of the recorded play."""
        return self.results(self.recorded)

    def evaluate(self, state: State, config: RunConfig) -> Tensors:
        """The results of an evaluation, by name; raises Fault where it fails."""
        split = "test" if "test" in config.context.data.index else "train"
        with _named("predict"):
            values = evaluate(config, state, split)
        return {f"the evaluation's {key}": value for key, value in values.items()}

    def results(self, play: Play) -> Tensors:
        """The last state of a play, its evaluation, and the report of its last round.

        The evaluation uses the recorded play's data, whatever data the play had.
        """
        results = _state(play.last) | self.evaluate(play.last, self.config())
        outcome = play.done[-1]
        if outcome.void or outcome.cohort is None:
            return results
        server = play.last.server
        return results | self.watched.report(server, outcome.mix, outcome.cohort)

    def left(self, config: RunConfig) -> Tensors:
        """The results of a play with this configuration."""
        return self.results(self.play(config))


# what goes into and comes out of the hooks ------------------------------------


def _watched(alg: Algorithm) -> Algorithm:
    """A copy of the algorithm whose hooks are watched; see `_hook`.

    It is of a class that is derived from the algorithm's own.
    """
    cls = type(alg)
    watched = type(cls.__name__, (cls,), {name: _hook(cls, name) for name in HOOKS})
    new = copy(alg)
    object.__setattr__(new, "__class__", watched)
    return new


def _hook(cls: type[Algorithm], name: str) -> Callable[..., Any]:
    """The hook of a class, with checks of its arguments and of what it returns.

    It raises Fault where the hook fails, changes an argument, or returns tensors that
    do not have a row for each client.
    """

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        payloads = dict(zip(HOOKS[name], args, strict=False))
        before = {what: _copies(payload) for what, payload in payloads.items()}
        count, place = _clients_of(args)
        with _named(name, place):
            returned = getattr(cls, name)(self, *args, **kwargs)
        for what, payload in payloads.items():
            fault = (
                f"{name}: {what}[{{!r}}] was changed in place; it is not the hook's "
                "own, so work on a copy."
            )
            _same(_copies(payload), before[what], fault)
        if name == "train":
            client_state, upload, *_ = returned
            _check_rows(name, client_state, count)
            _check_rows(name, upload, count)
            _check_client_state(args[1], client_state)
            self._uploads.append(_copies(upload))
        elif name in BY_CLIENT:
            _check_rows(name, returned, count)
        return returned

    return hook


def _clients_of(args: Sequence[Any]) -> tuple[int, str]:
    """The number of clients that a hook is called for, and words that say it."""
    for argument in args:
        if isinstance(argument, Cohort):
            count = len(argument.ids)
            return count, _of(count, argument.n)
        if isinstance(argument, Clients):
            count = len(argument.ids)
            return count, _of(count, argument.context.data.n)
    return 0, ""


def _check_rows(name: str, payload: Mapping[str, Any], count: int) -> None:
    """Raises Fault unless a payload has tensors only, with a row for each client.

    Bytes are counted by them.
    """
    for key, value in payload.items():
        rows = value.index if isinstance(value, SharedRows) else value
        if not isinstance(rows, Tensor) or rows.shape[:1] != (count,):
            raise Fault(
                f"{name}: expected a tensor with one row for each of the {count} "
                f"clients as {key!r}, got {summarize(rows)}."
            )


def _check_client_state(before: Tensors, after: Tensors) -> None:
    """Raises Fault where a client's state is not as `init_client` made it.

    The keys, shapes and dtypes stay the same.
    """
    for key, new in after.items():
        old = before.get(key)
        if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise Fault(
                f"train: the clients' state {key!r} was {summarize(old)} and became "
                f"{summarize(new)}; init_client gives a state, which keeps its shape "
                "and dtype."
            )


@contextmanager
def _named(hook: str, place: str = "") -> Iterator[None]:
    """Turns an error of the block into a Fault that names the hook."""
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else "without a message"
        kind = type(error).__name__
        raise Fault(f"{hook}: raised {kind}{place}: {reason}") from error


def _of(count: int, n: int) -> str:
    return f" with {count} of {n} clients"


def _copies(payload: Mapping[str, Any]) -> Tensors:
    """Copies of a payload's tensors."""
    copies = {}
    for key, value in payload.items():
        tensor = value.rows if isinstance(value, SharedRows) else value
        copies[key] = tensor.clone()
    return copies


def _state(state: State) -> Tensors:
    """Copies of a state's tensors, by name."""
    return _copies(flatten_state(state))


def _first_difference(a: Tensors, b: Tensors, tolerance: Tolerance) -> str | None:
    """The name of the first tensor that differs; None where none does."""
    for key in {**a, **b}:
        x = a.get(key, MISSING)
        y = b.get(key, MISSING)
        if x.shape != y.shape or x.dtype != y.dtype:
            return key
        if not torch.allclose(x.double(), y.double(), *tolerance, equal_nan=True):
            return key
    return None


def _same(a: Tensors, b: Tensors, fault: str, tolerance: Tolerance = EXACT) -> None:
    """Raises Fault where the tensors differ.

    Args:
        fault: The text, in which {} stands for the name of what differs first.
    """
    key = _first_difference(a, b, tolerance)
    if key is not None:
        raise Fault(fault.format(key))


def _unfit(tensors: Tensors) -> list[str]:
    """The names of the tensors that are not finite."""
    return [key for key, value in tensors.items() if not value.isfinite().all()]


# members of a class -----------------------------------------------------------


def _names_in(code: CodeType) -> set[str]:
    """The names of attributes and globals in a function and in those inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _code_of_member(member: Any) -> CodeType | None:
    """The code of a method or a property; None for a value."""
    # These hold the function of a class method, a property and a cached property.
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, member)
    return getattr(unwrap(member), "__code__", None)


def _foreign_classes(alg: Algorithm) -> list[type]:
    """The classes of the algorithm that are not pflcore's, its own class first."""
    foreign = []
    for cls in type(alg).__mro__:
        package = cls.__module__.partition(".")[0]
        if package != "pflcore" and cls is not object:
            foreign.append(cls)
    return foreign


def _added_members(alg: Algorithm) -> dict[str, Any]:
    """The public members that no class of pflcore has, and that are no options."""
    foreign = _foreign_classes(alg)
    known = {f.name for f in fields(alg)}
    for cls in type(alg).__mro__:
        if cls not in foreign:
            known |= vars(cls).keys()
    members: dict[str, Any] = {}
    for cls in reversed(foreign):  # a class overrides those that it is derived from
        members |= vars(cls)
    added = {}
    for name, member in members.items():
        if name not in known and not name.startswith("_"):
            added[name] = member
    return added


def _reachable_members(alg: Algorithm, members: Mapping[str, Any]) -> set[str]:
    """Those of `members` whose names stand in the code of hooks, or of one another.

    All code counts, whatever options it is for. A value does not count where an object
    that hooks are called with has an attribute of its name: `fit.buffers` in a hook
    does not show that the class's `buffers` are read.
    """
    to_read = []  # code of the hooks at first, then of the members that it names
    for cls in type(alg).__mro__:
        for name, member in vars(cls).items():
            if name not in members:
                to_read.append(_code_of_member(member))
    reached = set[str]()
    while to_read:
        code = to_read.pop()
        if code is None:
            continue
        for name in (_names_in(code) & members.keys()) - reached:
            if _has_code(members[name]) or name not in OTHER_ATTRIBUTES:
                reached.add(name)
                to_read.append(_code_of_member(members[name]))
    return reached


def _has_code(member: Any) -> bool:
    return isinstance(member, type) or _code_of_member(member) is not None


def _attributes_read(case: Case) -> set[str]:
    """The names of the algorithm's attributes that runs read.

    The runs have new clients, absent clients, evaluations after one round and after
    all, a report, and a client that is adapted after the run.
    """
    read = set[str]()
    cls = type(case.watched)

    def record_read(self: Any, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    recording = type(cls.__name__, (cls,), {"__getattribute__": record_read})
    alg = copy(case.watched)
    object.__setattr__(alg, "__class__", recording)
    config = case.config(alg)
    with suppress(Exception):  # the other checks find it
        alg.__post_init__()
        play = case.play(config, [PART])
        case.evaluate(play.last, config)
        play = case.play(config)
        case.evaluate(play.last, config)
        outcome = play.done[-1]
        if outcome.cohort is not None:
            alg.report(play.last.server, outcome.mix, outcome.cohort)
        adapt(config, play.last, case.data.subset([0]), rounds=1)
    return read


# the checks -------------------------------------------------------------------


def names_are_known(case: Case) -> None:
    """Every public name that the class adds is an option, a hook, or used by hooks."""
    _require_annotated_options(case.given)
    added = _added_members(case.given)
    unknown = added.keys() - _reachable_members(case.given, added)
    if unknown:
        unknown -= _attributes_read(case)
    for name, member in added.items():
        if name in unknown:
            raise Fault(_unknown_member_text(type(case.given), name, member))


def _require_annotated_options(alg: Algorithm) -> None:
    """Raises Fault where a class of the user's has an option that Python ignores."""
    cls = type(alg)
    options = {f.name for f in fields(alg)}
    for name, annotation in get_annotations(cls).items():
        is_dataclass = "__dataclass_fields__" in vars(cls)
        if not is_dataclass and "ClassVar" not in str(annotation):
            raise Fault(
                f"{name}: it is no option, because {cls.__name__} has no "
                "@dataclass(frozen=True) above it."
            )
    for foreign in _foreign_classes(alg):
        annotated = get_annotations(foreign).keys()
        for name in (options & vars(foreign).keys()) - annotated:
            value = vars(foreign)[name]
            is_slot = isinstance(value, MemberDescriptorType)
            if not is_slot:
                raise Fault(
                    f"{name}: {foreign.__name__}'s default {value!r} is not taken, "
                    f"because it has no annotation; write {name}: "
                    f"{type(value).__name__} = {value!r}."
                )


def _unknown_member_text(cls: type, name: str, member: Any) -> str:
    """The sentence on a member that no run uses."""
    if _has_code(member):
        nearest = get_close_matches(name, HOOK_NAMES, 1, 0.8)
        hint = f"the hooks are {', '.join(HOOK_NAMES)}"
        if nearest:
            hint = f"did you mean {nearest[0]!r}"
        return (
            f"{name}: no hook has this name, and no run calls it; {hint}, and the name "
            "of a helper begins with an underscore."
        )
    return (
        f"{name}: no run reads this attribute of {cls.__name__}; an option has an "
        "annotation, facts that a run has to know stand in traits = "
        f"Traits({', '.join(Traits._fields)}), and the name of a constant begins with "
        "an underscore."
    )


def stays_finite(case: Case) -> None:
    """On well-behaved data everything stays finite, and no client is dropped."""
    flaw = "is not finite on well-behaved data"
    for round, outcome in enumerate(case.recorded.done, 1):
        for client in outcome.dropped:
            raise Fault(
                f"train: the upload or new state of client {client} {flaw}, in round "
                f"{round}."
            )
    for key, round in case.recorded.unfit:
        raise Fault(f"update: {key} {flaw}, after round {round}.")
    for key in _unfit(case.evaluate(case.recorded.last, case.config())):
        raise Fault(f"model or predict: {key} {flaw}.")


def runs_repeat(case: Case) -> None:
    """One seed gives the same bits in every run, with any number of workers."""
    again = case.left(case.config())
    fault = (
        "{} differs between two runs of one seed: something draws from the global "
        "generator, or the algorithm remembers something between rounds outside its "
        "state."
    )
    _same(case.found, again, fault)
    with_threads = case.left(case.config(workers=Workers(3)))
    fault = (
        "{} differs between 1 and 3 worker threads; hooks and losses must not share "
        "what they change."
    )
    _same(case.found, with_threads, fault)


def nobody_trains_on_test(case: Case) -> None:
    """Nothing that is trained depends on the split "test"."""
    fault = (
        "train or update: {} depends on the split 'test', which is there for the "
        "evaluation; choose by 'val'."
    )
    _same(case.found, case.left(case.otherwise_tested()), fault)


def engines_agree(case: Case) -> None:
    """The engines loop and vmap give the same results up to rounding."""
    fault = (
        "{} differs between the engines 'loop' and 'vmap': a loss or an update mixes "
        "clients or branches on values."
    )
    by_vmap = case.left(case.config(engine=Engine("vmap")))
    _same(case.found, by_vmap, fault, Tolerance(1e-6, 1e-8))


def numbers_of_clients_play_no_part(case: Case) -> None:
    """Renumbered clients give renumbered results.

    A client has other random draws under another number. So each epoch is one batch of
    all samples, which shuffling cannot change. An algorithm whose results change with
    the seed even then has other draws, and is not checked.
    """
    if case.given.traits.required_clients and not hasattr(case.given, "target"):
        return
    order = [2, 0, 3, 1]
    first = _renumbered_results(case, ALL)
    got = _renumbered_results(case, order)
    want = {key: value[order] for key, value in first.items()}
    for key, value in want.items():
        has_columns = value.shape[1:] == (len(ALL),)
        if has_columns and _first_difference({key: value}, {key: got[key]}, CLOSE):
            want[key] = value[:, order]  # there is a column for each client, too
    if _first_difference(want, got, CLOSE) is None:
        return
    other_seed = _renumbered_results(case, ALL, seed=1)
    if _first_difference(first, other_seed, CLOSE) is None:
        fault = (
            "update: {} depends on the clients' numbers: renumbered clients give other "
            "results than the same ones renumbered."
        )
        _same(want, got, fault, CLOSE)


def _renumbered_results(case: Case, numbers: Sequence[int], seed: int = 0) -> Tensors:
    """The clients' states and the evaluation, where client `numbers[i]` is number i.

    Each tensor has a row for each client.
    """
    size = int(case.data.size("train").max())
    training = replace(TRAINING, batch_size=size, epochs=2)
    config = case.renumbered(numbers, training=training, seed=seed)
    cohorts = []
    for ids in COHORTS:
        cohorts.append([numbers.index(client) for client in ids])
    last = case.play(config, cohorts).last
    states = {f"clients.{key}": value for key, value in last.clients.items()}
    return states | case.evaluate(last, config)


def seeds_differ(case: Case) -> None:
    """Another seed gives another run."""
    other_seed = case.play(case.config(seed=1))
    last = case.recorded.states[-1]
    if _first_difference(other_seed.states[-1], last, EXACT) is None:
        raise Fault(
            "train: another seed gives the same run, so nothing that is trained on "
            "shuffled batches is kept or sent."
        )


def one_client_suffices(case: Case) -> None:
    """A federation of one client can be trained and evaluated."""
    config = case.renumbered([2], target=2)
    play = case.play(config, [[0], [0]])
    is_void = any(outcome.void for outcome in play.done)
    if is_void or _unfit(case.evaluate(play.last, config)):
        raise Fault(
            "update or model: a federation of one client gives results that are not "
            "finite."
        )


def float32_runs(case: Case) -> None:
    """The algorithm runs in float32, too."""
    case = replace(case, dtype=torch.float32)
    config = case.config()
    try:
        play = case.play(config, COHORTS[:2])
        case.evaluate(play.last, config)
    except Fault as fault:
        raise Fault(f"in float32, as runs are by default, {fault}") from fault


def broken_clients_are_absent(case: Case) -> None:
    """A client whose training overflows changes nothing, as if it were absent."""
    broken = 1
    required = case.given.traits.required_clients
    if not case.data.x.is_floating_point() or broken in required:
        return
    config = case.breaking([broken])
    cohorts = COHORTS[:2]
    play = case.play(config, cohorts)
    for key, _ in play.unfit:
        raise Fault(
            f"update: {key} is not finite after a client's update overflowed; nothing "
            "but checked uploads may reach it."
        )
    if all(outcome.dropped for outcome in play.done):
        others = []
        for ids in cohorts:
            others.append([client for client in ids if client != broken])
        without = case.play(config, others)
        fault = "train or update: {} depends on a client whose update was not finite."
        _same(play.states[-1], without.states[-1], fault, Tolerance(1e-12, 1e-14))


def bytes_are_counted(case: Case) -> None:
    """No upload has columns that are always zero, because their bytes are counted.

    Columns of parameters that FedAvg does not move either may be zero.
    """
    uploads = case.recorded.uploads
    plain = replace(case, given=FedAvg())
    movement = plain.play(plain.config(), [ALL]).uploads[0]["delta"].abs()
    for key, first in uploads[0].items():
        if first.shape[1:] != (case.net.size,):
            continue  # its columns are not the model's parameters
        for name, columns in case.net.slices.items():
            is_sent = any(upload[key][:, columns].any() for upload in uploads)
            if not is_sent and movement[:, columns].max() > 1e-9:
                raise Fault(
                    f"train: the columns of {name!r} in the upload {key!r} are always "
                    "zero, but are counted as sent; send the shared columns only, by "
                    "net.split and net.join."
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
    """Four clients with samples of three Gaussian classes.

    Every second client has its labels shifted by one, so that clients differ.
    """
    generator = torch.Generator().manual_seed(4)
    centres = 2 * torch.randn(3, 6, generator=generator, dtype=torch.float64)

    def samples(count: int, shift: int) -> tuple[Tensor, Tensor]:
        classes = torch.randint(0, 3, (count,), generator=generator)
        noise = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        return centres[classes] + noise, (classes + shift) % 3

    clients = []
    # Two clients have as many samples, because such clients take every step together.
    for client, count in enumerate((10, 20, 31, 20)):
        splits = {}
        for split in ("train", "val", "test"):
            splits[split] = samples(count, shift=client % 2)
        clients.append(splits)
    return Federation.from_clients(clients, classes=3, dtype=None)
