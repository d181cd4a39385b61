"""Whether a run can start from a state."""

from __future__ import annotations

from pflcore.algorithms.protocol import Algorithm
from pflcore.simulation.round import State, begin, flat
from pflcore.train import Net


def check_start(start: State, alg: Algorithm, net: Net, n: int, what: str = "warm_start") -> None:
    """ValueError where a state is not one of this algorithm, federation and model."""
    name, have = type(alg).__name__, flat(start)
    begun = begin(alg, net, n, clients=bool(start.clients))
    want = flat(begun)
    missing, foreign = (
        [_words(k) for k in sorted(a - b)]
        for a, b in ((want.keys(), have.keys()), (have.keys(), want.keys()))
    )
    if missing or any("client" in k for k in foreign):
        said = [f"without the {', '.join(missing)}"] if missing else []
        said += [f"with the {', '.join(foreign)}"] if foreign else []
        raise ValueError(
            f"{what}: expected a state of {name}, got one {' and '.join(said)}; start from a run "
            f"of {name}."
        )
    if len(start.seen) != n:
        raise ValueError(
            f"{what}: expected a state of {n} clients, got one of {len(start.seen)}; start from a "
            "run on this federation."
        )
    for key, like in want.items():
        shape, got = list(like.shape), list(have[key].shape)
        grown = key.startswith("server") and len(got) == len(shape) > 0 and got[1:] == shape[1:]
        if got != shape and not (grown and shape[0] not in (n, net.size)):  # rows that a run adds
            raise ValueError(
                f"{what}: expected {_words(key)} of shape {shape}, got {got}; start from a run of "
                "this model."
            )
        if have[key].dtype != like.dtype:
            raise ValueError(
                f"{what}: expected {_words(key)} in {like.dtype}, got {have[key].dtype}; start "
                "from a run of this model."
            )


def _words(key: str) -> str:
    part, _, name = key.partition(".")
    return f"{part.removesuffix('s')}'s {name}" if name else key
