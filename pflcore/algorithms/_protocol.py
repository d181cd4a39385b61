"""The protocol of an algorithm: its server's part and its clients' part.

The server's part works on rows. It knows no model, no data and no training loop. It is
used like an optimizer of optax: `init` once, then in every round

    down = alg.send(state, cohort)                # what each client receives
    changes, mix = alg.update(state, up, cohort)  # what the uploads change
    state = apply(state, changes)

By default a client trains from its download, and uploads the difference. An algorithm
with other clients defines their part, too.

Symbols:

- N clients (`n` in code) are in the federation, S of them in a round's cohort.
- A model has P parameters, and b numbers in batch norm's running statistics.
- A server makes M models in a round. A client may take K of the cohort's updates.
- R rows are shared by clients. A batch has B samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import dataclass_transform

from pflcore import ops
from pflcore._cohort import Cohort as Cohort
from pflcore._cohort import MixingWeights as MixingWeights
from pflcore._cohort import Tensors as Tensors
from pflcore._cohort import VoidRound as VoidRound
from pflcore._device import to_device
from pflcore.check import check_fields, reject, warn_caller
from pflcore.data._federation import Federation
from pflcore.train import Clients, Fit, Net, Training

# The clients' downloads by name, each a tensor [S, ...] or `SharedRows`.
Payload = dict[str, Any]
# The result of `train`: the clients' state, their uploads, and their training.
TrainResult = tuple[Tensors, Tensors, Fit]
# The function that `Clients.each_batch` gives to a local step. It returns the gradients
# [S, P] of rows [S, P] on the step's minibatch.
GradientFn = Callable[..., Tensor]
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def algorithm_options(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass, whose fields are the algorithm's options.

    It is `dataclasses.dataclass(frozen=True)`, and type checkers know it as that. The
    command line takes an option's help from its entry in "Args:" of the docstring, or
    from a comment at the field.
    """
    return dataclass(frozen=True)(cls)


class Stop(Exception):
    """Ends the run.

    A hook or a callback raises it, with one sentence that gives the reason.
    """


class BadUpload(ValueError):
    """Leaves clients out of a round.

    `update` raises it for uploads that it cannot use. It is then called again with the
    uploads of the other clients.

    Args:
        reasons: For each of these clients, by its number, the reason as a clause.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        sentences = [f"client number {i}: {text}" for i, text in self.reasons.items()]
        super().__init__(" ".join(sentences))


class SharedRows(NamedTuple):
    """Rows of one matrix that several clients receive, without copies.

    Each client downloads at most M of the R rows. Only the rows that it downloads are
    counted as traffic.

    Attributes:
        rows: [R, P] the rows, for example the models of all clients. They may share
            memory with the server's state, so a hook must not write to them.
        index: [S, M] for each client the numbers of its rows, from 0 to R - 1. A number
            of -1 stands for no row: clients may receive different numbers of rows.
    """

    rows: Tensor  # [R, P]
    # [S, M] int64. It hides the method `tuple.index`.
    index: Tensor  # type: ignore[assignment]


# A bound of uploads [S, ...]: a number, a tensor that broadcasts to them, or a function
# that computes either from all uploads [S, ...] by name.
Bound = float | Tensor | Callable[[Tensors], Tensor]


class Claim(NamedTuple):
    """A tensor that a client uploads beside its update, and the numbers it may hold.

    The server cannot see whether the numbers are true. So `Algorithm.uploads` says what
    they can be, and a client that uploads others is left out of the round. The bounds
    follow from what the server knows: the number of clients, the numbers of samples
    that they claim, and their training.

    Attributes:
        like: [...] a tensor with the shape and the dtype of one client's upload. Its
            numbers are not read.
        low: The least number that may occur, see `Bound`.
        high: The largest number that may occur, see `Bound`.
        is_whole: True for whole numbers.
        most: The largest sum of one client's numbers, [S] or one for all clients.
        is_statistics: True for batch norm's statistics, whose variances are at least 0.
    """

    like: Tensor
    low: Bound = -math.inf
    high: Bound = math.inf
    is_whole: bool = False
    most: float | Tensor = math.inf
    is_statistics: bool = False

    @property
    def is_bounded(self) -> bool:
        """True where some numbers of the dtype may not occur."""
        bounds = (self.low, self.high, self.most)
        is_free = all(isinstance(b, float) and math.isinf(b) for b in bounds)
        return self.is_whole or self.is_statistics or not is_free


# What a server expects of one client's upload, by name: a tensor [...] of the shape and
# the dtype of an update, or a `Claim`.
Uploads = dict[str, Tensor | Claim]


class RowUpdate(NamedTuple):
    """New rows of some clients for a tensor [N, ...].

    `update` returns it, as it must not write to the state itself.

    Attributes:
        ids: [S] int64, the ids of the clients whose rows are new. Each client may be
            named once; the rows of the other clients stay.
        rows: [S, ...] the new rows, in the order of `ids`. They are moved to the device
            and the dtype of the tensor.
    """

    ids: Tensor  # [S]
    rows: Tensor  # [S, ...]


# The changes of the server's state by a round: new tensors, or new rows, by name.
Changes = dict[str, Tensor | RowUpdate]
# The result of `update`: the changes, and the weights of the uploads in each model.
UpdateResult = tuple[Changes, MixingWeights | None]


def apply(state: Tensors, changes: Mapping[str, Tensor | RowUpdate]) -> Tensors:
    """The state, tensors [...] by name, after `changes`.

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

    On a CPU a row takes no memory before it is written: in a large federation few
    clients may ever take part.
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


# A row of this many numbers consists of whole vectors on every processor.
VECTOR_NUMBERS = 64


def map_rows(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f(x) [S, k] of an elementwise function; other rows change no bit of a row.

    Numbers after the last whole vector of a tensor go through other instructions, whose
    last digits may differ. So each row of `x` [S, k] is padded to whole vectors.
    """
    columns = x.shape[1]
    padding = -columns % VECTOR_NUMBERS
    padded = torch.nn.functional.pad(x, (0, padding))
    return f(padded)[:, :columns]


def momentum_steps(steps: Tensor, momentum: float) -> Tensor:
    """The sums [S] of the factors with which a client's gradients are in its update.

    With momentum a gradient also acts in later steps. Without it every factor is 1, and
    the sums are the numbers of steps [S].
    """
    m = momentum
    return steps / (1 - m) - m * (1 - m**steps) / (1 - m) ** 2


# The passes over its samples, in steps of one sample each, that a client may claim
# where the server does not know the options of training.
MAX_PASSES = 1000


def step_bounds(cohort: Cohort) -> tuple[Tensor, Tensor]:
    """The fewest and the most local steps [S] of a round, float64.

    Where the server does not know the options of training, a client has at least one
    step, and at most `MAX_PASSES` for each of its samples.
    """
    n = cohort.num_samples
    training = cohort.training
    if training is None:
        return torch.ones_like(n).double(), (MAX_PASSES * n).double()
    steps = training.steps_of(cohort.round, cohort.ids, cohort.seed)
    if steps is not None:
        return steps.double(), steps.double()
    # Whether the samples after the last whole minibatch are a step of their own is a
    # question of the model, too.
    fewest = (n // training.batch_size).clamp(min=1)
    most = -(-n // training.batch_size)
    return training.epochs * fewest.double(), training.epochs * most.double()


class Traits(NamedTuple):
    """Facts about an algorithm that a run cannot read off its hooks.

    They may depend on the algorithm's options: then `traits` is a property.

    Attributes:
        batch_norm: Policies for batch norm's running statistics that fit the algorithm;
            the first one is its default. "average" mixes them as the models are mixed,
            "local" leaves each client its own. ("rule",) alone means that the
            statistics are a part of the server's models.
        required_clients: Ids of the clients that take part in every round, for example
            the target of a personalized model. A round without one of them is void.
        returns: The meaning of the scores that `predict` returns: "logits",
            "probabilities" or "values". The loss and the labels are computed by it.
        needs_val: True for an algorithm that trains on a split "val". Where the
            federation lacks it, 20 % of each client's training samples become its split
            "val".
        chooses_on_val: True for an algorithm whose `model` chooses by a split "val". As
            with `needs_val`, its values on this split are too good.
        fixed_training: Options of `Training` that must have their defaults, each with
            the reason, as a clause after the algorithm's name: {"local_optimizer":
            "takes steps of SGD along ..."}. A run with another value is refused with
            it.
        head_reason: Why the scores of the model must be those of its head, as a clause
            after the algorithm's name: "adds a second head's scores". A run with
            another model is refused with it; "" says that any model will do.
        rounds_reason: Why the results of a round depend on the number of rounds of the
            run, as a clause after the algorithm's name: "follows a curve ...". Such a
            run cannot go on to more rounds than it was begun with; "" says that no hook
            reads the number of rounds.
        model_uploads: Names of uploads that are models, not differences. Each maps to
            the model from which its update is measured: "down.x" for x of the client's
            download, or "server.w" for the client's row of the server's tensor w.
        mean_state: Names of server tensors that are means over all clients with
            training samples, of what is 0 for a client that never took part. They are
            smaller with one client more.
        growing_state: Names of server tensors whose number of rows changes during a
            run, such as a list of models. All other tensors keep their shape.
        per_client_state: Names of server tensors [N, ...] that start as zeros. Rows of
            clients that never took part are not read, so they need no memory.
        clipped_with_update: Names of uploads and of client state that belong to an
            update. Where a run's `clip` shortens the update, they are shortened by the
            same factor.
        evaluation_only: Names of options that act in `model` or `predict` alone. They
            are tuned on one trained state, without training again.
        reported_state: Names of server tensors that the record of a round shows. "mix"
            stands for the weights of the uploads in each model.
    """

    batch_norm: tuple[str, ...] = ("average", "local")
    required_clients: tuple[int, ...] = ()
    returns: Literal["logits", "probabilities", "values"] = "logits"
    needs_val: bool = False
    chooses_on_val: bool = False
    fixed_training: Mapping[str, str] = {}
    head_reason: str = ""
    rounds_reason: str = ""
    model_uploads: Mapping[str, str] = {}
    mean_state: tuple[str, ...] = ()
    growing_state: tuple[str, ...] = ()
    per_client_state: tuple[str, ...] = ()
    clipped_with_update: tuple[str, ...] = ()
    evaluation_only: tuple[str, ...] = ()
    reported_state: tuple[str, ...] = ()


@algorithm_options
class Algorithm:
    """Base class of every algorithm.

    A subclass is a frozen dataclass whose fields are the options. Their annotations
    check them.

    Its methods are hooks, which a run calls in this order:

    1. Before round 1: `prepare`, `server_init_args`, `init`.
    2. In every round: `send`; `init_client` for clients that are new; `train`;
       `uploads`; `update`; `report`.
    3. In every evaluation: `clients_for_model`, `send`, `init_client` for clients that
       are new, `model`, `predict`.
    4. Where a client joins later: `assign_new_client` after its training.

    A hook must not change its arguments, also not in place.
    """

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which may depend on its options."""
        return Traits()

    def __post_init__(self) -> None:
        check_fields(self)

    def require_default(self, beside: str, *names: str, remedy: str = "") -> None:
        """Raises ValueError where an option without effect is not its default.

        Args:
            beside: The option whose value leaves the others without effect.
            names: These other options.
            remedy: What the user can do, without the full stop.
        """
        for name in names:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                expected = f"its default beside {beside}={getattr(self, beside)!r}"
                reject(name, expected, value, remedy=remedy)

    # the server ---------------------------------------------------------------
    def init(self, x0: Tensor, n: int) -> Tensors:
        """The server's state before the first round.

        A run calls it once, with `n` and what `server_init_args` returns. The result
        may be any tensors [...] by name; by default it is the common model "x" [P].

        Args:
            x0: [P] the common initial model, or the part of it that clients share.
            n: N, the number of clients.
        """
        return {"x": x0}

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        """The clients' downloads: tensors [S, ...] or `SharedRows`, by name.

        A run calls it at the start of each round for the clients that train, and before
        each evaluation for the clients that are evaluated. Row i of a tensor is for the
        client `cohort.ids[i]`. By default every client receives the common model "x"
        [S, P]. What it returns is counted as traffic, in bytes.

        Args:
            state: The server's state: the tensors of `init`, with the changes of the
                rounds so far.
            cohort: The clients that receive something.
        """
        return {"x": state["x"].expand(len(cohort.ids), -1)}

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        """The tensors that each client uploads, by the names that `train` gives.

        An update is given as a tensor [...] of one client's shape and dtype, every
        other upload as a `Claim`. A run calls it in each round after the training, and
        leaves out clients whose claims cannot be. A server on a machine of its own
        takes nothing else. By default the uploads are the models that
        `traits.model_uploads` names, or "delta" [P] where it names none.

        Args:
            state: The server's state before the round.
            down: The clients' downloads, as `send` made them.
            cohort: The clients that upload.
        """
        models: Uploads = {}
        for key, place in self.traits.model_uploads.items():
            side, _, name = place.partition(".")
            rows = state[name] if side == "server" else down[name]
            models[key] = rows[0]
        if not models and "x" in state:
            return {"delta": state["x"]}
        return models

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        """The changes of the state, and the weights of the uploads in each model.

        A run calls it in each round, after the training. The changes map names of the
        state to new tensors [...], or to a `RowUpdate` of a tensor with a row for each
        client.
        The state itself must stay as it is: a round that fails changes nothing. The
        weights are a `MixingWeights`; None in their place says that batch norm's
        statistics are never mixed.

        It may raise `VoidRound`, `BadUpload` or `Stop`.

        Args:
            state: The server's state before the round.
            up: The uploads [S, ...] by name, all of them finite.
            cohort: The clients whose uploads they are, in the same order. Clients whose
                uploads were not finite are not among them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update.")

    # a client -----------------------------------------------------------------
    def server_init_args(self, net: Net) -> Tensors:
        """The arguments of `init` but n: the initial model "x0" [P], and others.

        A run calls it once, before `init`. It is the only part of the server that sees
        the model. An algorithm that shares a part of the model returns that part.

        Args:
            net: The model that is trained; `net.w0` [P] is its initial row.
        """
        return {"x0": net.w0}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        """The first state of clients, [S, ...] by name.

        A run calls it before round 1, for names and shapes. It calls it again wherever
        some of the clients that train or are evaluated have no state yet; rows of the
        others are not used. A tensor [1, ...] stands for the same row for all clients.
        By default clients keep nothing.

        Args:
            down: The clients' downloads of this round, as `send` made them.
            net: The model that is trained.
            n: N, the number of clients.
        """
        return {}

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        """The new client state [S, ...], the uploads [S, ...], and the training.

        A run calls it once a round, for the whole cohort. By default each client trains
        from its download "x" and uploads the difference "delta" [S, P]. The record
        shows the loss of the `Fit` that is returned, and its statistics of batch norm
        become the clients'.

        Args:
            down: The clients' downloads, as `send` made them.
            client_state: Copies [S, ...] of the clients' state before the round.
            clients: The cohort with its data, which trains rows by `clients.fit`.
        """
        fit = clients.fit(down["x"])
        delta = fit.w.sub_(down["x"])  # in place: no second table of models
        return client_state, {"delta": delta}, fit

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        """The personalized models [S, ...] by name, as `predict` receives them.

        A run calls it before each evaluation; the result is never stored. By default
        the models are the clients' own ones "w" [S, P], where they keep them, else the
        downloads "x". Under the name "batch_norm" [S, b] it may return statistics that
        replace the clients' own.

        Args:
            down: The clients' downloads, as `send` made them for the evaluation.
            client_state: Copies [S, ...] of the clients' state; the first state for
                clients that never took part.
            clients: The clients that are evaluated, with their training data.
        """
        w = client_state["w"] if "w" in client_state else down["x"]
        return {"w": w}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """One client's scores [B, ...] on the samples `x` [B, ...].

        It is called for batches of samples, with batch norm and dropout in evaluation
        mode. `traits.returns` says what the scores mean. Where a class keeps the
        default, a run may compute the same scores without calling it.

        Args:
            model: The client's slice of each tensor that `model` returned, without the
                axis of clients: "w" is [P].
            net: The model as a function of a row: `net(row, x)`.
        """
        return net(model["w"], x)

    # rarely -------------------------------------------------------------------
    def prepare(self, net: Net) -> Net:
        """The model that is trained, made of the user's.

        A run calls it once, before every other hook. By default it is the user's model.
        """
        return net

    def report(
        self, state: Tensors, mix: MixingWeights | None, cohort: Cohort
    ) -> Tensors:
        """Small tensors [...] by name, for the round's record.

        A run calls it after each round that is not void. By default it returns the
        tensors that `traits.reported_state` names. For the mixing weights see
        `MixingWeights.report`.

        Args:
            state: The server's state after the round.
            mix: The weights that `update` returned.
            cohort: The clients whose uploads were used.
        """
        names = self.traits.reported_state
        tensors = {name: state[name] for name in names if name != "mix"}
        if mix is None or "mix" not in names:
            return tensors
        return mix.report(cohort) | tensors

    def clients_for_model(self, data: Federation, ids: Tensor) -> Tensor:
        """The ids of the clients that `model` needs for the models of `ids` [S].

        A run calls it before each evaluation. The result [S'] is ascending, and `ids`
        are among it. By default `model` needs no other clients.
        """
        return ids

    def assign_new_client(self, state: Tensors, up: Tensors, cohort: Cohort) -> Changes:
        """The changes of the state by a new client's upload.

        `History.adapt` calls it after each training of a client that joins later. It
        calls it instead of `update`, unless the server keeps the models of its clients.
        It is for what the upload shows of the client, such as its cluster. By default
        nothing changes.

        Args:
            state: The server's state, with a row for the new client.
            up: The new client's uploads [1, ...] by name.
            cohort: The new client alone.
        """
        return {}

    def update_without_clients(self, state: Tensors, cohort: Cohort) -> Changes:
        """The changes of the server's state by a round in which no client takes part.

        By default there are none. A server that adds noise does so in every round,
        since silence would tell that nobody was there.
        """
        return {}


def check_training(alg: Algorithm, training: Training) -> None:
    """Raises ValueError where the algorithm cannot train with these options."""
    name = type(alg).__name__
    for option, reason in alg.traits.fixed_training.items():
        default = Training.__dataclass_fields__[option].default
        if getattr(training, option) != default:
            raise ValueError(f"{option}: {name} {reason}; leave it at {default!r}.")


def warn_unused_momentum(alg: Algorithm, clients: Clients) -> None:
    """Warns where momentum or weight decay has no effect on the steps of `alg`."""
    training = clients.context.training
    if training.momentum or training.weight_decay:
        warn_caller(
            f"{type(alg).__name__}: its local steps are its paper's, without momentum "
            f"and weight decay; momentum={training.momentum:g} and "
            f"weight_decay={training.weight_decay:g} play no part."
        )
