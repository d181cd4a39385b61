"""Low-rank adapters (LoRA) as rows for their products scale * B A.

The mean of factors is not the factor of the mean product. And two clients may have
nearly equal products with very different factors. So adapters are compared and mixed by
their products: distances between rows are distances between products, and mixes of rows
are mixes of products.

The products themselves are never built. One QR of all clients' stacked factors, in
float64, gives bases that all clients share. In these bases each product is a small core
matrix, with the same distances and inner products. The ops take these core matrices as
rows.

FedDWA and means use the rows as they are. For clusters, Krum and different ranks,
compare directions: `pflcore.personalize(rows, "clusters", directions=True)`. Where
clients share one factor only, pack it by its name:

- FedSA-LoRA (Guo et al. 2025) shares A: `pflcore.pack(states, include="*lora_*A*")`.
- FFA-LoRA (Sun et al. 2024) has one frozen A for all clients, and shares B:
  `pflcore.pack(states, include="*lora_*B*")`.

Symbols: N clients; P numbers of a row; a layer's A is [r, i] and its B [o, r], where r
is its rank, and i and o are its inputs and outputs; m and n are the sides of a core
matrix; K adapters of a mix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pflcore import ops
from pflcore.check import Matrix, NonNegativeInt, PositiveFloat, Row, checked, require
from pflcore.interop._packing import ModelForm, Models, collect_models

__all__ = ["lift", "mix", "pack", "project", "scales", "sqdist", "unpack"]

State = Mapping[str, Tensor]
Scale = Mapping[str, float]  # name of A -> alpha / r
Scales = Scale | Sequence[Scale] | Mapping[Any, Scale]
Factors = list[tuple[Tensor, Tensor, float]]  # [N] of a [r_j, i], b [o, r_j], scale
# lora_A.weight, lora_A.default.weight, lora_embedding_A
FACTOR = re.compile(r"(.*lora_(?:embedding_)?)A((?:\.\w+)*)")


class Basis(NamedTuple):
    """The bases of core matrices: product = left @ core @ right.T.

    Attributes:
        left: Orthonormal columns [o, m] float64, m = min(o, sum of ranks).
        right: Orthonormal columns [i, n] float64, n = min(i, sum of ranks).
        size: The mean norm of a row of A over all clients. `lift` gives this norm to
            the rows that it makes, so that a learning rate keeps its meaning.
    """

    left: Tensor  # [o, m]
    right: Tensor  # [i, n]
    size: float


class Part(NamedTuple):
    """Columns of a row: one layer's core matrix, or another tensor.

    Attributes:
        name: The name of A, or of the tensor that is no factor.
        other: The name of B; None for a tensor that is no factor.
        basis: The bases of the core matrix; None for a tensor that is no factor.
        width: The number of columns.
    """

    name: str
    other: str | None
    basis: Basis | None
    width: int


class Layout(NamedTuple):
    """The layout of the rows of `pack`, from which `unpack` makes adapters.

    Attributes:
        parts: The parts of a row, in their order.
        states: The adapters [N] that `pack` was given.
        scale: The scales [N] of each adapter.
        form: The form of the container in which the adapters came.
    """

    parts: list[Part]
    states: list[State]
    scale: list[Scale]
    form: ModelForm


@checked
def project(
    a: Sequence[Matrix],  # [N] of [r_j, i]
    b: Sequence[Matrix],  # [N] of [o, r_j]
    scale: Sequence[PositiveFloat] | None = None,  # [N], default 1
) -> tuple[Tensor, Basis]:
    """Core rows [N, m * n] float64 of one layer, and their bases.

    The products are scale_j b_j a_j. Ranks may differ, and b may be zero. Squared
    distances, inner products and mixes of rows are those of the products.

    Where the ranks add up to more than a side of the layer, that side is not reduced.
    So rows are never longer than products; `sqdist` then needs less memory.

    Raises ValueError for factors that do not fit or are not finite, because one NaN
    would reach every client through the bases.
    """
    return _project(_factors("a, b, scale", a, b, scale))


def _project(factors: Factors) -> tuple[Tensor, Basis]:
    """The results of `project` for factors that are checked."""
    matrices_a = [a for a, _, _ in factors]
    matrices_b = [b for _, b, _ in factors]
    ranks = [len(a) for a in matrices_a]
    stacked = torch.cat(matrices_a)
    first = matrices_a[0]
    # Where all clients share one frozen A, it spans the space alone. Stacked copies of
    # it would only make the QR larger.
    is_shared = all(
        a.shape == first.shape and torch.equal(a, first) for a in matrices_a
    )
    left, cores_b = _span(torch.cat(matrices_b, 1))
    right, cores_a = _span((first if is_shared else stacked).T)
    core_b_of = cores_b.split(ranks, 1)
    core_a_of = [cores_a] * len(ranks) if is_shared else cores_a.split(ranks, 1)
    rows = []
    for (_, _, scale), core_b, core_a in zip(
        factors, core_b_of, core_a_of, strict=True
    ):
        rows.append((scale * core_b @ core_a.T).flatten())
    size = float(stacked.norm(dim=1).mean()) or 1.0
    return torch.stack(rows), Basis(left, right, size)


@checked
def lift(
    row: Row,  # [m * n]
    basis: Basis,
    rank: NonNegativeInt,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, float]:
    """The factors of a core row: (b [o, rank], a [rank, i], lost).

    scale * b a is the best approximation of the row's product with this rank. `lost` is
    the part of the product's squared norm that the approximation lacks, from 0 to 1.

    The rows of `a` are orthogonal and have the clients' mean norm; `b` takes the
    singular values. So a product of zero, as of a new adapter, gives b = 0 and an `a`
    that is not zero. The adapter can then learn.

    Raises ValueError for a rank that exceeds what the clients' factors span, and for a
    scale of 0.

    Args:
        row: A core row, mixed or not.
        basis: The bases that `project` returned.
        rank: The rank of the factors.
        scale: The adapter's scale, alpha / r.
    """
    m = basis.left.shape[1]
    n = basis.right.shape[1]
    require(row.numel() == m * n, "row", f"{m * n} numbers for this basis", row)
    fits = scale and 0 < rank <= min(m, n)
    wanted = f"1 to {min(m, n)}, as many as the factors span, and not 0"
    require(fits, "rank, scale", wanted, (rank, scale))
    u, s, vt = torch.linalg.svd(row.double().view(m, n), full_matrices=False)
    a = vt[:rank] @ basis.right.T
    b = basis.left @ (u[:, :rank] * s[:rank])
    total = float(s.square().sum())
    cut = float(s[rank:].square().sum())
    lost = cut / total if total > 0 else 0.0
    return b / (scale * basis.size), a * basis.size, lost


@checked
def pack(states: Models, scale: Scales) -> tuple[Tensor, Layout]:
    """Rows [N, P] float64 of N adapters, and the layout for `unpack`.

    Factors become core rows, see `project`. Other tensors, such as `modules_to_save`,
    `lora_B.bias` and DoRA's magnitudes, follow as plain columns. Whole numbers stay
    each client's own. DoRA's effective weight is not linear in B A, so its product and
    its magnitude are compared and mixed separately.

    Raises ValueError, with the client and the tensor, for different names or shapes and
    for a missing scale. Raises ValueError also for adapters that are no product of two
    factors (LoHa, LoKr, AdaLoRA).

    Args:
        states: The adapters as `get_peft_model_state_dict` returns them, in a list or
            in a dict by client id.
        scale: A dict from the name of each A to alpha / r, for all clients. Or one dict
            for each client, in a container like that of `states`. `scales(peft_model)`
            returns the dict of a model; a state does not contain it.
    """
    form, models, client_scales = _clients(states, scale)
    rows = []
    parts = []
    for name, other, layer in _layers(models, client_scales):
        row = layer
        basis: Basis | None = None
        if other is not None:
            row, basis = _project(layer)
        parts.append(Part(name, other, basis, row.shape[1]))
        rows.append(row)
    return torch.cat(rows, 1), Layout(parts, models, client_scales, form)


@checked
def unpack(rows: Matrix, layout: Layout) -> tuple[Any, list[float]]:
    """N adapters from rows [N, P], and the loss of each adapter.

    The adapters come in the container that `pack` was given, each with its client's
    ranks, scales, dtypes and whole numbers. An adapter's loss is the largest `lost` of
    its layers, see `lift`.
    """
    n = len(layout.states)
    width = sum(part.width for part in layout.parts)
    wanted = f"[{n}, {width}], a row for each adapter"
    require(rows.shape == (n, width), "rows", wanted, rows)
    adapters = []
    losses = []
    for row, state, scale in zip(rows, layout.states, layout.scale, strict=True):
        adapter, lost = _adapter(row, layout.parts, state, scale)
        adapters.append(adapter)
        losses.append(lost)
    return layout.form.wrap(adapters), losses


@checked
def sqdist(states: Models, scale: Scales) -> Tensor:
    """Squared distances [N, N] float64 between adapters, by inner products of factors.

    It is made for many clients, whose ranks add up to more than the layers are wide:
    the memory is the square of that sum, for layers of any size. The arguments and
    errors are those of `pack`.

    It subtracts squared norms, so its error is relative to these and not to the
    distance. Where products differ by a thousandth, the error is about 1e-9 of a
    distance; for `pairwise_sqdist(pack(...)[0])`, which subtracts first, it is 1e-13.
    """
    _, models, client_scales = _clients(states, scale)
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for _, other, layer in _layers(models, client_scales):
        if other is not None:
            total += _sqdist_of_products(layer).cpu()
        else:
            total += ops.pairwise_sqdist(layer).cpu()
    return total


def _sqdist_of_products(factors: Factors) -> Tensor:
    """Squared distances [N, N] between one layer's products.

    The inner product of b a and b' a' is the sum over (a a'.T) * (b.T b'). So the
    products are not built.
    """
    ranks = [len(a) for a, _, _ in factors]
    a = torch.cat([a for a, _, _ in factors])
    b = torch.cat([scale * b for _, b, scale in factors], 1)
    inner = (a @ a.T) * (b.T @ b)  # [sum of ranks, sum of ranks]
    inner = _sum_by_client(inner, ranks)
    inner = _sum_by_client(inner, ranks)  # [N, N]
    square = inner.diagonal()
    # A very long product is as far from the others as it is long, and its distances are
    # exact but for 1e-16 of them; it is in no distance between two others.
    sqdist = square[:, None] + square - inner - inner.T
    return sqdist.clamp(min=0).fill_diagonal_(0)


def _sum_by_client(matrix: Tensor, ranks: list[int]) -> Tensor:
    """The sums of each client's rows, transposed.

    So a second call sums each client's columns.
    """
    return torch.stack([part.sum(0) for part in matrix.split(ranks)]).T


@checked
def mix(
    states: Models,
    scale: Scales,
    weight: Matrix,  # [N, K]
    index: Tensor,  # [N, K] int64
) -> tuple[Any, list[float]]:
    """The results of `unpack` for each client's mix of K adapters.

    `feddwa_weights` returns `weight` and `index` of this form. Only K adapters at a
    time become rows, which saves memory.
    """
    form, models, client_scales = _clients(states, scale)
    n = len(models)
    are_adapters = bool(((index >= 0) & (index < n)).all())
    fits = are_adapters and weight.shape == index.shape and len(index) == n
    wanted = f"[{n}, K] each, of adapters 0 to {n - 1}"
    require(fits, "weight, index", wanted, (weight, index))
    adapters = []
    losses = []
    for client, mixed in enumerate(index.tolist()):
        rows, layout = pack(
            [models[j] for j in mixed], [client_scales[j] for j in mixed]
        )
        row = weight[client].to(rows) @ rows
        adapter, lost = _adapter(
            row, layout.parts, models[client], client_scales[client]
        )
        adapters.append(adapter)
        losses.append(lost)
    return form.wrap(adapters), losses


@checked
def scales(model: nn.Module, adapter: str = "default") -> dict[str, float]:
    """The scale alpha / r of each A in a PEFT model.

    The result has the scales by the names of A, which are those of
    `get_peft_model_state_dict`. Patterns of ranks and alphas, and rsLoRA, are taken
    into account. Raises ValueError where the model has no such adapter.
    """
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        for attribute, tail in (("lora_A", ".weight"), ("lora_embedding_A", "")):
            if adapter in getattr(module, attribute, {}):
                scaling: Any = module.scaling
                found[f"{name}.{attribute}{tail}"] = float(scaling[adapter])
    wanted = f"one with a LoRA adapter {adapter!r} (peft.get_peft_model)"
    require(found, "model", wanted, model)
    return found


def _factors(
    name: str, a: Sequence[Tensor], b: Sequence[Tensor], scale: Sequence[float] | None
) -> Factors:
    """A layer's factors in float64.

    Raises ValueError where they do not fit each other or are not finite.
    """
    scale = [1.0] * len(a) if scale is None else scale
    counts = [len(a), len(b), len(scale)]
    fits = len(a) and len(set(counts)) == 1
    require(fits, name, "one of each for every client", counts)
    rows_b = len(b[0])
    columns_a = a[0].shape[1]
    wanted = f"finite factors [r, {columns_a}] and [{rows_b}, r]"
    factors = []
    for client, (x, y, s) in enumerate(zip(a, b, scale, strict=True)):
        fits = x.shape[1] == columns_a and len(y) == rows_b and len(x) == y.shape[1]
        is_finite = bool(x.isfinite().all() and y.isfinite().all())
        got = f"client {client}'s {list(x.shape)} and {list(y.shape)}"
        require(fits and is_finite, name, wanted, got)
        factors.append((x.double(), y.double(), float(s)))
    return factors


def _span(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q, r) with x = q r and orthonormal columns of q.

    q is the identity where it is not larger than the q of a QR.
    """
    if x.shape[1] >= len(x):
        return torch.eye(len(x), dtype=x.dtype, device=x.device), x
    q, r = torch.linalg.qr(x)
    return q, r


def _clients(states: Any, scale: Any) -> tuple[ModelForm, list[State], list[Scale]]:
    """The form of a container, its adapters and their scales."""
    form, models = collect_models(states)
    by_name = isinstance(scale, Mapping)
    is_common = by_name and not any(isinstance(v, Mapping) for v in scale.values())
    clients = scale if by_name else range(len(scale))
    fits = is_common or {*clients} == {*form.ids}
    wanted = f"one for all clients, or one for each of {form.ids}"
    require(fits, "scale", wanted, scale)
    if is_common:
        return form, models, [scale] * len(models)
    return form, models, [scale[client] for client in form.ids]


def _layers(
    models: list[State], scale: list[Scale]
) -> Iterator[tuple[str, str | None, Any]]:
    """Yields each layer's names of A and B, and all adapters' factors.

    For a tensor that is no factor, it yields the name, None and plain rows [N, p].
    """
    name_of_b = _check_adapters(models)
    names_b = set(name_of_b.values())
    for name, tensor in models[0].items():
        if name in name_of_b:
            lacking = [j for j, scales in enumerate(scale) if name not in scales]
            wanted = f"one for {name} of every client"
            require(not lacking, "scale", wanted, f"none of {lacking}")
            other = name_of_b[name]
            a = [model[name].flatten(1) for model in models]
            b = [model[other].flatten(1) for model in models]
            yield name, other, _factors(name, a, b, [scales[name] for scales in scale])
        elif name not in names_b and tensor.is_floating_point():
            yield name, None, _plain_rows(models, name)


def _check_adapters(models: list[State]) -> dict[str, str]:
    """The names of the layers' B by the names of their A.

    Raises ValueError where adapters differ in their tensors, or are no LoRA.
    """
    first = models[0]
    for client, state in enumerate(models):
        differing = sorted({*state} ^ {*first})
        wanted = "an adapter of the first client's tensors"
        require(not differing, f"client {client}", wanted, differing)
    name_of_b = {}
    for match in map(FACTOR.fullmatch, first):
        if match:
            name_of_b[match[0]] = f"{match[1]}B{match[2]}"
    has_pairs = bool(name_of_b) and all(other in first for other in name_of_b.values())
    is_adalora = any("lora_E" in name for name in first)
    wanted = "LoRA's lora_A and lora_B by get_peft_model_state_dict"
    require(has_pairs and not is_adalora, "states", wanted, list(first))
    return name_of_b


def _plain_rows(models: list[State], name: str) -> Tensor:
    """One tensor of all adapters as rows [N, p] float64."""
    shape = models[0][name].shape
    for client, state in enumerate(models):
        tensor = state[name]
        fits = tensor.shape == shape and bool(tensor.isfinite().all())
        wanted = f"finite numbers {list(shape)}"
        require(fits, f"client {client}: {name}", wanted, tensor)
    return torch.stack([state[name].double().flatten() for state in models])


def _adapter(
    row: Tensor, parts: list[Part], like: State, scale: Scale
) -> tuple[dict[str, Tensor], float]:
    """The adapter in one row, and the largest `lost` of its layers.

    The adapter has the ranks, shapes and dtypes of `like`.
    """
    adapter = dict(like)
    most_lost = 0.0
    pieces = row.split([part.width for part in parts])
    for piece, part in zip(pieces, parts, strict=True):
        tensors = {part.name: piece}
        if part.other is not None:
            a, b, lost = _lift_to_rank(piece, part, like, scale)
            tensors = {part.name: a, part.other: b}
            most_lost = max(most_lost, lost)
        for name, tensor in tensors.items():
            shaped = tensor.reshape(like[name].shape)
            adapter[name] = shaped.to(like[name], copy=True)
    return adapter, most_lost


def _lift_to_rank(
    piece: Tensor, part: Part, like: State, scale: Scale
) -> tuple[Tensor, Tensor, float]:
    """(a, b, lost) by `lift`, with the rank of the adapter `like`.

    The rank may exceed what the clients' factors span. Then the other rows of a are
    those of `like`, and the other columns of b are zero.
    """
    assert part.basis is not None
    rank = len(like[part.name])
    span = min(part.basis.left.shape[1], part.basis.right.shape[1])
    b, a, lost = lift(piece, part.basis, min(rank, span), scale[part.name])
    further_a = like[part.name].flatten(1)[span:]
    a = torch.cat([a, further_a.to(a)])
    return a, pad(b, (0, max(0, rank - span))), lost
