"""Low-rank adapters (LoRA) as rows in which distances are those of the products scale *
B A, and mixes are mixes of products.

Averaging factors is not averaging products, and clients whose factors have bases of
their own are no neighbours by factors. One stacked QR in float64 makes each product a
small core matrix in bases that all clients share: an isometric image, on which the ops
run unchanged. Plain rows are right for FedDWA and for means; for clusters, Krum and
ranks that differ compare directions: `pflcore.personalize(rows, "clusters",
directions=True)`. Where only one factor is shared, it is packed by name: of FedSA-LoRA
(Guo et al. 2025) `pflcore.pack(states, include="*lora_*A*")`, of FFA-LoRA (Sun et al.
2024), whose A is frozen and the same for all, `include="*lora_*B*"`.
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
    """Where the core rows of a layer live: product = left @ core @ right.T; both have
    orthonormal columns, float64."""

    left: Tensor  # [o, m], m = min(o, sum of ranks)
    right: Tensor  # [i, n], n = min(i, sum of ranks)
    # the clients' mean norm of a row of A: `lift` gives it to its own, so that a
    # learning rate keeps its meaning
    size: float


class Part(NamedTuple):
    """Columns of a row: a layer's core row, or another tensor."""

    name: str  # of A, or of the tensor
    other: str  # of B, or ""
    basis: Basis | None
    width: int


class Layout(NamedTuple):
    """How `pack` put rows together, for `unpack`."""

    parts: list[Part]  # in order
    states: list[State]  # [N] as they came
    scale: list[Scale]  # [N]
    form: ModelForm  # in what they came


@checked
def project(
    a: Sequence[Matrix],  # [N] of [r_j, i]
    b: Sequence[Matrix],  # [N] of [o, r_j]
    scale: Sequence[PositiveFloat] | None = None,  # [N], default 1
) -> tuple[Tensor, Basis]:
    """Core rows [N, m * n] float64 of one layer's products scale_j b_j a_j, and their
    basis; ranks may differ, b may be zero.

    Squared distances, inner products and mixes of rows are those of the products. Where
    the ranks add up to more than a side of the layer, that side is not reduced, so rows
    are never longer than products (`sqdist` then needs less). ValueError for factors
    that do not fit or are not finite: one NaN would reach every client through the
    basis.
    """
    return _project(_factors("a, b, scale", a, b, scale))


def _project(factors: Factors) -> tuple[Tensor, Basis]:
    stacked = torch.cat([x for x, _, _ in factors])
    first = factors[0][0]
    # one frozen A spans itself
    shared = all(
        x.shape == first.shape and torch.equal(x, first) for x, _, _ in factors
    )
    left, cores_b = _span(torch.cat([y for _, y, _ in factors], 1))
    right, cores_a = _span((first if shared else stacked).T)
    ranks = [len(x) for x, _, _ in factors]
    each = [cores_a] * len(ranks) if shared else cores_a.split(ranks, 1)
    pairs = zip(factors, cores_b.split(ranks, 1), each, strict=True)
    rows = torch.stack([(s * y @ x.T).flatten() for (_, _, s), y, x in pairs])
    return rows, Basis(left, right, float(stacked.norm(dim=1).mean()) or 1.0)


@checked
def lift(
    row: Row,  # [m * n]
    basis: Basis,
    rank: NonNegativeInt,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, float]:
    """(b [o, rank], a [rank, i], lost): scale * b a is the row's product cut to `rank`,
    the best there is, `lost` the share of its square that the cut takes.

    The rows of `a` are orthogonal and have the clients' mean norm; `b` has the rest, so
    where there is no product (a fresh adapter) b is 0 and a is not, and can learn.
    ValueError for a rank beyond what the clients' factors span, or a scale of 0.
    """
    m = basis.left.shape[1]
    n = basis.right.shape[1]
    require(row.numel() == m * n, "row", f"{m * n} numbers for this basis", row)
    wanted = f"1 to {min(m, n)}, as many as the factors span, and not 0"
    require(scale and 0 < rank <= min(m, n), "rank, scale", wanted, (rank, scale))
    u, s, vt = torch.linalg.svd(row.double().view(m, n), full_matrices=False)
    a = vt[:rank] @ basis.right.T
    b = basis.left @ (u[:, :rank] * s[:rank])
    total = float(s.square().sum())
    cut = float(s[rank:].square().sum())
    return b / (scale * basis.size), a * basis.size, cut / total if total > 0 else 0.0


@checked
def pack(states: Models, scale: Scales) -> tuple[Tensor, Layout]:
    """Rows [N, P] float64 of N PEFT adapters (`get_peft_model_state_dict`), in a list
    or by client id, and the layout that `unpack` needs.

    `scale`: the name of each A -> alpha / r, once for all clients or for each of them
    (as the states come); it is not in a state, `scales(peft_model)` reads it, rsLoRA
    and rank and alpha patterns included. Factors become core rows (`project`). Every
    other tensor, `modules_to_save`, `lora_B.bias`, DoRA's magnitudes, follows as plain
    columns; integers stay each client's own. DoRA's effective weight is not linear in B
    A: what is compared and mixed is the product and the magnitude, each by itself.
    ValueError names client and tensor: key sets or shapes that differ, a scale that is
    missing, adapters that are no product of two factors (LoHa, LoKr, AdaLoRA).
    """
    form, models, each = _clients(states, scale)
    rows = []
    parts = []
    for name, other, given in _layers(models, each):
        row, basis = _project(given) if other else (given, None)
        parts.append(Part(name, other, basis, row.shape[1]))
        rows.append(row)
    return torch.cat(rows, 1), Layout(parts, models, each, form)


@checked
def unpack(rows: Matrix, layout: Layout) -> tuple[Any, list[float]]:
    """N adapters from rows [N, P], as they came, each with its client's ranks, scales,
    dtypes and integers; and for each the largest share of a layer's square that the cut
    to the rank lost."""
    n = len(layout.states)
    width = sum(p.width for p in layout.parts)
    require(
        rows.shape == (n, width),
        "rows",
        f"[{n}, {width}], a row for each adapter",
        rows,
    )
    each = zip(rows, layout.states, layout.scale, strict=True)
    adapters = [_adapter(row, layout.parts, state, scale) for row, state, scale in each]
    made, lost = zip(*adapters, strict=True)
    return layout.form.wrap(list(made)), list(lost)


@checked
def sqdist(states: Models, scale: Scales) -> Tensor:
    """Squared distances [N, N] float64 between adapters, by inner products of factors
    in float64, for more clients than `pack` is made for (ranks that add up to more than
    the layers are wide). Arguments and errors are those of `pack`.

    Memory is N ranks squared, whatever the layers. Its error is that of float64
    relative to the products' squares: at a relative spread of 1e-3 some 1e-9 of a
    distance, where `pairwise_sqdist(pack(...)[0])` subtracts first and has 1e-13.
    """
    _, models, each = _clients(states, scale)
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for _, other, given in _layers(models, each):
        if not other:
            total += ops.pairwise_sqdist(given).cpu()
            continue
        a = torch.cat([a for a, _, _ in given])
        b = torch.cat([s * b for _, b, s in given], 1)
        inner = (a @ a.T) * (b.T @ b)
        ranks = [len(a) for a, _, _ in given]
        for _ in ("rows", "columns"):  # summed by clients: [N, N]
            inner = torch.stack([part.sum(0) for part in inner.split(ranks)]).T
        square = inner.diagonal()
        total += (
            (square[:, None] + square - inner - inner.T)
            .clamp(min=0)
            .fill_diagonal_(0)
            .cpu()
        )
    return total


@checked
def mix(
    states: Models,
    scale: Scales,
    weight: Matrix,  # [N, K]
    index: Tensor,  # [N, K] int64
) -> tuple[Any, list[float]]:
    """What `unpack` gives, for mixes of K adapters each (`feddwa_weights` gives weight
    and index), from K adapters at a time."""
    form, models, each = _clients(states, scale)
    n = len(models)
    known = bool(((index >= 0) & (index < n)).all())
    fits = known and weight.shape == index.shape and len(index) == n
    require(
        fits,
        "weight, index",
        f"[{n}, K] each, of adapters 0 to {n - 1}",
        (weight, index),
    )
    made = []
    lost = []
    for w, near, like, own in zip(weight, index.tolist(), models, each, strict=True):
        rows, layout = pack([models[j] for j in near], [each[j] for j in near])
        new, most = _adapter(w.to(rows) @ rows, layout.parts, like, own)
        made.append(new)
        lost.append(most)
    return form.wrap(made), lost


@checked
def scales(model: nn.Module, adapter: str = "default") -> dict[str, float]:
    """The name of each A, as `get_peft_model_state_dict` has it, -> its scale in this
    PEFT model. ValueError where it has none."""
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        for held, tail in (("lora_A", ".weight"), ("lora_embedding_A", "")):
            if adapter in getattr(module, held, {}):
                scaling: Any = module.scaling
                found[f"{name}.{held}{tail}"] = float(scaling[adapter])
    require(
        found,
        "model",
        f"one with a LoRA adapter {adapter!r} (peft.get_peft_model)",
        model,
    )
    return found


def _factors(
    name: str, a: Sequence[Tensor], b: Sequence[Tensor], scale: Sequence[float] | None
) -> Factors:
    """A layer's factors in float64. ValueError where they do not fit or are not
    finite."""
    scale = [1.0] * len(a) if scale is None else scale
    counts = [len(a), len(b), len(scale)]
    require(
        len(a) and len(set(counts)) == 1, name, "one of each for every client", counts
    )
    o = len(b[0])
    i = a[0].shape[1]
    for j, (x, y) in enumerate(zip(a, b, strict=True)):
        fits = x.shape[1] == i and len(y) == o and len(x) == y.shape[1]
        got = f"client {j}'s {list(x.shape)} and {list(y.shape)}"
        finite = bool(x.isfinite().all() and y.isfinite().all())
        require(fits and finite, name, f"finite factors [r, {i}] and [{o}, r]", got)
    return [
        (x.double(), y.double(), float(s)) for x, y, s in zip(a, b, scale, strict=True)
    ]


def _span(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = q r with orthonormal columns of q; q is the identity where that is no
    larger."""
    if x.shape[1] >= len(x):
        return torch.eye(len(x), dtype=x.dtype, device=x.device), x
    q, r = torch.linalg.qr(x)
    return q, r


def _clients(states: Any, scale: Any) -> tuple[ModelForm, list[State], list[Scale]]:
    """Whose adapters they are, the adapters, and the scale of each."""
    form, models = collect_models(states)
    by_name = isinstance(scale, Mapping)
    one = by_name and not any(isinstance(v, Mapping) for v in scale.values())
    fits = one or {*(scale if by_name else range(len(scale)))} == {*form.ids}
    require(fits, "scale", f"one for all clients, or one for each of {form.ids}", scale)
    return form, models, [scale if one else scale[i] for i in form.ids]


def _layers(models: list[State], scale: list[Scale]) -> Iterator[tuple[str, str, Any]]:
    """Each layer: the names of A and B, and the factors; or a name, "" and plain
    rows [N, p]."""
    first = models[0]
    for j, state in enumerate(models):
        differ = sorted({*state} ^ {*first})
        require(
            not differ,
            f"client {j}",
            "an adapter of the first client's tensors",
            differ,
        )
    pairs = {m[0]: f"{m[1]}B{m[2]}" for m in filter(None, map(FACTOR.fullmatch, first))}
    products = pairs and all(b in first for b in pairs.values())
    products = products and not any("lora_E" in name for name in first)
    require(
        products,
        "states",
        "LoRA's lora_A and lora_B by get_peft_model_state_dict",
        list(first),
    )
    for name, tensor in first.items():
        if name in pairs:
            lacking = [j for j, mine in enumerate(scale) if name not in mine]
            require(
                not lacking,
                "scale",
                f"one for {name} of every client",
                f"none of {lacking}",
            )
            a, b = ([m[key].flatten(1) for m in models] for key in (name, pairs[name]))
            yield (
                name,
                pairs[name],
                _factors(name, a, b, [mine[name] for mine in scale]),
            )
        elif name not in pairs.values() and tensor.is_floating_point():
            for j, state in enumerate(models):
                fits = state[name].shape == tensor.shape and bool(
                    state[name].isfinite().all()
                )
                wanted = f"finite numbers {list(tensor.shape)}"
                require(fits, f"client {j}: {name}", wanted, state[name])
            yield (
                name,
                "",
                torch.stack([state[name].double().flatten() for state in models]),
            )


def _adapter(
    row: Tensor, parts: list[Part], like: State, scale: Scale
) -> tuple[dict[str, Tensor], float]:
    """One row as an adapter of the ranks, shapes and dtypes of `like`, and the largest
    share lost."""
    new = dict(like)
    most = 0.0
    pieces = row.split([p.width for p in parts])
    for piece, (name, other, basis, _) in zip(pieces, parts, strict=True):
        factors = {name: piece}
        if basis is not None:
            rank = len(like[name])
            span = min(basis.left.shape[1], basis.right.shape[1])
            b, a, lost = lift(piece, basis, min(rank, span), scale[name])
            # beyond what the factors span it has nothing
            a = torch.cat([a, like[name].flatten(1)[span:].to(a)])
            factors = {name: a, other: pad(b, (0, max(0, rank - span)))}
            most = max(most, lost)
        new |= {
            k: v.reshape(like[k].shape).to(like[k], copy=True)
            for k, v in factors.items()
        }
    return new, most
