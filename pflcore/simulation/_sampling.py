"""The rules by which the clients of a round are drawn.

- "uniform" draws every client with the same chance, S of them.
- "poisson" lets each client join with the chance `participation`, independently of all
  others; so the number of clients differs from round to round, and may be 0.
- "size" draws a client by its number of training samples, and a list of weights by its
  weight. The chances are exact: of S clients that are drawn without replacement, client
  i is among them with the chance S w_i / sum(w), or always where that exceeds 1.
- A function (round, generator, sizes) returns the clients itself.

The draws by weight are systematic sampling with unequal probabilities (Madow 1949), on
clients in a random order. Clients that are drawn one after another, each with the
chance of its weight among those that are left, would not have these chances: a large
client would be drawn too seldom.

Symbols: N clients of the federation; n of them may take part; S are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pflcore.check import (
    Expectation,
    Words,
    ids_of,
    import_object,
    reject,
    require,
    require_arguments,
)
from pflcore.train._context import TrainContext
from pflcore.train._random import (
    draw_without_replacement,
    generator_of,
    random_words,
    seed_of,
)

# (round, generator, sizes [N]) -> ids
CohortRule = Callable[[int, torch.Generator, Tensor], Any]
RULES = ("uniform", "poisson", "size")
COHORT_RULE_TEXT = "a function of (round, generator, sizes) that returns ids"
SAMPLING_TEXT = (
    f"'uniform', 'poisson', 'size', a weight for each client, {COHORT_RULE_TEXT}, or "
    "where one is: 'package.module:function'"
)


def _is_sampling(value: Any) -> bool:
    """True for a rule's name, the place of a function, a function, or a list."""
    if isinstance(value, str):
        return value in RULES or ":" in value
    return callable(value) or hasattr(value, "__len__")


Sampling = Annotated[
    str | CohortRule | Sequence[float] | Tensor,
    Expectation(SAMPLING_TEXT, _is_sampling, RULES),
]
# A chance that is so near to 1 counts as 1: then rounding draws no client twice.
CERTAIN_CHANCE = 1 - 1e-9


def checked_sampling(sampling: Any, n: int, clients: Tensor) -> Any:
    """The rule as a run needs it: a name, a function, or weights [N] in float64.

    Raises ValueError for a function of other arguments, for weights that are not one
    finite number >= 0 for each of the n clients, and where no client that may take part
    has a weight above 0.

    Args:
        sampling: The rule as it was given.
        n: The number of clients of the federation.
        clients: The ids of the clients that may take part.
    """
    if isinstance(sampling, str) and ":" in sampling:
        sampling = import_object(sampling, "sampling")
        fits = not isinstance(sampling, str) and _is_sampling(sampling)
        require(fits, "sampling", SAMPLING_TEXT, sampling)
    if callable(sampling):
        require_arguments("sampling", sampling, COHORT_RULE_TEXT, 3)
    if isinstance(sampling, str) or callable(sampling):
        return sampling
    words = f"a finite weight >= 0 for each of the {n} clients"
    try:
        weights = torch.as_tensor(sampling, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        reject("sampling", words, sampling)
    require(weights.shape == (n,), "sampling", words, sampling)
    wrong = (~(weights.isfinite() & (weights >= 0))).nonzero()[:, 0].tolist()
    if wrong:
        got = Words(f"{weights[wrong[0]].item():g} for client {wrong[0]}")
        reject("sampling", words, got)
    words = "a weight above 0 of a client that may take part"
    require(bool((weights[clients] > 0).any()), "sampling", words, Words("zeros alone"))
    return weights


def sampling_kind(sampling: Any) -> str:
    """The name of a rule, "weights" or "function"."""
    if isinstance(sampling, str):
        return sampling
    return "function" if callable(sampling) else "weights"


def describe_sampling(sampling: Any) -> Any:
    """The rule for a record: its name, its weights, or the name of its function."""
    if isinstance(sampling, str | Tensor):
        return sampling
    name = getattr(sampling, "__qualname__", type(sampling).__qualname__)
    return f"function {name}"


def draw_clients(
    context: TrainContext,
    round: int,
    count: int,
    clients: Tensor,
    sampling: Any,
    participation: float,
) -> Tensor:
    """The ids [S] of the clients that are drawn, int64.

    They are in a random order, but by "poisson", by a function, and where all clients
    that may take part are drawn.

    Args:
        context: The data and the seed of the run.
        round: The round, from 1.
        count: S, or fewer where fewer clients have a weight above 0.
        clients: The ids of the clients that may take part, ascending.
        sampling: The rule, as `checked_sampling` returns it.
        participation: The chance of each client, for "poisson".
    """
    kind = sampling_kind(sampling)
    if kind == "function":
        return _ids_by_function(context, round, count, clients, sampling)
    n = len(clients)
    key = (context.seed, round, "cohort")
    if kind == "poisson":
        drawn = draw_independently(n, participation, *key)
    elif kind == "uniform":
        return draw_uniformly(clients, count, *key)
    elif count >= n and kind != "weights":
        return clients
    else:
        sizes = context.data.size("train").double()
        weights = sizes if kind == "size" else sampling
        drawn = draw_by_weight(weights[clients], count, *key)
    return clients[drawn]


def draw_uniformly(clients: Tensor, count: int, *key: object) -> Tensor:
    """Draws `count` of the ids `clients`, without replacement: int64, in random order.

    Where there are no more than that, they are all of `clients` in their own order. The
    draw makes no tensor as long as `clients`, which may be millions.
    """
    n = len(clients)
    if count >= n:
        return clients
    return clients[draw_without_replacement(n, count, *key)]


def with_required(
    drawn: Tensor, required: Sequence[int], clients: Tensor, count: int | None
) -> Tensor:
    """The ids of drawn clients and of required ones, int64, ascending.

    Args:
        drawn: The ids of the clients that were drawn.
        required: The ids of the clients that an algorithm needs in every round.
        clients: The ids of the clients that may take part, ascending.
        count: The number of clients: required ones take the place of drawn ones. Those
            outside of `clients` come on top. None for all of them.
    """
    if not required:
        return drawn.sort().values
    # The required clients come first, so that a cut takes away others.
    cohort = [*required, *(i for i in drawn.tolist() if i not in required)]
    if count is not None:
        # `in` would look at all clients.
        wanted = torch.tensor(required)
        place = torch.searchsorted(clients, wanted).clamp(max=len(clients) - 1)
        count += int((clients[place] != wanted).sum())
        cohort = cohort[: max(count, len(required))]
    return torch.tensor(sorted(cohort))


def draw_independently(n: int, chance: float, *key: object) -> Tensor:
    """The positions, int64, of the clients of n that join with this chance each.

    Args:
        n: The number of clients that may take part.
        chance: The chance of each of them.
        key: The key of the random numbers.
    """
    words = random_words(np.asarray([seed_of(*key)], np.uint64), n)[0]
    joins = (words >> np.uint64(11)) * 2.0**-53 < chance
    return torch.from_numpy(joins.nonzero()[0])


def draw_by_weight(weights: Tensor, count: int, *key: object) -> Tensor:
    """Draws `count` of n clients by weight, without replacement: positions, int64.

    The chance of client i is count * w_i / sum(w). Clients for which that exceeds 1 are
    always drawn, and the others share the rest in the same way. Clients of weight 0 are
    never drawn; where fewer than `count` have a weight, all of those are drawn.

    Args:
        weights: The weights [n], finite and >= 0.
        count: The number of clients that are drawn.
        key: The key of the random numbers.
    """
    positive = weights.numpy().nonzero()[0]
    count = min(count, len(positive))
    seeds = np.asarray([seed_of(*key)], np.uint64)
    words = random_words(seeds, len(positive) + 1)[0]
    # In a random order every two clients may be drawn together.
    order = positive[words[1:].argsort(kind="stable")]
    share = weights.numpy()[order]
    share = share / share.max()
    is_drawn = _certain_clients(share, count)
    rest = (~is_drawn).nonzero()[0]
    left = count - int(is_drawn.sum())
    if left:
        # The clients' weights lie one behind the other on a line, and points in even
        # distances from a random start fall on those that are drawn.
        ends = share[rest].cumsum()
        start = float(words[0] >> np.uint64(11)) * 2.0**-53
        points = (start + np.arange(left)) * (ends[-1] / left)
        places = np.searchsorted(ends, points, side="right")
        is_drawn[rest[np.minimum(places, len(rest) - 1)]] = True
    return torch.from_numpy(order[is_drawn].astype(np.int64))


def _certain_clients(
    share: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.bool_]:
    """The mask [n] of the clients that a draw of `count` by `share` [n] must take."""
    certain = np.zeros(len(share), bool)
    while True:
        left = count - int(certain.sum())
        total = share[~certain].sum()
        more = ~certain & (share * left >= total * CERTAIN_CHANCE)
        if left == 0 or not more.any():
            return certain
        certain |= more


def _ids_by_function(
    context: TrainContext,
    round: int,
    count: int,
    clients: Tensor,
    function: CohortRule,
) -> Tensor:
    """The ids that the user's function returns for a round, once they are checked."""
    data = context.data
    generator = generator_of(context.seed, round, "cohort")
    name = f"sampling, in round {round}"
    value = function(round, generator, data.size("train").clone())
    ids = ids_of(name, value, data.n, data.names)
    strange = ids[~torch.isin(ids, clients)].tolist()
    words = f"some of the clients that may take part ({len(clients)})"
    require(not strange, name, words, strange)
    words = f"at most {count} clients, as participation says"
    require(len(ids) <= count, name, words, Words(f"{len(ids)}"))
    return ids
