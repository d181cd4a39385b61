"""Messages between a server and its clients, and their checks.

A message is a dict of plain tensors, which any framework carries. It holds the tensors
of an algorithm's payload by their keys, and beside them the header ("@about") and,
where they are averaged, batch norm's statistics ("@statistics"). Of `SharedRows` with
the key "w" it holds three parts: the rows that are sent ("w@rows"), a mask of these
among all ("w@sent"), and the client's own index ("w@index").

Shapes: N clients of the federation, P numbers of a model, R shared rows, b numbers of
batch norm.
"""

import zlib
from collections.abc import Mapping
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
from pflcore.check import Model, require
from pflcore.simulation.round import initial_state
from pflcore.train import Net
from pflcore.train._losses import Loss

HEADER_KEY = "@about"
BUFFERS_KEY = "@statistics"


class MessageHeader(NamedTuple):
    """The numbers of a message, in float64: whole numbers below 2**53, and a factor."""

    number: int  # the client's, from 0
    n: int  # N
    fingerprint: int
    round: int  # the round that the message is for, from 1
    rounds: int  # R
    done: int  # rounds that the server has finished
    accepted: int  # the last of them that used the client's upload; 0: none
    # how much of that upload the server took: below 1 where its `clip` shortened it
    factor: float


def fingerprint(algorithm: Algorithm, net: Net, averages: bool) -> int:
    """A number for what server and client must have in common.

    That is the algorithm's name, the model's dtype and shapes, and whether batch norm's
    statistics are averaged.
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
    """The message of one client, from its slices [1, ...] of a payload.

    Of shared rows it holds only those that the client receives.
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
    """The parts of a message that hold the shared rows of one client."""
    count = len(shared.rows)
    sent = torch.zeros(count, dtype=torch.bool, device=shared.rows.device)
    sent[shared.index[shared.index >= 0]] = True
    return {
        f"{key}@rows": shared.rows[sent],
        f"{key}@sent": sent,
        f"{key}@index": shared.index[0].clone(),
    }


# Clients of one federation: both sides hold some numbers of each.
MAX_CLIENTS = 2**24
# Samples of one client: the sum over clients is a whole number of 64 bits.
MAX_SAMPLES = 2**40
NOT_A_MESSAGE_TEXT = "{}: expected a dict of dense tensors as the other side made it."


class DownloadLayout(NamedTuple):
    """The layout of an algorithm's downloads, by the keys of the payload."""

    model_layouts: Mapping[str, tuple[int, torch.dtype]]  # numbers of each model
    # of each payload of shared rows their number, sent or not
    shared_row_counts: Mapping[str, int]


def download_layout(algorithm: Algorithm, net: Net) -> DownloadLayout | None:
    """The layout of the server's downloads.

    None where an algorithm of a user does not show it on this machine.
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
        # It may need another number of clients, or what only a server has.
        return None
    model_layouts: dict[str, tuple[int, torch.dtype]] = {}
    shared_row_counts: dict[str, int] = {}
    for key, value in down.items():
        rows = value
        if isinstance(value, SharedRows):
            rows = value.rows
            shared_row_counts[key] = len(rows)
        if rows.shape[-1] in model_sizes:
            model_layouts[key] = (rows.shape[-1], rows.dtype)
    return DownloadLayout(model_layouts, shared_row_counts)


def parse_header(numbers: Tensor) -> MessageHeader:
    """The numbers of a message. Raises ValueError for numbers that no message has."""
    *whole_numbers, factor = numbers.tolist()
    header = MessageHeader._make([*map(int, whole_numbers), factor])
    are_whole = list(header[:-1]) == whole_numbers
    has_client = 0 <= header.number < header.n <= MAX_CLIENTS
    has_round = header.round >= 1 and header.rounds >= 1
    has_past = 0 <= header.accepted <= header.done and 0 <= factor <= 1
    if not (are_whole and has_client and has_round and has_past):
        raise ValueError
    return header


def is_complete_tensor(value: Tensor) -> bool:
    """True for a dense tensor that holds all the numbers that its shape promises."""
    if value.layout is not torch.strided or value.is_nested:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def check_model_layouts(message: Tensors, layout: DownloadLayout, name: str) -> None:
    """Raises ValueError where a model of a message is no model of this client."""
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
    sent: Tensor,  # bool [R]: the rows that travelled
    index: Tensor,  # [M]
    max_rows: int | None,
) -> SharedRows:
    """All R shared rows of a payload; rows that did not travel take no memory.

    Raises ValueError where the parts do not fit each other, or R exceeds `max_rows`.
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
    rows[sent] = sent_rows  # at the same places: a row's number may be a client's
    return SharedRows(rows, index[None])


def decode_message(
    message: Any,
    device: torch.device,
    own_fingerprint: int,
    name: str,
    layout: DownloadLayout | None = None,
) -> tuple[Payload, MessageHeader, Tensor | None]:
    """The payload [1, ...] of a message, its header and batch norm's statistics [b].

    The tensors are on `device`. Raises ValueError for what is no message, for one of
    another fingerprint, and for one that does not fit `layout` (None: whatever an
    algorithm may send). It raises before it makes anything larger than the message.
    """
    try:
        tensors, header = _read_tensors(message)
    except Exception:  # somebody else made the message: it may be anything
        raise ValueError(NOT_A_MESSAGE_TEXT.format(name)) from None
    if header.fingerprint != own_fingerprint:
        raise ValueError(
            f"{name}: it is of another algorithm, model or `batch_norm` than those "
            "that are played here; give both sides the same."
        )
    if layout is not None:
        check_model_layouts(tensors, layout, name)
    try:
        tensors = {key: value.to(device) for key, value in tensors.items()}
        buffers = tensors.pop(BUFFERS_KEY, None)
        payload = _read_payload(tensors, header.n, layout)
    except Exception:
        raise ValueError(NOT_A_MESSAGE_TEXT.format(name)) from None
    return payload, header, buffers


def _read_tensors(message: Any) -> tuple[Tensors, MessageHeader]:
    """The tensors of a message without its header, and the header."""
    tensors = {key: value.detach() for key, value in message.items()}
    if not all(map(is_complete_tensor, tensors.values())):
        raise ValueError
    header = parse_header(tensors.pop(HEADER_KEY))
    return tensors, header


def _read_payload(tensors: Tensors, n: int, layout: DownloadLayout | None) -> Payload:
    """The payload [1, ...] of the tensors of a message of n clients.

    Raises an error of some kind where they are no parts of one.
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
            # Each client may have a list of its own of all clients' rows.
            max_rows = max(n, layout.shared_row_counts[key]) * n
        payload[key] = expand_shared_rows(sent_rows, sent, index, max_rows)
    if parts:
        raise ValueError
    return payload


UploadLayout = dict[str, tuple[torch.Size, torch.dtype]]


def layout_of(up: Tensors) -> UploadLayout:
    """Shape and dtype of each tensor of an upload."""
    return {key: (value.shape, value.dtype) for key, value in up.items()}
