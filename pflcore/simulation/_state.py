"""The state of a run, and the options that stay the same during it.

- `RunConfig` has the options, `State` has everything that changes.
- `initial_state` makes the state before the first round.
- `flatten_state` gives the tensors of a state names, and `unflatten_state` takes them
  back.
- `state_dict` copies what a checkpoint needs, and `load_state_dict` takes it up.

Symbols: N clients of the federation; S of them in the cohort; b numbers of batch norm's
running statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Cohort,
    Payload,
    RowUpdate,
    SharedRows,
    Tensors,
    apply,
    lazy_zeros,
)
from pflcore.check import PositiveInt, checked, require, summarize, summarize_kind
from pflcore.robust import mean_in
from pflcore.simulation._ranks import ONE_RANK, Ranks
from pflcore.simulation._settings import Robustness
from pflcore.train import Net
from pflcore.train._context import TrainContext

# Weights of all clients that are handled together. One thread passes through fewer in
# a few milliseconds; on a busy machine, waking other threads takes longer.
ONE_THREAD_MAX_WEIGHTS = 1 << 22


@dataclass(frozen=True)
class State:
    """Everything that changes during a run.

    Its fields cannot be set anew, yet the tensors are no constants: `commit` writes a
    round's new rows into them and returns a new `State` that shares their memory.

    Attributes:
        server: The tensors of the server, by name.
        clients: The rows of the clients' own state, by name. The row of a client that
            never took part is not read.
        buffers: The running statistics of batch norm of each client.
        participated: The mask of the clients that took part in a round so far.
        round: The number of rounds that were played.
        void_rounds: The number of void rounds in a row, up to the last one.
    """

    server: Tensors
    clients: Tensors  # [N, ...]
    buffers: Tensor  # [N, b]
    participated: Tensor  # bool [N]
    round: int = 0
    void_rounds: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class RunConfig(TrainContext):
    """Everything that a round needs and that stays the same over a run.

    It is the context of the clients' training, together with what the rounds around
    the training need.

    Attributes:
        algorithm: The algorithm: the server's rule and the hooks of the clients.
        robustness: What the run does about long updates, and clients that attack it.
        batch_norm: The policy for running statistics, see `batch_norm_policy`.
        ranks: The processes that play the run together.
        eligible: The ids [T] of the clients that may take part, ascending; None for all
            with training samples.
    """

    algorithm: Algorithm
    robustness: Robustness = field(default_factory=Robustness)
    batch_norm: str = "auto"
    ranks: Ranks = ONE_RANK
    eligible: Tensor | None = None

    @cached_property
    def eligible_clients(self) -> Tensor:
        """The ids [T] of the clients that may take part, ascending.

        Those that the algorithm requires are in every round.
        """
        trainable: Tensor = self.data.trainable_clients
        if self.eligible is None:
            return trainable
        required = torch.tensor([*self.algorithm.traits.required_clients]).long()
        joining = torch.cat([self.eligible, required])
        return trainable[torch.isin(trainable, joining)]

    @classmethod
    def of(
        cls, algorithm: Algorithm, context: TrainContext, **options: Any
    ) -> RunConfig:
        """The options of a run whose clients train as `context` says.

        Args:
            algorithm: The algorithm.
            context: The options of the training.
            options: Values of the other attributes, by name.
        """
        shared = {f.name: getattr(context, f.name) for f in fields(TrainContext)}
        return cls(**shared, algorithm=algorithm, **options)

    @cached_property
    def averages(self) -> bool:
        """True where batch norm's statistics are averaged over clients."""
        policy = batch_norm_policy(self.algorithm, self.net, self.batch_norm)
        return policy == "average"

    @property
    def in_process(self) -> RunConfig:
        """The same run for this process alone, which waits for no other rank."""
        return replace(self, ranks=ONE_RANK)

    def cohort(
        self,
        ids: Tensor,  # [S]
        round: int,
        participated: Tensor,  # bool [N]
        purpose: str = "send",
    ) -> Cohort:
        """The cohort of the clients `ids`.

        Args:
            ids: The numbers of the clients.
            round: The round, from 1.
            participated: The mask of the clients that took part in an earlier round.
            purpose: "send" for a round, or "evaluation".
        """
        return Cohort(
            ids,
            num_samples=self.data.size("train")[ids],
            n=self.data.n,
            round=round,
            rounds=self.rounds,
            seed=self.seed,
            purpose=purpose,
            trainable=self.eligible_clients,
            training=self.training,
            new=~participated[ids],
            participated=participated,
        )

    def fits_one_thread(self, count: int) -> bool:
        """True where `count` models are little work for several threads."""
        return count * self.net.size < ONE_THREAD_MAX_WEIGHTS


def batch_norm_policy(alg: Algorithm, net: Net, batch_norm: str = "auto") -> str:
    """The policy for batch norm's running statistics: "average", "local" or "rule".

    - "average" mixes the statistics with the weights that mix the models. Every client
      receives the mix, also one that did not take part.
    - "local" leaves each client its own statistics. A client that never trained is
      evaluated with the mean of those that did; where nothing of their training is in
      its model, with the initial statistics.
    - "rule" means that the algorithm treats the statistics as a part of its models.

    "auto" is the policy that the algorithm names first in its traits. Raises ValueError
    for a policy that the algorithm does not know.
    """
    known = alg.traits.batch_norm
    if batch_norm == "auto":
        return str(known[0])
    # Without batch norm all policies have the same effect: none.
    allowed = known if net.buffer_names else ("average", "local", "rule")
    if batch_norm not in allowed:
        words = " and ".join(map(repr, allowed))
        raise ValueError(
            f"batch_norm: this {type(alg).__name__} knows {words} statistics, got "
            f"{batch_norm!r}."
        )
    return batch_norm


@checked
def initial_state(
    alg: Algorithm,
    net: Net,
    n: PositiveInt,
    clients: bool = True,
    trainable_clients: Tensor | None = None,
) -> State:
    """The state before the first round.

    Raises ValueError where a client that the algorithm requires does not exist, or has
    no training samples.

    Args:
        alg: The algorithm.
        net: The model that the run starts from.
        n: The number of clients.
        clients: False leaves client state out, as for a server on a machine of its own.
        trainable_clients: The ids [T] of the clients that may take part; None for all.
    """
    if trainable_clients is None:
        trainable_clients = torch.arange(n)
    for client in alg.traits.required_clients:
        name = "target" if mean_in(alg) is None else "trusted_client"
        require(0 <= client < n, name, f"a client from 0 to {n - 1}", client)
        can_train = client in trainable_clients
        require(can_train, name, "a client with training samples", client)
    server = alg.init(**alg.server_init_args(net), n=n)
    if len(trainable_clients) < n:
        start = alg.init(**alg.server_init_args(net), n=len(trainable_clients))
        for name in server.keys() - set(alg.traits.per_client_state):
            server[name] = insert_clients(start[name], server[name], trainable_clients)
    client_states = {}
    if clients:
        for name, row in new_client_state(alg, net, server, n).items():
            client_states[name] = lazy_zeros(n, row[0])
    participated = torch.zeros(n, dtype=torch.bool)
    buffers = net.b0.repeat(n, 1)
    return State(server, client_states, buffers, participated)


def insert_clients(
    part: Tensor,  # [T, ...] or [T, T, ...] of the trainable clients
    whole: Tensor,  # [N, ...] or [N, N, ...] of all clients
    ids: Tensor,  # [T]
) -> Tensor:
    """A copy of `whole` with `part` at the clients `ids`.

    The axes of clients are those of different lengths. A tensor without such an axis is
    that of the trainable clients.
    """
    lengths = zip(part.shape, whole.shape, strict=True)
    axes = [axis for axis, (length, full) in enumerate(lengths) if length != full]
    if not axes:
        return part
    new = whole.clone()
    front = list(range(len(axes)))
    index = torch.meshgrid(*[to_device(ids, new.device)] * len(axes), indexing="ij")
    new.movedim(axes, front)[index] = part.movedim(axes, front)
    return new


def new_client_state(alg: Algorithm, net: Net, server: Tensors, n: int) -> Tensors:
    """The state [1, ...] that a client has in its first round."""
    cohort = Cohort(ids=torch.tensor([0]), num_samples=torch.tensor([1]), n=n)
    rows = alg.init_client(alg.send(server, cohort), net, n)
    return {name: row[:1] for name, row in rows.items()}


def client_rows(config: RunConfig, state: State, ids: Tensor, down: Payload) -> Tensors:
    """Copies [S, ...] of the state of the clients `ids`.

    A client that never took part has no state yet, and receives the first one.

    Args:
        config: The options of the run.
        state: The state of the run.
        ids: The numbers [S] of the clients.
        down: What the server sends them, from which a first state is made.
    """
    rows = {
        name: tensor[to_device(ids, tensor.device)]
        for name, tensor in state.clients.items()
    }
    is_new = ~state.participated[ids]
    if not rows or not is_new.any():
        return rows
    first_states = config.algorithm.init_client(down, config.net, config.data.n)
    for name, first in first_states.items():
        new = to_device(is_new, rows[name].device)
        rows[name][new] = first.expand_as(rows[name])[new]
    return rows


def have_initial_models(
    net: Net, down: Payload, client_states: Tensors, count: int
) -> Tensor:
    """Mask [S] on the CPU: True for clients that have the run's initial model.

    Then nothing of others' training is in it. The model is looked for where
    `Algorithm.model` looks by default: it is the client's own "w", else the download
    "x". Clients that receive nothing have no other model.

    Args:
        net: The model of the run, whose `w0` [P] is the initial one.
        down: The clients' downloads.
        client_states: The clients' own state [S, ...].
        count: S, the number of clients.
    """
    received = [v.rows if isinstance(v, SharedRows) else v for v in down.values()]
    if not any(tensor.numel() for tensor in received):
        return torch.ones(count, dtype=torch.bool)
    models = client_states.get("w", down.get("x"))
    if not isinstance(models, Tensor) or models.shape != (count, net.size):
        return torch.zeros(count, dtype=torch.bool)
    return (models == net.w0.to(models)).all(1).cpu()


def flatten_state(state: State) -> Tensors:
    """All tensors of a state by name: "server.x", "clients.v", "batch_norm", "seen"."""
    server = {f"server.{name}": tensor for name, tensor in state.server.items()}
    clients = {f"clients.{name}": tensor for name, tensor in state.clients.items()}
    tensors = {"batch_norm": state.buffers, "seen": state.participated}
    return server | clients | tensors


def unflatten_state(tensors: Tensors, round: int, void_rounds: int = 0) -> State:
    """The state with the tensors that `flatten_state` named."""
    server = _without_prefix(tensors, "server.")
    clients = _without_prefix(tensors, "clients.")
    return State(
        server, clients, tensors["batch_norm"], tensors["seen"], round, void_rounds
    )


def _without_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def copy_state(config: RunConfig, state: State) -> State:
    """A copy that shares no memory with `state`."""
    alg = config.algorithm
    n = len(state.participated)
    new = initial_state(alg, config.net, n, bool(state.clients))
    tensors = state_dict(alg, state)
    return load_state_dict(alg, new, tensors, state.round, state.void_rounds)


def client_row_names(alg: Algorithm, state: State) -> set[str]:
    """The names of tensors [N, ...] that are read only for participants."""
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

    Do not use `state` afterwards: its rows are updated in place.

    Args:
        alg: The algorithm.
        state: The initial state of the same run.
        tensors: The copies that `state_dict` made.
        round: The number of rounds that were played.
        void_rounds: The number of void rounds in a row.
    """
    ids = tensors["seen"].nonzero()[:, 0]
    old = flatten_state(state)
    sparse_names = client_row_names(alg, state)
    changes: Changes = {}
    for name, tensor in tensors.items():
        if name in sparse_names:
            changes[name] = RowUpdate(ids, tensor)
        else:
            changes[name] = tensor.to(old[name].device)
    return unflatten_state(apply(old, changes), round, void_rounds)


def check_state(state: State, alg: Algorithm, net: Net, n: int) -> None:
    """Raises ValueError for a state of another algorithm, federation or model."""
    initial = initial_state(alg, net, n, clients=bool(state.clients))
    expected = flatten_state(initial)
    tensors = flatten_state(state)
    needs = f"a state of {type(alg).__name__} with"
    extra = [name for name in tensors if name not in expected]
    require(not extra, "state", f"{needs} no {' and '.join(extra)}", list(tensors))
    for name, like in expected.items():
        tensor = tensors.get(name)
        may_grow = name.removeprefix("server.") in alg.traits.growing_state
        fits = tensor is not None and _form_fault(tensor, like, may_grow) is None
        kind = summarize_kind(like)
        wanted = f"the {name} like {kind}, for {n} clients and this model"
        require(fits, "state", f"{needs} {wanted}", tensor)


def check_server_changes(alg: Algorithm, server: Tensors, changes: Changes) -> None:
    """Raises ValueError where a hook of the server changes the form of its state.

    A tensor keeps its shape, dtype and device, so that a checkpoint of any round can be
    taken up. A tensor of `traits.growing_state` may have another number of rows.

    Args:
        alg: The algorithm.
        server: The server's state before the round.
        changes: The changes of it, which the hook returned.
    """
    for name, change in changes.items():
        place = f"update: state[{name!r}]"
        if name not in server:
            raise ValueError(f"{place} is new; let init make it.")
        like = server[name]
        if isinstance(change, RowUpdate):
            # Rows are moved to the dtype and the device of their tensor.
            rows = change.rows.to(like)
            like = like.new_empty(1).expand(len(change.ids), *like.shape[1:])
            fault = _form_fault(rows, like, may_grow=False)
        else:
            fault = _form_fault(change, like, name in alg.traits.growing_state)
        if fault is not None:
            raise ValueError(
                f"{place} {fault}; keep its form, or name a list whose number of rows "
                "changes in traits.growing_state."
            )


def check_client_states(before: Tensors, after: Tensors) -> None:
    """Raises ValueError where a training changes the form of clients' states.

    Args:
        before: The states [s, ...] before the training, by name.
        after: The states that `train` returned.
    """
    for name, like in before.items():
        place = f"train: client_state[{name!r}]"
        if name not in after:
            raise ValueError(f"{place} is gone; return all that init_client gave.")
        fault = _form_fault(after[name], like, may_grow=False)
        if fault is not None:
            raise ValueError(f"{place} {fault}; keep its form.")
    for name in after.keys() - before.keys():
        raise ValueError(
            f"train: client_state[{name!r}] is new; let init_client make it."
        )


def _form_fault(tensor: Any, like: Tensor, may_grow: bool) -> str | None:
    """The words for a tensor whose form is not that of `like`; None for the same form.

    With `may_grow` the number of rows may be another.
    """
    if not isinstance(tensor, Tensor):
        return f"is {summarize(tensor)}, init gave a tensor"
    axes = 1 if may_grow else 0
    has_axes = tensor.dim() == like.dim() and tensor.shape[axes:] == like.shape[axes:]
    fault = None
    if not has_axes:
        fault = f"has shape {list(tensor.shape)}, init gave {list(like.shape)}"
    elif tensor.dtype != like.dtype:
        fault = f"has dtype {tensor.dtype}, init gave {like.dtype}"
    elif tensor.device != like.device:
        fault = f"is on {tensor.device}, init gave it on {like.device}"
    return fault
