"""Random numbers that depend on a key alone: every (seed, round, client, stream) has
its own.

They come from a counter (splitmix64), not from a generator's state, so those of all
clients are drawn at once, in any order, on any number of workers, and nobody's draws
depend on who else takes part.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pflcore.check import require

# the version of the random streams: runs of one version, seed and setting are the same
# run
STREAM_VERSION = 3
U64 = npt.NDArray[np.uint64]
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
# clients of up to 16.7 million samples; 40 random bits decide their order
POSITION_BITS = 24


def seed_of(*key: object) -> int:
    """A 63-bit seed from any key, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class IsolatedDraws(TorchDispatchMode):
    """What this thread draws inside without a generator comes from one of its own, as
    after `torch.manual_seed(seed)`.

    The generators that threads share are left alone: nobody's draws depend on what
    another thread does meanwhile.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.used: dict[str, torch.Generator] = {}  # by device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and kwargs.get("generator") is None
        ):
            # a fresh tensor's have it in an overload
            if all(a.name != "generator" for a in func._schema.arguments):
                name = f"{func._overloadname}_generator".removeprefix("default_")
                func = getattr(func.overloadpacket, name, func)
            if any(a.name == "generator" for a in func._schema.arguments[len(args) :]):
                like = [a.device for a in args if isinstance(a, Tensor)]
                device = torch.device(
                    like[0] if like else kwargs.get("device") or "cpu"
                )
                if device.type != "meta":
                    own = torch.Generator(device).manual_seed(self.seed)
                    kwargs["generator"] = self.used.setdefault(str(own.device), own)
        return func(*args, **kwargs)


def generator_of(*key: object) -> torch.Generator:
    """torch's own generator for a key: for draws that happen once a round."""
    return torch.Generator().manual_seed(seed_of(*key))


def mix64(z: U64) -> U64:
    """splitmix64's finalizer (Steele, Lea, Flood 2014): a bijection of 64-bit words
    whose output bits look independent."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def client_seeds(ids: npt.ArrayLike, *key: object) -> U64:
    """One word per client [S] for this key (the run's seed, the round, the stream)."""
    return mix64(
        np.uint64(seed_of(*key))
        + GOLDEN_GAMMA * (np.asarray(ids, np.uint64) + np.uint64(1))
    )


def random_words(seeds: U64, count: int) -> U64:
    """`count` random words for each seed, [S, count]."""
    return mix64(
        seeds[:, None] + GOLDEN_GAMMA * np.arange(1, count + 1, dtype=np.uint64)
    )


def client_shuffles(seeds: U64, sizes: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """For each client a permutation of its `sizes[i]` positions, [S, max size]; 0
    beyond a client's size.

    Random keys are sorted with their positions in the low bits.
    """
    size = np.asarray(sizes, np.int64)
    most = (1 << POSITION_BITS) - 1
    longest = int(size.max())
    require(longest <= most, "sizes", f"at most {most} samples of a client", longest)
    low = np.uint64(most)
    outside = np.arange(longest) >= size[:, None]
    keys = random_words(seeds, longest)
    keys &= ~low
    keys |= np.arange(longest, dtype=np.uint64)
    np.putmask(keys, outside, ~np.uint64(0))  # sorts behind everybody's own
    keys.sort(axis=1)
    keys &= low
    np.putmask(keys, outside, np.uint64(0))
    return keys.view(np.int64)


def draw_without_replacement(n: int, count: int, *key: object) -> Tensor:
    """`count` of the numbers 0..n-1 without replacement, in the order of their draw,
    int64 [count]: work of `count`, not of `n`."""
    seeds = np.asarray([seed_of(*key)], np.uint64)
    if 4 * count >= n:
        return torch.from_numpy(
            random_words(seeds, n)[0].argsort(kind="stable")[:count]
        )
    tries = 2 * count + 8
    while True:
        numbers = (random_words(seeds, tries)[0] % np.uint64(n)).view(np.int64)
        first = np.unique(numbers, return_index=True)[1]
        if len(first) >= count:
            return torch.from_numpy(numbers[np.sort(first)[:count]])
        tries *= 2


def client_uniforms(seeds: U64, count: int) -> Tensor:
    """`count` numbers per seed, uniform on the open interval (0, 1), float32
    [S, count]."""
    high = (random_words(seeds, count) >> np.uint64(40)).astype(np.float32)
    return torch.from_numpy((high + np.float32(0.5)) * np.float32(2.0**-24))
