"""Models of which some columns are shared and the others stay with the client: FedPer, LG-FedAvg, FedRep, FedBABU and FedBN."""

from __future__ import annotations

import glob
import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pflcore.algorithms.base import FedAvg, Payload, Tensors
from pflcore.algorithms.finetune import FineTune
from pflcore.ops import kinds
from pflcore.ops.kinds import Count, NonNegative, Weighting, Whole
from pflcore.train.bridge import Local
from pflcore.train.net import Net

Train = Literal["joint", "alternate", "body"]


@dataclass(frozen=True)
class Split(FedAvg):
    """Shared columns x are averaged, private columns h stay: client i's model is (x, h_i). The classes below are its presets.

    server: x [K] · client: h [P - K] (with train="body" nothing) · down: x [S, K] · up: delta [S, K] (the shared columns alone).
    joint      (x_i, h_i) <- SGD on f_i at (x, h_i), both at once
    alternate  h_i <- SGD on f_i(x, .) for `private_epochs`, x_i <- SGD on f_i(., h_i) for the run's epochs
    body       x_i <- SGD on f_i(., h), h the initial columns of all clients
    and x <- x + server_lr sum_i share_i (x_i - x). Evaluated is (x, h_i), trained on by `finetune_epochs` epochs that are thrown away.
    A client that never took part has the initial h; `adapt` gives a newcomer one. While h alone is trained batch norm's running statistics
    stay. `clip_grad` measures the whole gradient, frozen columns too.
    """

    private: str | tuple[str, ...] = "head"  # "head", "body" (all but the head), "batch_norm", or patterns of parameter names
    train: Train = "joint"  # shared and private columns together, private before shared ("alternate"), or shared alone ("body")
    private_epochs: Count | None = None  # with "alternate": epochs of the private columns; default: the run's
    finetune_epochs: Whole = 0  # epochs of all columns at every evaluation
    finetune_lr: NonNegative | None = None  # their step size; default: the run's

    late: ClassVar[tuple[str, ...]] = ("finetune_epochs", "finetune_lr")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.private and kinds.NAMES.fits(self.private)):
            raise ValueError(f"private: expected 'head', 'body', 'batch_norm' or patterns of parameter names, got {self.private!r}.")

    def names(self, net: Net) -> tuple[str, ...]:
        """The private parameters, as patterns for `net.split`; none where a model has no batch norm to be private."""
        if self.private not in ("head", "body", "batch_norm"):
            return (self.private,) if isinstance(self.private, str) else tuple(self.private)
        if self.private == "batch_norm":
            layers = {name for name, m in net.module.named_modules() if isinstance(m, _BatchNorm)}
            chosen = [n for n in net.names if n.rpartition(".")[0] in layers]
        else:
            head = net.head_slice
            chosen = [n for n, s in net.slices.items() if (head.start <= s.start < head.stop) is (self.private == "head")]
        return tuple(map(glob.escape, chosen))

    def cut(self, net: Net, w: Tensor) -> tuple[Tensor, Tensor]:
        """The shared and the private columns of models `w` [..., P]."""
        names = self.names(net)
        return net.split(w, *names) if names else (w, w[..., :0])

    def model(self, net: Net, x: Tensor, own: Tensors) -> Tensor:
        """The clients' models [S, P]."""
        names = self.names(net)
        return net.join(x, own["h"] if own else self.cut(net, net.w0)[1], *names) if names else x

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        x, h = self.cut(net, net.w0)
        if not (x.numel() and h.numel()):
            what = "the whole model is private, so nothing" if h.numel() else f"the model has no {self.private} parameter, so all of it"
            warnings.warn(f"private: {what} is shared.", stacklevel=1)  # of this line: once, whoever calls
        return {"x": x}, {} if self.train == "body" else {"h": h}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        w, mask = self.model(local.net, down["x"], own), local.net.mask(*self.names(local.net))
        if self.train == "alternate":
            before = local.buffers.clone()
            w = local.fit(w, mask=mask, epochs=self.private_epochs, stream="private").w
            local.buffers = before
        x, h = self.cut(local.net, local.fit(w, mask=None if self.train == "joint" else ~mask).w)
        return {"h": h} if own else {}, {"delta": x - down["x"]}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        w = self.model(local.net, down["x"], own)
        tuned = FineTune(finetune_epochs=self.finetune_epochs, finetune_lr=self.finetune_lr)
        return tuned.personal({"x": w}, own, local) if self.finetune_epochs else {"w": w}


@dataclass(frozen=True)
class FedPer(Split):
    """Arivazhagan et al. 2019, FedPer (Algorithms 1 and 2): the head W_P stays, W_B <- sum_i n_i / n W_B,i, both trained together.

    See `Split`.
    """

    unused: ClassVar[tuple[str, ...]] = ("train", "private_epochs")


@dataclass(frozen=True)
class LGFedAvg(Split):
    """Liang et al. 2020, LG-FedAvg (Algorithm 1): the lower layers stay, the head theta_g <- sum_i n_i / n theta_g,i is shared.

    Both are trained together; how many layers are shared is `private`'s to say. See `Split`.
    """

    private: str | tuple[str, ...] = "body"  # "body" (all but the head), "head", "batch_norm", or patterns of parameter names

    unused: ClassVar[tuple[str, ...]] = ("train", "private_epochs")
    buffers: ClassVar[tuple[str, ...]] = ("local", "average")  # the layers that they belong to are private


@dataclass(frozen=True)
class FedRep(Split):
    """Collins et al. 2021, FedRep (Algorithm 1): first the private head on the frozen body, then the body; phi <- 1 / (r n) sum_i phi_i.

    See `Split`.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    train: Train = "alternate"

    unused: ClassVar[tuple[str, ...]] = ("train",)


@dataclass(frozen=True)
class FedBABU(Split):
    """Oh et al. 2022, FedBABU (Algorithm 1): the body alone is trained, on the initial head; every evaluation fine-tunes all layers.

    See `Split`. A client keeps nothing between rounds, and a newcomer is fine-tuned like everybody.
    """

    train: Train = "body"
    finetune_epochs: Whole = 5  # epochs of all columns at every evaluation

    unused: ClassVar[tuple[str, ...]] = ("train", "private_epochs")


@dataclass(frozen=True)
class FedBN(Split):
    """Li et al. 2021, FedBN (Algorithm 1): batch norm's parameters and statistics stay, other layers w <- 1 / K sum_i w_i.

    See `Split`. On a model without batch norm it is FedAvg, and says so.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    private: str | tuple[str, ...] = "batch_norm"

    unused: ClassVar[tuple[str, ...]] = ("train", "private_epochs")
    buffers: ClassVar[tuple[str, ...]] = ("local",)
