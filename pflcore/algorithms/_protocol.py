"""The protocol of an algorithm: its server's part and its clients' part.

The server's part works on rows. It knows no model, no data and no training loop. It is
used like an optimizer of optax: `init` once, then in every round

    down = alg.send(state, cohort)                # what each client receives
    changes, mix = alg.update(state, up, cohort)  # what the uploads change
    state = apply(state, changes)

By default a client trains from its download, and uploads the difference. An algorithm
with other clients defines their part, too.

Symbols: N clients (`n` in code), S of them in a round's cohort, P parameters of a
model, M models that a server makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import dataclass_transform

from pflcore import ops
from pflcore._device import to_device
from pflcore.check import check_fields, reject, warn_caller
from pflcore.data._federation import Federation
from pflcore.train import Clients, Fit, Net, Training
from pflcore.train._random import generator_of

Tensors = dict[str, Tensor]  # a state, or uploads [S, ...], by name
Payload = dict[str, Any]  # what clients receive: Tensor [S, ...] or SharedRows, by name
# What `train` returns: the clients' state, their uploads, and their training.
TrainResult = tuple[Tensors, Tensors, Fit]
# From rows [S, P] to their gradients [S, P] on one step's minibatch, as
# `Clients.each_batch` makes it.
GradientFn = Callable[..., Tensor]
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def algorithm_options(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass, whose fields are the algorithm's options.

    It is `dataclasses.dataclass(frozen=True)`, and type checkers know it as that. A
    comment beside a field is the option's help on the command line.
    """
    return dataclass(frozen=True)(cls)


class Stop(Exception):
    """Ends the run; its text is one sentence that says why."""


class VoidRound(Exception):
    """Makes the round void: nothing changes.

    `update` raises it, with one sentence, where the uploads are too few for it.
    """


class BadUpload(ValueError):
    """Leaves clients out of a round; `update` raises it.

    Args:
        reasons: from a client's number to the reason
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        sentences = [f"client number {i}: {text}" for i, text in self.reasons.items()]
        super().__init__(" ".join(sentences))


class SharedRows(NamedTuple):
    """At most M of R shared rows for each client, without copies.

    A client receives the rows whose numbers are in its row of `index`, except -1.
    """

    rows: Tensor  # [R, P]
    # [S, M] numbers of rows, -1 for none. It hides the method `tuple.index`.
    index: Tensor  # type: ignore[assignment]


class MixingWeights(NamedTuple):
    """The weights of the cohort's updates in each model that the server made.

    The record shows them, and batch norm's statistics are mixed with them.
    """

    # [M, S] float64, of all updates of the cohort; [M, K] with `index`.
    weight: Tensor
    # [M, K] int64, positions in the cohort of the K updates that a model mixes.
    index: Tensor | None = None  # type: ignore[assignment]
    # [M] ids of the clients whose models they are. None: one model for all clients.
    receivers: Tensor | None = None

    def aggregate(
        self, updates: Tensor, base: Tensor | None = None, lr: float = 1.0
    ) -> Tensor:
        """The models [M, P]: base + lr * (weight @ updates), of updates [S, P]."""
        device = updates.device
        index = None if self.index is None else to_device(self.index, device)
        weight = to_device(self.weight, device)
        return ops.aggregate(updates, weight, index, base, lr)

    def report(self, cohort: Cohort) -> Tensors:
        """The weights by clients' numbers, for the record.

        - one model, and all clients in the cohort: "weights" [N]
        - one model, and some clients absent: "weight" and "index" [S], the ids
        - with `index`: "weight" and "index" [M, K] of the clients "rows" [M]
        """
        if self.index is not None:
            ids = cohort.ids
            return {"rows": ids, "index": ids[self.index.cpu()], "weight": self.weight}
        if len(cohort.ids) == cohort.n:
            return {"weights": self.weight[0]}
        return {"index": cohort.ids, "weight": self.weight[0]}


class Cohort(NamedTuple):
    """The clients of one round."""

    ids: Tensor  # [S] int64, ascending
    num_samples: Tensor  # [S] int64, training samples
    n: int  # N, clients of the federation
    round: int = 1  # the number of this round, from 1
    rounds: int = 1  # of the run
    seed: int = 0  # of the run, for an algorithm that draws
    num_dropped: int = 0  # clients beside these whose uploads were not finite
    # Names the stream of `generator`: "send" for training, or "evaluation".
    purpose: str = "send"

    def take(self, kept: Tensor) -> Cohort:
        """The cohort of the clients that the mask `kept`, bool [S], selects."""
        return self._replace(
            ids=self.ids[kept],
            num_samples=self.num_samples[kept],
            num_dropped=self.num_dropped + int((~kept).sum()),
        )

    def mean_weights(self, weighting: str = "samples") -> MixingWeights:
        """The weights of one mean of the cohort: by samples, or uniform."""
        size = self.num_samples
        if weighting != "samples":
            size = torch.ones_like(self.num_samples)
        return MixingWeights((size.double() / size.sum())[None])

    @property
    def generator(self) -> torch.Generator:
        """A new generator, seeded by the run's seed, the round and the purpose."""
        return generator_of(self.seed, self.round, self.purpose)


class RowUpdate(NamedTuple):
    """New rows of some clients for a tensor [N, ...].

    `update` returns it, as it must not write to the state itself.
    """

    ids: Tensor  # [S] int64
    rows: Tensor  # [S, ...]


# What a round changes of the server's state: new tensors, or new rows, by name.
Changes = dict[str, Tensor | RowUpdate]
# What `update` returns: the changes, and which uploads went into which model.
UpdateResult = tuple[Changes, MixingWeights | None]


def apply(state: Tensors, changes: Mapping[str, Tensor | RowUpdate]) -> Tensors:
    """The state [...] after `changes`.

    Do not use `state` afterwards: its rows are updated in place.
    """
    # Everything that needs memory comes before the first write. So a failure leaves the
    # state as it was.
    writes = []
    for name, change in changes.items():
        if isinstance(change, RowUpdate):
            tensor = state[name]
            ids = to_device(change.ids, tensor.device)
            writes.append((tensor, ids, change.rows.to(tensor)))
    new_tensors = {k: v for k, v in changes.items() if isinstance(v, Tensor)}
    for tensor, ids, rows in writes:
        tensor[ids] = rows
    return state | new_tensors


def lazy_zeros(n: int, like: Tensor) -> Tensor:
    """Zeros [n, *like.shape] of `like`'s dtype and device.

    On a CPU a row takes no memory before it is written: few clients of a table may ever
    take part.
    """
    if like.device.type != "cpu":
        return like.new_zeros(n, *like.shape)
    return torch.from_numpy(np.zeros((n, *like.shape), like.numpy().dtype))


def squared_norms(rows: Tensor) -> Tensor:
    """The squared norms [S] of `rows` [S, P], float64.

    They are as exact as `ops.pairwise_sqdist`, which computes them.
    """
    origin = torch.zeros_like(rows[:1])
    return ops.pairwise_sqdist(rows, origin)[:, 0]


def normalize_rows(a: Tensor) -> Tensor:
    """The rows of `a` [M, S], which is not negative, each divided by its sum.

    A row of zeros stays a row of zeros.
    """
    total = a.sum(1, keepdim=True)
    divisor = total.clamp(min=torch.finfo(a.dtype).tiny)
    return torch.where(total > 0, a / divisor, 0.0)


# As many numbers are whole vectors on any processor.
VECTOR_NUMBERS = 64


def map_rows(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f(x) [S, k] of an elementwise function, with bits that other rows do not change.

    Numbers after the last whole vector of a tensor go through other instructions, whose
    last digits may differ. So each row of `x` [S, k] is padded to whole vectors.
    """
    columns = x.shape[1]
    padding = -columns % VECTOR_NUMBERS
    padded = torch.nn.functional.pad(x, (0, padding))
    return f(padded)[:, :columns]


class Traits(NamedTuple):
    """Facts of an algorithm that a run needs beside its hooks.

    They may depend on the algorithm's options.
    """

    # Policies for batch norm's running statistics that fit the algorithm. ("rule",):
    # the statistics are a part of the server's models.
    batch_norm: tuple[str, ...] = ("average", "local")
    required_clients: tuple[int, ...] = ()  # clients that take part in every round
    returns: Literal["logits", "probabilities", "values"] = "logits"  # of `predict`
    needs_val: bool = False  # trains on a split "val"
    # Why its formula rests on SGD's steps: "takes steps of SGD along ...".
    sgd_only_reason: str = ""
    no_clip_grad_reason: str = ""  # why clipped gradients do not fit it
    # Uploads that are models, not differences. Each has the model from which its update
    # is measured: "down.x" (x of the client's download) or "server.w" (the client's row
    # of the server's tensor w).
    model_uploads: Mapping[str, str] = {}
    # Tensors of the server with a row for each client, at first zero. Rows of clients
    # that never took part are not read.
    per_client_state: tuple[str, ...] = ()
    # Uploads and client state that are shortened with the update, where it is clipped.
    clipped_with_update: tuple[str, ...] = ()
    # Options without effect on training. They are tuned on one trained state.
    evaluation_only: tuple[str, ...] = ()
    # Tensors of the server's state that go into the round's record; "mix" stands for
    # the weights of the uploads in each model.
    reported_state: tuple[str, ...] = ()


@algorithm_options
class Algorithm:
    """Base class of every algorithm.

    Its options are fields. Their annotations check them.
    """

    traits: ClassVar[Any] = Traits()

    def __post_init__(self) -> None:
        check_fields(self)

    def require_default(self, beside: str, *names: str) -> None:
        """Raises ValueError where an option without effect is not its default.

        Args:
            beside: the option whose value leaves the others without effect
            names: these other options
        """
        for name in names:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                expected = f"its default beside {beside}={getattr(self, beside)!r}"
                reject(name, expected, value)

    # the server ---------------------------------------------------------------
    def init(self, x0: Tensor, n: int) -> Tensors:
        """The server's state before the first round.

        Args:
            x0: [P] the common initial model
        """
        return {"x": x0}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        """The clients' downloads: tensors [S, ...] or `SharedRows`, by name."""
        return {"x": state["x"].expand(len(cohort.ids), -1)}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        """The changes of the state, and the weights of the uploads in each model.

        The state itself stays as it is. Instead of weights, None says that batch norm's
        statistics are never mixed.

        Args:
            up: the uploads [S, ...] by name
        """
        raise NotImplementedError(f"{type(self).__name__} has no update.")

    # a client -----------------------------------------------------------------
    def server_init_args(self, net: Net) -> Tensors:
        """The arguments of `init` beside n: x0, the initial model or its shared part.

        An algorithm may add others.
        """
        return {"x0": net.w0}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        """The state [S, ...] of clients that take part for the first time."""
        return {}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        """The new client state [S, ...], the uploads [S, ...], and the training.

        The round's record shows the loss of this training, and its statistics of batch
        norm count.
        """
        fit = clients.fit(down["x"])
        delta = fit.w.sub_(down["x"])  # in place: no second table of models
        return client_state, {"delta": delta}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        """The personalized models [S, ...], as `predict` receives them.

        By default they are the clients' own models "w", where they keep them, else the
        downloads "x". The name "batch_norm" [S, b] is for statistics that replace the
        clients' own.
        """
        w = client_state["w"] if "w" in client_state else down["x"]
        return {"w": w}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """One client's scores on `x` [B, ...]."""
        return net(model["w"], x)

    # rarely -------------------------------------------------------------------
    def prepare(self, net: Net) -> Net:
        """The model that is trained, made of the user's.

        A run calls it once, before `init`.
        """
        return net

    def report(
        self, state: Tensors, mix: MixingWeights | None, cohort: Cohort
    ) -> Tensors:
        """Small tensors for the round's record, of the state after the round.

        By default these are the tensors that `traits.reported_state` names. For the
        mixing weights see `MixingWeights.report`.
        """
        names = self.traits.reported_state
        tensors = {name: state[name] for name in names if name != "mix"}
        if mix is None or "mix" not in names:
            return tensors
        return mix.report(cohort) | tensors

    def clients_for_model(self, data: Federation, ids: Tensor) -> Tensor:
        """The ids of the clients that `model` needs for the models of `ids` [S].

        They are ascending, and `ids` are among them. By default there are no others.
        """
        return ids

    def assign_new_client(self, state: Tensors, up: Tensors, cohort: Cohort) -> Changes:
        """The changes of the state by a new client's upload `up` [1, ...].

        `History.adapt` calls it after the client's first training. It is for what the
        upload shows of the client, such as its cluster.
        """
        return {}

    def add_client(self, state: Tensors, n: int) -> Tensors:
        """The state after a client has joined the n clients.

        The run itself adds the client's rows to tables. This hook is for what is a mean
        over all clients.
        """
        return state


def check_training(alg: Algorithm, training: Training) -> None:
    """Raises ValueError where the algorithm cannot train with these options."""
    traits = alg.traits
    name = type(alg).__name__
    if traits.sgd_only_reason and training.local_optimizer != "sgd":
        raise ValueError(
            f"local_optimizer: {name} {traits.sgd_only_reason}, and AdamW's steps are "
            "others; take local_optimizer='sgd'."
        )
    if traits.no_clip_grad_reason and training.clip_grad is not None:
        raise ValueError(
            f"clip_grad: {name} {traits.no_clip_grad_reason}, which are not clipped; "
            "leave clip_grad out."
        )


def warn_unused_momentum(alg: Algorithm, clients: Clients) -> None:
    """Warns where momentum or weight decay has no effect on the steps of `alg`."""
    training = clients.context.training
    if training.momentum or training.weight_decay:
        warn_caller(
            f"{type(alg).__name__}: its local steps are its paper's, without momentum "
            f"and weight decay; momentum={training.momentum:g} and "
            f"weight_decay={training.weight_decay:g} play no part."
        )
