"""The personalized models of clients, and those of clients that come later.

- `Personalized` is one client's model as an `nn.Module`, for every algorithm.
- `adapt` makes the model of a newcomer, for which the state grows by one client.

Symbols: N clients of the federation; B samples of a batch; T steps of a sequence; K
labels or numbers of one sample; D features.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pflcore._device import to_device
from pflcore.algorithms import name_of
from pflcore.algorithms._protocol import Algorithm, Tensors
from pflcore.check import NonNegativeInt, checked, require
from pflcore.data._federation import Federation
from pflcore.data._inputs import to_inputs, to_tensor
from pflcore.data._labels import Classes
from pflcore.data._protocols import (
    leave_out_unlabelled,
    single_client_federation,
    with_validation,
)
from pflcore.data._ragged import Ragged
from pflcore.data._scaling import Scaling
from pflcore.data._tables import select_columns, text_names
from pflcore.nn._context import forward_context
from pflcore.nn._copy import copy_module
from pflcore.simulation._evaluate import (
    evaluation_buffers,
    has_custom_predict,
    personalized_models,
    split_by_training,
)
from pflcore.simulation._state import (
    RunConfig,
    State,
    client_rows,
    flatten_state,
    initial_state,
    unflatten_state,
)
from pflcore.simulation._uploads import RoundOutcome, accept
from pflcore.simulation.round import (
    client_changes,
    commit,
    server_changes,
    step,
    train_cohort,
)
from pflcore.train import Clients, Net
from pflcore.train._first_batch import plan_single_samples
from pflcore.train._losses import binary_cross_entropy, hinge
from pflcore.train._memory import is_out_of_memory
from pflcore.train._validate import MismatchError, check_rows


def with_new_client(
    alg: Algorithm,
    state: State,
    net: Net,
    n: int,
    trainable_clients: Tensor,  # [T]
) -> tuple[State, bool]:
    """A copy of the state with a newcomer, client n.

    The second value is true where the server keeps a model for each client. The
    newcomer's batch norm starts from the mean of the others' statistics.

    Args:
        alg: The algorithm.
        state: The state of n clients.
        net: The model of the run.
        n: The number of clients so far.
        trainable_clients: The ids of those that may take part.
    """
    # A tensor with rows or columns for clients is larger in the state of a federation
    # with one more client.
    has_clients = bool(state.clients)
    before = flatten_state(initial_state(alg, net, n, clients=has_clients))
    after = flatten_state(initial_state(alg, net, n + 1, clients=has_clients))
    larger = {
        name: tensor
        for name, tensor in after.items()
        if tensor.shape != before[name].shape
    }
    keeps_models = any(
        name.startswith("server.") and tensor.shape[-1:] == (net.size,)
        for name, tensor in larger.items()
    )
    new = {}
    num_others = len(trainable_clients)
    server = dict(state.server)
    for name in alg.traits.mean_state:  # the newcomer's part of the mean is 0
        server[name] = server[name] * (num_others / (num_others + 1))
    for name, tensor in flatten_state(replace(state, server=server)).items():
        # Only the algorithm knows how a table grows that is empty before round 1.
        if len(larger.get(name, ())):
            new[name] = embed_tensor(tensor, larger[name])
        else:
            new[name] = tensor.clone()
    statistics = state.buffers[to_device(trainable_clients, state.buffers.device)]
    new["batch_norm"][n] = statistics.mean(0)
    return unflatten_state(new, state.round, state.void_rounds), keeps_models


def embed_tensor(old: Tensor, large: Tensor) -> Tensor:
    """A copy of `large` with `old` in its first rows and columns."""
    new = large.to(old, copy=True)
    corner = tuple(slice(length) for length in old.shape)
    new[corner] = old
    return new


# Losses that take each score by itself.
ELEMENTWISE_LOSSES = hinge, binary_cross_entropy
PREDICT_BATCH_SIZE = 125  # samples of one forward pass
NO_LABEL = -1  # the answer without a label; accuracies use the same number


class Standardizer(nn.Module):
    """Scales raw features [B, ...] to those of a client's training.

    Args:
        scaling: The means and deviations of the client's features.
    """

    mean: Tensor  # [...] float64
    deviation: Tensor

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.register_buffer("mean", scaling.mean.clone())
        self.register_buffer("deviation", scaling.deviation.clone())

    def forward(self, raw: Tensor) -> Tensor:
        """Standardized features [B, ...], in float64 on the way."""
        # Features of another shape would broadcast.
        if raw.shape[1:] != self.mean.shape:
            shape = ", ".join(map(str, ("B", *self.mean.shape)))
            raise ValueError(
                f"x: expected raw features [{shape}], got {list(raw.shape)}."
            )
        raw = raw if raw.is_floating_point() else raw.float()
        return Scaling(self.mean, self.deviation).apply(raw)


class Personalized(nn.Module):
    """One client's personalized model.

    `model(x)` gives scores; `model.predict(x)` gives the labels or values that they
    mean. `returns` is the kind of the scores: "logits", "probabilities" or "values".

    The model is the one that the algorithm evaluates: the mixture of APFL, the shared
    model with the client's neighbours of kNN-Per, both heads of FedRoD. Batch norm uses
    the client's statistics, and dropout is off. The model always takes raw features:
    where the federation was standardized it scales them itself, by the client's
    statistics. Where the federation knows the names of columns and classes, `predict`
    takes a data frame's columns by name, and answers with the classes' names. The model
    cannot be trained further; `module()` gives a module that can.

    Args:
        algorithm: The algorithm, whose `predict` makes the scores.
        net: The model of the run.
        model: What `predict` receives, by name: rows of models, for example.
        buffers: The client's running statistics of batch norm.
        classes: The number of classes; None for numbers as targets.
        scaling: The means and deviations by which raw features are standardized; None
            where they are not.
        name: The client's name, where the federation has names.
        columns: The names of the features, in their order; None where they have none.
        class_names: The names of the classes; None where they have none.

    Attributes:
        keys: The names of `model`.
    """

    buffer_row: Tensor

    def __init__(
        self,
        algorithm: Algorithm,
        net: Net,
        model: Tensors,
        buffers: Tensor,
        classes: int | None,
        scaling: Scaling | None = None,
        name: str | int | None = None,
        columns: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.net = net
        self.classes = classes
        self.keys = tuple(model)
        self.name = name
        self.columns = columns and tuple(columns)
        self.class_names = class_names and tuple(class_names)
        self.scaling = None
        if scaling is not None:
            self.scaling = Standardizer(scaling).to(buffers.device)
        for key, value in model.items():
            self.register_buffer(f"view_{key}", value.detach().clone())
        self.register_buffer("buffer_row", buffers.detach().clone())

    def __getstate__(self) -> dict[str, Any]:
        net = copy.copy(self.net)
        # The function that made the model may be a lambda, which pickle cannot store.
        net.build = net.module
        return {**vars(self), "net": net}

    @property
    def returns(self) -> str:
        """The meaning of the scores: "logits", "probabilities" or "values"."""
        returns = str(self.algorithm.traits.returns)
        if self.net.loss_fn in ELEMENTWISE_LOSSES:
            return "logits"
        if not self.net.scores_classes:
            return "values"
        # A method that mixes its neighbours' targets gives numbers where these are
        # numbers.
        if self.classes is None and returns == "probabilities":
            return "values"
        return returns

    def extra_repr(self) -> str:
        """The model in words: its algorithm, client, size, and scores."""
        words = [name_of(self.algorithm)]
        if self.name is not None:
            words.append(f"of client {self.name!r}")
        words += [f"{self.net.size:,} weights", self.returns]
        if self.scaling is not None:
            words.append("of raw features")
        return ", ".join(words)

    def __repr__(self) -> str:
        return f"Personalized({self.extra_repr()})"

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the samples `x` [B, ...] with raw features."""
        device = self.buffer_row.device
        if self.net.w0.device != device:
            self.net = self.net.to(device)
        model = {key: getattr(self, f"view_{key}") for key in self.keys}
        if self.scaling is not None:
            x = self.scaling(x)
        with forward_context(train=False, buffers=self.buffer_row, single_client=True):
            return self.algorithm.predict(model, self.net, x)

    @overload
    def predict(self, x: Any, *, class_numbers: Literal[True]) -> Tensor: ...

    @overload
    def predict(self, x: Any, *, class_numbers: bool = False) -> Any: ...

    @torch.no_grad()
    def predict(self, x: Any, *, class_numbers: bool = False) -> Any:
        """The labels or values of samples.

        Labels are int64 [B], [B, T] of every step, or [B, K] of K yes-or-no labels. For
        numbers as targets the values are [B] or [B, K]. A score that stands alone
        (hinge, binary cross entropy, a single output) means class 1 where it is
        positive. Where a score is NaN there is no answer: -1.

        Where the classes have names, the result is a numpy array of these instead, of
        the same shape, with None where there is no answer.

        Raises ValueError where `x` is no batch of samples, or lacks a column.

        Args:
            x: Samples [B, ...] with raw features, also where the federation was
                standardized: a tensor, an array, or a dict of them where the pool has
                several fields. Where the federation has `columns`, also a data frame
                or a dict of columns: they are taken by name, in any order, and other
                columns are ignored.
            class_numbers: Return labels as int64, also where the classes have names.
        """
        answers = self._answers(self.scores(x))
        if self.class_names is None or answers.is_floating_point() or class_numbers:
            return answers
        return self._named(answers)

    @torch.no_grad()
    def scores(self, x: Any) -> Tensor:
        """The scores of samples, whose meaning `returns` tells.

        Raises ValueError where `x` is no batch of samples, or lacks a column.

        Args:
            x: Samples [B, ...] as `predict` takes them.
        """
        x = self._to_samples(x)
        try:
            return self._scores(x)
        except MismatchError:
            raise
        except (RuntimeError, ValueError, IndexError) as e:
            if is_out_of_memory(e):
                raise
            remedy = "for one sample give x[None]"
            try:
                self._scores(x[None])
            except (RuntimeError, ValueError, IndexError):
                remedy = f"the model says {str(e).partition(chr(10))[0]!r}"
            raise ValueError(
                f"x: expected samples [B, ...], got shape {list(x.shape)}; {remedy}."
            ) from e

    def _named(self, labels: Tensor) -> NDArray[np.object_]:
        """The names of labels; None in the place of `NO_LABEL`.

        A model may have more scores than there are classes: a label without a name
        stays a number.
        """
        names: dict[int, str | None] = {NO_LABEL: None}
        names |= enumerate(self.class_names or ())
        flat = [names.get(label, label) for label in labels.flatten().tolist()]
        array = np.empty(len(flat), dtype=object)
        array[:] = flat
        return array.reshape(tuple(labels.shape))

    def _to_samples(self, x: Any) -> Tensor:
        """The samples as a tensor, on the model's device, of its dtype."""
        is_table = isinstance(x, Mapping) or text_names(x) is not None
        if is_table and self.columns is not None:
            x = torch.from_numpy(select_columns(x, self.columns, "x"))
        if isinstance(x, Mapping):
            x, fields = to_inputs(x, "x", self.net.dtype)
            if fields != self.net.fields:
                wanted = self.net.fields or "one tensor"
                raise ValueError(f"x: expected {wanted}, got the fields {fields}.")
        samples: Tensor = to_tensor(x, "x", None)
        device = self.buffer_row.device
        if samples.is_floating_point() or self.scaling is not None:
            return samples.to(device, self.buffer_row.dtype)
        return samples.to(device)

    def _scores(self, x: Tensor) -> Tensor:
        """The scores of samples, a few at a time.

        Raises IndexError where there is not one score for each sample.
        """
        parts = [self(part) for part in x.split(PREDICT_BATCH_SIZE)]
        last = parts[-1]
        if len(x) % PREDICT_BATCH_SIZE == 1 and last.shape[:1] != (1,):
            # For one sample a model may have dropped the axis of the batch. If two
            # samples give two scores, the samples have the right shape.
            two = self(torch.cat([x[-1:]] * 2))
            if two.shape[:1] == (2,):
                check_rows(last, 1)
        scores = torch.cat(parts)
        if len(scores) != len(x):
            raise IndexError
        return scores

    def _answers(self, scores: Tensor) -> Tensor:
        """The labels or values that scores mean."""
        has_one_column = scores.dim() > 1 and scores.shape[-1] == 1
        single = scores[..., 0] if has_one_column else scores
        if self.classes is None or self.returns == "values":
            return single
        stands_alone = (
            self.net.loss_fn in ELEMENTWISE_LOSSES
            or scores.dim() == 1
            or (has_one_column and scores.dim() == 2)
        )
        if stands_alone:
            return (single > 0).long().masked_fill(single.isnan(), NO_LABEL)
        return scores.argmax(1).masked_fill(scores.isnan().any(1), NO_LABEL)

    def module(self) -> nn.Module:
        """The model as a module of its own class.

        It can be saved, or trained further.

        It is in evaluation mode. Where the federation was standardized it is the second
        part of an `nn.Sequential`, after one that scales raw features. Raises
        ValueError where the algorithm predicts with more than one model.
        """
        model = self._unscaled_module()
        if self.scaling is None:
            return model
        scaling = copy_module(self.scaling)
        return nn.Sequential(OrderedDict(scaling=scaling, model=model)).eval()

    def _unscaled_module(self) -> nn.Module:
        """The model without the part that scales its features."""
        if has_custom_predict(self.algorithm):
            raise ValueError(
                f"module: {type(self.algorithm).__name__} predicts with more than one "
                "model; call this object itself, which is an nn.Module too."
            )
        row = self.get_buffer("view_w")
        template = self.net.to(row.device).module
        self.net.load(template, row, self.buffer_row)
        template.eval()  # one of the user's need not return the module
        return template

    def tensors(self) -> Tensors:
        """The tensors [...] that predictions are made of, by name.

        Where the algorithm predicts with one model, they are its `state_dict`. Else
        they are the arguments of the algorithm's `predict`, with each row split into
        the parameters that it holds, and batch norm's statistics. The part that scales
        raw features is left out: see `scaling`.
        """
        if not has_custom_predict(self.algorithm):
            return dict(self._unscaled_module().state_dict())
        net = self.net
        tensors = {}
        buffers = self.buffer_row.split(net.buffer_sizes)
        for name, buffer, shape in zip(
            net.buffer_names, buffers, net.buffer_shapes, strict=True
        ):
            tensors[f"statistics.{name}"] = buffer.view(shape)
        for key in self.keys:
            tensors |= self._named_parts(key, self.get_buffer(f"view_{key}"))
        return tensors

    def _named_parts(self, key: str, value: Tensor) -> Tensors:
        """The parameters in a row of a model, or of its head.

        A row is a vector of the model's dtype that is as long as the model, or as its
        trainable head. Any other value is returned whole.
        """
        net = self.net
        first_column = {}
        if net.has_trainable_head:
            head = net.head_slice
            first_column[head.stop - head.start] = head.start
        first_column[net.size] = 0
        is_vector = value.dim() == 1 and value.dtype == net.dtype
        start = first_column.get(len(value)) if is_vector else None
        if start is None:
            return {key: value}
        parts = {}
        columns_of = net.slices.values()
        for name, columns, shape in zip(net.names, columns_of, net.shapes, strict=True):
            if start <= columns.start < start + len(value):
                part = value[columns.start - start : columns.stop - start]
                parts[f"{key}.{name}"] = part.view(shape)
        return parts


def client_facts(data: Federation, client: int) -> dict[str, Any]:
    """The facts of a client's data that `Personalized` takes, by argument."""
    scaling = None if data.scaling is None else data.scaling.for_client(client)
    name = None if data.names is None else data.names[client]
    return {
        "classes": data.classes,
        "scaling": scaling,
        "name": name,
        "columns": data.columns,
        "class_names": data.class_names,
    }


@dataclass(frozen=True)
class LazyModels:
    """The personalized models of a state, made when they are asked for.

    Attributes:
        config: The options of the run.
        state: The state whose models they are.
    """

    config: RunConfig
    state: State

    def __len__(self) -> int:
        return self.config.data.n

    @functools.cached_property
    def _groups(self) -> list[Tensor]:
        """The ids of the clients whose models are made at once, as in evaluations."""
        return split_by_training(self.config.data, torch.arange(len(self)))

    @functools.cached_property
    def _groups_of_models(self) -> list[tuple[Tensors, Clients]]:
        """The models of all clients, group by group."""
        config = self.config
        return [personalized_models(config, self.state, ids) for ids in self._groups]

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """The group of each client, and its place in the group, by its id."""
        places: dict[int, tuple[int, int]] = {}
        for group, ids in enumerate(self._groups):
            places |= {i: (group, place) for place, i in enumerate(ids.tolist())}
        return places

    def __getitem__(self, client: int) -> Personalized:
        """The model of one client."""
        config = self.config
        facts = client_facts(config.data, int(client))
        group, place = self._places[int(client)]
        models, clients = self._groups_of_models[group]
        model = {key: rows[place] for key, rows in models.items()}
        buffers = clients.buffers[place]
        return Personalized(config.algorithm, config.net, model, buffers, **facts)

    def adapt(self, samples: Any, rounds: int) -> Personalized:
        """The model of a newcomer, see `History.adapt`."""
        return adapt(self.config, self.state, samples, rounds)


# newcomers --------------------------------------------------------------------


@checked
def adapt(
    config: RunConfig, state: State, samples: Any, rounds: NonNegativeInt = 5
) -> Personalized:
    """The model of a newcomer, made by the algorithm's own rule.

    The newcomer is a client that was not in the run. It does its own work of some
    rounds, with the state that the server has. Where the server keeps a model for each
    client, all clients play these rounds with it, on copies. `state` stays as it is.
    Raises ValueError for samples that do not fit.

    Args:
        config: The options of the run.
        state: The last state of the run.
        samples: The newcomer's samples, see `History.adapt`.
        rounds: The number of rounds of the newcomer's work.
    """
    n = config.data.n
    others = config.eligible_clients
    alg = config.algorithm
    config = _config_with_newcomer(config, state, samples, rounds)
    state, keeps_models = with_new_client(alg, state, config.net, n, others)
    if not config.averages:
        state.buffers[n] = _first_statistics(config, state, n)
    if not config.data.size("train")[n]:
        return LazyModels(config, state)[n]  # a newcomer with test samples alone
    for _ in range(rounds):
        if keeps_models:
            # The newcomer's model is made of the uploads of all clients.
            state, outcome = step(config, state, config.eligible_clients)
        else:
            state, outcome = _newcomer_round(config, state)
        is_finite = n not in outcome.dropped and not outcome.void
        wanted = "samples on which training stays finite"
        require(is_finite, "samples", wanted, "updates that are not")
    return LazyModels(config, state)[n]


def _config_with_newcomer(
    config: RunConfig, state: State, samples: Any, rounds: int
) -> RunConfig:
    """The options of `rounds` more rounds with one more client.

    They are played with the run's step size, without a schedule or augmentation.
    """
    config = config.without_augmentation()
    needs_val = config.algorithm.traits.needs_val
    data = with_extra_client(
        config.data, samples, needs_val, config.seed, config.net.ignored_label
    )
    # It begins anew: with the step size of a schedule's end it would stay where it is.
    training = replace(config.training, schedule=None)
    try:
        plan_single_samples(config.net, data, training)
    except ValueError as e:
        raise ValueError(f"samples: {str(e).removeprefix('data: ')}") from None
    eligible = torch.cat([config.eligible_clients, torch.tensor([data.n - 1])])
    return replace(
        config,
        data=data,
        training=training,
        eligible=eligible[data.size("train")[eligible] > 0],
        engine=config.engine._replace(chain=None),  # it was verified on other data
        rounds=config.rounds + rounds,
    )


def _first_statistics(config: RunConfig, state: State, client: int) -> Tensor:
    """Batch norm's statistics [b] of a client that never took part."""
    ids = torch.tensor([client])
    cohort = config.cohort(ids, max(1, state.round), state.participated, "evaluation")
    down = config.algorithm.send(state.server, cohort)
    client_states = client_rows(config, state, ids, down)
    statistics: Tensor = evaluation_buffers(config, state, ids, down, client_states)[0]
    return statistics


def _newcomer_round(config: RunConfig, state: State) -> tuple[State, RoundOutcome]:
    """One round of the last client alone.

    The server learns nothing from it but the models to which the client belongs.
    """
    alg = config.algorithm
    newcomer = torch.tensor([config.data.n - 1])
    result = train_cohort(config, state, newcomer)
    variances = config.net.variances
    result, outcome = accept(result, alg, state.server, variances=variances)
    new = alg.assign_new_client(state.server, result.up, result.cohort)
    changes = server_changes(alg, state, new, outcome)
    changes |= client_changes(result)
    return commit(state, changes, outcome), outcome


def with_extra_client(
    data: Federation,
    samples: Any,
    needs_val: bool,
    seed: int,
    ignored_label: int | None = None,
) -> Federation:
    """The federation with one more client.

    Raises ValueError where the samples are of another kind than the federation's.

    Args:
        data: The federation.
        samples: The newcomer's samples, see `History.adapt`.
        needs_val: Hold samples out as a split "val".
        seed: The seed by which they are drawn.
        ignored_label: The label of samples that count in nothing; None for none.
    """
    newcomer = newcomer_data(data, samples, ignored_label)
    if needs_val:
        newcomer = with_validation(newcomer, seed)
    newcomer = newcomer.to(data.device)
    start = len(data.x)
    no_samples = torch.empty(0, dtype=torch.int64, device=data.device)
    index = {}
    for split, rows in data.index.items():
        has_split = split in newcomer.index
        new_row = newcomer.index[split][0] + start if has_split else no_samples
        index[split] = [*rows, new_row]
    y = newcomer.y
    if newcomer.relabel is not None:
        y = newcomer.relabel[0][y]
    relabel = data.relabel
    if relabel is not None:
        # The newcomer's labels are right as they are: each maps to itself.
        identity = torch.arange(relabel.shape[1], device=relabel.device)
        relabel = torch.cat([relabel, identity[None]])
    # Both parts were checked when they were made.
    return data._copy_with(
        x=torch.cat([data.x, newcomer.x]),
        y=torch.cat([data.y, y]),
        index={split: Ragged.from_lists(rows) for split, rows in index.items()},
        relabel=relabel,
        facts={},
        truth={},
        names=_joined_names(data.names, newcomer.names),
        scaling=_joined_scaling(data.scaling, newcomer.scaling),
    )


def _joined_names(
    names: tuple[str | int, ...] | None, last: tuple[str | int, ...] | None
) -> tuple[str | int, ...] | None:
    """The names of all clients and of one more; None where one has no name."""
    return None if names is None or last is None else names + last


def newcomer_data(
    data: Federation, samples: Any, ignored_label: int | None
) -> Federation:
    """One client's samples as a federation that fits `data`.

    They are standardized where `data` is, and their columns have the same order. Raises
    ValueError where they do not fit.
    """
    float_dtypes = [t.dtype for t in (data.x, data.y) if t.is_floating_point()]
    dtype = float_dtypes[0] if float_dtypes else None
    classes: Classes = data.class_names or data.classes
    newcomer = single_client_federation(
        samples,
        classes=classes,
        dtype=dtype,
        columns=data.columns,
        ignored_label=None if data.classes is None else ignored_label,
    )
    if newcomer.columns is not None and data.columns is not None:
        newcomer = newcomer.with_columns(data.columns)
    newcomer = leave_out_unlabelled(newcomer, ignored_label)
    kind = _sample_kind(newcomer)
    wanted = _sample_kind(data)
    words = "inputs of shape {} ({}, targets {})".format(*wanted)
    require(kind == wanted, "samples", words, kind)
    is_raw = newcomer.scaling is None
    words = "raw features, which the run's clients have"
    require(is_raw or data.scaling, "samples", words, newcomer)
    if is_raw and data.scaling is not None:
        newcomer = newcomer.standardize()
    return newcomer


def _sample_kind(data: Federation) -> tuple[Any, torch.dtype, torch.dtype]:
    """The shape or fields of samples, and their dtypes."""
    return data.fields or data.shape, data.x.dtype, data.y.dtype


def _joined_scaling(
    all_clients: Scaling | None, last: Scaling | None
) -> Scaling | None:
    """The scaling of a federation, followed by that of one more client."""
    if all_clients is None or last is None:
        return all_clients
    pairs = zip(all_clients, last, strict=True)
    return Scaling(*(torch.cat([rows, row.to(rows)]) for rows, row in pairs))
