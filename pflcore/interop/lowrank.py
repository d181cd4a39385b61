"""Low-rank adapters (LoRA) as rows in which distances are those of the products scale * B A, and
mixes are mixes of products.

Averaging factors is not averaging products, and clients whose factors have bases of their own are
no neighbours by factors. One stacked QR in float64 makes each product a small core matrix in bases
that all clients share: an isometric image, on which the ops run unchanged. Plain rows are right for
FedDWA and for means; for clusters, Krum and ranks that differ compare directions:
`pflcore.personalize(rows, "clusters", directions=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from pflcore import ops
from pflcore.check import Kind, Matrix, Positive, Row, Whole, checked, many, some
from pflcore.interop.packing import pack as pack_factors

__all__ = [
    "Basis",
    "Layout",
    "distances",
    "fedsa_lora",
    "ffa_lora",
    "lift",
    "mix",
    "pack",
    "project",
    "scales",
    "sqdist",
    "unpack",
]

State = Mapping[str, Tensor]
Scale = Mapping[str, float]  # name of A -> alpha / r
A_DICT = Kind("a dict", lambda v: isinstance(v, Mapping))
MODELS = many(
    A_DICT,
    "adapters, as get_peft_model_state_dict gives them, in a list or by client id, at least one",
)
SCALES = Kind(
    "scales by name of A, of each client or for all",
    lambda v: isinstance(v, Mapping) or many(A_DICT, "").fits(v),
)
States = Annotated[Sequence[State] | Mapping[Any, State], MODELS]
Scales = Annotated[Sequence[Scale] | Mapping[Any, Any], SCALES]
NUMBERS = Kind(
    "int64 numbers of adapters [M, K]",
    lambda v: isinstance(v, Tensor) and v.dtype == torch.int64 and v.dim() == 2,
)
PEFT = Kind("a PEFT model", lambda v: isinstance(v, nn.Module))
Packable = Annotated[Any, some("adapters, in a list or by client id, at least one")]
# lora_A.weight, lora_A.default.weight, lora_embedding_A
FACTOR = re.compile(r"lora_(embedding_)?A(?:\.\w+)*$")
REFUSED = {
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_E": "AdaLoRA",
    "ranknum": "AdaLoRA",
    "oft_": "OFT",
    "vera_lambda": "VeRA",
}


class Basis(NamedTuple):
    """Where the core rows of a layer live: product = left @ core @ right.T; both have orthonormal
    columns, float64."""

    left: Tensor  # [o, m], m = min(o, sum of ranks)
    right: Tensor  # [i, n], n = min(i, sum of ranks)
    # the clients' mean norm of a row of A: `lift` gives it to its own, so that a learning rate
    # keeps its meaning
    size: float


class Layout(NamedTuple):
    """How `pack` put rows together, for `unpack`."""

    # (name of A, name of B, basis, columns) or (name, "", None, columns), in order
    parts: list[tuple[str, str, Basis | None, int]]
    states: list[State]  # [N] as they came
    scale: list[Scale]  # [N]
    ids: list[Any] | None  # of clients that came in a dict


@checked
def project(
    a: Sequence[Matrix],  # [N] of [r_j, i]
    b: Sequence[Matrix],  # [N] of [o, r_j]
    scale: Sequence[Positive] | None = None,  # [N], default 1
) -> tuple[Tensor, Basis]:
    """Core rows [N, m * n] float64 of one layer's products scale_j b_j a_j, and their basis; ranks
    may differ, b may be zero.

    Squared distances, inner products and mixes of rows are those of the products. Where the ranks
    add up to more than a side of the layer, that side is not reduced, so rows are never longer than
    products (`sqdist` then needs less). ValueError for factors that do not fit or are not finite:
    one NaN would reach every client through the basis.
    """
    factors = _checked(a, b, scale)
    left, cores_b = _span(torch.cat([y for _, y, _ in factors], 1))
    first = factors[0][0]
    # one frozen A spans itself
    shared = all(x.shape == first.shape and torch.equal(x, first) for x, _, _ in factors)
    right, cores_a = _span(first.T if shared else torch.cat([x for x, _, _ in factors]).T)
    ranks = [len(x) for x, _, _ in factors]
    pairs = zip(
        factors,
        cores_b.split(ranks, 1),
        [cores_a] * len(ranks) if shared else cores_a.split(ranks, 1),
        strict=True,
    )
    rows = torch.stack([(s * y @ x.T).flatten() for (_, _, s), y, x in pairs])
    return rows, Basis(
        left, right, float(torch.cat([x for x, _, _ in factors]).norm(dim=1).mean()) or 1.0
    )


@checked
def lift(
    row: Row,  # [m * n]
    basis: Basis,
    rank: Whole,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, float]:
    """(b [o, rank], a [rank, i], lost): scale * b a is the row's product cut to `rank`, the best
    there is, `lost` the share of its square that the cut takes.

    The rows of `a` are orthogonal and have the clients' mean norm; `b` has the rest, so where there
    is no product (a fresh adapter) b is 0 and a is not, and can learn. ValueError for a rank beyond
    what the clients' factors span, or a scale of 0.
    """
    if row.numel() != basis.left.shape[1] * basis.right.shape[1]:
        raise ValueError(
            f"row: expected {basis.left.shape[1] * basis.right.shape[1]} numbers for this basis, "
            f"got {row.numel()}."
        )
    u, s, vt = torch.linalg.svd(
        row.double().view(basis.left.shape[1], basis.right.shape[1]), full_matrices=False
    )
    if not scale or not 0 < rank <= len(s):
        raise ValueError(
            f"rank, scale: expected 1 to {len(s)}, as many as the factors span, and not 0, got "
            f"{rank} and {scale}."
        )
    a, b = vt[:rank] @ basis.right.T, basis.left @ (u[:, :rank] * s[:rank])
    total = float(s.square().sum())
    return (
        b / (scale * basis.size),
        a * basis.size,
        float(s[rank:].square().sum()) / total if total > 0 else 0.0,
    )


@checked
def sqdist(
    a: Sequence[Matrix], b: Sequence[Matrix], scale: Sequence[Positive] | None = None
) -> Tensor:
    """Squared distances [N, N] float64 between the products scale_j b_j a_j of one layer, by inner
    products of factors in float64.

    For many clients: memory is N ranks squared, whatever the layer. Its error is that of float64
    relative to the products' squares: at a relative spread of 1e-3 some 1e-9 of a distance, where
    `pairwise_sqdist(project(...)[0])` subtracts first and has 1e-13.
    """
    factors = _checked(a, b, scale)
    x, y = torch.cat([x for x, _, _ in factors]), torch.cat([s * y for _, y, s in factors], 1)
    who = (
        torch.arange(len(factors))
        .repeat_interleave(torch.tensor([len(x) for x, _, _ in factors]))
        .to(x.device)
    )
    inner = torch.zeros(len(factors), len(x), dtype=x.dtype, device=x.device).index_add_(
        0, who, (x @ x.T) * (y.T @ y)
    )
    inner = torch.zeros(len(factors), len(factors), dtype=x.dtype, device=x.device).index_add_(
        1, who, inner
    )
    square = inner.diagonal()
    return (square[:, None] + square - inner - inner.T).clamp(min=0).fill_diagonal_(0)


@checked
def pack(states: States, scale: Scales) -> tuple[Tensor, Layout]:
    """Rows [N, P] float64 of N PEFT adapters (`get_peft_model_state_dict`), in a list or by client
    id, and the layout that `unpack` needs.

    `scale`: the name of each A -> alpha / r, once for all clients or for each of them (as the
    states come); it is not in a state, `scales(peft_model)` reads it, rsLoRA and rank and alpha
    patterns included. Factors become core rows (`project`). Every other tensor, `modules_to_save`,
    `lora_B.bias`, DoRA's magnitudes, follows as plain columns; integers stay each client's own.
    DoRA's effective weight is not linear in B A: what is compared and mixed is the product and the
    magnitude, each by itself. ValueError names client and tensor: key sets or shapes that differ, a
    scale that is missing, adapters that are no product of two factors (LoHa, LoKr, AdaLoRA).
    """
    ids, models, each = _clients(states, scale)
    pairs = _pairs(models, each)
    rows: list[Tensor] = []
    parts: list[tuple[str, str, Basis | None, int]] = []
    for name, tensor in models[0].items():
        if name in pairs:
            row, basis = _named(name, project, *_factors(models, each, name, pairs[name]))
            parts.append((name, pairs[name], basis, row.shape[1]))
            rows.append(row)
        elif name not in pairs.values() and tensor.is_floating_point():
            rows.append(_plain(name, models))
            parts.append((name, "", None, rows[-1].shape[1]))
    return torch.cat(rows, 1), Layout(parts, models, each, ids)


@checked
def unpack(rows: Matrix, layout: Layout) -> tuple[Any, list[float]]:
    """N adapters from rows [N, P], as they came, each with its client's ranks, scales, dtypes and
    integers; and for each the largest share of a layer's square that the cut to the rank lost."""
    width = sum(p[3] for p in layout.parts)
    if rows.shape != (len(layout.states), width):
        raise ValueError(
            f"rows: expected [{len(layout.states)}, {width}], a row for each adapter, got "
            f"{list(rows.shape)}."
        )
    pairs = zip(rows, layout.states, layout.scale, strict=True)
    adapters, lost = zip(
        *(_adapter(row, layout.parts, state, scale) for row, state, scale in pairs), strict=True
    )
    return list(adapters) if layout.ids is None else dict(
        zip(layout.ids, adapters, strict=True)
    ), list(lost)


@checked
def distances(states: States, scale: Scales) -> Tensor:
    """Squared distances [N, N] float64 between whole adapters by `sqdist`, for more clients than
    `pack` is made for (ranks that add up to more than the layers are wide). Arguments and errors
    are those of `pack`."""
    _, models, each = _clients(states, scale)
    pairs = _pairs(models, each)
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for name, tensor in models[0].items():
        if name in pairs:
            total += _named(name, sqdist, *_factors(models, each, name, pairs[name])).cpu()
        elif name not in pairs.values() and tensor.is_floating_point():
            total += ops.pairwise_sqdist(_plain(name, models)).cpu()
    return total


@checked
def mix(
    states: States,
    scale: Scales,
    weight: Matrix,  # [N, K]
    index: Annotated[Tensor, NUMBERS],  # [N, K]
) -> tuple[Any, list[float]]:
    """What `unpack` gives, for mixes of K adapters each (`feddwa_weights` gives weight and index),
    from K adapters at a time."""
    ids, models, each = _clients(states, scale)
    if weight.shape != index.shape or len(index) != len(models):
        raise ValueError(
            f"weight, index: expected [{len(models)}, K] each, got {list(weight.shape)} and "
            f"{list(index.shape)}."
        )
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(models):
        raise ValueError(
            f"index: expected numbers from 0 to {len(models) - 1}, got {int(index.min())} to "
            f"{int(index.max())}."
        )
    adapters, lost = [], []
    for w, near, like, own in zip(weight, index.tolist(), models, each, strict=True):
        rows, layout = pack([models[j] for j in near], [each[j] for j in near])
        adapter, share = _adapter(w.to(rows) @ rows, layout.parts, like, own)
        adapters.append(adapter)
        lost.append(share)
    return adapters if ids is None else dict(zip(ids, adapters, strict=True)), lost


@checked
def scales(model: Annotated[nn.Module, PEFT], adapter: str = "default") -> dict[str, float]:
    """The name of each A, as `get_peft_model_state_dict` has it, -> its scale in this PEFT model.
    ValueError where it has none."""
    scale_of: dict[str, float] = {}
    for name, module in model.named_modules():
        for held, tail in (("lora_A", ".weight"), ("lora_embedding_A", "")):
            if adapter in getattr(module, held, {}):
                scaling: Any = module.scaling
                scale_of[f"{name}.{held}{tail}"] = float(scaling[adapter])
    if not scale_of:
        raise ValueError(
            f"model: found no LoRA adapter {adapter!r} in this {type(model).__name__}; make one "
            "with peft.get_peft_model."
        )
    return scale_of


@checked
def ffa_lora(states: Packable, **options: Any) -> Any:
    """FFA-LoRA (Sun et al. 2024): A is frozen and the same for all, so B alone is packed:
    `pflcore.pack` with include "*lora_B*".

    Distances of B are then those of the products where A's rows are orthonormal, and means are
    means of products always. ValueError where the A's differ.
    """
    frozen, form = pack_factors(
        states, include=("*lora_A*", "*lora_embedding_A*") if _has_embedding(states) else "*lora_A*"
    )
    other = (frozen != frozen[0]).any(1).nonzero()[:, 0].tolist()
    if other:
        raise ValueError(
            f"client {form.ids[other[0]]!r}: its A differs from client {form.ids[0]!r}'s, FFA-LoRA "
            "freezes one A for all; use project."
        )
    return pack_factors(states, include="*lora_*B*", **options)


@checked
def fedsa_lora(states: Packable, **options: Any) -> Any:
    """FedSA-LoRA (Guo et al. 2025): A is shared, B stays each client's own: `pflcore.pack` with
    include "*lora_A*"."""
    return pack_factors(
        states,
        include=("*lora_A*", "*lora_embedding_A*") if _has_embedding(states) else "*lora_A*",
        **options,
    )


def _has_embedding(states: Any) -> bool:
    first = next(iter(states.values() if isinstance(states, Mapping) else states), None)
    if first is None:
        raise ValueError(f"states: expected the adapters of at least one client, got {states!r}.")
    first = first[1] if isinstance(first, tuple) else first
    return any("lora_embedding_A" in n for n in first) if isinstance(first, Mapping) else False


def _checked(
    a: Sequence[Tensor], b: Sequence[Tensor], scale: Sequence[float] | None
) -> list[tuple[Tensor, Tensor, float]]:
    scale = [1.0] * len(a) if scale is None else scale
    if not len(a) or not len(a) == len(b) == len(scale):
        raise ValueError(
            f"a, b, scale: expected one of each for every client, got {len(a)}, {len(b)} and "
            f"{len(scale)}."
        )
    for j, (x, y) in enumerate(zip(a, b, strict=True)):
        if (
            x.dim() != 2
            or y.dim() != 2
            or x.shape[1] != a[0].shape[1]
            or y.shape[0] != b[0].shape[0]
            or len(x) != y.shape[1]
        ):
            want = f"[r, {a[0].shape[-1]}] and [{len(b[0])}, r]"
            raise ValueError(
                f"a, b: expected {want}, got client {j}'s {list(x.shape)} and {list(y.shape)}."
            )
        if not bool(x.isfinite().all() and y.isfinite().all()):
            raise ValueError(
                f"a, b: expected finite factors, client {j}'s are not; leave that client out."
            )
    return [(x.double(), y.double(), float(s)) for x, y, s in zip(a, b, scale, strict=True)]


def _span(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = q r with orthonormal columns of q; q is the identity where that is no larger."""
    if x.shape[1] >= len(x):
        return torch.eye(len(x), dtype=x.dtype, device=x.device), x
    q, r = torch.linalg.qr(x)
    return q, r


def _clients(states: Any, scale: Any) -> tuple[list[Any] | None, list[State], list[Scale]]:
    """The clients' ids where they came in a dict, their adapters, and the scale of each."""
    ids = list(states) if isinstance(states, Mapping) else None
    models = [states[i] for i in ids] if ids is not None else list(states)
    if not models or not all(isinstance(m, Mapping) for m in models):
        raise ValueError(
            "states: expected adapters, as get_peft_model_state_dict gives them, in a list or by "
            "client id, at least one."
        )
    if isinstance(scale, Mapping) and not any(isinstance(v, Mapping) for v in scale.values()):
        return ids, models, [scale] * len(models)
    if (isinstance(scale, Mapping) and scale.keys() != set(ids or [])) or len(scale) != len(models):
        raise ValueError(
            f"scale: expected that of each of {len(models)} clients, or one for all, got "
            f"{len(scale)}."
        )
    return (
        ids,
        models,
        [scale[i] for i in ids] if isinstance(scale, Mapping) and ids is not None else list(scale),
    )


def _factors(
    models: Sequence[State], scale: Sequence[Scale], a: str, b: str
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """One layer's; a convolution's are matrices too."""
    return (
        [m[a].flatten(1) for m in models],
        [m[b].flatten(1) for m in models],
        [c[a] for c in scale],
    )


def _named(name: str, f: Callable[..., Any], *factors: Any) -> Any:
    try:
        return f(*factors)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _adapter(
    row: Tensor, parts: Sequence[tuple[str, str, Basis | None, int]], like: State, scale: Scale
) -> tuple[dict[str, Tensor], float]:
    """One row as an adapter of the ranks, shapes and dtypes of `like`, and the largest share
    lost."""
    new: dict[str, Tensor] = {}
    most = 0.0
    for piece, (name, other, basis, _) in zip(row.split([p[3] for p in parts]), parts, strict=True):
        factors = {name: piece}
        if basis is not None:
            rank, span = len(like[name]), min(basis.left.shape[1], basis.right.shape[1])
            b, a, lost = lift(piece, basis, min(rank, span), scale[name])
            # beyond what the factors span it has nothing
            a = torch.cat([a, like[name].flatten(1)[span:].to(a)])
            b = torch.cat([b, b.new_zeros(len(b), max(0, rank - span))], 1)
            factors, most = {name: a, other: b}, max(most, lost)
        new |= {k: v.reshape(like[k].shape).to(like[k], copy=True) for k, v in factors.items()}
    return {k: new.get(k, v) for k, v in like.items()}, most


def _pairs(states: Sequence[State], scale: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Name of A -> name of B, when all clients have the same tensors and a scale for each
    product."""
    for j, state in enumerate(states):
        if state.keys() != states[0].keys():
            raise ValueError(
                f"client {j}: its adapter differs from client 0's in "
                f"{', '.join(sorted(state.keys() ^ states[0].keys())[:5])}."
            )
    for name in states[0]:
        kind = next((kind for mark, kind in REFUSED.items() if mark in name), None)
        if kind:
            raise ValueError(
                f"{name}: {kind}'s weight is no product of two factors that can be projected; pack "
                "it with pflcore.pack."
            )
    pairs = {}
    for match in filter(None, map(FACTOR.search, states[0])):
        name = match.string
        at = match.end(1) if match[1] else match.start() + len("lora_")
        pairs[name] = other = f"{name[:at]}B{name[at + 1 :]}"
        if other not in states[0]:
            raise ValueError(
                f"{name}: found no {other} beside it; give whole adapters, or pack one factor with "
                "fedsa_lora."
            )
        for j, mine in enumerate(scale):
            if name not in mine:
                raise ValueError(f"scale: client {j} has none for {name}; give scales(peft_model).")
    if not pairs:
        raise ValueError(
            f"states: found no lora_A among {', '.join(list(states[0])[:5])}; give "
            "get_peft_model_state_dict(model)."
        )
    return pairs


def _plain(name: str, states: Sequence[State]) -> Tensor:
    for j, state in enumerate(states):
        if state[name].shape != states[0][name].shape:
            raise ValueError(
                f"client {j}: {name} has shape {list(state[name].shape)}, client 0's has "
                f"{list(states[0][name].shape)}."
            )
        if not bool(state[name].isfinite().all()):
            raise ValueError(f"client {j}: {name} is not finite; leave this client out.")
    return torch.stack([s[name].double().flatten() for s in states])
