"""Pictures of PIL as tensors of floats, as torchvision's `ToTensor` makes them.

PIL is not imported: a picture is known by its attributes.

Symbols: a picture has C bands of H x W pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Words, reject

# Modes whose pixels are bytes from 0 to 255, one for each band.
BYTE_MODES = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LA")
# Modes that PIL converts to one of these without loss.
CONVERTED_MODES = {"1": "L", "P": "RGB"}


def is_picture(value: Any) -> bool:
    """True for an image of PIL."""
    return hasattr(value, "getbands") and hasattr(value, "convert")


def picture_tensor(picture: Any) -> Tensor:
    """The picture as float32 [C, H, W], pixels from 0 to 1.

    Raises ValueError for a mode whose pixels are no bytes.
    """
    mode = CONVERTED_MODES.get(picture.mode)
    if mode is not None:
        picture = picture.convert(mode)
    if picture.mode not in BYTE_MODES:
        expected = f"one of the modes {', '.join([*BYTE_MODES, *CONVERTED_MODES])}"
        remedy = "convert it to an array of floats yourself"
        reject("picture", expected, Words(f"mode {picture.mode}"), remedy=remedy)
    pixels = torch.from_numpy(np.array(picture, dtype=np.float32) / 255)
    if pixels.dim() == 2:
        return pixels[None]
    return pixels.permute(2, 0, 1).contiguous()
