"""What travels between a server and a client: dicts of plain tensors, which any framework
carries."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore.algorithms.lookup import name_of
from pflcore.algorithms.protocol import Algorithm, Payload, Pool, Tensors
from pflcore.check import Model, shown
from pflcore.train import Net
from pflcore.train.losses import Loss

ABOUT, STATISTICS = "@about", "@statistics"  # beside the algorithm's own keys


class About(NamedTuple):
    """The whole numbers of a message."""

    number: int  # the client's, from 0
    n: int  # N
    size: int  # P
    method: int  # `method_number` of the algorithm
    round: int  # from 1, the one that the message is for
    rounds: int  # R
    done: int  # rounds that the server has finished
    accepted: int  # the last of them that the client's upload was part of; 0: none
    bits: int  # of `factor`

    @property
    def factor(self) -> Tensor:
        """How much of that upload the server took, float64 [1]: below 1 where its `clip` shortened
        it."""
        return torch.tensor([self.bits]).view(torch.float64)


def method_number(algorithm: Algorithm) -> int:
    """What both sides call the algorithm, as a number."""
    return zlib.crc32(name_of(algorithm).encode())


def net_of(algorithm: Algorithm, model: Model, loss: Loss, seed: int) -> Net:
    """The model as the algorithm trains it."""
    return algorithm.prepare(model if isinstance(model, Net) else Net(model, loss, seed=seed))


def packed(payload: Payload, about: About, statistics: Tensor | None) -> Tensors:
    """The message of one client, of the slices [1, ...] of a payload; of pools the rows that are
    sent."""
    message: Tensors = {}
    for key, value in payload.items():
        if isinstance(value, Pool):
            sent = torch.zeros(len(value.rows), dtype=torch.bool, device=value.rows.device)
            sent[value.index[value.index >= 0]] = True
            message |= {f"{key}@rows": value.rows[sent], f"{key}@sent": sent}
            message[f"{key}@index"] = value.index[0].clone()
        else:
            message[key] = value[0].clone()
    rest = {} if statistics is None else {STATISTICS: statistics.clone()}
    return message | {ABOUT: torch.tensor(about)} | rest


def opened(
    message: Any, net: Net, algorithm: Algorithm, what: str
) -> tuple[Payload, About, Tensor | None]:
    """The payload [1, ...] of a message, its numbers and the statistics [b] that came with it, on
    the model's device."""
    try:
        if any(v.is_nested or v.layout != torch.strided for v in message.values()):
            raise ValueError(
                f"{what}: expected dense tensors, got a sparse or a nested one; send what the "
                "other side made."
            )
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
        raise ValueError(
            f"{what}: expected a dict of tensors as the other side made it, got {shown(message)}."
        ) from None
    if about.method != method_number(algorithm):
        raise ValueError(
            f"{what}: it is of another algorithm than {name_of(algorithm)}, which is played here; "
            "give both sides one."
        )
    if about.size != net.size:
        raise ValueError(
            f"{what}: it is for a model of {about.size} parameters, this one has {net.size}; give "
            "both sides one model."
        )
    return payload, about, statistics
