"""Random numbers that depend on a key alone.

A key is, for example, (seed, round, client, stream).

They come from a counter (splitmix64), not from the state of a generator. So the numbers
of all clients are drawn at once, in any order and on any number of workers, and a
client's numbers do not depend on which other clients take part.

Symbols: S clients, or seeds. A word is 64 random bits.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pflcore.check import require

# The version of the random streams. Runs of one version, seed and configuration are the
# same run.
STREAM_VERSION = 3
U64 = npt.NDArray[np.uint64]
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
# Low bits of a shuffle's sort keys: a client has up to 16.7 million samples. The other
# 40 bits are random and decide the order.
POSITION_BITS = 24


def seed_of(*key: object) -> int:
    """A 63-bit seed from any key, the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class IsolatedDraws(TorchDispatchMode):
    """Context in which torch draws from a generator of this thread.

    This holds for draws that name no generator. They give the numbers that follow
    `torch.manual_seed(seed)`. The generators that threads share are left alone, so
    draws do not depend on what another thread does meanwhile.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.used: dict[str, torch.Generator] = {}  # generators of draws, by device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, so that torch does not import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not is_random or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        func = _with_generator_argument(func)
        free_arguments = func._schema.arguments[len(args) :]
        if any(argument.name == "generator" for argument in free_arguments):
            devices = [value.device for value in args if isinstance(value, Tensor)]
            device = torch.device(kwargs.get("device") or "cpu")
            if devices:
                device = devices[0]
            if device.type != "meta":
                kwargs["generator"] = self._generator(device)
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        """The generator of a device, which its first draw makes."""
        # A generator's device has an index, so "cuda" and "cuda:0" are one key.
        new = torch.Generator(device).manual_seed(self.seed)
        return self.used.setdefault(str(new.device), new)


def _with_generator_argument(func: Any) -> Any:
    """The overload of a random op that takes a generator.

    Ops that make a tensor, such as `torch.randn`, take a generator in one of their
    overloads only. `func` is returned where there is no such overload.
    """
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = f"{func._overloadname}_generator".removeprefix("default_")
    return getattr(func.overloadpacket, name, func)


def generator_of(*key: object) -> torch.Generator:
    """Torch generator of a key, for draws that happen once a round.

    Making a generator takes longer than the functions below, which draw for all clients
    at once.
    """
    return torch.Generator().manual_seed(seed_of(*key))


def mix64(z: U64) -> U64:
    """Words `z` after the finaliser of splitmix64.

    The finaliser (Steele, Lea, Flood 2014) is a bijection of 64-bit words, whose output
    bits look independent.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def client_seeds(ids: npt.ArrayLike, *key: object) -> U64:
    """A random word for each client [S], by a key such as (seed, round)."""
    counters = np.asarray(ids, np.uint64) + np.uint64(1)
    return mix64(np.uint64(seed_of(*key)) + GOLDEN_GAMMA * counters)


def random_words(seeds: U64, count: int, first: int = 0) -> U64:
    """Random words of each seed, [S, count], from the one of number `first` on."""
    counters = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    return mix64(seeds[:, None] + GOLDEN_GAMMA * counters)


def client_shuffles(seeds: U64, sizes: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """A random permutation of each client's `sizes[i]` positions, [S, max size].

    A row is 0 beyond its client's size. The rows are random keys that have their
    positions in the low bits and are then sorted.
    """
    size = np.asarray(sizes, np.int64)
    longest = int(size.max())
    max_size = (1 << POSITION_BITS) - 1
    expected = f"at most {max_size} samples of a client"
    require(longest <= max_size, "sizes", expected, longest)
    position_mask = np.uint64(max_size)
    is_outside = np.arange(longest) >= size[:, None]
    keys = random_words(seeds, longest)
    keys &= ~position_mask
    keys |= np.arange(longest, dtype=np.uint64)
    # The largest key is sorted to the end of the row.
    np.putmask(keys, is_outside, ~np.uint64(0))
    keys.sort(axis=1)
    keys &= position_mask
    np.putmask(keys, is_outside, np.uint64(0))
    return keys.view(np.int64)


def draw_without_replacement(n: int, count: int, *key: object) -> Tensor:
    """Draws `count` of the numbers 0..n-1 without replacement, int64 [count].

    The numbers are in the order of their draw. Where `count` is much smaller than `n`,
    the work grows with `count` and not with `n`.
    """
    seeds = np.asarray([seed_of(*key)], np.uint64)
    if 4 * count >= n:
        # Most draws of single numbers would meet a number that was drawn before.
        order = random_words(seeds, n)[0].argsort(kind="stable")
        return torch.from_numpy(order[:count])
    # On average at most a quarter of these draws are repetitions.
    draws = 2 * count + 8
    while True:
        # A longer draw begins with the numbers of the shorter one.
        numbers = (random_words(seeds, draws)[0] % np.uint64(n)).view(np.int64)
        _, first_index = np.unique(numbers, return_index=True)
        if len(first_index) >= count:
            return torch.from_numpy(numbers[np.sort(first_index)[:count]])
        draws *= 2


def client_uniforms(seeds: U64, count: int) -> Tensor:
    """Uniform random numbers of each seed, float32 [S, count].

    They lie in the open interval (0, 1).
    """
    # float32 has 24 bits of precision. The half keeps the numbers off 0 and 1.
    high_bits = (random_words(seeds, count) >> np.uint64(40)).astype(np.float32)
    return torch.from_numpy((high_bits + np.float32(0.5)) * np.float32(2.0**-24))
