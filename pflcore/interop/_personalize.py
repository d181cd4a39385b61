"""One call: clients' models in, one personalized model per client out, for the methods
that need nothing of a client but its model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore import ops
from pflcore.algorithms import ALGORITHMS, algorithm_of, check_options, name_of
from pflcore.algorithms._clusters import agglomerate, cosine_matrix
from pflcore.algorithms._fedavg import krum
from pflcore.algorithms._protocol import (
    Algorithm,
    MixingWeights,
    normalize_rows,
    squared_norms,
)
from pflcore.algorithms._relations import FedAMP, FedDWA, HeurFedAMP, LatestModels
from pflcore.check import (
    BatchNormPolicy,
    Names,
    NonNegativeInt,
    PositiveInt,
    checked,
    require,
)
from pflcore.interop._packing import (
    ModelForm,
    Models,
    PackedModels,
    pack,
    split_row,
    unpack,
)
from pflcore.simulation._uploads import finite_rows


@checked
@dataclass(frozen=True)
class Krum:
    """Blanchard et al. 2017: the model whose squared distances to its N - f - 2 nearest
    others have the least sum; everybody gets it.

    With `m` > 1 (MultiKrum) the mean of the `m` such models of the least sums. Of
    equals the earlier client. Deviation: exact distances.
    """

    f: NonNegativeInt = 1  # how many clients may be hostile, 2 f + 2 < N
    m: PositiveInt = 1

    def select(self, sqdist: Tensor) -> Tensor:
        """The chosen clients [m], best first, by squared distances [N, N]."""
        n = len(sqdist)
        wanted = f"0 <= f with 2 f + 2 < {n} clients and 1 <= m <= N - f"
        require(2 * self.f + 2 < n and self.m <= n - self.f, "f, m", wanted, self)
        return krum(sqdist, self.f, self.m)


@checked
@dataclass(frozen=True)
class Clusters:
    """Agglomerative clustering into `k` groups, each client gets its group's mean: by
    distances between models, or, where the call gives a `base`, by the cosines of the
    updates from it (with k = 2 a split of Clustered FL, Sattler et al. 2021)."""

    k: PositiveInt = 2
    linkage: Literal["complete", "single"] = "complete"


Method = Algorithm | Krum | Clusters
METHODS_BY_NAME: dict[str, Callable[..., Method]] = {
    **{name: ALGORITHMS[name] for name in ("fedamp", "sfl", "feddwa", "feddwa_qp")},
    "heurfedamp": partial(HeurFedAMP, xi_self=0.5),
    "krum": Krum,
    "multikrum": partial(Krum, m=2),
    "clusters": Clusters,
}


@checked
def personalize(  # noqa: PLR0913 (what a mix has)
    uploads: Models,
    method: Method | type[Algorithm] | str = "fedamp",
    *,
    guidance: Models | None = None,
    previous: Models | None = None,
    base: Any = None,
    include: Names = (),
    exclude: Names = (),
    batch_norm: BatchNormPolicy = "auto",
    directions: bool = False,
    **options: Any,
) -> Any:
    """One personalized model for each client, in the form of `uploads` (see `pack`):
    what the method's server makes of one round.

    `method` by name with its `options`, `personalize(x, "krum", f=2)`, or an algorithm:
    "fedamp" and "heurfedamp" (what each client is drawn to, u), "sfl", "krum",
    "multikrum", "clusters" (k groups), "feddwa" and "feddwa_qp". By name both AMPs
    leave a client at least half of its own model (alpha = sigma / 2 N, xi_self = .5):
    with their own defaults, models that are close become their mean. FedDWA asks how
    near the others' models are to where a client is going: `guidance` are models of all
    the clients one look ahead, `previous` those of their last round (where uploads and
    these are dicts, clients without one keep their model). `base`, one model, is what
    clusters' updates are counted from. All in the form of the uploads. `include`,
    `exclude` as `pack` has them; `batch_norm`: "auto" is the method's own. `directions`
    compares the models' directions, as adapters of different ranks ask for; what is
    mixed stays as it is. ValueError in one sentence, also where an upload is not
    finite.
    """
    alg = method_of(method, options)
    if batch_norm == "auto":
        batch_norm = (
            alg.traits.batch_norm[0] if isinstance(alg, Algorithm) else "average"
        )
    packed = partial(pack, include=include, exclude=exclude)
    rows, form = packed(uploads, batch_norm=batch_norm)
    if method == "fedamp" and isinstance(alg, FedAMP) and "alpha" not in options:
        alg = replace(alg, alpha=alg.sigma / (2 * len(rows)))
    _check_rows(rows, form)
    guides = [
        _matching_rows("guidance, previous", packed(given), rows, form)
        for given in (guidance, previous)
        if given is not None
    ]
    _check_guidance(alg, len(guides))
    compared = [rows, *guides]
    if base is not None:
        require(
            isinstance(alg, Clusters),
            "base",
            "None where the method is not 'clusters'",
            base,
        )
        start = _matching_rows("base", packed([base]), rows[:1], ModelForm([0], "list"))
        compared = [rows - start]
    elif directions:
        compared = [F.normalize(v.double()) for v in compared]
    mix = _mixing_weights(alg, compared[0], compared[1:], base is not None)
    return unpack(mix.aggregate(rows), form, mix.weight, mix.index)


def method_of(method: Any, options: dict[str, Any]) -> Method:
    """The method of this name with these options, or the instance itself."""
    fresh = not options or isinstance(method, str | type)
    require(fresh, "options", "none beside an instance, which has its own", options)
    alg = method
    if isinstance(method, str) and method in METHODS_BY_NAME:
        make = METHODS_BY_NAME[method]
        cls: Any = make.func if isinstance(make, partial) else make
        check_options(cls, options)
        return make(**options)
    listed = isinstance(method, str) and name_of(method) in ALGORITHMS
    if listed or isinstance(method, Algorithm | type) or ":" in str(method):
        alg = algorithm_of(method, **options)
    names = ", ".join(METHODS_BY_NAME)
    if isinstance(alg, Algorithm) and not isinstance(alg, LatestModels | FedDWA):
        raise ValueError(
            f"method: {name_of(alg)} needs more of its clients than a model; use "
            "pflcore.Server "
            f"and pflcore.Client, or one of {names}."
        )
    require(
        isinstance(alg, Method),
        "method",
        f"one of {names}, or an instance",
        alg,
        METHODS_BY_NAME,
    )
    return alg  # type: ignore[no-any-return]


def _check_guidance(alg: Method, count: int) -> None:
    """ValueError where FedDWA has not one of `guidance` and `previous`, or another
    has some."""
    if isinstance(alg, FedDWA) and count == 0:
        raise ValueError(
            f"guidance, previous: personalize by {name_of(alg)} needs guidance= or "
            "previous=: "
            "without one each client would get its own model back."
        )
    one = (
        "one of them"
        if isinstance(alg, FedDWA)
        else "none, as FedDWA's methods alone have one"
    )
    got = ("none", "one", "both")[count]
    require(count == isinstance(alg, FedDWA), "guidance, previous", one, got)


def min_models(method: Method) -> int:
    """How many models the method needs at least."""
    if isinstance(method, Krum):
        return max(2 * method.f + 3, method.f + method.m)
    return method.k if isinstance(method, Clusters) else 1


def _check_rows(rows: Tensor, form: ModelForm) -> None:
    """ValueError for a client whose model is not finite, or whose statistics are
    impossible."""
    statistics = (
        rows.new_zeros(len(rows), 0) if form.statistics is None else form.statistics
    )
    fine = finite_rows([rows, statistics], len(rows))
    for name, values in split_row(form.averaged, statistics.T).items():
        if name.endswith("running_var"):
            fine &= (values >= 0).all(0).cpu()
    if not fine.all():
        raise ValueError(
            f"uploads: client {form.ids[int(fine.int().argmin())]!r}'s model is not "
            "finite, or has "
            "a negative variance; leave that client out of this round."
        )


def _matching_rows(
    name: str, packed: PackedModels, rows: Tensor, form: ModelForm
) -> Tensor:
    """Rows [N, P] in the order of the uploads'; where these have names, a client's own
    where nothing is given."""
    more = packed.rows
    ids = form.ids
    by_name = form.outer == "dict"
    where = {client: j for j, client in enumerate(packed.form.ids)}
    alike = (
        more.dtype == rows.dtype
        and more.shape[1] == rows.shape[1]
        and more.isfinite().all()
    )
    fits = where.keys() & set(ids) if by_name else len(more) == len(ids)
    require(
        # ids that the uploads have not are ids of nobody
        alike and fits and (by_name or packed.form.outer != "dict"),
        name,
        f"{len(ids)} finite models as the uploads are, {rows.shape[1]} numbers of "
        f"{rows.dtype}, "
        "by the same ids",
        more,
    )
    if not by_name:
        return more
    return torch.stack(
        [more[where[i]] if i in where else rows[j] for j, i in enumerate(ids)]
    )


def _mixing_weights(
    alg: Method, rows: Tensor, guides: list[Tensor], updates: bool
) -> MixingWeights:
    """What each client's model is made of, by rows that are compared [N, P]."""
    if isinstance(alg, FedDWA):
        return MixingWeights(*alg.mixing_weights(guides[0], rows))
    n = len(rows)
    sqdist = ops.pairwise_sqdist(rows).cpu()
    norm2 = squared_norms(rows).cpu()
    if isinstance(alg, Clusters):
        require(alg.k <= n, "k", f"at most {n} groups, one for each client", alg.k)
        group = agglomerate(
            cosine_matrix(sqdist, norm2) if updates else -sqdist, alg.k, alg.linkage
        )
        weight = normalize_rows((group[:, None] == group).double())
    elif isinstance(alg, Krum):
        weight = torch.zeros(n, n, dtype=torch.float64)
        weight.index_fill_(1, alg.select(sqdist), 1 / alg.m)
    else:
        assert isinstance(alg, LatestModels)
        weight = alg.mixing_matrix(sqdist, norm2, torch.ones(n, dtype=torch.bool))
    return MixingWeights(weight)
