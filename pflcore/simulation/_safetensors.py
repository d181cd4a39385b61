"""The writer of safetensors files: one tensor after another, without a copy of all.

The files are those of the package safetensors, which reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The dtypes of the format with their names, in the order in which a file has them.
DTYPE_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HEADER_BYTES = 8  # the length of the header stands in as many bytes before it
DIGEST_KEY = "sha256"
DIGEST_PLACEHOLDER = f"{DIGEST_KEY:*^64}"  # stands where the digest of the file will be


def write_safetensors(
    part: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors [...] on any device into a new file.

    Beside the tensors there is memory for one of them, where it is not contiguous on
    the CPU. With the metadata `DIGEST_PLACEHOLDER` the SHA-256 of the file with the
    placeholder takes its place.

    Raises OSError where the file cannot be written, and TypeError for a dtype that the
    format lacks.
    """
    names = _ordered_names(tensors)
    head = _head(names, tensors, metadata)
    digest = hashlib.sha256()
    with open(part, "wb") as file:
        for piece in _pieces(head, names, tensors):
            digest.update(piece)
            file.write(piece)
        place = head.find(DIGEST_PLACEHOLDER.encode())
        if place >= 0:
            file.seek(place)
            file.write(digest.hexdigest().encode())


def _ordered_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in the order of the file: by dtype, then by name.

    Raises TypeError for a dtype that the format lacks.
    """
    dtypes = [*DTYPE_NAMES]
    for tensor in tensors.values():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"checkpoint: safetensors holds no {tensor.dtype}; keep the state in "
                "another dtype."
            )
    return sorted(tensors, key=lambda name: (dtypes.index(tensors[name].dtype), name))


def _head(
    names: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> bytes:
    """The header as bytes, with its length before it."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin = end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_BYTES)  # the tensors begin at a multiple
    return len(text).to_bytes(HEADER_BYTES, "little") + text


def _pieces(
    head: bytes, names: list[str], tensors: Mapping[str, Tensor]
) -> Iterator[Any]:
    """Yields the pieces of the file as buffers, one tensor at a time."""
    yield head
    for name in names:
        plain = tensors[name].detach().cpu().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy()
