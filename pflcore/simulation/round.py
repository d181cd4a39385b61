"""One round of federated learning: train, accept, serve, commit.

- `train_cohort` trains the clients of the cohort on their own data.
- An adversary, where a run has one, replaces the uploads of its clients.
- `accept` leaves out clients whose results are not finite, and clips long updates.
- `serve` computes what the round changes, the server's new state above all.
- `commit` writes the changes.

Only `commit` writes to the run's state, once everything that it writes is computed. The
steps before it read the state, and note in a `RoundOutcome` what happened.

Client rows that do not fit into memory lie in files. These take disk space only for
clients that took part.

Shapes: N clients of the federation, S of them in the cohort, b running statistics.
"""

import shutil
import tempfile
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
from pflcore.check import (
    Fraction,
    PositiveInt,
    checked,
    reject,
    require,
    summarize,
    warn_caller,
)
from pflcore._device import to_device
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
from pflcore.train._context import TrainContext
from pflcore.train._gpu_flags import REPEATABLE_FLAGS
from pflcore.train._random import draw_without_replacement
from pflcore.train._workers import single_threaded

__all__ = ["RunConfig", "initial_state", "step"]

# Weights of all clients that are handled together. One thread passes through fewer in
# a few milliseconds; on a busy machine, waking other threads takes longer.
ONE_THREAD_MAX_WEIGHTS = 1 << 22
# A file system allocates whole blocks, so a row may take one block more than its bytes.
FILE_BLOCK_BYTES = 1 << 12


@dataclass(frozen=True)
class State:
    """Everything that changes during a run.

    Its fields cannot be set anew, yet the tensors are no constants: `commit` writes a
    round's new rows into them and returns a new `State` that shares their memory.
    """

    server: Tensors
    clients: Tensors  # [N, ...]; the row of a client that never took part is not read
    buffers: Tensor  # [N, b] running statistics of batch norm
    participated: Tensor  # bool [N]
    round: int = 0  # rounds played
    void_rounds: int = 0  # void rounds in a row


class RunConfig(NamedTuple):
    """Everything that stays the same during a run."""

    algorithm: Algorithm
    # model, data, training options, engine, workers, seed and number of rounds
    context: TrainContext
    robustness: Robustness = Robustness()
    batch_norm: str = "auto"  # see `batch_norm_policy`
    folder: Path | None = None  # holds the files of client rows; None: rows in memory

    @property
    def averages(self) -> bool:
        """True where batch norm's statistics are averaged over clients."""
        net = self.context.net
        return batch_norm_policy(self.algorithm, net, self.batch_norm) == "average"

    def cohort(self, ids: Tensor, round: int, purpose: str = "send") -> Cohort:
        """The cohort of the clients `ids` [S]."""
        context = self.context
        return Cohort(
            ids,
            num_samples=context.data.size("train")[ids],
            n=context.data.n,
            round=round,
            rounds=context.rounds,
            seed=context.seed,
            purpose=purpose,
        )

    def fits_one_thread(self, count: int) -> bool:
        """True where `count` models are too little work for several threads."""
        return count * self.context.net.size < ONE_THREAD_MAX_WEIGHTS


def batch_norm_policy(alg: Algorithm, net: Net, batch_norm: str = "auto") -> str:
    """The policy for batch norm's running statistics: "average", "local" or "rule".

    - "average" mixes the statistics with the weights that mix the models. Every client
      receives the mix, also one that did not take part.
    - "local" leaves each client its own statistics. A client that never trained is
      evaluated with the mean of those that did.
    - "rule" means that the algorithm treats the statistics as a part of its models.

    "auto" is the policy that the algorithm names first in its traits. Raises ValueError
    for a policy that the algorithm does not know.
    """
    known = alg.traits.batch_norm
    if batch_norm == "auto":
        return str(known[0])
    # Without batch norm every policy comes to the same.
    allowed = known if net.buffer_names else ("average", "local", "rule")
    if batch_norm not in allowed:
        words = " and ".join(map(repr, allowed))
        raise ValueError(
            f"batch_norm: this {type(alg).__name__} knows {words} statistics, got "
            f"{batch_norm!r}."
        )
    return batch_norm


# a round ----------------------------------------------------------------------


@checked
def step(config: RunConfig, state: State, ids: Tensor) -> tuple[State, RoundOutcome]:
    """Plays one round with the clients `ids` [S], in any order.

    A client whose upload or new state is not finite is left out of the round and keeps
    its old state. The round is void where a required client is left out, where no
    client is left, or where the server's new state is not finite. A void round changes
    nothing but the counters of rounds.

    Do not use `state` afterwards: its rows are updated in place.
    """
    alg = config.algorithm
    adversary = config.robustness.adversary
    check_training(alg, config.context.training)
    ids = _check_cohort(alg, ids)
    with single_threaded(config.fits_one_thread(len(ids))):
        result = train_cohort(config, state, ids)
        if adversary is not None:
            result = adversary.attack_uploads(result, alg.traits, state.server)
        # Statistics travel from every client that answers, accepted or not.
        buffer_bytes = result.buffers.nbytes if config.averages else 0
        result, outcome = accept(
            result, alg.traits, state.server, config.robustness.clip
        )
        outcome.bytes_down += buffer_bytes
        outcome.bytes_up += buffer_bytes
        changes = serve(alg, state, result, outcome, config.averages)
        return commit(state, changes, config.folder), outcome


def _check_cohort(alg: Algorithm, ids: Tensor) -> Tensor:
    """The ids [S] in ascending order.

    Raises ValueError for a repeated client, or where a required client is missing.
    """
    ascending: Tensor = ids.unique()
    require(len(ascending) == len(ids), "ids", "each client once", ids.tolist())
    required = alg.traits.required_clients
    absent = set(required) - set(ascending.tolist())
    wanted = f"the target {required} in every round"
    require(not absent, "ids", wanted, ascending.tolist())
    return ascending


def train_cohort(config: RunConfig, state: State, ids: Tensor) -> CohortResult:
    """Trains the clients `ids` [S] on their own data."""
    with REPEATABLE_FLAGS.set_for(config.context.net.w0.device):
        cohort = config.cohort(ids, state.round + 1)
        down = config.algorithm.send(state.server, cohort)
        states_before = client_rows(config, state, ids, down)
        buffers = state.buffers[to_device(ids, state.buffers.device)]
        clients = Clients(config.context, ids, cohort.round, buffers)
        client_states, up, fit = config.algorithm.train(down, states_before, clients)
        return CohortResult(
            cohort, down, up, states_before, client_states, fit.buffers, fit.loss
        )


def warn_bad_upload(bad: BadUpload) -> None:
    """Warns of clients that are left out of a round."""
    warn_caller(f"left out of the round: {bad}", RuntimeWarning)


def serve(  # noqa: PLR0911 (one return for each end that a round may have)
    alg: Algorithm,
    state: State,
    result: CohortResult,
    outcome: RoundOutcome,
    averages: bool,
    on_refused: Callable[[BadUpload], None] = warn_bad_upload,
) -> Changes:
    """The changes of a round, keyed as in `flatten_state`: none where it is void.

    The server computes its new state from the uploads. `outcome` is written to: it
    receives the mixing weights, or the reason why the round is void. Where the
    algorithm cannot use some uploads, `on_refused` is called with them, and the round
    is served again without their clients.
    """
    if outcome.void:
        return {}
    try:
        server_changes, mixing = alg.update(state.server, result.up, result.cohort)
    except VoidRound as reason:
        outcome.void = True
        outcome.void_reason = str(reason)
        return {}
    except BadUpload as bad:
        on_refused(bad)
        result = drop_clients(result, outcome, alg.traits, bad)
        return serve(alg, state, result, outcome, averages, on_refused)
    outcome.non_finite_state = non_finite_names(
        _new_tensors(state.server, server_changes)
    )
    outcome.void = bool(outcome.non_finite_state)
    if outcome.void:
        return {}
    outcome.mix = mixing
    buffer_mixing = mixing if averages else None
    return round_changes(result, server_changes, buffer_mixing)


def _new_tensors(server: Tensors, changes: Changes) -> Tensors:
    """The tensors that an update computed, without those that it passed through.

    A tensor that was passed through was finite before the round.
    """
    computed = {}
    for name, change in changes.items():
        tensor = change.rows if isinstance(change, RowUpdate) else change
        if tensor is not server.get(name):
            computed[name] = tensor
    return computed


def round_changes(
    result: CohortResult,
    server_changes: Changes,
    buffer_mixing: MixingWeights | None,  # None: no statistics are mixed
) -> Changes:
    """The changes of server and clients, keyed as in `flatten_state`."""
    changes: Changes = {f"server.{name}": new for name, new in server_changes.items()}
    changes |= client_changes(result)
    if buffer_mixing is not None and result.buffers.numel():
        n = result.cohort.n
        changes["batch_norm"] = mixed_buffers(result.buffers, buffer_mixing, n)
    return changes


def client_changes(result: CohortResult) -> Changes:
    """The changes of the state of the cohort's clients by training."""
    ids = result.cohort.ids
    changes: Changes = {
        f"clients.{name}": RowUpdate(ids, rows)
        for name, rows in result.client_states.items()
    }
    changes["batch_norm"] = RowUpdate(ids, result.buffers)
    changes["seen"] = RowUpdate(ids, torch.ones_like(ids, dtype=torch.bool))
    return changes


def mixed_buffers(
    buffers: Tensor,  # [S, b] of the cohort
    mixing: MixingWeights,
    n: int,
) -> RowUpdate:
    """Batch norm's statistics after the round, mixed as the models are.

    A client whose model took nothing of the cohort keeps the statistics from before the
    round, as it keeps its model: the statistics that it trained go only where its
    update goes.
    """
    weight = mixing.weight.double()  # in float32 the least divisor would be 0
    total = weight.sum(1, keepdim=True)
    normalized = mixing._replace(weight=weight / total.clamp(min=1e-300))
    mixed = normalized.aggregate(buffers)
    if mixing.receivers is None:  # one model for all clients
        return RowUpdate(torch.arange(n), mixed.expand(n, -1))
    has_weights = total[:, 0].cpu() > 0
    rows = mixed[to_device(has_weights, mixed.device)]
    return RowUpdate(mixing.receivers[has_weights], rows)


def commit(state: State, changes: Changes, folder: Path | None = None) -> State:
    """The state after the round. Without changes only the counters of rounds move on.

    Do not use `state` afterwards: its rows are updated in place. Raises OSError, before
    anything is written, where the disk of `folder` has no room for the new rows.
    """
    if not changes:
        round = state.round + 1
        return replace(state, round=round, void_rounds=state.void_rounds + 1)
    if folder is not None:
        needed = sum(
            disk_bytes(change.rows)
            for name, change in changes.items()
            if isinstance(change, RowUpdate) and name != "batch_norm"
        )
        check_disk_space("this round's rows need", needed, folder)
    with defer_signals():  # a signal between two rows would leave half a round
        tensors = apply(flatten_state(state), changes)
        return unflatten_state(tensors, state.round + 1)


# states -----------------------------------------------------------------------


@checked
def initial_state(
    alg: Algorithm,
    net: Net,
    n: PositiveInt,
    folder: Path | None = None,
    clients: bool = True,
) -> State:
    """The state before the first round.

    Args:
        folder: holds files with the rows of clients, their own and the server's; None:
            the rows are in memory.
        clients: False leaves client state out, as on a server of its own.
    """
    for client in alg.traits.required_clients:
        has_trusted_client = getattr(alg, "trusted_client", None) is not None
        name = "trusted_client" if has_trusted_client else "target"
        require(0 <= client < n, name, f"a client from 0 to {n - 1}", client)
    server = alg.init(**alg.server_init_args(net), n=n)
    if folder is not None:
        for name in alg.traits.per_client_state:
            server[name] = stored_zeros(n, server[name][0], folder)
    client_states = {}
    if clients:
        for name, row in new_client_state(alg, net, server, n).items():
            client_states[name] = stored_zeros(n, row[0], folder)
    participated = torch.zeros(n, dtype=torch.bool)
    return State(server, client_states, net.b0.repeat(n, 1), participated)


def new_client_state(alg: Algorithm, net: Net, server: Tensors, n: int) -> Tensors:
    """The state [1, ...] that a client has in its first round."""
    cohort = Cohort(ids=torch.tensor([0]), num_samples=torch.tensor([1]), n=n)
    rows = alg.init_client(alg.send(server, cohort), net, n)
    return {name: row[:1] for name, row in rows.items()}


def client_rows(config: RunConfig, state: State, ids: Tensor, down: Payload) -> Tensors:
    """Copies [S, ...] of the state of the clients `ids`.

    A client that never took part has no state yet and receives the first one.
    """
    rows = {
        name: tensor[to_device(ids, tensor.device)]
        for name, tensor in state.clients.items()
    }
    is_new = ~state.participated[ids]
    if not rows or not is_new.any():
        return rows
    n = config.context.data.n
    first_states = config.algorithm.init_client(down, config.context.net, n)
    for name, first in first_states.items():
        new = to_device(is_new, rows[name].device)
        rows[name][new] = first.expand_as(rows[name])[new]
    return rows


def flatten_state(state: State) -> Tensors:
    """All tensors of a state by name: "server.x", "clients.v", "batch_norm", "seen"."""
    server = {f"server.{name}": tensor for name, tensor in state.server.items()}
    clients = {f"clients.{name}": tensor for name, tensor in state.clients.items()}
    return server | clients | {"batch_norm": state.buffers, "seen": state.participated}


def unflatten_state(tensors: Tensors, round: int, void_rounds: int = 0) -> State:
    """The state with the tensors that `flatten_state` named."""
    server = _without_prefix(tensors, "server.")
    clients = _without_prefix(tensors, "clients.")
    return State(
        server, clients, tensors["batch_norm"], tensors["seen"], round, void_rounds
    )


def _without_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose name begins with `prefix`, by the rest of the name."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def copy_state(config: RunConfig, state: State) -> State:
    """A copy that shares no memory and no file with `state`."""
    alg = config.algorithm
    n = len(state.participated)
    has_client_rows = bool(state.clients)
    new = initial_state(alg, config.context.net, n, config.folder, has_client_rows)
    if config.folder is not None:
        num_participated = int(state.participated.sum())
        # Only rows of clients that took part take space, whichever rows they are.
        needed = sum(
            disk_bytes(rows[:num_participated]) for rows in state.clients.values()
        )
        check_disk_space("a copy of the state needs", needed, config.folder)
    tensors = state_dict(alg, state)
    return load_state_dict(alg, new, tensors, state.round, state.void_rounds)


def client_row_names(alg: Algorithm, state: State) -> set[str]:
    """The names of tensors [N, ...] whose rows are read only for participants."""
    server = {f"server.{name}" for name in alg.traits.per_client_state}
    return server | {f"clients.{name}" for name in state.clients}


def state_dict(alg: Algorithm, state: State) -> Tensors:
    """Copies of all tensors that a run needs to continue.

    Tensors that are read only for participants keep only the participants' rows.
    """
    ids = state.participated.nonzero()[:, 0]
    sparse_names = client_row_names(alg, state)
    copies = {}
    for name, tensor in flatten_state(state).items():
        if name in sparse_names:
            copies[name] = tensor[to_device(ids, tensor.device)]
        else:
            copies[name] = tensor.clone()
    return copies


def load_state_dict(
    alg: Algorithm, state: State, tensors: Tensors, round: int, void_rounds: int
) -> State:
    """The state whose tensors `state_dict` copied.

    `state` is an initial state of the same run. Do not use it afterwards: its rows are
    updated in place.
    """
    ids = tensors["seen"].nonzero()[:, 0]
    old = flatten_state(state)
    sparse_names = client_row_names(alg, state)
    changes: Changes = {}
    for name, tensor in tensors.items():
        if name in sparse_names:
            changes[name] = RowUpdate(ids, tensor)
        else:
            # A tensor that the server added during the run has no device before it.
            device = old.get(name, state.buffers).device
            changes[name] = tensor.to(device)
    return unflatten_state(apply(old, changes), round, void_rounds)


def check_state(state: State, alg: Algorithm, net: Net, n: int) -> None:
    """Raises ValueError for a state of another algorithm, federation or model."""
    expected = flatten_state(initial_state(alg, net, n, clients=bool(state.clients)))
    tensors = flatten_state(state)
    needs = f"a state of {type(alg).__name__} with"
    extra = [
        name for name in tensors if name.startswith("clients.") and name not in expected
    ]
    require(not extra, "state", f"{needs} no {' and '.join(extra)}", list(tensors))
    for name, like in expected.items():
        rows = like.shape[:1]
        # The server's lists of models or groups may have grown during the run. A list
        # as long as the federation or the model cannot.
        may_grow = (
            name.startswith("server") and bool(rows) and rows[0] not in (n, net.size)
        )
        fits = _is_alike(tensors.get(name), like, ignored_axes=int(may_grow))
        wanted = f"the {name} like {summarize(like)}, for {n} clients and this model"
        require(fits, "state", f"{needs} {wanted}", tensors.get(name))


def _is_alike(tensor: Tensor | None, like: Tensor, ignored_axes: int) -> bool:
    """True where dtypes and shapes are equal, the first `ignored_axes` axes aside."""
    if tensor is None or tensor.dtype != like.dtype or tensor.dim() != like.dim():
        return False
    return tensor.shape[ignored_axes:] == like.shape[ignored_axes:]


@checked
def sample_cohort(
    config: RunConfig,
    round: PositiveInt,
    participation: Fraction = 1.0,
    clients: Tensor | None = None,
) -> Tensor:
    """Draws the cohort of a round: client ids [S], int64, ascending.

    S is max(1, floor(participation * n + 0.5)), where n counts `clients` (ids,
    ascending; default: all). Required clients always take part.
    """
    context = config.context
    n = context.data.n if clients is None else len(clients)
    count = max(1, int(participation * n + 0.5))
    if count < n:
        # Makes no tensor as long as the federation, which may have millions of clients.
        drawn = draw_without_replacement(n, count, context.seed, round, "cohort")
    else:
        drawn = torch.arange(n)
    if clients is not None:
        drawn = clients[drawn]
    required = config.algorithm.traits.required_clients
    if not required:
        return drawn.sort().values
    others = [i for i in drawn.tolist() if i not in required]
    if clients is not None:  # required clients outside of `clients` come on top
        count += sum(i not in clients for i in required)
    # The required clients come first, so that a cut takes away others.
    cohort = [*required, *others][: max(count, len(required))]
    return torch.tensor(sorted(cohort))


# files ------------------------------------------------------------------------


def stored_zeros(n: int, like: Tensor, folder: Path | None = None) -> Tensor:
    """Zeros [n, *like.shape] that take no space before they are written.

    With `folder` they are a memory-mapped file without a name, so nothing is left on
    disk however the process ends. Raises ValueError where the folder cannot be written.
    """
    if folder is None or like.device.type != "cpu" or not like.numel():
        return lazy_zeros(n, like)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            rows = np.memmap(file, like.numpy().dtype, "w+", shape=(n, *like.shape))
    except OSError:
        reject("storage", "a folder that can be written", str(folder))
    return torch.from_numpy(rows)


def disk_bytes(rows: Tensor) -> int:
    """The most disk space of rows [S, ...], with blocks that are partly filled."""
    return rows.nbytes + len(rows) * FILE_BLOCK_BYTES


def check_disk_space(
    what: str, needed: int, folder: Path, error: type[OSError | MemoryError] = OSError
) -> None:
    """Raises `error` where the disk has less than `needed` bytes free.

    A memory-mapped file that cannot grow would end the process without a message.
    """
    free = shutil.disk_usage(folder).free if needed else 0
    if needed > free:
        raise error(
            f"storage: {what} up to {human_bytes(needed)} on disk, and {folder} has "
            f"{human_bytes(free)} free; make room, or name another folder (storage)."
        )
