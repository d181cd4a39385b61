"""The named transforms of images."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pflcore.train._augment import augment_batches
from pflcore.train._transforms import RANDOM_BITS, crop, cutout, flip

IMAGES = torch.arange(1.0, 1 + 6 * 2 * 5 * 7).view(6, 2, 5, 7)  # no pixel is 0
WORDS = np.arange(6, dtype=np.uint64)[None] << np.uint64(40)  # [1, 6]


def integers(*columns):
    """Integers of `RANDOM_BITS` bits, of these fractions of their range."""
    return (torch.tensor(columns).T * (1 << RANDOM_BITS)).long()


def test_flip_twice_is_the_identity():
    numbers = integers([0.0, 0.2, 0.4, 0.6, 0.8, 0.99])

    once = flip(IMAGES, 0.5, numbers)

    assert torch.equal(once[:3], IMAGES[:3].flip(-1))
    assert torch.equal(once[3:], IMAGES[3:])
    assert torch.equal(flip(once, 0.5, numbers), IMAGES)
    assert torch.equal(flip(IMAGES, 0.0, numbers), IMAGES)
    assert torch.equal(flip(IMAGES, 1.0, numbers), IMAGES.flip(-1))


def test_crop_is_a_window_of_the_padded_image():
    fractions = [0.0, 0.25, 0.5, 0.7, 0.9, 0.9999999]
    padded = F.pad(IMAGES, (2, 2, 2, 2))

    got = crop(IMAGES, 2, integers(fractions, fractions[::-1]))

    tops = [int(5 * fraction) for fraction in fractions]
    corners = list(zip(tops, tops[::-1], strict=True))
    assert corners[0] == (0, 4) and corners[-1] == (4, 0)  # both ends are reached
    for image, window, (top, left) in zip(padded, got, corners, strict=True):
        assert torch.equal(window, image[:, top : top + 5, left : left + 7])


@pytest.mark.parametrize("side", [1, 2, 3, 50])
def test_cutout_changes_a_square_alone(side):
    rows = [0.0, 0.25, 0.45, 0.65, 0.85, 0.99]
    columns = [0.99, 0.5, 0.5, 0.5, 0.0, 0.99]

    got = cutout(IMAGES, side, integers(rows, columns))

    for image, result, row, column in zip(IMAGES, got, rows, columns, strict=True):
        top = int(5 * row) - side // 2
        left = int(7 * column) - side // 2
        want = image.clone()
        want[:, max(0, top) : top + side, max(0, left) : left + side] = 0
        assert torch.equal(result, want)


@pytest.mark.parametrize("name", ["flip", "crop:2", "cutout:3"])
def test_a_sample_alone_is_what_it_is_in_a_batch(name):
    """Samples are drawn and changed by themselves, with no loop over them."""
    batch = augment_batches([name], IMAGES[None], [6], WORDS, None)

    alone = [
        augment_batches([name], IMAGES[None, i : i + 1], [1], WORDS[:, i : i + 1], None)
        for i in range(6)
    ]

    assert torch.equal(batch, torch.cat(alone, 1))
    assert len({tuple((batch[0, i] - IMAGES[i]).tolist()[0][0]) for i in range(6)}) > 1
