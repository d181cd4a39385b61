"""Models of which some columns are shared and the others stay with the client: FedPer, LG-FedAvg,
FedRep, FedBABU and FedBN."""

from __future__ import annotations

import glob
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.finetune import FineTune
from pflcore.algorithms.protocol import Payload, Tensors, Traits
from pflcore.check import Count, NonNegative, Weighting, Whole, are_names, refuse
from pflcore.data.ragged import onto
from pflcore.train import Clients, Fit, Net, Objective


@dataclass(frozen=True)
class Split(FedAvg):
    """Shared columns x are averaged, private columns h stay: client i's model is (x, h_i). The
    classes below are its presets.

    server: x [K] · client: h [P - K] (with order="body" nothing) · down: x [S, K] · up: delta
    [S, K] (the shared columns alone).
    joint      (x_i, h_i) <- SGD on f_i at (x, h_i), both at once
    alternate  h_i <- SGD on f_i(x, .) for `private_epochs`, x_i <- SGD on f_i(., h_i) for the run's
               epochs
    body       x_i <- SGD on f_i(., h), h the initial columns of all clients
    and x <- x + server_lr sum_i share_i (x_i - x). Evaluated is (x, h_i), trained on by
    `finetune_epochs` epochs that are thrown away.
    A client that never took part has the initial h; `adapt` gives a newcomer one. While h alone is
    trained batch norm's running statistics stay. `clip_grad` measures the whole gradient, frozen
    columns too.
    """

    private: str | tuple[str, ...] = "head"  # or "body", "batch_norm", or patterns of names
    order: Literal["joint", "alternate", "body"] = "joint"  # both; private first; shared alone
    private_epochs: Count | None = None  # with "alternate": of the private columns; None: the run's
    finetune_epochs: Whole = 0  # epochs of all columns at every evaluation
    finetune_lr: NonNegative | None = None  # their step size; None: the run's

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.private and are_names(self.private)):
            known = "'head', 'body', 'batch_norm' or patterns of parameter names"
            refuse("private", known, self.private)

    @property
    def traits(self) -> Traits:
        return super().traits._replace(late=("finetune_epochs", "finetune_lr"))

    def columns(self, net: Net) -> Tensor:
        """Which columns are private, bool [P] on the CPU; none where a model has no batch norm."""
        if self.private == "batch_norm":
            layers = {k for k, m in net.module.named_modules() if isinstance(m, _BatchNorm)}
            names = [k for k in net.names if k.rpartition(".")[0] in layers]
            return net.mask(*map(glob.escape, names))
        if self.private not in ("head", "body"):
            return net.mask(*([self.private] if isinstance(self.private, str) else self.private))
        head = torch.zeros(net.size, dtype=torch.bool)
        head[net.head_slice] = True
        return head if self.private == "head" else ~head

    def joined(self, net: Net, x: Tensor, own: Tensors) -> Tensor:
        """The clients' models [S, P]."""
        shared, private = places(self.columns(net), x.device)
        if not len(private):
            return x
        w = net.w0.repeat(len(x), 1).index_copy_(1, shared, x)
        return w.index_copy_(1, private, own["h"]) if own else w

    def initial(self, net: Net) -> Tensors:
        private = self.columns(net)
        if private.all() or not private.any():
            lacks = f"the model has no {self.private} parameter, so all of it"
            what = "the whole model is private, so nothing" if private.any() else lacks
            warnings.warn(f"private: {what} is shared.", stacklevel=1)  # of this line: once
        return {"x0": net.w0[places(private, net.w0.device)[0]]}

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        _, private = places(self.columns(net), net.w0.device)
        return {} if self.order == "body" else {"h": net.w0[None, private]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        mask = self.columns(clients.net)
        shared, private = places(mask, down["x"].device)
        w = self.joined(clients.net, down["x"], own)
        if self.order == "alternate":
            alone = Objective(mask=mask)
            w = clients.fit(w, alone, epochs=self.private_epochs, stream="private").w
        fit = clients.fit(w, Objective(mask=None if self.order == "joint" else ~mask))
        new = {"h": fit.w[:, private]} if own else {}
        return new, {"delta": fit.w[:, shared] - down["x"]}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        w = self.joined(clients.net, down["x"], own)
        tuned = FineTune(finetune_epochs=self.finetune_epochs, finetune_lr=self.finetune_lr)
        return tuned.model({"x": w}, own, clients)


def places(private: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The shared and the private columns of `private` bool [P], int64 each, on `device`."""
    return onto((~private).nonzero()[:, 0], device), onto(private.nonzero()[:, 0], device)


@dataclass(frozen=True)
class FedPer(Split):
    """Arivazhagan et al. 2019, FedPer (Algorithms 1 and 2): the head W_P stays,
    W_B <- sum_i n_i / n W_B,i, both trained together.

    See `Split`.
    """

    order: Literal["joint"] = "joint"
    private_epochs: None = None


@dataclass(frozen=True)
class LGFedAvg(Split):
    """Liang et al. 2020, LG-FedAvg (Algorithm 1): the lower layers stay, the head
    theta_g <- sum_i n_i / n theta_g,i is shared.

    Both are trained together; how many layers are shared is `private`'s to say. See `Split`.
    """

    private: str | tuple[str, ...] = "body"  # all but the head; or "head", "batch_norm", or names
    order: Literal["joint"] = "joint"
    private_epochs: None = None

    @property
    def traits(self) -> Traits:  # the layers that statistics belong to are private
        return super().traits._replace(batch_norm=super().traits.batch_norm[::-1])


@dataclass(frozen=True)
class FedRep(Split):
    """Collins et al. 2021, FedRep (Algorithm 1): first the private head on the frozen body, then
    the body; phi <- 1 / (r n) sum_i phi_i.

    See `Split`.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    order: Literal["alternate"] = "alternate"


@dataclass(frozen=True)
class FedBABU(Split):
    """Oh et al. 2022, FedBABU (Algorithm 1): the body alone is trained, on the initial head; every
    evaluation fine-tunes all layers.

    See `Split`. A client keeps nothing between rounds, and a newcomer is fine-tuned like everybody.
    """

    order: Literal["body"] = "body"
    private_epochs: None = None
    finetune_epochs: Whole = 5  # epochs of all columns at every evaluation


@dataclass(frozen=True)
class FedBN(Split):
    """Li et al. 2021, FedBN (Algorithm 1): batch norm's parameters and statistics stay, other
    layers w <- 1 / K sum_i w_i.

    See `Split`. On a model without batch norm it is FedAvg, and says so.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    private: str | tuple[str, ...] = "batch_norm"
    order: Literal["joint"] = "joint"
    private_epochs: None = None

    @property
    def traits(self) -> Traits:
        return super().traits._replace(batch_norm=("local",))
