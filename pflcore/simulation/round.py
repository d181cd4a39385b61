"""One round as arrows in one direction: train -> (attack) -> accept -> serve -> commit.

Each takes values and returns values. `commit` alone writes, when everything it writes
is there. Rows of clients that do not fit into memory are in files, with blocks on disk
only for those that were ever written.
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
    MixingWeights,
    Payload,
    RowUpdate,
    Tensors,
    VoidRound,
    apply,
    check_training,
    lazy_zeros,
)
from pflcore.check import Fraction, PositiveInt, checked, reject, require, summarize
from pflcore.data._ragged import to_device
from pflcore.metrics import human_bytes
from pflcore.simulation._settings import Robustness
from pflcore.simulation._signals import defer_signals
from pflcore.simulation._uploads import (
    CohortResult,
    RoundOutcome,
    accept,
    drop_clients,
    non_finite_names,
)
from pflcore.train import Clients, Net
from pflcore.train._clients import TrainContext
from pflcore.train._gpu_flags import REPEATABLE_FLAGS
from pflcore.train._random import draw_without_replacement
from pflcore.train._workers import single_threaded

__all__ = ["RunConfig", "initial_state", "step"]
ONE_THREAD_MAX_WEIGHTS = (
    1 << 22
)  # weights of all clients that are looked at together: one thread passes through
# them in a few milliseconds, and waking others takes longer on a busy machine
FILE_BLOCK_BYTES = 1 << 12  # bytes of a file's blocks: a row may take so many more


@dataclass(frozen=True)
class State:
    """Everything that changes over a run."""

    server: Tensors
    # [N, ...]; rows of a client who has not taken part yet are never read
    clients: Tensors
    buffers: Tensor  # [N, b] running statistics
    participated: Tensor  # bool [N], who has taken part
    round: int = 0  # rounds played
    void_rounds: int = 0  # void rounds in a row


class RunConfig(NamedTuple):
    """What stays the same over a run."""

    algorithm: Algorithm
    # what training needs: model, data, options, engine, workers, seed, rounds
    context: TrainContext
    robustness: Robustness = Robustness()
    batch_norm: str = "auto"
    folder: Path | None = None  # of the files that hold the clients' rows

    @property
    def averages(self) -> bool:
        """Whether batch norm's statistics are averaged, rather than each client's
        own."""
        return (
            batch_norm_policy(self.algorithm, self.context.net, self.batch_norm)
            == "average"
        )

    def cohort(self, ids: Tensor, round: int, purpose: str = "send") -> Cohort:
        """The clients `ids` [S] as a server's rule sees them."""
        s = self.context
        return Cohort(
            ids,
            s.data.size("train")[ids],
            s.data.n,
            round,
            s.rounds,
            s.seed,
            0,
            purpose,
        )

    def fits_one_thread(self, count: int) -> bool:
        """Whether so many clients' models are little work for all cores."""
        return count * self.context.net.size < ONE_THREAD_MAX_WEIGHTS


def batch_norm_policy(alg: Algorithm, net: Net, batch_norm: str = "auto") -> str:
    """What becomes of batch norm's running statistics: "average", by the weights by
    which the models themselves are mixed, for every client, also one that did not take
    part; or "local", each client's own. "auto" is what the method's paper says, else
    "average" where clients are served a mix of models, and "local" where they are
    served what they trained themselves.

    Under "local" a client that never trained is evaluated with the mean of those who
    did.
    """
    known = alg.traits.batch_norm
    if batch_norm == "auto":
        return str(known[0])
    kinds = known if net.buffer_names else ("average", "local", "rule")
    if batch_norm not in kinds:
        words = " and ".join(map(repr, kinds))
        raise ValueError(
            f"batch_norm: this {type(alg).__name__} knows {words} statistics, got "
            f"{batch_norm!r}."
        )
    return batch_norm


# a round ----------------------------------------------------------------------


@checked
def step(config: RunConfig, state: State, ids: Tensor) -> tuple[State, RoundOutcome]:
    """One round with the clients `ids` [S], in any order; gives the state after it, or
    where the round is void the old one, the round counted. `state` is used up: rows are
    written in place.

    A client with anything not finite in its upload or its new state is absent from the
    round: it keeps its old state. Without a required client, without anybody, or where
    the server's own new state is not finite, the round is void.
    """
    alg = config.algorithm
    adversary = config.robustness.adversary
    given = ids
    ids = ids.unique()  # ascending
    check_training(alg, config.context.training)
    require(len(ids) == len(given), "ids", "each client once", given.tolist())
    absent = set(alg.traits.required_clients) - set(ids.tolist())
    require(
        not absent,
        "ids",
        f"the target {alg.traits.required_clients} in every round",
        ids.tolist(),
    )
    with single_threaded(config.fits_one_thread(len(ids))):
        trained = train_cohort(config, state, ids)
        if adversary is not None:  # some clients send something else than they trained
            trained = adversary.attack_uploads(trained, alg.traits, state.server)
        trained, outcome = accept(
            trained, alg.traits, state.server, config.robustness.clip
        )
        if config.averages:
            # of all who were sent to and answered, also of those whose upload was not
            # accepted
            traffic = trained.buffers[0].nbytes * len(ids)
            outcome.bytes_down += traffic
            outcome.bytes_up += traffic
        changes = serve(alg, state, trained, outcome, config.averages)
        return commit(state, changes, config.folder), outcome


def train_cohort(config: RunConfig, state: State, ids: Tensor) -> CohortResult:
    """Every client of the cohort trains on its own data."""
    with REPEATABLE_FLAGS.set_for(config.context.net.w0.device):
        return _train_cohort(config, state, ids)


def _train_cohort(config: RunConfig, state: State, ids: Tensor) -> CohortResult:
    cohort = config.cohort(ids, state.round + 1)
    down = config.algorithm.send(state.server, cohort)
    before = client_rows(config, state, ids, down)
    statistics = state.buffers[to_device(ids, state.buffers.device)]
    clients = Clients(config.context, ids, cohort.round, statistics)
    own, up, fit = config.algorithm.train(down, before, clients)
    return CohortResult(cohort, down, up, before, own, fit.buffers, fit.loss)


def warn_bad_upload(bad: BadUpload) -> None:
    """Warns of clients that are left out of a round."""
    warnings.warn(f"left out of the round: {bad}", RuntimeWarning, stacklevel=4)


def serve(  # noqa: PLR0911 (a way that a round may go each)
    alg: Algorithm,
    state: State,
    trained: CohortResult,
    outcome: RoundOutcome,
    averages: bool,
    on_refused: Callable[[BadUpload], None] = warn_bad_upload,
) -> Changes:
    """What the round changes, by the names of `flatten_state`; nothing where it is
    void, which `outcome` says then. `on_refused` hears of uploads that the algorithm
    cannot use, before the others play."""
    if outcome.void:
        return {}
    try:
        server, mix = alg.update(state.server, trained.up, trained.cohort)
    except VoidRound as void:
        outcome.void, outcome.void_reason = True, str(void)
        return {}
    except BadUpload as bad:  # the others play the round
        on_refused(bad)
        trained = drop_clients(trained, outcome, alg.traits, bad)
        return serve(alg, state, trained, outcome, averages, on_refused)
    made = {k: v.rows if isinstance(v, RowUpdate) else v for k, v in server.items()}
    outcome.non_finite_state = non_finite_names(
        {k: v for k, v in made.items() if v is not state.server.get(k)}
    )
    if outcome.non_finite_state:
        outcome.void = True
        return {}
    outcome.mix = mix
    changes: Changes = {f"server.{k}": v for k, v in server.items()} | client_changes(
        trained
    )
    if averages and mix is not None and trained.buffers.numel():
        changes["batch_norm"] = mixed_buffers(trained.buffers, mix, trained.cohort.n)
    return changes


def client_changes(trained: CohortResult) -> Changes:
    """What a cohort's training changes of its clients' state."""
    ids = trained.cohort.ids
    changes: Changes = {
        f"clients.{k}": RowUpdate(ids, v) for k, v in trained.client_states.items()
    }
    return changes | {
        "batch_norm": RowUpdate(ids, trained.buffers),
        "seen": RowUpdate(ids, ids >= 0),
    }


def mixed_buffers(statistics: Tensor, mix: MixingWeights, n: int) -> RowUpdate:
    """Batch norm's statistics after the round, of the cohort's [S, b], mixed as the
    models are.

    A client whose model took nothing of the cohort keeps the statistics from before the
    round, as it keeps the model: those that it trained go only where its update goes.
    """
    weight = mix.weight.double()  # in float32 the least divisor would be 0
    total = weight.sum(1, keepdim=True)
    mixed = mix._replace(weight=weight / total.clamp(min=1e-300)).aggregate(statistics)
    if mix.receivers is None:
        return RowUpdate(torch.arange(n), mixed.expand(n, -1))
    took = total[:, 0].cpu() > 0
    return RowUpdate(mix.receivers[took], mixed[to_device(took, mixed.device)])


def commit(state: State, changes: Changes, folder: Path | None = None) -> State:
    """The state after the round. Rows are written in place: the state that went in
    is used up."""
    if not changes:
        return replace(state, round=state.round + 1, void_rounds=state.void_rounds + 1)
    if folder is not None:
        new = [
            v.rows
            for k, v in changes.items()
            if isinstance(v, RowUpdate) and k != "batch_norm"
        ]
        check_disk_space("this round's rows need", sum(map(disk_bytes, new)), folder)
    with defer_signals():  # no signal comes while rows are written
        return unflatten_state(apply(flatten_state(state), changes), state.round + 1)


# states -----------------------------------------------------------------------


@checked
def initial_state(
    alg: Algorithm,
    net: Net,
    n: PositiveInt,
    folder: Path | None = None,
    clients: bool = True,
) -> State:
    """The state before the first round; with `folder` each client's rows, its own and
    the server's, are in files there. Without `clients` there are none of the clients'
    own."""
    for target in alg.traits.required_clients:
        name = (
            "trusted_client"
            if getattr(alg, "trusted_client", None) is not None
            else "target"
        )
        require(0 <= target < n, name, f"a client from 0 to {n - 1}", target)
    server = alg.init(**alg.server_init_args(net), n=n)
    if folder is not None:
        server |= {
            k: stored_zeros(n, server[k][0], folder)
            for k in alg.traits.per_client_state
        }
    own = new_client_state(alg, net, server, n) if clients else {}
    own = {k: stored_zeros(n, v[0], folder) for k, v in own.items()}
    return State(server, own, net.b0.repeat(n, 1), torch.zeros(n, dtype=torch.bool))


def new_client_state(alg: Algorithm, net: Net, server: Tensors, n: int) -> Tensors:
    """One client's first state, [1, ...] each."""
    first = Cohort(torch.tensor([0]), torch.tensor([1]), n)
    return {
        k: v[:1] for k, v in alg.init_client(alg.send(server, first), net, n).items()
    }


def client_rows(config: RunConfig, state: State, ids: Tensor, down: Payload) -> Tensors:
    """The clients' own state [S, ...], copies; one who has not taken part yet has a
    newcomer's."""
    own = {k: v[to_device(ids, v.device)] for k, v in state.clients.items()}
    new = ~state.participated[ids]
    if own and new.any():
        n = config.context.data.n
        for key, first in config.algorithm.init_client(
            down, config.context.net, n
        ).items():
            at = to_device(new, own[key].device)
            own[key][at] = first.expand_as(own[key])[at]
    return own


def flatten_state(state: State) -> Tensors:
    """The state's tensors by one name each: "server.x", "clients.v", "batch_norm",
    "seen"."""
    server = {f"server.{k}": v for k, v in state.server.items()}
    clients = {f"clients.{k}": v for k, v in state.clients.items()}
    return server | clients | {"batch_norm": state.buffers, "seen": state.participated}


def unflatten_state(tensors: Tensors, round: int, void: int = 0) -> State:
    """The state that `flatten_state` was made of."""
    server, clients = (
        {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)}
        for part in ("server.", "clients.")
    )
    return State(server, clients, tensors["batch_norm"], tensors["seen"], round, void)


def copy_state(config: RunConfig, state: State) -> State:
    """The state with tensors of its own, in files where they were in files."""
    alg = config.algorithm
    n = len(state.participated)
    begun = initial_state(
        alg, config.context.net, n, config.folder, bool(state.clients)
    )
    if config.folder is not None:
        seen = int(state.participated.sum())
        wanted = sum(disk_bytes(v[:seen]) for v in state.clients.values())
        check_disk_space("a copy of the state needs", wanted, config.folder)
    return load_state_dict(
        alg, begun, state_dict(alg, state), state.round, state.void_rounds
    )


def client_row_names(alg: Algorithm, state: State) -> set[str]:
    """The tensors with a row for each client that is read only once it has taken
    part."""
    return {f"server.{k}" for k in alg.traits.per_client_state} | {
        f"clients.{k}" for k in state.clients
    }


def state_dict(alg: Algorithm, state: State) -> Tensors:
    """A copy of all that a run needs to go on; of the clients' rows those of who has
    taken part."""
    seen = state.participated.nonzero()[:, 0]
    own = client_row_names(alg, state)
    return {
        k: v[to_device(seen, v.device)] if k in own else v.clone()
        for k, v in flatten_state(state).items()
    }


def load_state_dict(
    alg: Algorithm, begun: State, tensors: Tensors, round: int, void: int
) -> State:
    """The state that `state_dict` was made of; `begun` is one of the same run, and
    is used up."""
    seen = tensors["seen"].nonzero()[:, 0]
    state = flatten_state(begun)
    own = client_row_names(alg, begun)
    changes: Changes = {
        k: RowUpdate(seen, v) if k in own else v.to(state.get(k, begun.buffers).device)
        for k, v in tensors.items()
    }
    return unflatten_state(apply(state, changes), round, void)


def check_state(start: State, alg: Algorithm, net: Net, n: int) -> None:
    """ValueError where a state is not one of this algorithm, federation and model."""
    want = flatten_state(initial_state(alg, net, n, clients=bool(start.clients)))
    have = flatten_state(start)
    kept = f"a state of {type(alg).__name__} with"
    more = [k for k in have if k.startswith("clients.") and k not in want]
    require(not more, "state", f"{kept} no {' and '.join(more)}", list(have))
    for key, like in want.items():
        old = have.get(key)
        rows = like.shape[:1]
        # a server's list of models or groups may have grown
        grown = bool(key.startswith("server") and rows and rows[0] not in (n, net.size))
        same = old is not None and (
            (old.dtype, old.dim(), old.shape[grown:])
            == (like.dtype, like.dim(), like.shape[grown:])
        )
        fits = (
            f"{kept} the {key} like {summarize(like)}, for {n} clients and this model"
        )
        require(same, "state", fits, old)


@checked
def sample_cohort(
    config: RunConfig,
    round: PositiveInt,
    participation: Fraction = 1.0,
    clients: Tensor | None = None,
) -> Tensor:
    """The ids [S] of this round's cohort, int64, ascending: max(1, floor(participation
    * n + 0.5)) of the n clients `clients` (ids, ascending; default: all), the required
    ones in any case."""
    s = config.context
    required = config.algorithm.traits.required_clients
    n = s.data.n if clients is None else len(clients)
    m = max(1, int(participation * n + 0.5))
    order = (
        draw_without_replacement(n, m, s.seed, round, "cohort")
        if m < n
        else torch.arange(n)
    )
    if clients is not None:
        order = clients[order]
    if not required:
        return order.sort().values
    first = [*required, *(i for i in order.tolist() if i not in required)]
    # who join beside them
    extra = 0 if clients is None else sum(i not in clients for i in required)
    return torch.tensor(sorted(first[: max(m + extra, len(required))]))


# files ------------------------------------------------------------------------


def stored_zeros(n: int, like: Tensor, folder: Path | None = None) -> Tensor:
    """Zeros [n, *like.shape] that take no memory, or no room in a file in `folder`,
    before they are written. The file has no name, so that nothing is left behind
    however the process ends. ValueError where it cannot be written."""
    if folder is None or like.device.type != "cpu" or not like.numel():
        return lazy_zeros(n, like)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            rows = np.memmap(file, like.numpy().dtype, "w+", shape=(n, *like.shape))
    except OSError:
        reject("storage", "a folder that can be written", str(folder))
    return torch.from_numpy(rows)


def disk_bytes(rows: Tensor) -> int:
    """The bytes that rows [S, ...] may take on disk: each its own, and a block that it
    only begins."""
    return rows.nbytes + len(rows) * FILE_BLOCK_BYTES


def check_disk_space(
    what: str, wanted: int, folder: Path, error: type[OSError | MemoryError] = OSError
) -> None:
    """An error, one sentence, where the disk has less than `wanted` bytes free: a
    mapped file that cannot grow would end the process."""
    free = shutil.disk_usage(folder).free if wanted else 0
    if wanted > free:
        raise error(
            f"storage: {what} up to {human_bytes(wanted)} on disk, and {folder} has "
            f"{human_bytes(free)} free; "
            "make room, or name another folder (storage)."
        )
