"""Messages between a server and its clients, and their checks.

A message is a dict of plain tensors, which any framework carries. It belongs to one
client, and holds:

- the tensors of the algorithm's payload, by their keys;
- "@about": the numbers of a `MessageHeader`;
- "@statistics": batch norm's running statistics, only where they are averaged;
- "@classes": in an upload, the names of the client's classes, if it has some.

A payload's `SharedRows` with the key "w" have three tensors in the message: the rows
that are sent ("w@rows"), a mask of the sent rows among all rows ("w@sent"), and the
client's index ("w@index").

The other side may be faulty or hostile, so every part of a message is checked before
it is used.

Symbols: N clients of the federation; P numbers of a model; R shared rows, of which R'
are sent; M models of a client; b numbers of batch norm's statistics.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore.algorithms import name_of
from pflcore.algorithms._protocol import (
    Algorithm,
    Cohort,
    Payload,
    SharedRows,
    Tensors,
    lazy_zeros,
)
from pflcore.check import Model, Words, is_dense, reject, require
from pflcore.simulation._state import initial_state
from pflcore.train import Net
from pflcore.train._losses import Loss

HEADER_KEY = "@about"
BUFFERS_KEY = "@statistics"
CLASSES_KEY = "@classes"


class MessageHeader(NamedTuple):
    """The numbers that a message begins with.

    They travel as one float64 tensor in this order. All but `factor` are whole numbers
    below 2**53, which float64 holds exactly.

    Attributes:
        number: The client's number, from 0.
        n: The number of clients N.
        fingerprint: The result of `fingerprint`, equal on both sides.
        round: The round that the message is for, from 1; for an evaluation the last
            round that the server has finished, 0 before the first.
        rounds: The planned number of rounds.
        done: The number of rounds that the server has finished.
        accepted: The last round whose upload of this client the server used. It is 0
            where the server has used no upload of the client.
        factor: The part of that upload's length that the server used, from 0 to 1. It
            is below 1 where the server's `clip` shortened the upload.
    """

    number: int
    n: int
    fingerprint: int
    round: int
    rounds: int
    done: int
    accepted: int
    factor: float


def fingerprint(algorithm: Algorithm, net: Net, averages: bool) -> int:
    """A checksum of the settings that server and client must share.

    The settings are the algorithm's name, the model's dtype and shapes, and whether
    batch norm's statistics are averaged.
    """
    parts = name_of(algorithm), str(net.dtype), net.shapes, net.buffer_shapes, averages
    return zlib.crc32(repr(parts).encode())


def prepare_net(algorithm: Algorithm, model: Model, loss: Loss, seed: int) -> Net:
    """The model as the algorithm trains it."""
    net = model if isinstance(model, Net) else Net(model, loss, seed=seed)
    return algorithm.prepare(net)


def encode_message(
    payload: Payload, header: MessageHeader, buffers: Tensor | None
) -> Tensors:
    """One client's message, from its part [1, ...] of a payload.

    Of shared rows the message holds only those that the client's index names.

    Args:
        buffers: Batch norm's statistics [b]; None where they do not travel.
    """
    message: Tensors = {HEADER_KEY: torch.tensor(header, dtype=torch.float64)}
    if buffers is not None:
        message[BUFFERS_KEY] = buffers.clone()
    for key, value in payload.items():
        if isinstance(value, SharedRows):
            message |= _encode_shared_rows(key, value)
        else:
            message[key] = value[0].clone()
    return message


def _encode_shared_rows(key: str, shared: SharedRows) -> Tensors:
    """The three tensors of a message for one client's shared rows."""
    count = len(shared.rows)
    sent = torch.zeros(count, dtype=torch.bool, device=shared.rows.device)
    sent[shared.index[shared.index >= 0]] = True
    return {
        f"{key}@rows": shared.rows[sent],
        f"{key}@sent": sent,
        f"{key}@index": shared.index[0].clone(),
    }


def encode_class_names(names: Sequence[str]) -> Tensor:
    """The names of classes 0, 1, ... as uint8, the bytes of a JSON list."""
    return torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8)


def decode_class_names(encoded: Tensor, name: str) -> tuple[str, ...]:
    """The names of classes in the tensor of `encode_class_names`.

    Raises ValueError, which begins with `name`, for any other tensor.
    """
    try:
        names = json.loads(bytes(encoded.cpu().numpy()))
    except (TypeError, ValueError, RuntimeError, RecursionError):
        names = None
    is_list = isinstance(names, list) and all(isinstance(text, str) for text in names)
    wanted = "the names of classes that a Client sends"
    require(is_list, f"{name}, {CLASSES_KEY!r}", wanted, encoded)
    return tuple(names)


# Both sides hold some numbers for each client of the federation, so a message that
# claims more clients is refused.
MAX_CLIENTS = 2**24
# The largest number of samples of one client. A sum over MAX_CLIENTS such numbers fits
# into 64 bits.
MAX_SAMPLES = 2**40


class DownloadLayout(NamedTuple):
    """The layout of an algorithm's downloads, by the keys of the payload.

    Attributes:
        model_layouts: The length and the dtype of each tensor that holds models.
        shared_row_counts: The number R of all rows of each `SharedRows`.
    """

    model_layouts: Mapping[str, tuple[int, torch.dtype]]
    shared_row_counts: Mapping[str, int]


def download_layout(algorithm: Algorithm, net: Net) -> DownloadLayout | None:
    """The layout of the server's downloads, found by a download made here.

    None where a user's algorithm cannot make a download on this machine.
    """
    n = max(algorithm.traits.required_clients, default=0) + 2
    model_sizes = {net.size}
    try:
        for value in algorithm.server_init_args(net).values():
            if value.dim():
                model_sizes.add(value.shape[-1])
        server = initial_state(algorithm, net, n, clients=False).server
        cohort = Cohort(ids=torch.tensor([0]), num_samples=torch.tensor([1]), n=n)
        down = algorithm.send(server, cohort)
    except Exception:
        # The algorithm may need more clients, or data that only a server has.
        return None
    model_layouts: dict[str, tuple[int, torch.dtype]] = {}
    shared_row_counts: dict[str, int] = {}
    for key, value in down.items():
        rows = value
        if isinstance(value, SharedRows):
            rows = value.rows
            shared_row_counts[key] = len(rows)
        # A number for each client is no model, also where a model has one parameter.
        if rows.dim() > 1 and rows.shape[-1] in model_sizes:
            model_layouts[key] = (rows.shape[-1], rows.dtype)
    return DownloadLayout(model_layouts, shared_row_counts)


def parse_header(numbers: Tensor) -> MessageHeader:
    """The header in a message's numbers.

    Raises ValueError for numbers that no message has.
    """
    *whole_numbers, factor = numbers.tolist()
    header = MessageHeader._make([*map(int, whole_numbers), factor])
    are_whole = list(header[:-1]) == whole_numbers
    has_client = 0 <= header.number < header.n <= MAX_CLIENTS
    # Before the first round there is an evaluation of round 0.
    has_round = header.round >= min(1, header.done) and header.rounds >= 1
    has_past = 0 <= header.accepted <= header.done and 0 <= factor <= 1
    if not (are_whole and has_client and has_round and has_past):
        raise ValueError
    return header


def _read_tensors(message: Any, name: str) -> Tensors:
    """The tensors of a message.

    Raises ValueError, with the key, for anything that is no dict of dense tensors.

    Args:
        message: What the other side sent.
        name: The words that begin an error's sentence.
    """
    wanted = "a dict of tensors by name, as the other side made it"
    require(isinstance(message, Mapping), name, wanted, message)
    remedy = "convert what is no tensor, such as an array by torch.from_numpy"
    tensors = {}
    for key, value in dict(message).items():
        require(isinstance(key, str), name, "names of tensors as its keys", key)
        is_plain = type(value) in (Tensor, torch.nn.Parameter)
        if not is_plain:
            reject(f"{name}, {key!r}", "a tensor", value, remedy=remedy)
        if not is_complete_tensor(value):
            got = f"{value.layout} on {value.device}"
            reject(
                f"{name}, {key!r}", "a dense tensor with all its numbers", Words(got)
            )
        tensors[key] = value.detach()
    return tensors


def is_complete_tensor(value: Tensor) -> bool:
    """True for a dense tensor with all the numbers of its shape."""
    if not is_dense(value) or value.is_meta or value.is_quantized:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def convert(value: Tensor, like: Tensor, name: str) -> Tensor:
    """The tensor in the dtype of `like`.

    A dtype that holds all numbers of that of `like` is converted, for example float64
    to float32: programs of other languages have no other numbers. A narrower dtype is
    refused, since its digits are lost. Raises ValueError for it, for another shape, and
    where conversion would change a whole number.

    Args:
        value: [...] a tensor of the other side.
        like: [...] a tensor of the shape and the dtype that are expected.
        name: The words that begin an error's sentence.
    """
    is_wide = torch.promote_types(value.dtype, like.dtype) == value.dtype
    if value.is_floating_point() and not like.is_floating_point():
        is_wide = value.dtype is torch.float64  # a narrower one may have rounded
    fits = value.shape == like.shape and is_wide and not value.is_complex()
    if not fits:
        reject(name, describe_layout(like), Words(describe_layout(value)))
    converted = value.to(like.dtype)
    if not like.is_floating_point() and not torch.equal(converted.to(value), value):
        wanted = f"numbers that {describe_layout(like)} can hold"
        reject(name, wanted, Words("others"))
    return converted


def describe_layout(tensor: Tensor) -> str:
    """The text of a tensor's shape and dtype, such as "[10] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def check_model_layouts(message: Tensors, layout: DownloadLayout, name: str) -> None:
    """Raises ValueError where a message's model has not this client's layout."""
    for key, (size, dtype) in layout.model_layouts.items():
        message_key = f"{key}@rows" if key in layout.shared_row_counts else key
        rows = message.get(message_key)
        if rows is None:
            continue
        fits = rows.dim() and rows.shape[-1] == size and rows.dtype == dtype
        wanted = f"{size} numbers of {dtype}, as the model here has"
        require(fits, f"{name}, {key!r}", wanted, rows)


def expand_shared_rows(
    sent_rows: Tensor,  # [R', P]
    sent: Tensor,  # bool [R], True for the rows that were sent
    index: Tensor,  # [M], rows of the client, or -1
    max_rows: int | None,
) -> SharedRows:
    """All R shared rows of a payload, of which R' were sent.

    The other rows take no memory.

    Raises ValueError where the tensors do not fit each other, or R exceeds `max_rows`.
    """
    count = len(sent)
    fits = sent.dtype == torch.bool and len(sent_rows) == int(sent.sum())
    low = -1
    high = -1
    if index.numel():
        low = int(index.min())
        high = int(index.max())
    has_rows = -1 <= low <= high < count
    is_too_long = max_rows is not None and count > max_rows
    if not fits or not has_rows or is_too_long:
        raise ValueError
    like = sent_rows[0] if len(sent_rows) else sent_rows.new_empty(sent_rows.shape[1:])
    rows = lazy_zeros(count, like)
    # Rows keep their numbers, because a row's number may be that of a client.
    rows[sent] = sent_rows
    return SharedRows(rows, index[None])


def decode_download(
    message: Any,
    device: torch.device,
    own_fingerprint: int,
    layout: DownloadLayout | None,
) -> tuple[Payload, MessageHeader, Tensor | None]:
    """A download's payload [1, ...], header and batch norm's statistics [b].

    The tensors are on `device`. Raises ValueError for anything that is no message, for
    a message of another fingerprint, and for one that does not fit `layout`. It raises
    before it makes anything larger than the message.

    Args:
        message: What the server sent.
        device: The device of the tensors.
        own_fingerprint: The fingerprint of this side.
        layout: The layout that the payload must have; None accepts every payload.
    """
    name = "download"
    tensors, header = open_message(message, own_fingerprint, name)
    if layout is not None:
        check_model_layouts(tensors, layout, name)
    tensors = {key: value.to(device) for key, value in tensors.items()}
    buffers = tensors.pop(BUFFERS_KEY, None)
    try:
        payload = _read_payload(tensors, header.n, layout)
    except Exception:  # tensors of another program may fail anywhere
        keys = ", ".join(repr(key) for key in tensors if "@" in key)
        raise ValueError(
            f"{name}: expected shared rows as the other side made them, got {keys} "
            "that do not fit; send all tensors unchanged."
        ) from None
    return payload, header, buffers


def open_message(
    message: Any, own_fingerprint: int, name: str
) -> tuple[Tensors, MessageHeader]:
    """The tensors of a message without its header, and the header.

    Raises ValueError for anything that is no message, and for a message of another
    fingerprint.

    Args:
        message: What the other side sent.
        own_fingerprint: The fingerprint of this side.
        name: The words that begin an error's sentence.
    """
    tensors = _read_tensors(message, name)
    header = _read_header(tensors, name)
    if header.fingerprint != own_fingerprint:
        raise ValueError(
            f"{name}: it is of another algorithm, model or `batch_norm` than those "
            "that are played here; give both sides the same."
        )
    return tensors, header


def _read_header(tensors: Tensors, name: str) -> MessageHeader:
    """The header of a message, which is taken out of its tensors.

    Raises ValueError where there is none, or its numbers are those of no message.
    """
    numbers = tensors.pop(HEADER_KEY, None)
    where = f"{name}, {HEADER_KEY!r}"
    remedy = "send all tensors that the other side made, unchanged"
    wanted = f"the {len(MessageHeader._fields)} numbers that a message begins with"
    if numbers is None:
        reject(where, wanted, Words("none"), remedy=remedy)
    try:
        return parse_header(numbers)
    except Exception:  # the numbers may be of any shape and kind
        reject(where, wanted, numbers, remedy=remedy)


def _read_payload(tensors: Tensors, n: int, layout: DownloadLayout | None) -> Payload:
    """The payload [1, ...] in the tensors of a message.

    Raises an error, of any kind, where the tensors are no payload.
    """
    payload: Payload = {k: v[None] for k, v in tensors.items() if "@" not in k}
    parts = {k: v for k, v in tensors.items() if "@" in k}
    shared_keys = {k.removesuffix("@rows") for k in parts if k.endswith("@rows")}
    if layout is not None:
        shared_keys.intersection_update(layout.shared_row_counts)
    for key in shared_keys:
        sent_rows = parts.pop(f"{key}@rows")
        sent = parts.pop(f"{key}@sent")
        index = parts.pop(f"{key}@index")
        max_rows = None
        if layout is not None:
            # Each of the n clients may have its own list of rows, which is as long as
            # the list that this side makes or has a row for each client.
            max_rows = max(n, layout.shared_row_counts[key]) * n
        payload[key] = expand_shared_rows(sent_rows, sent, index, max_rows)
    if parts:
        raise ValueError
    return payload
