"""One round as arrows in one direction: train -> (attack) -> accept -> serve -> commit.

Each takes values and returns values. `commit` alone writes, when everything it writes is there.
Rows of clients that do not fit into memory are in files, with blocks on disk only for those that
were ever written.
"""

import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore.algorithms._protocol import (
    Algorithm,
    BadUpload,
    Changes,
    Cohort,
    Mix,
    Payload,
    Rows,
    Tensors,
    Void,
    apply,
    check_training,
    zero_rows,
)
from pflcore.check import Count, Fraction, checked, need, refuse, shown
from pflcore.data._ragged import onto
from pflcore.metrics import human
from pflcore.simulation._accept import Outcome, Trained, accept, leave_out, spoilt
from pflcore.simulation._interrupts import unbroken
from pflcore.simulation._settings import Robustness
from pflcore.train import Clients, Net
from pflcore.train._card import REPEATING
from pflcore.train._clients import Setting
from pflcore.train._random import drawn
from pflcore.train._workers import one_thread

__all__ = ["Setup", "begin", "step"]
SMALL = 1 << 22  # weights of all clients that are looked at together: one thread passes through
# them in a few milliseconds, and waking others takes longer on a busy machine
BLOCK = 1 << 12  # bytes of a file's blocks: a row may take so many more


@dataclass(frozen=True)
class State:
    """Everything that changes over a run."""

    server: Tensors
    clients: Tensors  # [N, ...]; rows of a client who has not taken part yet are never read
    batch_norm: Tensor  # [N, b] running statistics
    seen: Tensor  # bool [N], who has taken part
    round: int = 0  # rounds played
    void: int = 0  # void rounds in a row


class Setup(NamedTuple):
    """What stays the same over a run."""

    algorithm: Algorithm
    setting: Setting  # what training needs: model, data, options, engine, workers, seed, rounds
    robustness: Robustness = Robustness()
    batch_norm: str = "auto"
    folder: Path | None = None  # of the files that hold the clients' rows

    @property
    def averages(self) -> bool:
        """Whether batch norm's statistics are averaged, rather than each client's own."""
        return policy(self.algorithm, self.setting.net, self.batch_norm) == "average"

    def cohort(self, ids: Tensor, round: int, purpose: str = "send") -> Cohort:
        """The clients `ids` [S] as a server's rule sees them."""
        s = self.setting
        return Cohort(ids, s.data.size("train")[ids], s.data.n, round, s.rounds, s.seed, 0, purpose)

    def few(self, count: int) -> bool:
        """Whether so many clients' models are little work for all cores."""
        return count * self.setting.net.size < SMALL


def policy(alg: Algorithm, net: Net, batch_norm: str = "auto") -> str:
    """What becomes of batch norm's running statistics: "average", by the weights by which the
    models themselves are mixed, for every client, also one that did not take part; or "local", each
    client's own. "auto" is what the method's paper says, else "average" where clients are served a
    mix of models, and "local" where they are served what they trained themselves.

    Under "local" a client that never trained is evaluated with the mean of those who did.
    """
    known = alg.traits.batch_norm
    if batch_norm == "auto":
        return str(known[0])
    kinds = known if net.buffer_names else ("average", "local", "rule")
    if batch_norm not in kinds:
        words = " and ".join(map(repr, kinds))
        raise ValueError(
            f"batch_norm: this {type(alg).__name__} knows {words} statistics, got {batch_norm!r}."
        )
    return batch_norm


# a round ----------------------------------------------------------------------------------------


@checked
def step(setup: Setup, state: State, ids: Tensor) -> tuple[State, Outcome]:
    """One round with the clients `ids` [S], in any order; gives the state after it, or where the
    round is void the old one, the round counted. `state` is used up: rows are written in place.

    A client with anything not finite in its upload or its new state is absent from the round: it
    keeps its old state. Without a required client, without anybody, or where the server's own new
    state is not finite, the round is void.
    """
    alg, adversary = setup.algorithm, setup.robustness.adversary
    given, ids = ids, ids.unique()  # ascending
    check_training(alg, setup.setting.training)
    need(len(ids) == len(given), "ids", "each client once", given.tolist())
    absent = set(alg.traits.required) - set(ids.tolist())
    need(not absent, "ids", f"the target {alg.traits.required} in every round", ids.tolist())
    with one_thread(setup.few(len(ids))):
        trained = train(setup, state, ids)
        if adversary is not None:  # some clients send something else than they trained
            trained = adversary.send(trained, alg.traits, state.server)
        trained, outcome = accept(trained, alg.traits, state.server, setup.robustness.clip)
        if setup.averages:
            # of all who were sent to and answered, also of those whose upload was not accepted
            traffic = trained.batch_norm[0].nbytes * len(ids)
            outcome.bytes_down += traffic
            outcome.bytes_up += traffic
        changes = serve(alg, state, trained, outcome, setup.averages)
        return commit(state, changes, setup.folder), outcome


def train(setup: Setup, state: State, ids: Tensor) -> Trained:
    """Every client of the cohort trains on its own data."""
    with REPEATING.set_for(setup.setting.net.w0.device):
        return _trained(setup, state, ids)


def _trained(setup: Setup, state: State, ids: Tensor) -> Trained:
    cohort = setup.cohort(ids, state.round + 1)
    down = setup.algorithm.send(state.server, cohort)
    before = own_rows(setup, state, ids, down)
    statistics = state.batch_norm[onto(ids, state.batch_norm.device)]
    clients = Clients(setup.setting, ids, cohort.round, statistics)
    own, up, fit = setup.algorithm.train(down, before, clients)
    return Trained(cohort, down, up, before, own, fit.buffers, fit.loss)


def warn_of(bad: BadUpload) -> None:
    """Warns of clients that are left out of a round."""
    warnings.warn(f"left out of the round: {bad}", RuntimeWarning, stacklevel=4)


def serve(  # noqa: PLR0911 (a way that a round may go each)
    alg: Algorithm,
    state: State,
    trained: Trained,
    outcome: Outcome,
    averages: bool,
    refused: Callable[[BadUpload], None] = warn_of,
) -> Changes:
    """What the round changes, by the names of `flat`; nothing where it is void, which `outcome`
    says then. `refused` hears of uploads that the algorithm cannot use, before the others play."""
    if outcome.void:
        return {}
    try:
        server, mix = alg.update(state.server, trained.up, trained.cohort)
    except Void as void:
        outcome.void, outcome.why = True, str(void)
        return {}
    except BadUpload as bad:  # the others play the round
        refused(bad)
        trained = leave_out(trained, outcome, alg.traits, bad)
        return serve(alg, state, trained, outcome, averages, refused)
    made = {k: v.rows if isinstance(v, Rows) else v for k, v in server.items()}
    outcome.spoilt = spoilt({k: v for k, v in made.items() if v is not state.server.get(k)})
    if outcome.spoilt:
        outcome.void = True
        return {}
    outcome.mix = mix
    changes: Changes = {f"server.{k}": v for k, v in server.items()} | kept_by_clients(trained)
    if averages and mix is not None and trained.batch_norm.numel():
        changes["batch_norm"] = averaged(trained.batch_norm, mix, trained.cohort.n)
    return changes


def kept_by_clients(trained: Trained) -> Changes:
    """What a cohort's training changes of its clients' state."""
    ids = trained.cohort.ids
    changes: Changes = {f"clients.{k}": Rows(ids, v) for k, v in trained.own.items()}
    return changes | {"batch_norm": Rows(ids, trained.batch_norm), "seen": Rows(ids, ids >= 0)}


def averaged(statistics: Tensor, mix: Mix, n: int) -> Rows:
    """Batch norm's statistics after the round, of the cohort's [S, b], mixed as the models are.

    A client whose model took nothing of the cohort keeps the statistics from before the round, as
    it keeps the model: those that it trained go only where its update goes.
    """
    weight = mix.weight.double()  # in float32 the least divisor would be 0
    total = weight.sum(1, keepdim=True)
    mixed = mix._replace(weight=weight / total.clamp(min=1e-300)).of(statistics)
    if mix.rows is None:
        return Rows(torch.arange(n), mixed.expand(n, -1))
    took = total[:, 0].cpu() > 0
    return Rows(mix.rows[took], mixed[onto(took, mixed.device)])


def commit(state: State, changes: Changes, folder: Path | None = None) -> State:
    """The state after the round. Rows are written in place: the state that went in is used up."""
    if not changes:
        return replace(state, round=state.round + 1, void=state.void + 1)
    if folder is not None:
        new = [v.rows for k, v in changes.items() if isinstance(v, Rows) and k != "batch_norm"]
        check_room("this round's rows need", sum(map(room, new)), folder)
    with unbroken():  # no signal comes while rows are written
        return unflat(apply(flat(state), changes), state.round + 1)


# states -----------------------------------------------------------------------------------------


@checked
def begin(
    alg: Algorithm, net: Net, n: Count, folder: Path | None = None, clients: bool = True
) -> State:
    """The state before the first round; with `folder` each client's rows, its own and the server's,
    are in files there. Without `clients` there are none of the clients' own."""
    for target in alg.traits.required:
        name = "root" if getattr(alg, "root", None) is not None else "target"
        need(0 <= target < n, name, f"a client from 0 to {n - 1}", target)
    server = alg.init(**alg.initial(net), n=n)
    if folder is not None:
        server |= {k: zeros(n, server[k][0], folder) for k in alg.traits.per_client}
    own = fresh(alg, net, server, n) if clients else {}
    own = {k: zeros(n, v[0], folder) for k, v in own.items()}
    return State(server, own, net.b0.repeat(n, 1), torch.zeros(n, dtype=torch.bool))


def fresh(alg: Algorithm, net: Net, server: Tensors, n: int) -> Tensors:
    """One client's first state, [1, ...] each."""
    first = Cohort(torch.tensor([0]), torch.tensor([1]), n)
    return {k: v[:1] for k, v in alg.newcomer(alg.send(server, first), net, n).items()}


def own_rows(setup: Setup, state: State, ids: Tensor, down: Payload) -> Tensors:
    """The clients' own state [S, ...], copies; one who has not taken part yet has a newcomer's."""
    own, new = {k: v[onto(ids, v.device)] for k, v in state.clients.items()}, ~state.seen[ids]
    if own and new.any():
        n = setup.setting.data.n
        for key, first in setup.algorithm.newcomer(down, setup.setting.net, n).items():
            at = onto(new, own[key].device)
            own[key][at] = first.expand_as(own[key])[at]
    return own


def flat(state: State) -> Tensors:
    """The state's tensors by one name each: "server.x", "clients.v", "batch_norm", "seen"."""
    server = {f"server.{k}": v for k, v in state.server.items()}
    clients = {f"clients.{k}": v for k, v in state.clients.items()}
    return server | clients | {"batch_norm": state.batch_norm, "seen": state.seen}


def unflat(tensors: Tensors, round: int, void: int = 0) -> State:
    """The state that `flat` was made of."""
    server, clients = (
        {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)}
        for part in ("server.", "clients.")
    )
    return State(server, clients, tensors["batch_norm"], tensors["seen"], round, void)


def copied(setup: Setup, state: State) -> State:
    """The state with tensors of its own, in files where they were in files."""
    alg, n = setup.algorithm, len(state.seen)
    begun = begin(alg, setup.setting.net, n, setup.folder, bool(state.clients))
    if setup.folder is not None:
        seen = int(state.seen.sum())
        wanted = sum(room(v[:seen]) for v in state.clients.values())
        check_room("a copy of the state needs", wanted, setup.folder)
    return load_state_dict(alg, begun, state_dict(alg, state), state.round, state.void)


def row_names(alg: Algorithm, state: State) -> set[str]:
    """The tensors with a row for each client that is read only once it has taken part."""
    return {f"server.{k}" for k in alg.traits.per_client} | {f"clients.{k}" for k in state.clients}


def state_dict(alg: Algorithm, state: State) -> Tensors:
    """A copy of all that a run needs to go on; of the clients' rows those of who has taken part."""
    seen, own = state.seen.nonzero()[:, 0], row_names(alg, state)
    return {k: v[onto(seen, v.device)] if k in own else v.clone() for k, v in flat(state).items()}


def load_state_dict(alg: Algorithm, begun: State, tensors: Tensors, round: int, void: int) -> State:
    """The state that `state_dict` was made of; `begun` is one of the same run, and is used up."""
    seen, state, own = tensors["seen"].nonzero()[:, 0], flat(begun), row_names(alg, begun)
    changes: Changes = {
        k: Rows(seen, v) if k in own else v.to(state.get(k, begun.batch_norm).device)
        for k, v in tensors.items()
    }
    return unflat(apply(state, changes), round, void)


def check_start(start: State, alg: Algorithm, net: Net, n: int) -> None:
    """ValueError where a state is not one of this algorithm, federation and model."""
    want, have = flat(begin(alg, net, n, clients=bool(start.clients))), flat(start)
    kept = f"a state of {type(alg).__name__} with"
    more = [k for k in have if k.startswith("clients.") and k not in want]
    need(not more, "state", f"{kept} no {' and '.join(more)}", list(have))
    for key, like in want.items():
        old, rows = have.get(key), like.shape[:1]
        # a server's list of models or groups may have grown
        grown = bool(key.startswith("server") and rows and rows[0] not in (n, net.size))
        same = old is not None and (
            (old.dtype, old.dim(), old.shape[grown:])
            == (like.dtype, like.dim(), like.shape[grown:])
        )
        fits = f"{kept} the {key} like {shown(like)}, for {n} clients and this model"
        need(same, "state", fits, old)


@checked
def sample(
    setup: Setup, round: Count, participation: Fraction = 1.0, among: Tensor | None = None
) -> Tensor:
    """The ids [S] of this round's cohort, int64, ascending: max(1, floor(participation * n + 0.5))
    of the n clients `among` (ids, ascending; default: all), the required ones in any case."""
    s, required = setup.setting, setup.algorithm.traits.required
    n = s.data.n if among is None else len(among)
    m = max(1, int(participation * n + 0.5))
    order = drawn(n, m, s.seed, round, "cohort") if m < n else torch.arange(n)
    if among is not None:
        order = among[order]
    if not required:
        return order.sort().values
    first = [*required, *(i for i in order.tolist() if i not in required)]
    extra = 0 if among is None else sum(i not in among for i in required)  # who join beside them
    return torch.tensor(sorted(first[: max(m + extra, len(required))]))


# files ------------------------------------------------------------------------------------------


def zeros(n: int, like: Tensor, folder: Path | None = None) -> Tensor:
    """Zeros [n, *like.shape] that take no memory, or no room in a file in `folder`, before they are
    written. The file has no name, so that nothing is left behind however the process ends.
    ValueError where it cannot be written."""
    if folder is None or like.device.type != "cpu" or not like.numel():
        return zero_rows(n, like)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            rows = np.memmap(file, like.numpy().dtype, "w+", shape=(n, *like.shape))
    except OSError:
        refuse("rows", "a folder that can be written", str(folder))
    return torch.from_numpy(rows)


def room(rows: Tensor) -> int:
    """The bytes that rows [S, ...] may take on disk: each its own, and a block that it only
    begins."""
    return rows.nbytes + len(rows) * BLOCK


def check_room(
    what: str, wanted: int, folder: Path, error: type[OSError | MemoryError] = OSError
) -> None:
    """An error, one sentence, where the disk has less than `wanted` bytes free: a mapped file that
    cannot grow would end the process."""
    free = shutil.disk_usage(folder).free if wanted else 0
    if wanted > free:
        raise error(
            f"rows: {what} up to {human(wanted)} on disk, and {folder} has {human(free)} free; "
            "make room, or name another folder (rows)."
        )
