"""What travels between a server and a client: dicts of plain tensors, which any framework carries."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pflcore.algorithms.base import FedAvg, Payload, Pool, Tensors
from pflcore.algorithms.lookup import name_of
from pflcore.ops import kinds
from pflcore.train.losses import Loss
from pflcore.train.net import Net

ABOUT, STATISTICS = "@about", "@statistics"  # beside the algorithm's own keys
BITS_OF_ONE = int(torch.ones((), dtype=torch.float64).view(torch.int64))


class About(NamedTuple):
    """The whole numbers of a message."""

    number: int  # the client's, from 0
    n: int  # N
    size: int  # P
    round: int  # 1-based, the one that the message is for
    rounds: int  # R
    done: int  # rounds that the server has finished
    accepted: int  # the last of them that the client's upload was part of; 0: none
    method: int  # `method_number` of the algorithm
    bits: int = BITS_OF_ONE  # of `factor`

    @property
    def factor(self) -> float:
        """How much of that upload the server took: below 1 where its `clip` shortened it. A float64."""
        return float(torch.tensor(self.bits).view(torch.float64))


def method_number(algorithm: FedAvg) -> int:
    """What both sides call the algorithm, as a number."""
    return zlib.crc32(name_of(algorithm).encode())


def net_of(algorithm: FedAvg, model: Any, loss: Loss, seed: int) -> Net:
    """The model as the algorithm trains it."""
    if not isinstance(model, Net | nn.Module) and not callable(model):
        raise TypeError(f"model: expected an nn.Module, a function that makes one or a Net, got {type(model).__name__}.")
    return algorithm.prepare(model if isinstance(model, Net) else Net(model, loss, seed=seed))


def packed(down: Payload, about: About, statistics: Tensor | None) -> Tensors:
    """One client's download: the slices of a cohort of one, of pools the rows that are sent."""
    message: Tensors = {}
    for key, value in down.items():
        if isinstance(value, Pool):
            sent = torch.zeros(len(value.rows), dtype=torch.bool, device=value.rows.device)
            sent[value.index[value.index >= 0]] = True
            message |= {f"{key}@rows": value.rows[sent], f"{key}@sent": sent, f"{key}@index": value.index[0].clone()}
        else:
            message[key] = value[0].clone()
    return finished(message, about, statistics)


def finished(message: Tensors, about: About, statistics: Tensor | None) -> Tensors:
    """A message with what every message has."""
    return {**message, ABOUT: torch.tensor(about), **({} if statistics is None else {STATISTICS: statistics.clone()})}


def opened(message: Any, net: Net, algorithm: FedAvg, what: str) -> tuple[Payload, About, Tensor | None]:
    """The payload [1, ...] of a message, its numbers and the statistics [b] that came with it, on the model's device."""
    try:
        if any(v.is_nested or v.layout != torch.strided for v in message.values()):
            raise ValueError(f"{what}: expected dense tensors, got a sparse or a nested one; send what the other side made.")
        about = About(*message[ABOUT].tolist())
        tensors = {k: v.detach().to(net.w0.device) for k, v in message.items() if k != ABOUT}
        statistics = tensors.pop(STATISTICS, None)
        payload: Payload = {k: v[None] for k, v in tensors.items() if "@" not in k}
        for key in (k.removesuffix("@rows") for k in tensors if k.endswith("@rows")):
            sent, few = tensors[f"{key}@sent"], tensors[f"{key}@rows"]
            rows = few.new_zeros(len(sent), *few.shape[1:])  # a row's number may be a client's
            rows[sent] = few
            payload[key] = Pool(rows, tensors[f"{key}@index"][None])
    except (TypeError, KeyError, AttributeError, IndexError, RuntimeError):
        raise ValueError(f"{what}: expected a dict of tensors as the other side made it, got {kinds.shown(message)}.") from None
    if about.method != method_number(algorithm):
        raise ValueError(f"{what}: it is of another algorithm than {name_of(algorithm)}, which is played here; give both sides one.")
    if about.size != net.size:
        raise ValueError(f"{what}: it is for a model of {about.size} parameters, this one has {net.size}; give both sides one model.")
    return payload, about, statistics
