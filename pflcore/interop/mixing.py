"""One call: clients' models in, one personalized model per client out, for the methods that need
nothing of a client but its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore import ops
from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.clusters import cosines, groups
from pflcore.algorithms.fedavg import krum
from pflcore.algorithms.lookup import algorithm_of
from pflcore.algorithms.protocol import Algorithm, Mix
from pflcore.algorithms.relations import SFL, FedAMP, FedDWA, HeurFedAMP, nearest, smoothing
from pflcore.check import Buffers, Count, Kind, Names, Whole, check, checked, refuse, shown
from pflcore.interop.packing import _cut, pack, unpack
from pflcore.simulation.accept import finite_rows

USABLE = "fedamp, heurfedamp, sfl, feddwa, feddwa_qp, krum, multikrum, clusters"


@dataclass(frozen=True)
class Krum:
    """Blanchard et al. 2017: the model whose squared distances to its N - f - 2 nearest others have
    the least sum; everybody gets it.

    With `m` > 1 (MultiKrum) the mean of the `m` such models of the least sums. Of equals the
    earlier client. Deviation: exact distances.
    """

    f: Whole = 1  # how many clients may be hostile, 2 f + 2 < N
    m: Count = 1

    def __post_init__(self) -> None:
        check(self)

    def chosen(self, sqdist: Tensor) -> Tensor:
        """The chosen clients [m], best first, by squared distances [N, N]."""
        n = len(sqdist)
        if not (2 * self.f + 2 < n and self.m <= n - self.f):
            raise ValueError(
                f"f, m: expected 0 <= f with 2 f + 2 < {n} clients and 1 <= m <= N - f, got "
                f"f={self.f}, m={self.m}."
            )
        return krum(sqdist, self.f, self.m)


@dataclass(frozen=True)
class Clusters:
    """Agglomerative clustering into `k` groups, each client gets its group's mean: by distances
    between models, or, where the call gives a `base`, by the cosines of the updates from it (with
    k = 2 a split of Clustered FL, Sattler et al. 2021)."""

    k: Count = 2
    linkage: Literal["complete", "single"] = "complete"

    def __post_init__(self) -> None:
        check(self)


Method = Algorithm | Krum | Clusters


Models = Annotated[
    Any,
    Kind(
        "rows [N, P], a list of models or a dict of them by client id",
        lambda v: hasattr(v, "__iter__") and not isinstance(v, str | bytes),
    ),
]


@checked
def personalize(  # noqa: PLR0913 (what a mix has)
    uploads: Any,
    method: Method | type[Algorithm] | str = "fedamp",
    *,
    guidance: Models | None = None,
    previous: Models | None = None,
    base: Any = None,
    include: Names = (),
    exclude: Names = (),
    buffers: Buffers = "auto",
    directions: bool = False,
    **options: Any,
) -> Any:
    """One personalized model for each client, in the form of `uploads` (see `pack`): what the
    method's server makes of one round.

    `method` with its `options`, or an instance: "fedamp" and "heurfedamp" (what each client is
    drawn to, u), "sfl", "krum", "multikrum", "clusters" (k groups), "feddwa" and "feddwa_qp". By
    name both AMPs leave a client at least half of its own model (alpha = sigma / 2 N, xi_self =
    .5): with their own defaults, models that are close become their mean. FedDWA asks how near the
    others' models are to where a client is going: `guidance` are models of all the clients one look
    ahead, `previous` those of their last round (where uploads and these are dicts or pairs, clients
    without one keep their model). `base`, one model, is what clusters' updates are counted from.
    All in the form of the uploads. `include`, `exclude` as `pack` has them; `buffers`: "auto" is
    the method's own. `directions` compares the models' directions, as adapters of different ranks
    ask for; what is mixed stays as it is. ValueError in one sentence, also where an upload is not
    finite.
    """
    alg = method_of(method, options)
    if buffers == "auto":
        buffers = alg.traits.batch_norm[0] if isinstance(alg, Algorithm) else "average"
    only: dict[str, Any] = {"include": include, "exclude": exclude}
    rows, form = pack(uploads, **only, buffers=buffers)
    if method == "fedamp" and isinstance(alg, FedAMP) and "alpha" not in options:
        alg = replace(alg, alpha=alg.sigma / (2 * len(rows)))
    if method == "heurfedamp" and isinstance(alg, HeurFedAMP) and "xi_self" not in options:
        alg = replace(alg, xi_self=0.5)
    _check_rows(rows, form)
    named, matrix = form.outer in ("dict", "pairs"), form.outer == "matrix"
    extra: dict[str, Tensor] = {}
    for name, given in (("guidance", guidance), ("previous", previous)):
        if given is not None:
            extra[name] = _rows_of(name, given, rows, form.ids, named, only)
    if base is not None and matrix and not hasattr(base, "shape"):
        raise TypeError(
            f"base: expected one row of {rows.shape[1]} parameters, as the uploads are a matrix, "
            f"got {shown(base)}."
        )
    if base is not None:
        one = base[None] if matrix else [base]
        extra["base"] = _rows_of("base", one, rows, [0], False, only)
    compared = {"rows": rows, **extra}
    if directions and base is None:
        compared = {k: F.normalize(v.double()) for k, v in compared.items()}
    mix = _mix(alg, **compared)
    weight = mix.weight.to(rows.device)
    index = None if mix.index is None else mix.index.to(rows.device)
    return unpack(mix.of(rows), form, weight, index)


def method_of(method: Any, options: dict[str, Any]) -> Method:
    """The method of this name with these options, or the instance itself."""
    if options and not isinstance(method, str | type):
        raise TypeError(
            f"options: {type(method).__name__} has its own, got {', '.join(options)} beside it; "
            "make the instance with them."
        )
    multi: Callable[..., Krum] = lambda m=2, **o: Krum(m=m, **o)  # noqa: E731
    own: dict[Any, Callable[..., Method]] = {"krum": Krum, "multikrum": multi, "clusters": Clusters}
    if isinstance(method, str) and method not in {*own, *ALGORITHMS} and ":" not in method:
        raise ValueError(f"method: expected one of {USABLE}, got {method!r}.")
    if isinstance(method, Krum | Clusters):
        return method
    try:
        make = own[method] if method in own else lambda **o: algorithm_of(method, **o)
        alg = make(**options)
    except TypeError as error:
        raise TypeError(
            f"method: {method!r} cannot be made from {', '.join(options)} ({error})."
        ) from None
    if not isinstance(alg, FedAMP | FedDWA | SFL | Krum | Clusters):
        raise ValueError(
            f"method: {type(alg).__name__} needs more of a client than its model; use "
            f"pflcore.Server and Client, or one of {USABLE}."
        )
    return alg


def _check_rows(rows: Tensor, form: Any) -> None:
    """ValueError for a client whose model is not finite, or whose statistics are impossible."""
    statistics = rows.new_zeros(len(rows), 0) if form.statistics is None else form.statistics
    fine = finite_rows([rows, statistics], len(rows))
    for name, values in _cut(form.averaged, statistics.T).items():
        if name.endswith("running_var"):
            fine &= (values >= 0).all(0).cpu()
    if not bool(fine.all()):
        raise ValueError(
            f"uploads: client {form.ids[int(fine.int().argmin())]!r}'s model is not finite, or has "
            "a negative variance; leave that client out of this round."
        )


def _rows_of(
    name: str, given: Any, rows: Tensor, ids: list[Any], named: bool, only: dict[str, Any]
) -> Tensor:
    """Rows in the order of `ids`; where they are `named`, a client's own where nothing is given."""
    more, form = pack(given, **only)
    dtypes = [str(t.dtype).removeprefix("torch.") for t in (rows, more)]
    alike = more.shape[1] == rows.shape[1] and dtypes[0] == dtypes[1]
    if not (alike and (named or len(more) == len(ids))):
        raise ValueError(
            f"{name}: expected {len(ids)} models of {rows.shape[1]} {dtypes[0]} parameters, as the "
            f"uploads are, got {list(more.shape)} {dtypes[1]}."
        )
    if not bool(more.isfinite().all()):
        raise ValueError(f"{name}: expected finite models; leave the client out that sent another.")
    if not named:
        return more
    where = {i: j for j, i in enumerate(form.ids)}
    if not where.keys() & set(ids):
        raise ValueError(
            f"{name}: none of its clients, {shown(form.ids)}, is one of the uploads', "
            f"{shown(ids)}; use the same ids."
        )
    return torch.stack([more[where[i]] if i in where else rows[j] for j, i in enumerate(ids)])


def _mix(
    alg: Method,
    rows: Tensor,
    guidance: Tensor | None = None,
    previous: Tensor | None = None,
    base: Tensor | None = None,
) -> Mix:
    """What each client's model is made of, by rows that are compared [N, P]."""
    guides = [g for g in (guidance, previous) if g is not None]
    if isinstance(alg, FedDWA):
        if len(guides) != 1:
            raise ValueError(
                "guidance, previous: FedDWA needs one of them; with a client's own model in their "
                "place its own distance is 0, so it gets the whole weight and nothing is mixed."
            )
        return Mix(*alg.weights(guides[0], rows))
    if guides:
        raise ValueError(
            f"guidance, previous: they are FedDWA's, {type(alg).__name__} does not look at them; "
            "leave them out."
        )
    if base is not None and not isinstance(alg, Clusters):
        raise ValueError(
            f"base: only clusters count updates from it, {type(alg).__name__} does not; leave it "
            "out."
        )
    if isinstance(alg, Clusters):
        return _clusters(alg, rows, base)
    return Mix(_weights(alg, rows))


def _clusters(alg: Clusters, rows: Tensor, base: Tensor | None) -> Mix:
    if alg.k > len(rows):
        refuse("k", f"at most {len(rows)} groups, one for each client", alg.k)
    delta = rows if base is None else rows - base
    sqdist = ops.pairwise_sqdist(delta).cpu()
    similarity = -sqdist if base is None else cosines(sqdist, _norm2(delta))
    group = groups(similarity, alg.k, alg.linkage)
    same = (group[:, None] == group).double()
    return Mix(same / same.sum(1, keepdim=True))


def _weights(alg: Method, rows: Tensor) -> Tensor:
    """The weights [N, N] of a method that looks at the models alone."""
    n, sqdist = len(rows), ops.pairwise_sqdist(rows).cpu()
    everybody = torch.ones(n, dtype=torch.bool)
    if isinstance(alg, Krum):
        none = torch.zeros(n, n, dtype=torch.float64)
        return none.index_fill_(1, alg.chosen(sqdist), 1 / alg.m)
    if isinstance(alg, FedAMP):
        return alg.mixing(sqdist, _norm2(rows), everybody)
    assert isinstance(alg, SFL)
    drawn = alg.adjacency.endswith(".npy")
    graph = alg.graph(n) if drawn else nearest(sqdist, alg.k, everybody)
    return smoothing(graph, everybody, alg.layers, alg.s)


def _norm2(rows: Tensor) -> Tensor:
    return ops.pairwise_sqdist(rows, torch.zeros_like(rows[:1]))[:, 0].cpu()
