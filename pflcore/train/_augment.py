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

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.check import summarize
from pflcore.data._federation import Federation
from pflcore.data._inputs import Fields
from pflcore.train._random import (
    U64,
    IsolatedDraws,
    client_seeds,
    mix64,
    random_words,
)
from pflcore.train._transforms import RANDOM_BITS, AugmentFunction, named_transform
from pflcore.train._validate import MismatchError


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

    `x` are some of the samples, on which each transform is tried. Errors that a
    function raises are raised as they are.
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
        if isinstance(entry, str) and name.startswith("crop"):
            _check_padding(name, data.shape)
        x = _augment_twice(entry, x, seeds, data.fields)


def _check_padding(word: str, shape: Sequence[int]) -> None:
    """Raises MismatchError where a crop's border is as wide as the image.

    Then some windows would hold nothing but the border.

    Args:
        word: The transform, such as "crop:4".
        shape: The shape of a sample, (channels, height, width).
    """
    _, padding = named_transform(word)
    side = min(shape[1:])
    if padding >= side:
        raise MismatchError(
            f"augment: {word} has a border of {padding:g} pixels, and the images have "
            f"{side} on a side; give a border of fewer pixels, such as "
            f"crop:{max(1, side // 8)}."
        )


def _augment_twice(
    entry: str | AugmentFunction,
    x: Tensor,  # [B, ...]
    seeds: U64,  # [1, B]
    fields: Fields | None,
) -> Tensor:  # [B, ...]
    """The samples after a transform, which must give them twice."""
    arguments = ([entry], x[None], [len(x)], seeds, fields)
    first, second = (augment_batches(*arguments)[0] for _ in range(2))
    if not torch.allclose(first, second, rtol=0, atol=0, equal_nan=True):
        raise MismatchError(
            f"augment: {_name_of(entry)} gives another batch when it is called again "
            "with a generator of the same seed; let all of its random numbers be "
            "torch's, and use nothing that another call has changed."
        )
    return first


def _name_of(entry: str | AugmentFunction) -> str:
    """The name of a transform, for errors."""
    return str(getattr(entry, "__name__", entry))
