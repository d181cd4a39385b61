"""One call: clients' models in, one personalized model per client out, for the methods that need nothing of a client but its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore import ops
from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.base import FedAvg
from pflcore.algorithms.clustered_fl import cosines, groups
from pflcore.algorithms.defences import krum
from pflcore.algorithms.fedamp import FedAMP, HeurFedAMP
from pflcore.algorithms.feddwa import FedDWA
from pflcore.algorithms.lookup import algorithm_of
from pflcore.algorithms.sfl import SFL, nearest, smoothing
from pflcore.interop.packing import _cut, pack, unpack
from pflcore.ops import kinds
from pflcore.simulation.round import finite

USABLE = "fedamp, heurfedamp, sfl, feddwa, feddwa_qp, krum, multikrum, clusters"


class Mix(NamedTuple):
    """Whose models make whose: weights [N, N], or [N, K] with whose they are."""

    weight: Tensor
    index: Tensor | None = None  # type: ignore[assignment]  # hides tuple.index


@dataclass(frozen=True)
class Krum:
    """Blanchard et al. 2017: the model whose squared distances to its N - f - 2 nearest others have the least sum; everybody gets it.

    With `m` > 1 (MultiKrum) the mean of the `m` such models of the least sums. Of equals the earlier client. Deviation: exact distances.
    """

    f: kinds.Whole = 1  # how many clients may be hostile, 2 f + 2 < N
    m: kinds.Count = 1

    def __post_init__(self) -> None:
        kinds.check(self)

    def chosen(self, sqdist: Tensor) -> Tensor:
        """The chosen clients [m], best first, by squared distances [N, N]."""
        n = len(sqdist)
        if not (2 * self.f + 2 < n and self.m <= n - self.f):
            raise ValueError(f"f, m: expected 0 <= f with 2 f + 2 < {n} clients and 1 <= m <= N - f, got f={self.f}, m={self.m}.")
        return krum(sqdist, self.f, self.m)


@dataclass(frozen=True)
class Clusters:
    """Agglomerative clustering into `k` groups, each client gets its group's mean: by distances between models, or, where the call
    gives a `base`, by the cosines of the updates from it (with k = 2 a split of Clustered FL, Sattler et al. 2021)."""

    k: kinds.Count = 2
    linkage: Literal["complete", "single"] = "complete"

    def __post_init__(self) -> None:
        kinds.check(self)


@kinds.takes(
    guidance=kinds.some("models, as uploads are given"),
    previous=kinds.some("models, as uploads are given"),
    method=kinds.Kind("a method's name, its class or an instance", lambda v: isinstance(v, str | type | FedAvg | Krum | Clusters)),
    include=kinds.NAMES,
    exclude=kinds.NAMES,
)
def personalize(
    uploads: Any,
    method: FedAvg | Krum | Clusters | str = "fedamp",
    *,
    guidance: Any = None,
    previous: Any = None,
    base: Any = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    buffers: str = "auto",
    directions: bool = False,
    **options: Any,
) -> Any:
    """One personalized model for each client, in the form of `uploads` (see `pack`): what the method's server makes of one round.

    `method` with its `options`, or an instance: "fedamp" and "heurfedamp" (what each client is drawn to, u), "sfl", "krum", "multikrum",
    "clusters" (k groups), "feddwa" and "feddwa_qp". By name both AMPs leave a client at least half of its own model (alpha = sigma / 2 N,
    xi_self = .5): with their own defaults, models that are close become their mean. FedDWA asks how near the others' models are to where
    a client is going: `guidance` are models of all the clients one look ahead, `previous` those of their last round (where uploads and
    these are dicts or pairs, clients without one keep their model). `base`, one model, is what clusters' updates are counted from. All in
    the form of the uploads.
    `include`, `exclude` as `pack` has them; `buffers`: "auto" is the method's own. `directions` compares the models' directions, as
    adapters of different ranks ask for; what is mixed stays as it is. ValueError in one sentence, also where an upload is not finite.
    """
    alg = method_of(method, options)
    if buffers == "auto":
        buffers = alg.buffers[0] if isinstance(alg, FedAvg) else "average"
    only: dict[str, Any] = {"include": include, "exclude": exclude}
    rows, form = pack(uploads, **only, buffers=buffers)
    if method == "fedamp" and isinstance(alg, FedAMP) and "alpha" not in options:
        alg = replace(alg, alpha=alg.sigma / (2 * len(rows)))
    if method == "heurfedamp" and isinstance(alg, HeurFedAMP) and "xi_self" not in options:
        alg = replace(alg, xi_self=0.5)
    statistics = [] if form.statistics is None else [form.statistics]
    bad = ~finite([rows, *statistics], len(rows))
    for name, values in _cut(form.averaged, statistics[0].T).items() if statistics else ():
        if name.endswith("running_var"):
            bad |= (values < 0).any(0).cpu()
    if bool(bad.any()):
        who = form.ids[int(bad.nonzero()[0])]
        raise ValueError(f"uploads: client {who!r}'s model is not finite, or has a negative variance; leave that client out of this round.")
    extra: dict[str, Tensor] = {}
    for name, given in (("guidance", guidance), ("previous", previous)):
        if given is not None:
            extra[name] = _rows_of(name, given, rows, form.ids, form.outer in ("dict", "pairs"), only)
    if base is not None and form.outer == "matrix" and not hasattr(base, "shape"):
        raise TypeError(f"base: expected one row of {rows.shape[1]} parameters, as the uploads are a matrix, got {kinds.shown(base)}.")
    if base is not None:
        extra["base"] = _rows_of("base", base[None] if form.outer == "matrix" else [base], rows, [0], False, only)
    compared = {k: F.normalize(v.double()) if directions and base is None else v for k, v in (("rows", rows), *extra.items())}
    weight, index = _mix(alg, **compared)
    at: dict[str, Any] = {"weight": weight.to(rows.device), "index": None if index is None else index.to(rows.device)}
    return unpack(ops.aggregate(rows, **at), form, **at)


def method_of(method: Any, options: dict[str, Any]) -> FedAvg | Krum | Clusters:
    if options and not isinstance(method, str | type):
        raise TypeError(f"options: {type(method).__name__} has its own, got {', '.join(options)} beside it; make the instance with them.")
    own: dict[Any, Callable[..., Any]] = {"krum": Krum, "multikrum": lambda m=2, **o: Krum(m=m, **o), "clusters": Clusters}
    try:
        alg = method if isinstance(method, Krum | Clusters) else own[method](**options) if method in own else None
    except TypeError as error:
        raise TypeError(f"method: {method!r} cannot be made from {', '.join(options)} ({error}).") from None
    if isinstance(method, str) and method not in {*own, *ALGORITHMS} and ":" not in method:
        raise ValueError(f"method: expected one of {USABLE}, got {method!r}.")
    alg = alg or algorithm_of(method, **options)
    if not isinstance(alg, FedAMP | FedDWA | SFL | Krum | Clusters):
        raise ValueError(
            f"method: {type(alg).__name__} needs more of a client than its model; use pflcore.Server and Client, or one of {USABLE}."
        )
    return alg


def _rows_of(name: str, given: Any, rows: Tensor, ids: list[Any], some: bool, only: dict[str, Any]) -> Tensor:
    """Rows in the order of `ids`; with `some` a client's own where nothing is given for it."""
    more, form = pack(given, **only)
    wanted = f"{len(ids)} models of {rows.shape[1]} {str(rows.dtype).removeprefix('torch.')} parameters"
    if more.shape[1] != rows.shape[1] or more.dtype != rows.dtype or not (some or len(more) == len(ids)):
        raise ValueError(f"{name}: expected {wanted}, as the uploads are, got {list(more.shape)} {str(more.dtype).removeprefix('torch.')}.")
    if not bool(more.isfinite().all()):
        raise ValueError(f"{name}: expected finite models; leave the client out that sent another.")
    if not some:
        return more
    where = {i: j for j, i in enumerate(form.ids)}
    if not where.keys() & set(ids):
        raise ValueError(
            f"{name}: none of its clients, {kinds.shown(form.ids)}, is one of the uploads', {kinds.shown(ids)}; use the same ids."
        )
    return torch.stack([more[where[i]] if i in where else rows[j] for j, i in enumerate(ids)])


def _mix(
    alg: FedAvg | Krum | Clusters,
    rows: Tensor,
    guidance: Tensor | None = None,
    previous: Tensor | None = None,
    base: Tensor | None = None,
) -> Mix:
    """What each client's model is made of, by rows that are compared [N, P]."""
    n = len(rows)
    everybody = torch.ones(n, dtype=torch.bool)
    if isinstance(alg, FedDWA):
        guide = guidance if guidance is not None else previous
        if guide is None or (guidance is not None and previous is not None):
            raise ValueError(
                "guidance, previous: FedDWA needs one of them; with a client's own model in their place its own distance is 0, so it gets "
                "the whole weight and nothing is mixed."
            )
        return Mix(*alg.weights(guide, rows))
    if guidance is not None or previous is not None:
        raise ValueError(f"guidance, previous: they are FedDWA's, {type(alg).__name__} does not look at them; leave them out.")
    if base is not None and not isinstance(alg, Clusters):
        raise ValueError(f"base: only clusters count updates from it, {type(alg).__name__} does not; leave it out.")
    if isinstance(alg, Clusters):
        if alg.k > n:
            raise ValueError(f"k: expected at most {n} groups, one for each client, got {alg.k}.")
        delta = rows if base is None else rows - base
        similarity = -ops.pairwise_sqdist(delta).cpu()
        if base is not None:
            similarity = cosines(-similarity, _norm2(delta).sqrt())
        group = groups(similarity, alg.k, alg.linkage)
        same = (group[:, None] == group).double()
        return Mix(same / same.sum(1, keepdim=True))
    sqdist = ops.pairwise_sqdist(rows).cpu()
    if isinstance(alg, Krum):
        return Mix(torch.zeros(n, n, dtype=torch.float64).index_fill_(1, alg.chosen(sqdist), 1 / alg.m))
    if isinstance(alg, FedAMP):
        return Mix(alg.mixing(sqdist, _norm2(rows), everybody))
    assert isinstance(alg, SFL)
    if alg.adjacency == "oracle_labels":
        raise ValueError(
            "adjacency: 'oracle_labels' needs the clients' labels, which are not in a model; take 'knn_models' or a .npy file."
        )
    return Mix(
        smoothing(alg.graph(n) if alg.adjacency.endswith(".npy") else nearest(sqdist, alg.k, everybody), everybody, alg.layers, alg.s)
    )


def _norm2(rows: Tensor) -> Tensor:
    return ops.pairwise_sqdist(rows, torch.zeros_like(rows[:1]))[:, 0].cpu()
