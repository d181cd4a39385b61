"""What an algorithm is: a server's rule, and a client's part where it trains in a way
of its own.

A server's rule works on rows and knows no model, no data and no training loop. It is
used as an optimizer of optax is: `init` once, then in every round

    down = rule.send(state, cohort)                # what each client receives
    changes, mix = rule.update(state, up, cohort)  # what its uploads change
    state = apply(state, changes)

Letters: N clients, S of them in a round's cohort, P parameters, M models that a server
makes.
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
from pflcore.check import check_fields, reject, warn_caller
from pflcore.data._federation import Federation
from pflcore.data._ragged import to_device
from pflcore.train import Clients, Fit, Net, Training
from pflcore.train._random import generator_of

Tensors = dict[str, Tensor]  # a state, or uploads [S, ...], by name
Payload = dict[str, Any]  # what clients receive: Tensor [S, ...] or SharedRows, by name
# what `train` gives: what the clients keep, what they upload, their training
TrainResult = tuple[Tensors, Tensors, Fit]
# rows [S, P] -> their gradients [S, P] on one step's minibatch: `Clients.each_batch`
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
    """Ends the run: raised with one sentence where going on makes no sense."""


class VoidRound(Exception):
    """Makes the round void, nothing changes: `update` raises it with one sentence where
    so few uploads say nothing."""


class BadUpload(ValueError):
    """Leaves clients out of a round: `update` raises it with a reason for each of
    their numbers."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__(
            " ".join(f"client number {i}: {said}" for i, said in self.reasons.items())
        )


class SharedRows(NamedTuple):
    """At most M of R shared rows for each client, without the copies; what travels is
    the rows whose numbers are not -1."""

    rows: Tensor  # [R, P]
    index: Tensor  # type: ignore[assignment]  # [S, M], -1: nothing; hides tuple.index


class MixingWeights(NamedTuple):
    """Whose updates went into which model: for the record, and for batch norm's
    statistics."""

    # [M, S] float64: M models of all the cohort's updates; or [M, K] with index
    weight: Tensor
    index: Tensor | None = None  # type: ignore[assignment]  # [M, K] int64: places in the cohort
    # [M] ids of the clients whose models they are; None: one for all
    receivers: Tensor | None = None

    def aggregate(
        self, updates: Tensor, base: Tensor | None = None, lr: float = 1.0
    ) -> Tensor:
        """The models [M, P]: base + lr * (weight @ updates), of updates [S, P]."""
        index = None if self.index is None else to_device(self.index, updates.device)
        return ops.aggregate(
            updates, to_device(self.weight, updates.device), index, base, lr
        )

    def report(self, cohort: Cohort) -> Tensors:
        """The weights by clients' numbers: of one model "weights" [N], or where some
        are absent "weight" and "index" [S]; with an index "weight" and "index" [M, K]
        of the clients "rows" [M]."""
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
    round: int = 1  # from 1
    rounds: int = 1
    seed: int = 0  # of the run, for a rule that draws
    num_dropped: int = 0  # clients beside these whose uploads were not finite
    # names the stream of `generator`: "send" to train on, or "evaluation"
    purpose: str = "send"

    def take(self, kept: Tensor) -> Cohort:
        """The cohort without those who are not `kept`, bool [S]."""
        return self._replace(
            ids=self.ids[kept],
            num_samples=self.num_samples[kept],
            num_dropped=self.num_dropped + int((~kept).sum()),
        )

    def mean_weights(self, weighting: str = "samples") -> MixingWeights:
        """One mean of the cohort, by samples or uniform."""
        size = (
            self.num_samples
            if weighting == "samples"
            else torch.ones_like(self.num_samples)
        )
        return MixingWeights((size.double() / size.sum())[None])

    @property
    def generator(self) -> torch.Generator:
        """A generator of this round's own."""
        return generator_of(self.seed, self.round, self.purpose)


class RowUpdate(NamedTuple):
    """New rows for some clients in a tensor [N, ...]: returned by who must not
    write."""

    ids: Tensor  # [S] int64
    rows: Tensor  # [S, ...]


# what a round changes of the server's state: new tensors, or new rows, by name
Changes = dict[str, Tensor | RowUpdate]
# what `update` gives: the changes, and which uploads went into which model
UpdateResult = tuple[Changes, MixingWeights | None]


def apply(state: Tensors, changes: Mapping[str, Tensor | RowUpdate]) -> Tensors:
    """The state [...] after `changes`. Rows are written in place: the state that went
    in is used up."""
    # all that takes memory comes first: then everything is written, or nothing
    writes = [
        (state[k], to_device(new.ids, state[k].device), new.rows.to(state[k]))
        for k, new in changes.items()
        if isinstance(new, RowUpdate)
    ]
    for tensor, ids, rows in writes:
        tensor[ids] = rows
    return state | {k: v for k, v in changes.items() if isinstance(v, Tensor)}


def lazy_zeros(n: int, like: Tensor) -> Tensor:
    """Zeros [n, *like.shape] of `like`'s dtype and device.

    On a CPU they take no memory before they are written, row by row: for a table of
    clients few of whom may ever take part.
    """
    if like.device.type != "cpu":
        return like.new_zeros(n, *like.shape)
    return torch.from_numpy(np.zeros((n, *like.shape), like.numpy().dtype))


def squared_norms(rows: Tensor) -> Tensor:
    """The squared norms [S] of `rows` [S, P], float64, as exact as
    `ops.pairwise_sqdist`."""
    return ops.pairwise_sqdist(rows, torch.zeros_like(rows[:1]))[:, 0]


def normalize_rows(a: Tensor) -> Tensor:
    """Divides the numbers `a` >= 0 [M, S] by the sums of their rows, which then sum to
    1; a row of zeros stays a row of zeros."""
    total = a.sum(1, keepdim=True)
    return torch.where(total > 0, a / total.clamp(min=torch.finfo(a.dtype).tiny), 0.0)


VECTOR_NUMBERS = 64  # numbers: whole vectors of any processor


def map_rows(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies the elementwise function `f` to the rows `x` [S, k]: f(x) [S, k], each
    row with the bits that it has alone.

    Numbers after the last whole vector go through other instructions, whose last digits
    may differ; so each row is padded to whole vectors.
    """
    return f(torch.nn.functional.pad(x, (0, -x.shape[1] % VECTOR_NUMBERS)))[
        :, : x.shape[1]
    ]


class Traits(NamedTuple):
    """What a run has to know of an algorithm beside its hooks; may depend on its
    options."""

    # what may become of its running statistics
    batch_norm: tuple[str, ...] = ("average", "local")
    # ("rule",): they are a part of what the server's models are
    required_clients: tuple[int, ...] = ()  # clients that join every round
    returns: Literal["logits", "probabilities", "values"] = "logits"  # of `predict`
    needs_val: bool = False  # trains on a split "val"
    # why its formula rests on SGD's steps: "takes steps of SGD along ..."
    sgd_only_reason: str = ""
    no_clip_grad_reason: str = ""  # why clipped gradients do not fit it
    # uploads that are models, not differences: what each is
    model_uploads: Mapping[str, str] = {}
    # measured from, "down.x" (its download) or "server.w" (the server's row of the
    # client) the server's tensors of a row for each client, at first zero
    per_client_state: tuple[str, ...] = ()
    # uploads and client state that a clip shortens with the update
    clipped_with_update: tuple[str, ...] = ()
    # options of no part in training: to be tuned on one trained state
    evaluation_only: tuple[str, ...] = ()
    reported_state: tuple[
        str, ...
    ] = ()  # tensors of the server's state that go into the round's record,
    # and "mix": whose updates went into which model


@algorithm_options
class Algorithm:
    """What every algorithm derives from: options are fields, checked by their
    annotations."""

    traits: ClassVar[Any] = Traits()

    def __post_init__(self) -> None:
        check_fields(self)

    def require_default(self, beside: str, *names: str) -> None:
        """ValueError where one of the options `names`, which play no part, is not
        its default."""
        for name in names:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                words = f"its default beside {beside}={getattr(self, beside)!r}"
                reject(name, words, getattr(self, name))

    # the server ---------------------------------------------------------------
    def init(self, x0: Tensor, n: int) -> Tensors:
        """The server's state before the first round; x0 [P] is the common initial
        model."""
        return {"x": x0}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        """What each client of the cohort receives: tensors [S, ...] or a
        `SharedRows`."""
        return {"x": state["x"].expand(len(cohort.ids), -1)}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        """What the uploads [S, ...] change of the state, which stays as it is, and
        which of them went into which model (None: statistics of batch norm are never
        mixed)."""
        raise NotImplementedError(f"{type(self).__name__} has no update.")

    # a client -----------------------------------------------------------------
    def server_init_args(self, net: Net) -> Tensors:
        """What `init` is given: the initial model, or its shared part; an algorithm may
        want more."""
        return {"x0": net.w0}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        """The state [S, ...] of clients that take part for the first time."""
        return {}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        """A round's work of the cohort: what the clients keep and what they upload,
        [S, ...] each; and the training whose loss is recorded and whose statistics of
        batch norm count."""
        fit = clients.fit(down["x"])
        # in place: no second table of updates
        return client_state, {"delta": fit.w.sub_(down["x"])}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        """The personalized models [S, ...], as `predict` takes them: the clients' own
        w, where they keep one, else x; "batch_norm" [S, b] are statistics that replace
        the clients' own."""
        return {"w": client_state["w"] if "w" in client_state else down["x"]}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """One client's scores on `x` [B, ...]."""
        return net(model["w"], x)

    # rarely -------------------------------------------------------------------
    def prepare(self, net: Net) -> Net:
        """The model that is trained, made of the one given: asked for once, before
        `init`."""
        return net

    def report(
        self, state: Tensors, mix: MixingWeights | None, cohort: Cohort
    ) -> Tensors:
        """Small tensors worth a line in the round's record, of the state after it;
        "weights" are the mixing weights, see `MixingWeights.report`. By default those
        that `traits.reported_state` names."""
        names = self.traits.reported_state
        shown = mix.report(cohort) if mix is not None and "mix" in names else {}
        return shown | {k: state[k] for k in names if k != "mix"}

    def clients_for_model(self, data: Federation, ids: Tensor) -> Tensor:
        """The clients [M] that `model` must see to make the models of the clients `ids`
        [S], these among them: ids, ascending. By default nobody else."""
        return ids

    def assign_new_client(self, state: Tensors, up: Tensors, cohort: Cohort) -> Changes:
        """What a newcomer's upload `up` [1, ...] shows of where it belongs: for
        `History.adapt`."""
        return {}

    def add_client(self, state: Tensors, n: int) -> Tensors:
        """The state where a client joins the n that there are, beside the rows that it
        gets: for what is a mean over all."""
        return state


def check_training(alg: Algorithm, training: Training) -> None:
    """ValueError, one sentence, where the algorithm cannot train so."""
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
    """Warns where the run's momentum or weight decay plays no part in the steps of
    `alg`."""
    t = clients.context.training
    if t.momentum or t.weight_decay:
        warn_caller(
            f"{type(alg).__name__}: its local steps are its paper's, without momentum "
            f"and weight decay; momentum={t.momentum:g} and "
            f"weight_decay={t.weight_decay:g} play no part."
        )
