"""One call from the clients' models to their personalized models.

It serves the methods that need nothing but the clients' models.

Symbols: N clients; P numbers of a model; f bad clients that a defence expects; k
groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms import ALGORITHMS, algorithm_of, check_options, name_of
from pflcore.algorithms._clusters import agglomerate
from pflcore.algorithms._feddwa import FedDWA
from pflcore.algorithms._pfedgraph import PFedGraph
from pflcore.algorithms._protocol import (
    Algorithm,
    MixingWeights,
    normalize_rows,
)
from pflcore.algorithms._relations import FedAMP, HeurFedAMP, LatestModels
from pflcore.check import (
    BatchNormPolicy,
    Names,
    PositiveInt,
    Words,
    checked,
    require,
    warn_caller,
)
from pflcore.interop._packing import (
    ModelForm,
    Models,
    PackedModels,
    pack,
    split_row,
    unpack,
)
from pflcore.ops._directions import cosine_matrix, unit_rows
from pflcore.ops._sums import scatter_add
from pflcore.robust import Krum, MultiKrum, choose_by_krum
from pflcore.simulation._uploads import finite_rows


@checked
@dataclass(frozen=True)
class Clusters:
    """Agglomerative clustering into `k` groups; each client gets its group's mean.

    Clients are compared by the distances between their models. Where `personalize` is
    called with a `base`, they are compared by the cosines of their updates from it.
    With these cosines and k = 2, it is a split of Clustered FL (Sattler et al. 2021).

    Args:
        k: The number of groups.
        linkage: The distance between two groups: "complete", the largest between
            their clients, or "single", the smallest.
    """

    k: PositiveInt = 2
    linkage: Literal["complete", "single"] = "complete"


Method = Algorithm | Krum | Clusters
METHOD_NAMES = ("fedamp", "pfedgraph", "sfl", "feddwa", "feddwa_qp")
METHODS_BY_NAME: dict[str, Callable[..., Method]] = {
    **{name: ALGORITHMS[name] for name in METHOD_NAMES},
    "heurfedamp": partial(HeurFedAMP, xi_self=0.5),
    "krum": Krum,
    "multikrum": partial(MultiKrum, num_selected=2),
    "clusters": Clusters,
}


class MixedModels(NamedTuple):
    """The clients' personalized models as rows, for `unpack`.

    Attributes:
        rows: The personalized models [N, P].
        form: The form of the uploads.
        mixing: The weights of the uploads in each model.
        advice: A sentence for the user, where the models are hardly mixed.
    """

    rows: Tensor  # [N, P]
    form: ModelForm
    mixing: MixingWeights
    advice: str | None

    @property
    def weights(self) -> Tensor:
        """The weights [N, N] of all uploads in each model, float64, on the CPU."""
        weight = self.mixing.weight.double().cpu()
        index = self.mixing.index
        if index is None:
            return weight
        square = weight.new_zeros(len(weight), len(weight))
        return scatter_add(square, index.cpu(), weight)


@checked
def personalize(  # noqa: PLR0913 (each option of the one call)
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
    return_weights: bool = False,
    **options: Any,
) -> Any:
    """One personalized model for each client, in the form of `uploads`.

    The models are those that the method's server makes in one round. The methods are:

    - "fedamp", "heurfedamp": the models u that the clients are drawn to;
    - "pfedgraph", "sfl", "feddwa", "feddwa_qp": weighted means of similar clients'
      models ("pfedgraph" with equal shares for all clients);
    - "krum", "multikrum": one robust model for all clients;
    - "clusters": the mean of each of k groups.

    By name, "fedamp" (alpha = sigma / 2 N) and "heurfedamp" (xi_self = 0.5) leave each
    client at least half of its own model. With the defaults of their classes, models
    that are close would become their mean. Where models are far from each other for
    FedAMP's sigma, so that each would stay what it is, a RuntimeWarning says so. Raises
    ValueError for arguments that do not fit, and for a model that is not finite.

    Args:
        uploads: The clients' models, in a form of `pack`.
        method: A name with its options, as in `personalize(x, "clusters", k=3)`, or an
            instance, which has its own options.
        guidance: One model for each client that has been trained further. FedDWA
            compares the other clients' models with the model that a client is about to
            have, so it needs `guidance` or `previous`.
        previous: The models of the clients' last round, for FedDWA. Where these and the
            uploads are dicts, a client may be absent; its upload then takes the place.
        base: One model, from which "clusters" and "pfedgraph" compute the updates that
            they compare; "pfedgraph" needs it.
        include: Patterns of the tensors to mix, as in `pack`.
        exclude: Patterns of the tensors that stay each client's own, as in `pack`.
        batch_norm: The policy for running statistics, "local" or "average"; "auto" is
            the method's own.
        directions: True compares the directions of the models, as adapters of different
            ranks need it. The models themselves are mixed.
        return_weights: True returns the models and the weights [N, N] float64 that
            mixed them: row i are the weights of all uploads in the model of the i-th.
        options: Options of the method that `method` names.
    """
    mixed = mix_models(
        uploads,
        method,
        guidance=guidance,
        previous=previous,
        base=base,
        include=include,
        exclude=exclude,
        batch_norm=batch_norm,
        directions=directions,
        **options,
    )
    if mixed.advice is not None:
        warn_caller(mixed.advice, RuntimeWarning)
    mixing = mixed.mixing
    models = unpack(mixed.rows, mixed.form, mixing.weight, mixing.index)
    return (models, mixed.weights) if return_weights else models


def mix_models(
    uploads: Models,
    method: Any = "fedamp",
    *,
    guidance: Models | None = None,
    previous: Models | None = None,
    base: Any = None,
    include: Names = (),
    exclude: Names = (),
    batch_norm: str = "auto",
    directions: bool = False,
    **options: Any,
) -> MixedModels:
    """The models of `personalize`, which has the same arguments, as rows."""
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
    if base is None:
        wanted = "the model that the clients started from, with 'pfedgraph'"
        require(not isinstance(alg, PFedGraph), "base", wanted, None)
    else:
        wanted = "None where the method is not 'clusters' or 'pfedgraph'"
        require(isinstance(alg, Clusters | PFedGraph), "base", wanted, base)
        one = ModelForm([0], "list")
        compared = rows - _matching_rows("base", pack_rows([base]), rows[:1], one)
    if base is None and directions:
        compared = unit_rows(rows)
        guides = [unit_rows(guide) for guide in guides]
    mixing, advice = _mixing_weights(alg, compared, guides, base is not None)
    return MixedModels(mixing.aggregate(rows), form, mixing, advice)


def method_of(method: Any, options: dict[str, Any]) -> Method:
    """The method of this name with these options, or the instance itself.

    Raises ValueError for an unknown method, and for one that needs more than models.
    """
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
    is_class_path = isinstance(method, str) and ":" in method
    if isinstance(method, type) and issubclass(method, Krum | Clusters):
        check_options(method, options)
        alg = method(**options)
    elif is_known or is_class_path or isinstance(method, Algorithm | type):
        alg = algorithm_of(method, **options)
    names = ", ".join(METHODS_BY_NAME)
    needs_models_alone = isinstance(alg, LatestModels | FedDWA | PFedGraph)
    if isinstance(alg, Algorithm) and not needs_models_alone:
        raise ValueError(
            f"method: {name_of(alg)} needs more of its clients than a model; use "
            f"pflcore.Server and pflcore.Client, or one of {names}."
        )
    wanted = f"one of {names}, or an instance"
    require(isinstance(alg, Method), "method", wanted, alg, METHODS_BY_NAME)
    return alg  # type: ignore[no-any-return]


def _check_guidance(alg: Method, count: int) -> None:
    """Raises ValueError unless FedDWA has one of `guidance` and `previous`.

    Other methods take neither. `count` is the number of those that were given.
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
        return method.clients_needed
    return method.k if isinstance(method, Clusters) else 1


def _check_rows(rows: Tensor, form: ModelForm) -> None:
    """Raises ValueError for a model with impossible numbers.

    These are numbers that are not finite, and negative variances.
    """
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
    """Further models [N, P] of the clients, in the uploads' order.

    Where clients have names, a client without a further model has its upload in that
    place. Raises ValueError, which begins with `name`, for models that do not fit.

    Args:
        name: The arguments that the models come from.
        packed: The further models.
        rows: The uploads [N, P].
        form: The form of the uploads.
    """
    others = packed.rows
    ids = form.ids
    by_name = form.outer == "dict"
    place_of = {client: place for place, client in enumerate(packed.form.ids)}
    if by_name:
        # The places of a list are no names, also where names are numbers.
        fits = packed.form.outer == "dict" and bool(place_of.keys() & set(ids))
    else:
        # Uploads without names are matched by their order.
        fits = len(others) == len(ids) and packed.form.outer != "dict"
    has_kind = others.dtype == rows.dtype and others.shape[1] == rows.shape[1]
    wanted = (
        f"{len(ids)} finite models as the uploads are, {rows.shape[1]} numbers of "
        f"{rows.dtype}, by the same ids"
    )
    is_finite = bool(others.isfinite().all())
    require(has_kind and is_finite and fits, name, wanted, others)
    if not by_name:
        return others
    matching = []
    for client, row in zip(ids, rows, strict=True):
        if client in place_of:
            row = others[place_of[client]]
        matching.append(row)
    return torch.stack(matching)


def _mixing_weights(
    alg: Method,
    rows: Tensor,  # [N, P], the rows that are compared
    guides: list[Tensor],  # of [N, P]: FedDWA's guidance, if any
    are_updates: bool,
) -> tuple[MixingWeights, str | None]:
    """The weights with which the uploads make each client's model.

    The text is the advice for weights that mix hardly anything.
    """
    if isinstance(alg, FedDWA):
        return MixingWeights(*alg.mixing_weights(guides[0], rows)), None
    n = len(rows)
    if isinstance(alg, LatestModels):
        pairs = alg.compare(rows, rows).cpu()
        has_model = torch.ones(n, dtype=torch.bool)
        weight = alg.mixing_matrix(pairs, has_model)
        return MixingWeights(weight), alg.scale_advice(pairs, weight, has_model)
    if isinstance(alg, PFedGraph):
        weight = alg.mixing_matrix(rows, torch.full((n,), 1.0 / n).double())
    elif isinstance(alg, Clusters):
        require(alg.k <= n, "k", f"at most {n} groups, one for each client", alg.k)
        similarity = cosine_matrix(rows) if are_updates else -ops.pairwise_sqdist(rows)
        group = agglomerate(similarity.cpu(), alg.k, alg.linkage)
        weight = normalize_rows((group[:, None] == group).double())
    else:
        assert isinstance(alg, Krum)
        weight = torch.zeros(n, n, dtype=torch.float64)
        wanted = f"0 <= f with 2 f + 2 < {n} clients, and 1 to N - f selected"
        fits = alg.clients_needed <= n
        require(fits, "num_byzantine, num_selected", wanted, Words(alg))
        sqdist = ops.pairwise_sqdist(rows)
        selected = choose_by_krum(sqdist, alg.num_byzantine, alg.num_chosen(n))
        weight.index_fill_(1, selected, 1 / len(selected))
    return MixingWeights(weight), None
