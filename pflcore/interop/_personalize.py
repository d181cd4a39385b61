"""One call: the models of clients in, one personalized model for each client out.

It serves the methods that need nothing of a client but its model.
"""

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
from pflcore.algorithms._defences import krum
from pflcore.algorithms._feddwa import FedDWA
from pflcore.algorithms._protocol import (
    Algorithm,
    MixingWeights,
    normalize_rows,
    squared_norms,
)
from pflcore.algorithms._relations import FedAMP, HeurFedAMP, LatestModels
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
    """Krum (Blanchard et al. 2017): one model of N for all clients.

    With f = `num_byzantine`, it is the model whose squared distances to its N - f - 2
    nearest others have the least sum; of equals the earlier client's. With
    `num_selected` > 1 (MultiKrum) it is the mean of so many models of the least sums.
    Deviation: exact distances.
    """

    num_byzantine: NonNegativeInt = 1  # bad clients that it stands: f, 2 f + 2 < N
    num_selected: PositiveInt = 1  # models whose mean is taken

    def select(self, sqdist: Tensor) -> Tensor:
        """The selected clients, best first, by squared distances [N, N]."""
        n = len(sqdist)
        f = self.num_byzantine
        fits = 2 * f + 2 < n and self.num_selected <= n - f
        wanted = f"0 <= f with 2 f + 2 < {n} clients, and 1 to N - f selected"
        require(fits, "num_byzantine, num_selected", wanted, self)
        return krum(sqdist, f, self.num_selected)


@checked
@dataclass(frozen=True)
class Clusters:
    """Agglomerative clustering into `k` groups; each client gets its group's mean.

    It goes by distances between models, or, where the call gives a `base`, by the
    cosines of the updates from it. With these and k = 2 it is a split of Clustered FL
    (Sattler et al. 2021).
    """

    k: PositiveInt = 2
    linkage: Literal["complete", "single"] = "complete"


Method = Algorithm | Krum | Clusters
METHODS_BY_NAME: dict[str, Callable[..., Method]] = {
    **{name: ALGORITHMS[name] for name in ("fedamp", "sfl", "feddwa", "feddwa_qp")},
    "heurfedamp": partial(HeurFedAMP, xi_self=0.5),
    "krum": Krum,
    "multikrum": partial(Krum, num_selected=2),
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
    """One personalized model for each client, in the form of `uploads`.

    It is what the method's server makes of one round. By name both AMPs leave a client
    at least half of its own model (alpha = sigma / 2 N, xi_self = .5): with their own
    defaults, models that are close become their mean. Raises ValueError for arguments
    that do not fit, and for an upload that is not finite.

    Args:
        uploads: the clients' models; for their forms see `pack`.
        method: a name with its `options`, as in `personalize(x, "krum", f=2)`, or an
            instance: "fedamp" and "heurfedamp" (what each client is drawn to, u),
            "sfl", "krum", "multikrum", "clusters" (k groups), "feddwa", "feddwa_qp".
        guidance: models of all clients one look ahead. FedDWA asks how near the others'
            models are to where a client is going, so it needs these or `previous`.
        previous: models of the clients' last round. Where these and the uploads are
            dicts, clients without one keep their model.
        base: one model, from which the updates of "clusters" are counted.
        include: see `pack`.
        exclude: see `pack`.
        batch_norm: "auto" is the method's own policy.
        directions: compares the directions of the models, as adapters of different
            ranks need it; the models themselves are mixed.
    """
    alg = method_of(method, options)
    policy: Any = batch_norm
    if batch_norm == "auto":
        policy = "average"
        if isinstance(alg, Algorithm):
            policy = alg.traits.batch_norm[0]
    pack_rows = partial(pack, include=include, exclude=exclude)
    rows, form = pack_rows(uploads, batch_norm=policy)
    if method == "fedamp" and isinstance(alg, FedAMP) and "alpha" not in options:
        alg = replace(alg, alpha=alg.sigma / (2 * len(rows)))
    _check_rows(rows, form)
    guides = []
    for models in (guidance, previous):
        if models is not None:
            packed = pack_rows(models)
            guides.append(_matching_rows("guidance, previous", packed, rows, form))
    _check_guidance(alg, len(guides))
    compared = rows
    if base is not None:
        wanted = "None where the method is not 'clusters'"
        require(isinstance(alg, Clusters), "base", wanted, base)
        one = ModelForm([0], "list")
        compared = rows - _matching_rows("base", pack_rows([base]), rows[:1], one)
    elif directions:
        compared = F.normalize(rows.double())
        guides = [F.normalize(guide.double()) for guide in guides]
    mixing = _mixing_weights(alg, compared, guides, base is not None)
    return unpack(mixing.aggregate(rows), form, mixing.weight, mixing.index)


def method_of(method: Any, options: dict[str, Any]) -> Method:
    """The method of this name with these options, or the instance itself."""
    is_instance = not isinstance(method, str | type)
    fits = not options or not is_instance
    require(fits, "options", "none beside an instance, which has its own", options)
    if isinstance(method, str) and method in METHODS_BY_NAME:
        make = METHODS_BY_NAME[method]
        cls: Any = make.func if isinstance(make, partial) else make
        check_options(cls, options)
        return make(**options)
    alg = method
    is_known = isinstance(method, str) and name_of(method) in ALGORITHMS
    is_class_path = ":" in str(method)
    if is_known or isinstance(method, Algorithm | type) or is_class_path:
        alg = algorithm_of(method, **options)
    names = ", ".join(METHODS_BY_NAME)
    if isinstance(alg, Algorithm) and not isinstance(alg, LatestModels | FedDWA):
        raise ValueError(
            f"method: {name_of(alg)} needs more of its clients than a model; use "
            f"pflcore.Server and pflcore.Client, or one of {names}."
        )
    wanted = f"one of {names}, or an instance"
    require(isinstance(alg, Method), "method", wanted, alg, METHODS_BY_NAME)
    return alg  # type: ignore[no-any-return]


def _check_guidance(alg: Method, count: int) -> None:
    """Raises ValueError for a wrong number of `guidance` and `previous`.

    FedDWA needs one of them; other methods take none.
    """
    if isinstance(alg, FedDWA) and count == 0:
        raise ValueError(
            f"guidance, previous: personalize by {name_of(alg)} needs guidance= or "
            "previous=: without one each client would get its own model back."
        )
    expected = 1 if isinstance(alg, FedDWA) else 0
    wanted = ("none, as FedDWA's methods alone have one", "one of them")[expected]
    got = ("none", "one", "both")[count]
    require(count == expected, "guidance, previous", wanted, got)


def min_models(method: Method) -> int:
    """The smallest number of models with which the method works."""
    if isinstance(method, Krum):
        f = method.num_byzantine
        return max(2 * f + 3, f + method.num_selected)
    return method.k if isinstance(method, Clusters) else 1


def _check_rows(rows: Tensor, form: ModelForm) -> None:
    """Raises ValueError for a model that is not finite, or has a negative variance."""
    buffers = form.statistics
    if buffers is None:
        buffers = rows.new_zeros(len(rows), 0)
    fits = finite_rows([rows, buffers], len(rows))
    for name, values in split_row(form.averaged, buffers.T).items():
        if name.endswith("running_var"):
            fits &= (values >= 0).all(0).cpu()
    if not fits.all():
        first_bad = form.ids[int(fits.int().argmin())]
        raise ValueError(
            f"uploads: client {first_bad!r}'s model is not finite, or has a negative "
            "variance; leave that client out of this round."
        )


def _matching_rows(
    name: str, packed: PackedModels, rows: Tensor, form: ModelForm
) -> Tensor:
    """Other models [N, P] of the uploads' clients, in the order of the uploads.

    Where clients have names, one without another model has its upload in its place.
    """
    others = packed.rows
    ids = form.ids
    by_name = form.outer == "dict"
    place_of = {client: place for place, client in enumerate(packed.form.ids)}
    if by_name:
        fits = bool(place_of.keys() & set(ids))
    else:
        # Names say nothing where the uploads have none.
        fits = len(others) == len(ids) and packed.form.outer != "dict"
    is_alike = others.dtype == rows.dtype and others.shape[1] == rows.shape[1]
    wanted = (
        f"{len(ids)} finite models as the uploads are, {rows.shape[1]} numbers of "
        f"{rows.dtype}, by the same ids"
    )
    require(is_alike and others.isfinite().all() and fits, name, wanted, others)
    if not by_name:
        return others
    matching = []
    for client, row in zip(ids, rows, strict=True):
        matching.append(others[place_of[client]] if client in place_of else row)
    return torch.stack(matching)


def _mixing_weights(
    alg: Method,
    rows: Tensor,  # [N, P], the rows that are compared
    guides: list[Tensor],  # of [N, P]
    are_updates: bool,
) -> MixingWeights:
    """The weights that make each client's model of the uploads."""
    if isinstance(alg, FedDWA):
        return MixingWeights(*alg.mixing_weights(guides[0], rows))
    n = len(rows)
    sqdist = ops.pairwise_sqdist(rows).cpu()
    norm2 = squared_norms(rows).cpu()
    if isinstance(alg, Clusters):
        require(alg.k <= n, "k", f"at most {n} groups, one for each client", alg.k)
        similarity = cosine_matrix(sqdist, norm2) if are_updates else -sqdist
        group = agglomerate(similarity, alg.k, alg.linkage)
        weight = normalize_rows((group[:, None] == group).double())
    elif isinstance(alg, Krum):
        weight = torch.zeros(n, n, dtype=torch.float64)
        weight.index_fill_(1, alg.select(sqdist), 1 / alg.num_selected)
    else:
        assert isinstance(alg, LatestModels)
        weight = alg.mixing_matrix(sqdist, norm2, torch.ones(n, dtype=torch.bool))
    return MixingWeights(weight)
