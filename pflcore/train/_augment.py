"""Augmentation: random changes of the clients' minibatches in training.

A transform has a name, such as "crop:4", or is a user's function. The named ones change
the images of all clients of a step at once, and draw random integers for every sample.
A function changes the minibatch of one client, with a generator for that minibatch.

All draws are a function of the seed, the round, the client, the stream, the pass over
the client's samples, and the sample. So they depend neither on the engine, nor on the
number of workers, nor on which other clients train.

Symbols: s clients of a step; B samples of the minibatch of each; n = s * B; C, H, W
channels, height and width of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pflcore._device import to_device
from pflcore.check import Words, closest_name, import_object, reject, summarize
from pflcore.data._federation import Federation
from pflcore.data._inputs import Fields
from pflcore.train._random import (
    U64,
    IsolatedDraws,
    client_seeds,
    mix64,
    random_words,
)
from pflcore.train._validate import MismatchError, are_equal, first_line, reraise_as

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


# batches ------------------------------------------------------------------------


def augment_batches(
    entries: Sequence[str | AugmentFunction],
    x: Tensor,  # [s, B, ...]
    sizes: Sequence[int],  # [s]
    seeds: U64,  # [s, B]
    fields: Fields | None,
) -> Tensor:  # [s, B, ...]
    """The samples after all transforms, in their order.

    Args:
        entries: The transforms.
        x: The minibatches of the clients. They stay as they are.
        sizes: The number of samples of each client's minibatch. What lies behind them
            in `x` is of no meaning.
        seeds: A random word for each sample.
        fields: The fields of a sample, where samples have several.
    """
    for entry in entries:
        seeds = mix64(seeds)  # each transform has draws of its own
        if isinstance(entry, str):
            x = _transform_images(entry, x, seeds)
        else:
            x = _call_function(entry, x, sizes, seeds, fields)
    return x


def _transform_images(
    word: str,
    x: Tensor,  # [s, B, C, H, W]
    seeds: U64,  # [s, B]
) -> Tensor:
    """The images after a named transform."""
    transform, number = named_transform(word)
    words = random_words(seeds.ravel(), transform.draws)
    high_bits = (words >> np.uint64(64 - RANDOM_BITS)).view(np.int64)
    integers = to_device(torch.from_numpy(high_bits), x.device)
    images = transform.function(x.flatten(0, 1), number, integers)
    return images.contiguous().view(x.shape)


def _call_function(
    function: AugmentFunction,
    x: Tensor,  # [s, B, ...]
    sizes: Sequence[int],
    seeds: U64,  # [s, B]
    fields: Fields | None,
) -> Tensor:
    """The samples after a user's function, minibatch by minibatch."""
    x = x.clone()
    for client, size in enumerate(sizes):
        seed = int(seeds[client, 0] >> np.uint64(1))
        batch: Any = x[client, :size].clone()
        if fields is not None:
            batch = fields.split_fields(batch)
        generator = torch.Generator(x.device).manual_seed(seed)
        # Draws that name no generator repeat, too: torchvision's transforms make such.
        with IsolatedDraws(seed ^ 1):
            batch = function(batch, generator)
        if fields is not None:
            batch = fields.join_fields(batch, x.dtype)
        _check_result(function, batch, x[client, :size])
        x[client, :size] = batch
    return x


def _check_result(function: AugmentFunction, batch: Any, given: Tensor) -> None:
    """Raises MismatchError unless a function returned a batch like the given one."""
    is_tensor = isinstance(batch, Tensor)
    if not is_tensor or batch.shape != given.shape or batch.dtype != given.dtype:
        raise MismatchError(
            f"augment: {_name_of(function)} returned {summarize(batch)} for a batch, "
            f"{summarize(given)}; let it return a batch of the same shape and dtype."
        )


def check_augment(
    entries: Sequence[str | AugmentFunction],
    data: Federation,
    x: Tensor,  # [B, ...]
) -> None:
    """Raises MismatchError where a transform does not fit the samples of `data`.

    `x` are some of the samples, on which each transform is tried.
    """
    seeds = random_words(client_seeds([0], "augment"), len(x))
    for entry in entries:
        name = _name_of(entry)
        is_image = len(data.shape) == 3 and data.fields is None
        if isinstance(entry, str) and not is_image:
            raise MismatchError(
                f"augment: {name} is for images (channels, height, width), and the "
                f"samples are {data.fields or list(data.shape)}; give a function of "
                "(batch, generator) in its place."
            )
        with reraise_as(partial(_explain_error, name, data)):
            x = _augment_twice(entry, x, seeds, data.fields)


def _explain_error(name: str, data: Federation, error: Exception) -> str:
    """Text of an error that a transform raised."""
    samples = data.fields or list(data.shape)
    return f"augment: {name} fails on samples of {samples}: {first_line(error)}."


def _augment_twice(
    entry: str | AugmentFunction,
    x: Tensor,  # [B, ...]
    seeds: U64,  # [1, B]
    fields: Fields | None,
) -> Tensor:  # [B, ...]
    """The samples after a transform, which must give them twice."""
    arguments = ([entry], x[None], [len(x)], seeds, fields)
    first, second = (augment_batches(*arguments)[0] for _ in range(2))
    if not are_equal(first, second):
        raise MismatchError(
            f"augment: {_name_of(entry)} gives another batch when it is called again "
            "with a generator of the same seed; let all of its random numbers be "
            "torch's, and use nothing that another call has changed."
        )
    return first


def _name_of(entry: str | AugmentFunction) -> str:
    """The name of a transform, for errors."""
    return str(getattr(entry, "__name__", entry))
