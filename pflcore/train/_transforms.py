"""Transforms of augmentation, by their names and as users write them.

Symbols: n samples; C, H, W channels, height and width of an image; B samples of a
minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore.check import Words, closest_name, import_object, reject

# (batch [B, ...], generator) -> batch [B, ...]
AugmentFunction: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
AUGMENT_TEXT = (
    "'flip', 'crop:PIXELS', 'cutout:PIXELS', a function of (batch, generator) that "
    "returns a batch, or where one is: 'package.module:function', or a list of these"
)
# What evaluation needs as well is no augmentation.
AUGMENT_REMEDY = (
    "a change that evaluation needs, too, such as a normalisation, belongs to the "
    "model: pflcore.nn.Normalize"
)
RANDOM_BITS = 24  # of the random integers of a named transform


class Transform(NamedTuple):
    """A transform of images that has a name.

    Attributes:
        function: The function (x [n, C, H, W], number, integers [n, draws]) -> x. The
            integers have `RANDOM_BITS` random bits.
        draws: The number of random integers that it needs for a sample.
        number: The number that it takes where none stands behind its name.
        words: The words for the numbers that it can take.
        fits: A function that is true for these numbers.
    """

    function: Callable[[Tensor, Any, Tensor], Tensor]
    draws: int
    number: float
    words: str
    fits: Callable[[float], bool]


# transforms of images -----------------------------------------------------------


def flip(x: Tensor, probability: float, integers: Tensor) -> Tensor:
    """Mirrors images [n, C, H, W] left to right, each with this probability."""
    is_flipped = integers[:, 0] < round(probability * (1 << RANDOM_BITS))
    return torch.where(is_flipped[:, None, None, None], x.flip(-1), x)


def crop(x: Tensor, padding: int, integers: Tensor) -> Tensor:
    """Windows of images [n, C, H, W] that are padded with zeros on all sides.

    Each window has the size of the image, and a random place (He et al. 2016, section
    4.2).
    """
    height, width = x.shape[-2:]
    padded = F.pad(x, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    top, left = _below(integers, 2 * padding + 1).unbind(1)
    return windows[torch.arange(len(x), device=x.device), :, top, left]


def cutout(x: Tensor, side: int, integers: Tensor) -> Tensor:
    """Images [n, C, H, W] in each of which a random square is 0.

    The centre of the square is any pixel, so a part of the square may lie outside of
    the image (DeVries and Taylor 2017).
    """
    height, width = x.shape[-2:]
    in_rows = _is_near(_below(integers[:, :1], height), height, side)
    in_columns = _is_near(_below(integers[:, 1:], width), width, side)
    in_square = in_rows[:, :, None] & in_columns[:, None, :]
    return x.masked_fill(in_square[:, None], 0)


def _below(integers: Tensor, count: int) -> Tensor:
    """Random integers from 0 to `count` - 1, of integers of `RANDOM_BITS` bits."""
    return integers * count >> RANDOM_BITS


def _is_near(centre: Tensor, length: int, side: int) -> Tensor:
    """Mask [n, length] of the `side` places around the centres [n, 1]."""
    first = centre - side // 2
    places = torch.arange(length, device=centre.device)
    return (places >= first) & (places < first + side)


def _is_count(number: float) -> bool:
    """True for a whole number from 1 on."""
    return number >= 1 and number == int(number)


TRANSFORMS = {
    "flip": Transform(flip, 1, 0.5, "a probability from 0 to 1", lambda p: 0 <= p <= 1),
    "crop": Transform(crop, 2, 4, "a whole number of pixels, from 1", _is_count),
    "cutout": Transform(cutout, 2, 16, "a whole number of pixels, from 1", _is_count),
}


# what users write ---------------------------------------------------------------


def is_augment(value: Any) -> bool:
    """True for a name, a function, or a list of names and functions."""
    entries = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(entry, str) or callable(entry) for entry in entries)


def augment_entries(value: Any) -> tuple[str | AugmentFunction, ...]:
    """The names and functions that the option `augment` holds.

    Raises ValueError for a name that no transform has.
    """
    if value is None:
        return ()
    entries = value if isinstance(value, list | tuple) else [value]
    return tuple(map(_entry, entries))


def _entry(value: str | AugmentFunction) -> str | AugmentFunction:
    """The name of a transform, or a function, also from "package.module:function"."""
    if not isinstance(value, str):
        return value
    name, _, place = value.partition(":")
    if name not in TRANSFORMS and place.isidentifier():
        function: AugmentFunction = import_object(value, "augment")
        return function
    named_transform(value)
    return value


@lru_cache(maxsize=64)
def named_transform(word: str) -> tuple[Transform, float]:
    """The transform and the number of a word such as "crop:4".

    Raises ValueError where there is no such transform, or the number does not fit.
    """
    name, colon, text = word.partition(":")
    transform = TRANSFORMS.get(name)
    if transform is None:
        near = closest_name(name, TRANSFORMS)
        got = Words(f"{word!r} (did you mean {near!r}?)") if near else word
        reject("augment", AUGMENT_TEXT, got, remedy=AUGMENT_REMEDY)
    if not colon:
        return transform, transform.number
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not transform.fits(number):
        reject("augment", f"{transform.words} behind '{name}:'", word)
    return transform, number if transform.draws == 1 else int(number)
