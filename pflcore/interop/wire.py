"""What travels between a server and a client: dicts of plain tensors, which any framework
carries."""

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore.algorithms import name_of
from pflcore.algorithms.protocol import Algorithm, Payload, Pool, Tensors
from pflcore.check import Model
from pflcore.train import Net
from pflcore.train.losses import Loss

ABOUT, STATISTICS = "@about", "@statistics"  # beside the algorithm's own keys


class About(NamedTuple):
    """The numbers of a message, in float64: whole numbers below 2**53, and a factor."""

    number: int  # the client's, from 0
    n: int  # N
    fingerprint: int
    round: int  # from 1, the one that the message is for
    rounds: int  # R
    done: int  # rounds that the server has finished
    accepted: int  # the last of them that the client's upload was part of; 0: none
    # how much of that upload the server took: below 1 where its `clip` shortened it
    factor: float


def fingerprint(algorithm: Algorithm, net: Net, averages: bool) -> int:
    """What both sides must have alike, as a number: the algorithm's name, the model's shapes and
    what becomes of batch norm's statistics."""
    parts = name_of(algorithm), str(net.dtype), net.shapes, net.buffer_shapes, averages
    return zlib.crc32(repr(parts).encode())


def net_of(algorithm: Algorithm, model: Model, loss: Loss, seed: int) -> Net:
    """The model as the algorithm trains it."""
    return algorithm.prepare(model if isinstance(model, Net) else Net(model, loss, seed=seed))


def packed(payload: Payload, about: About, statistics: Tensor | None) -> Tensors:
    """The message of one client, of the slices [1, ...] of a payload; of pools the rows that are
    sent."""
    message: Tensors = {ABOUT: torch.tensor(about, dtype=torch.float64)}
    if statistics is not None:
        message[STATISTICS] = statistics.clone()
    for key, value in payload.items():
        if isinstance(value, Pool):
            sent = torch.zeros(len(value.rows), dtype=torch.bool, device=value.rows.device)
            sent[value.index[value.index >= 0]] = True
            message |= {f"{key}@rows": value.rows[sent], f"{key}@sent": sent}
            value = value.index
            key = f"{key}@index"
        message[key] = value[0].clone()
    return message


def opened(
    message: Any, device: torch.device, alike: int, what: str
) -> tuple[Payload, About, Tensor | None]:
    """The payload [1, ...] of a message, its numbers and the statistics [b] that came with it, on
    `device`. ValueError where it is no message, or its fingerprint is not
    `alike`."""
    try:
        tensors = {k: v.detach().to(device) for k, v in message.items()}
        dense = all(v.layout is torch.strided and not v.is_nested for v in tensors.values())
        *whole, factor = tensors.pop(ABOUT).tolist()
        about, statistics = About._make([*map(int, whole), factor]), tensors.pop(STATISTICS, None)
        payload: Payload = {k: v[None] for k, v in tensors.items() if "@" not in k}
        for key in (k.removesuffix("@rows") for k in tensors if k.endswith("@rows")):
            sent, few = tensors[f"{key}@sent"], tensors[f"{key}@rows"]
            rows = few.new_zeros(len(sent), *few.shape[1:])  # a row's number may be a client's
            rows[sent] = few
            payload[key] = Pool(rows, tensors[f"{key}@index"][None])
    except Exception:  # of what somebody else made
        dense = False
    if not dense:
        raise ValueError(f"{what}: expected a dict of dense tensors as the other side made it.")
    if about.fingerprint != alike:
        raise ValueError(
            f"{what}: it is of another algorithm, model or `batch_norm` than those that are played "
            "here; give both sides the same."
        )
    return payload, about, statistics
