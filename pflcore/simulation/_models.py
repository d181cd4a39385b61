"""The models that a run leaves: one client's as an `nn.Module`, whatever its method
calls a model; and that of a client who comes later, for whom the state grows by one.
"""

import copy
import functools
import inspect
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pflcore.algorithms import name_of
from pflcore.algorithms._protocol import Algorithm, Tensors
from pflcore.check import NonNegativeInt, checked, require
from pflcore.data._federation import Federation
from pflcore.data._inputs import IGNORED_LABEL, to_inputs, to_tensor
from pflcore.data._protocols import (
    mask_ignored_label,
    single_client_federation,
    with_validation,
)
from pflcore.data._samples import Scaling
from pflcore.nn._context import forward_context
from pflcore.results._files import atomic_write
from pflcore.simulation._evaluate import has_custom_predict, personalized_models
from pflcore.simulation._uploads import accept
from pflcore.simulation.checkpoint import safetensors_bytes
from pflcore.simulation.round import (
    RunConfig,
    State,
    client_changes,
    commit,
    flatten_state,
    initial_state,
    step,
    train_cohort,
    unflatten_state,
)
from pflcore.train import Clients, Net
from pflcore.train._losses import binary_cross_entropy, hinge
from pflcore.train._select_engine import plan_single_samples
from pflcore.train._validate import NoBatchAxis


def with_new_client(
    alg: Algorithm, state: State, net: Net, n: int
) -> tuple[State, bool]:
    """A copy of the state with a newcomer, client n, and whether the server keeps a
    model for each client.

    What has rows or columns for the clients shows by its shape: a federation with one
    more client has more of them. The newcomer's batch norm starts from the mean of the
    others' statistics.
    """
    few, many = (
        flatten_state(initial_state(alg, net, m, clients=bool(state.clients)))
        for m in (n, n + 1)
    )
    grow = {k: v for k, v in many.items() if v.shape != few[k].shape}
    models = [
        k for k, v in grow.items() if k[:7] == "server." and v.shape[-1:] == (net.size,)
    ]
    old = flatten_state(replace(state, server=alg.add_client(state.server, n)))
    # a table that begins empty is the algorithm's own to grow
    new = {
        k: embed_tensor(v, grow[k]) if len(grow.get(k, ())) else v.clone()
        for k, v in old.items()
    }
    new["batch_norm"][n] = state.buffers.mean(0)
    return unflatten_state(new, state.round, state.void_rounds), bool(models)


def embed_tensor(old: Tensor, large: Tensor) -> Tensor:
    """A copy of `large`, a first tensor of more clients, with `old` in its first rows
    and columns."""
    new = large.to(old, copy=True)
    new[tuple(slice(length) for length in old.shape)] = old
    return new


ELEMENTWISE_LOSSES = hinge, binary_cross_entropy  # losses of each score alone
PREDICT_BATCH_SIZE = 125  # samples of one forward pass
NO_LABEL = -1  # no class's label, as accuracies have it
LOAD_HINT = (
    "model.load_state_dict(safetensors.torch.load_file(file)) into a model of the "
    "run's class; "
    "model.eval()(x) gives the scores."
)
SCALING_HINT = (
    "The model takes standardized features: of raw ones x = ((raw.double() - mean) / "
    "deviation).float(), by the client's mean and deviation here. "
)


class Standardizer(nn.Module):
    """Raw features [B, ...] to those that a client's model was trained on."""

    mean: Tensor  # [...] float64
    deviation: Tensor

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.register_buffer("mean", scaling.mean.clone())
        self.register_buffer("deviation", scaling.deviation.clone())

    def forward(self, raw: Tensor) -> Tensor:
        """Standardized features [B, ...], in float64 on the way."""
        if raw.shape[1:] != self.mean.shape:  # which would be spread
            shape = ", ".join(map(str, ("B", *self.mean.shape)))
            raise ValueError(
                f"x: expected raw features [{shape}], got {list(raw.shape)}."
            )
        raw = raw if raw.is_floating_point() else raw.float()
        return Scaling(self.mean, self.deviation).apply(raw)


class Personalized(nn.Module):
    """One client's personalized model: `model(x)` gives scores, `model.predict(x)` the
    labels or values that they mean.

    It is what the algorithm evaluates: of APFL the mixture, of kNN-Per the shared model
    with the client's neighbours, of FedRoD both heads. Batch norm uses the client's
    statistics, dropout is off. `returns` says what the scores are: "logits",
    "probabilities" or "values". It takes raw features, always: where the federation was
    standardized it scales them itself, by its client's statistics. Nothing in it is
    trained further; `module()` gives a module that can be.
    """

    buffer_row: Tensor

    def __init__(
        self,
        algorithm: Algorithm,
        net: Net,
        view: Tensors,
        statistics: Tensor,
        classes: int | None,
        scaling: Scaling | None = None,
        name: str | int | None = None,
    ) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.net = net
        self.classes = classes
        self.keys = tuple(view)
        self.name = name  # the client's own
        self.scaling = (
            None if scaling is None else Standardizer(scaling).to(statistics.device)
        )
        for key, value in view.items():
            self.register_buffer(f"view_{key}", value.detach().clone())
        self.register_buffer("buffer_row", statistics.detach().clone())

    def __getstate__(self) -> dict[str, Any]:
        net = copy.copy(self.net)
        # a function that made it may be a lambda, which no pickle holds
        net.build = net.module
        return {**vars(self), "net": net}

    @property
    def returns(self) -> str:
        """What the scores are: "logits", "probabilities" or "values"."""
        said = str(self.algorithm.traits.returns)
        if self.net.loss_fn in ELEMENTWISE_LOSSES:
            return "logits"
        # with numbers that neighbours have as targets
        mixed = self.classes is None and said == "probabilities"
        return "values" if mixed or not self.net.scores_classes else said

    def extra_repr(self) -> str:
        """The model in a few words: whose it is, of which method, its size, what it
        gives."""
        whose = [] if self.name is None else [f"of client {self.name!r}"]
        raw = [] if self.scaling is None else ["of raw features"]
        size = f"{self.net.size:,} weights"
        return ", ".join([name_of(self.algorithm), *whose, size, self.returns, *raw])

    def __repr__(self) -> str:
        return f"Personalized({self.extra_repr()})"

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the samples `x` [B, ...], raw features."""
        device = self.buffer_row.device
        if self.net.w0.device != device:
            self.net = self.net.to(device)
        view = {k: getattr(self, f"view_{k}") for k in self.keys}
        x = x if self.scaling is None else self.scaling(x)
        with forward_context(False, self.buffer_row, single_client=True):
            return self.algorithm.predict(view, self.net, x)

    @torch.no_grad()
    def predict(self, x: Any) -> Tensor:
        """Labels int64 [B], [B, T] of every step, or [B, K] of K yes-or-no labels, of
        the samples `x` [B, ...], a tensor, an array, or a dict of them where the pool
        has several fields; for numbers as targets the values [B] or [B, K].

        `x` are raw features, also where the federation was standardized.

        A score that stands alone (hinge, binary cross entropy, a single output) says
        class 1 where it is positive; where a score is NaN there is no answer: -1.
        ValueError where `x` is no batch of samples.
        """
        if isinstance(x, Mapping):
            x, fields = to_inputs(x, "x", self.net.dtype)
            if fields != self.net.fields:
                wanted = self.net.fields or "one tensor"
                raise ValueError(f"x: expected {wanted}, got the fields {fields}.")
        x, like = to_tensor(x, "x", None), self.buffer_row
        numbers = x.is_floating_point() or self.scaling is not None
        x = x.to(like.device, like.dtype if numbers else x.dtype)
        try:
            parts = [self(part) for part in x.split(PREDICT_BATCH_SIZE)]
            if len(x) % PREDICT_BATCH_SIZE == 1 and parts[-1].shape[:1] != (1,):
                two = self(torch.cat([x[-1:]] * 2))
                if two.shape[:1] == (2,):  # so the samples are what they should be
                    raise NoBatchAxis(parts[-1].shape)
            scores = torch.cat(parts)
            if len(scores) != len(x):
                raise IndexError
        except NoBatchAxis:
            raise
        except (RuntimeError, ValueError, IndexError) as e:
            raise ValueError(
                f"x: expected samples [B, ...], got shape {list(x.shape)}; for one "
                "sample give "
                "x[None]."
            ) from e
        alone = self.net.loss_fn in ELEMENTWISE_LOSSES
        one = scores.dim() > 1 and scores.shape[-1] == 1
        single = scores[..., 0] if one else scores
        if self.classes is None or self.returns == "values":
            return single
        if alone or scores.dim() == 1 or (one and scores.dim() == 2):
            return (single > 0).long().masked_fill(single.isnan(), NO_LABEL)
        return scores.argmax(1).masked_fill(scores.isnan().any(1), NO_LABEL)

    def module(self) -> nn.Module:
        """The model as a module of its own class, in evaluation mode, to be saved or
        trained on.

        Where the federation was standardized it is the second part of an
        `nn.Sequential`, after one that scales raw features. ValueError where it is no
        single one.
        """
        model = self._unscaled_module()
        if self.scaling is None:
            return model
        first = copy.deepcopy(self.scaling)
        return nn.Sequential(OrderedDict(scaling=first, model=model)).eval()

    def _unscaled_module(self) -> nn.Module:
        """The model without what scales its features."""
        if has_custom_predict(self.algorithm):
            raise ValueError(
                f"module: {type(self.algorithm).__name__} predicts with more than one "
                "model; call "
                "this object itself, which is an nn.Module too."
            )
        row = self.get_buffer("view_w")
        return self.net.load(
            self.net.to(row.device).module, row, self.buffer_row
        ).eval()

    def tensors(self) -> Tensors:
        """What predictions are made of, by name: the `state_dict` of the run's model
        where it is one, else what the method's `predict` is given, with a row as the
        parameters that it holds, and batch norm's statistics. What scales raw features
        is in `scaling`."""
        if not has_custom_predict(self.algorithm):
            return dict(self._unscaled_module().state_dict())
        net = self.net
        statistics = self.buffer_row.split(self.net.buffer_sizes)
        each = zip(net.buffer_names, statistics, net.buffer_shapes, strict=True)
        out = {f"statistics.{n}": b.view(s) for n, b, s in each}
        head = net.head_slice if net.head_name is not None else slice(0, 0)
        starts = {net.size: 0, head.stop - head.start: head.start}
        for key in self.keys:
            value = self.get_buffer(f"view_{key}")
            start = starts.get(len(value)) if value.dim() == 1 else None
            if start is None:
                out[key] = value
                continue
            for name, at, shape in zip(
                net.names, net.slices.values(), net.shapes, strict=True
            ):
                if start <= at.start < start + len(value):
                    out[f"{key}.{name}"] = value[
                        at.start - start : at.stop - start
                    ].view(shape)
        return out


def client_facts(
    data: Federation, client: int
) -> tuple[int | None, Scaling | None, str | int | None]:
    """What a client's model has to know of its data: classes, scaling, the client's
    own name."""
    scaling = None if data.scaling is None else data.scaling.for_client(client)
    name = None if data.names is None else data.names[client]
    return data.classes, scaling, name


def export_models(
    models: Iterable[Personalized],
    header: Mapping[str, Any],
    folder: str | Path,
) -> None:
    """Clients' models 0, 1, ... as files; see `History.export`."""
    folder, clients = Path(folder), list[dict[str, Any]]()
    said = {k: header[k] for k in ("options", "training", "data")}
    manifest = {"method": header["algorithm"], **said, "clients": clients}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for client, model in enumerate(models):
            tensors = model.tensors()
            file = f"client-{client}.safetensors"
            with atomic_write(folder / file) as part:
                # in memory of their own: tied weights share theirs
                part.write_bytes(
                    safetensors_bytes({k: v.clone() for k, v in tensors.items()})
                )
            known: dict[str, Any] = {"client": client}
            if model.name is not None:
                known["name"] = model.name
            if model.scaling is not None:
                known |= {k: v.tolist() for k, v in model.scaling.state_dict().items()}
            shapes = {k: list(v.shape) for k, v in tensors.items()}
            clients.append({**known, "file": file, "tensors": shapes})
            own = has_custom_predict(model.algorithm) and inspect.getdoc(
                model.algorithm.predict
            )
            first = "" if model.scaling is None else SCALING_HINT
            manifest |= {
                "returns": model.returns,
                "predict": first + (own or LOAD_HINT),
            }
        # last: what it names is there
        with atomic_write(folder / "manifest.json") as part:
            part.write_text(json.dumps(manifest, indent=1) + "\n")
    except OSError as e:
        raise OSError(
            f"export: {folder} cannot be written ({e.strerror or e}); make room there, "
            "or name "
            "another folder."
        ) from None


@dataclass(frozen=True)
class LazyModels:
    """The personalized models of a state, made when they are asked for."""

    config: RunConfig
    state: State

    def __len__(self) -> int:
        return self.config.context.data.n

    @functools.cached_property
    def all_models(self) -> tuple[Tensors, Clients]:
        """All at once, as an evaluation does."""
        return personalized_models(self.config, self.state, torch.arange(len(self)))

    def __getitem__(self, client: int) -> Personalized:
        """The model of one client."""
        context = self.config.context
        i = int(client)
        about = client_facts(context.data, i)
        if self.config.folder is None:
            model, clients = self.all_models
        else:  # rows of all of them may not fit into memory
            model, clients = personalized_models(
                self.config, self.state, torch.tensor([i])
            )
            i = 0
        own = {k: v[i] for k, v in model.items()}
        b = clients.buffers[i]
        return Personalized(self.config.algorithm, context.net, own, b, *about)


# who comes later --------------------------------------------------------------


@checked
def adapt(
    config: RunConfig, state: State, samples: Any, rounds: NonNegativeInt = 5
) -> Personalized:
    """The model of a client who was not there, made by the algorithm's own rule;
    `state` stays.

    The newcomer does its own work of some rounds, with what the server has. Where the
    server keeps a model for each client, everybody plays these rounds with it, on
    copies.
    """
    run = config.context
    alg = config.algorithm
    n = config.context.data.n
    data = with_extra_client(
        run.data, samples, alg.traits.needs_val, run.seed, run.net.ignored_label
    )
    lr = run.training.lr_at(max(1, state.round), run.rounds)
    training = replace(run.training, lr=lr, schedule=None)
    try:
        plan_single_samples(run.net, data, training)
    except ValueError as e:
        raise ValueError(f"samples: {str(e).removeprefix('data: ')}") from None
    engine = run.engine._replace(chain=None)  # which was found on other data
    run = run._replace(
        data=data, training=training, engine=engine, rounds=run.rounds + rounds
    )
    config = config._replace(context=run, folder=None)
    state, everybody = with_new_client(alg, state, run.net, n)
    for _ in range(rounds):
        if everybody:  # the server makes the newcomer's model of everybody's uploads
            state, outcome = step(config, state, torch.arange(n + 1))
        else:
            # the client's own work, of which the server learns at most where it belongs
            trained = train_cohort(config, state, torch.tensor([n]))
            trained, outcome = accept(trained, alg.traits, state.server)
            routed = alg.assign_new_client(state.server, trained.up, trained.cohort)
            changes = {f"server.{k}": v for k, v in routed.items()} | client_changes(
                trained
            )
            state = commit(state, changes)
        finite = n not in outcome.dropped and not outcome.void
        what = "samples on which training stays finite"
        require(finite, "samples", what, "updates that are not")
    return LazyModels(config, state)[n]


def with_extra_client(
    data: Federation,
    samples: Any,
    needs_val: bool,
    seed: int,
    ignored_label: int = IGNORED_LABEL,
) -> Federation:
    """The federation with one more client, whose samples must be of the same kind;
    label `ignored_label` counts in nothing."""
    floating = [t.dtype for t in (data.x, data.y) if t.is_floating_point()]
    known = data.classes
    if known is not None and ignored_label != IGNORED_LABEL:
        known = max(known, ignored_label + 1)
    one = single_client_federation(
        samples, classes=known, dtype=next(iter(floating), None)
    )
    one = mask_ignored_label(one, ignored_label)
    got, wanted = ((f.fields or f.shape, f.x.dtype, f.y.dtype) for f in (one, data))
    what = "inputs of shape {} ({}, targets {})"
    require(got == wanted, "samples", what.format(*wanted), got)
    raw = one.scaling is None
    require(
        raw or data.scaling,
        "samples",
        "raw features, which the run's clients have",
        one,
    )
    if raw and data.scaling is not None:
        one = one.standardize()
    one = (with_validation(one, seed) if needs_val else one).to(data.device)
    start = len(data.x)
    none = torch.empty(0, dtype=torch.int64, device=data.device)
    own = {s: rows[0] + start for s, rows in one.index.items()}
    index = {s: [*rows, own.get(s, none)] for s, rows in data.index.items()}
    relabel = data.relabel
    scaling = data.scaling
    own_y = one.y if one.relabel is None else one.relabel[0][one.y]
    if relabel is not None:  # its labels are its own already
        relabel = torch.cat(
            [relabel, torch.arange(relabel.shape[1], device=relabel.device)[None]]
        )
    if scaling is not None and one.scaling is not None:
        both = zip(scaling, one.scaling, strict=True)
        scaling = Scaling(
            *(torch.cat([all_of, last.to(all_of)]) for all_of, last in both)
        )
    x = torch.cat([data.x, one.x])
    y = torch.cat([data.y, own_y])
    about: dict[str, Any] = {"fields": data.fields, "scaling": scaling}
    return Federation(x, y, index, data.classes, relabel, data.name, **about)
