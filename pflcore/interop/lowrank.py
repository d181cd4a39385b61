"""Low-rank adapters (LoRA) as rows that stand for the products scale * B A.

Distances between rows are those between products, and mixes of rows are mixes of
products. Averaging factors is not averaging products, and clients whose factors have
bases of their own are no neighbours by factors. One stacked QR in float64 makes each
product a small core matrix in bases that all clients share: an isometric image, on
which the ops run unchanged.

Plain rows are right for FedDWA and for means. For clusters, Krum and ranks that differ
compare directions: `pflcore.personalize(rows, "clusters", directions=True)`. Where only
one factor is shared, pack it by name: of FedSA-LoRA (Guo et al. 2025)
`pflcore.pack(states, include="*lora_*A*")`, of FFA-LoRA (Sun et al. 2024), whose A is
frozen and the same for all, `include="*lora_*B*"`.

Letters: N clients; a layer's A is [r, i] and its B [o, r], where r is its rank, and i
and o are its inputs and outputs; m and n are the sides of a core matrix.
"""

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
    """The space of a layer's core rows: product = left @ core @ right.T.

    Both matrices have orthonormal columns, in float64.
    """

    left: Tensor  # [o, m], m = min(o, sum of ranks)
    right: Tensor  # [i, n], n = min(i, sum of ranks)
    # The clients' mean norm of a row of A. `lift` gives it to the rows that it makes,
    # so that a learning rate keeps its meaning.
    size: float


class Part(NamedTuple):
    """Columns of a row: a layer's core row, or another tensor."""

    name: str  # of A, or of the tensor
    other: str  # of B; "" for a tensor that is no factor
    basis: Basis | None
    width: int


class Layout(NamedTuple):
    """The order in which `pack` put rows together, for `unpack`."""

    parts: list[Part]  # in order
    states: list[State]  # [N] as they came
    scale: list[Scale]  # [N]
    form: ModelForm  # of the container in which they came


@checked
def project(
    a: Sequence[Matrix],  # [N] of [r_j, i]
    b: Sequence[Matrix],  # [N] of [o, r_j]
    scale: Sequence[PositiveFloat] | None = None,  # [N], default 1
) -> tuple[Tensor, Basis]:
    """Core rows [N, m * n] float64 of one layer's products, and their basis.

    The products are scale_j b_j a_j; ranks may differ, and b may be zero.

    Squared distances, inner products and mixes of rows are those of the products. Where
    the ranks add up to more than a side of the layer, that side is not reduced, so rows
    are never longer than products (`sqdist` then needs less). ValueError for factors
    that do not fit or are not finite: one NaN would reach every client through the
    basis.
    """
    return _project(_factors("a, b, scale", a, b, scale))


def _project(factors: Factors) -> tuple[Tensor, Basis]:
    """Core rows and basis as from `project`, of factors that are checked."""
    matrices_a = [a for a, _, _ in factors]
    matrices_b = [b for _, b, _ in factors]
    ranks = [len(a) for a in matrices_a]
    stacked = torch.cat(matrices_a)
    first = matrices_a[0]
    # A frozen A that all clients share spans its own space.
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

    scale * b a is the row's product cut to `rank`, the best approximation that there
    is; `lost` is the share of its square that the cut takes. The rows of `a` are
    orthogonal and have the clients' mean norm; `b` has the rest. So where the product
    is zero, as of a new adapter, b is 0 and a is not, and it can learn. Raises
    ValueError for a rank beyond what the clients' factors span, or a scale of 0.
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
    """Rows [N, P] float64 of N PEFT adapters, and the layout that `unpack` needs.

    Factors become core rows (`project`). Other tensors, such as `modules_to_save`,
    `lora_B.bias` and DoRA's magnitudes, follow as plain columns; integers stay each
    client's own. DoRA's effective weight is not linear in B A: the product and the
    magnitude are compared and mixed each by itself. Raises ValueError, with the client
    and the tensor, for names or shapes that differ, for a scale that is missing, and
    for adapters that are no product of two factors (LoHa, LoKr, AdaLoRA).

    Args:
        states: adapters as `get_peft_model_state_dict` returns them, in a list or by
            client id.
        scale: the name of each A -> alpha / r, once for all clients or for each of them
            (as the states come). A state does not hold it: `scales(peft_model)` reads
            it, patterns of ranks and alphas and rsLoRA included.
    """
    form, models, client_scales = _clients(states, scale)
    rows = []
    parts = []
    for name, other, layer in _layers(models, client_scales):
        row, basis = _project(layer) if other else (layer, None)
        parts.append(Part(name, other, basis, row.shape[1]))
        rows.append(row)
    return torch.cat(rows, 1), Layout(parts, models, client_scales, form)


@checked
def unpack(rows: Matrix, layout: Layout) -> tuple[Any, list[float]]:
    """N adapters from rows [N, P], and what the cut to the rank lost.

    The adapters come as they were given to `pack`, each with its client's ranks,
    scales, dtypes and integers. The list has for each the largest share of a layer's
    square that was lost.
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

    It serves more clients than `pack` is made for: ranks that add up to more than the
    layers are wide. Arguments and errors are those of `pack`. Memory is N ranks
    squared, whatever the layers. Its error is that of float64 relative to the products'
    squares: at a relative spread of 1e-3 some 1e-9 of a distance, where
    `pairwise_sqdist(pack(...)[0])` subtracts first and has 1e-13.
    """
    _, models, client_scales = _clients(states, scale)
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for _, other, layer in _layers(models, client_scales):
        if other:
            total += _sqdist_of_products(layer).cpu()
        else:
            total += ops.pairwise_sqdist(layer).cpu()
    return total


def _sqdist_of_products(factors: Factors) -> Tensor:
    """Squared distances [N, N] between one layer's products.

    The inner product of two products b a and b' a' is the sum of (a a'.T) * (b.T b').
    """
    ranks = [len(a) for a, _, _ in factors]
    a = torch.cat([a for a, _, _ in factors])
    b = torch.cat([scale * b for _, b, scale in factors], 1)
    inner = (a @ a.T) * (b.T @ b)  # [sum of ranks, sum of ranks]
    inner = _sum_by_client(inner, ranks)
    inner = _sum_by_client(inner, ranks)  # [N, N]
    square = inner.diagonal()
    sqdist = square[:, None] + square - inner - inner.T
    return sqdist.clamp(min=0).fill_diagonal_(0)


def _sum_by_client(matrix: Tensor, ranks: list[int]) -> Tensor:
    """The sums of each client's rows, transposed: the next call sums the columns."""
    return torch.stack([part.sum(0) for part in matrix.split(ranks)]).T


@checked
def mix(
    states: Models,
    scale: Scales,
    weight: Matrix,  # [N, K]
    index: Tensor,  # [N, K] int64
) -> tuple[Any, list[float]]:
    """The results of `unpack` for mixes of K adapters each.

    `feddwa_weights` returns such weights and index. Rows are made of K adapters at a
    time.
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
    """The name of each A -> its scale in this PEFT model.

    Names are those of `get_peft_model_state_dict`. Raises ValueError where the model
    has no such adapter.
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

    q is the identity where that is no larger.
    """
    if x.shape[1] >= len(x):
        return torch.eye(len(x), dtype=x.dtype, device=x.device), x
    q, r = torch.linalg.qr(x)
    return q, r


def _clients(states: Any, scale: Any) -> tuple[ModelForm, list[State], list[Scale]]:
    """The form in which adapters came, the adapters, and the scales of each."""
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


def _layers(models: list[State], scale: list[Scale]) -> Iterator[tuple[str, str, Any]]:
    """Each layer: the names of A and B, and the factors.

    A tensor that is no factor comes as its name, "" and plain rows [N, p].
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
            yield name, "", _plain_rows(models, name)


def _check_adapters(models: list[State]) -> dict[str, str]:
    """The name of each A -> that of its B.

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
    """One row as an adapter, and the largest share of a layer that was lost.

    The adapter has the ranks, shapes and dtypes of `like`.
    """
    adapter = dict(like)
    most_lost = 0.0
    pieces = row.split([part.width for part in parts])
    for piece, part in zip(pieces, parts, strict=True):
        tensors = {part.name: piece}
        if part.basis is not None:
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
    """(a, b, lost) as from `lift`, of the rank that the adapter `like` has.

    Where that exceeds what the clients' factors span, the further rows of a are those
    of `like`, and the further columns of b are zero.
    """
    assert part.basis is not None
    rank = len(like[part.name])
    span = min(part.basis.left.shape[1], part.basis.right.shape[1])
    b, a, lost = lift(piece, part.basis, min(rank, span), scale[part.name])
    further_a = like[part.name].flatten(1)[span:]
    a = torch.cat([a, further_a.to(a)])
    return a, pad(b, (0, max(0, rank - span))), lost
