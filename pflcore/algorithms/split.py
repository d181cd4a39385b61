"""Models of which some columns are shared and the others stay with the client: FedPer, LG-FedAvg,
FedRep, FedBABU, FedBN, and FedRoD, whose personal head adds its scores to the shared one's.
"""

from __future__ import annotations

import glob
import warnings
from typing import Literal
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pflcore.algorithms.adaptation import FineTune, head_mask
from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Payload, Tensors, Trained, Traits, options
from pflcore.check import Count, NonNegative, Weighting, Whole, are_names, refuse
from pflcore.data.ragged import onto
from pflcore.nn.mode import forward_mode
from pflcore.train import Clients, Net, Objective
from pflcore.train.losses import REGRESSION, binary_cross_entropy, cross_entropy, hinge, loss_name


@options
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
        late, policies = ("finetune_epochs", "finetune_lr"), super().traits.batch_norm
        if self.private == "body":  # the layers that statistics belong to are private
            policies = policies[::-1]
        return super().traits._replace(late=late, batch_norm=policies)

    def columns(self, net: Net) -> Tensor:
        """Which columns are private, bool [P] on the CPU; none where a model has no batch norm."""
        if self.private == "batch_norm":
            layers = {k for k, m in net.module.named_modules() if isinstance(m, _BatchNorm)}
            names = [k for k in net.names if k.rpartition(".")[0] in layers]
            return net.mask(*map(glob.escape, names))
        if self.private in ("head", "body"):
            head = head_mask(net)
            return head if self.private == "head" else ~head
        return net.mask(*([self.private] if isinstance(self.private, str) else self.private))

    def joined(self, net: Net, x: Tensor, own: Tensors) -> Tensor:
        """The clients' models [S, P]."""
        private = onto(self.columns(net), x.device)
        w = net.w0.repeat(len(x), 1).masked_scatter_(~private, x)
        return w.masked_scatter_(private, own["h"]) if own else w

    def initial(self, net: Net) -> Tensors:
        private = self.columns(net)
        if private.all() or not private.any():
            lacks = f"the model has no {self.private} parameter, so all of it"
            what = "the whole model is private, so nothing" if private.any() else lacks
            warnings.warn(f"private: {what} is shared.", stacklevel=1)  # of this line: once
        return {"x0": net.w0[~private]}

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        return {} if self.order == "body" else {"h": net.w0[None, self.columns(net)]}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> Trained:
        private, w = self.columns(clients.net), self.joined(clients.net, down["x"], own)
        if self.order == "alternate":
            alone = Objective(mask=private)
            w = clients.fit(w, alone, epochs=self.private_epochs, stream="private").w
        fit = clients.fit(w, Objective(mask=None if self.order == "joint" else ~private))
        new = {"h": fit.w[:, private]} if own else {}
        return new, {"delta": fit.w[:, ~private] - down["x"]}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        w = self.joined(clients.net, down["x"], own)
        tuned = FineTune(finetune_epochs=self.finetune_epochs, finetune_lr=self.finetune_lr)
        return tuned.model({"x": w}, own, clients)


@options
class FedPer(Split):
    """Arivazhagan et al. 2019, FedPer (Algorithms 1 and 2): the head W_P stays,
    W_B <- sum_i n_i / n W_B,i, both trained together.

    See `Split`.
    """

    order: Literal["joint"] = "joint"
    private_epochs: None = None


@options
class LGFedAvg(Split):
    """Liang et al. 2020, LG-FedAvg (Algorithm 1): the lower layers stay, the head
    theta_g <- sum_i n_i / n theta_g,i is shared.

    Both are trained together; how many layers are shared is `private`'s to say. See `Split`.
    """

    private: str | tuple[str, ...] = "body"  # all but the head; or "head", "batch_norm", or names
    order: Literal["joint"] = "joint"
    private_epochs: None = None


@options
class FedRep(Split):
    """Collins et al. 2021, FedRep (Algorithm 1): first the private head on the frozen body, then
    the body; phi <- 1 / (r n) sum_i phi_i.

    See `Split`.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    order: Literal["alternate"] = "alternate"


@options
class FedBABU(Split):
    """Oh et al. 2022, FedBABU (Algorithm 1): the body alone is trained, on the initial head; every
    evaluation fine-tunes all layers.

    See `Split`. A client keeps nothing between rounds, and a newcomer is fine-tuned like everybody.
    """

    order: Literal["body"] = "body"
    private_epochs: None = None
    finetune_epochs: Whole = 5  # epochs of all columns at every evaluation


@options
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


CHECKED: WeakSet[Net] = WeakSet()  # models that are their head on their features


@options
class FedRoD(FedAvg):
    """Chen and Chao 2022, FedRoD (linear): a generic model, and a personal head h that adds its
    scores to the generic ones.

    server: x [P] (body f and generic head g) · client: its head h · down: x [S, P] · up: delta
    [S, P] (1 model; h stays).
    The generic model minimises balanced softmax, CE(g(z) + gamma log n_c), z = f(x) and n_c the
    client's samples of class c; the head minimises CE(g(z) + h(z)) with g(z) and z detached, so
    that it moves nothing but h. Both are trained at once, by the run's SGD. Predicted is
    g(z) + h(z). A client without class c gives it no generic score while it trains. CE is the run's
    loss, another one of class scores as well. Decision where the paper is silent: h starts at zero,
    so that a new client's model is the generic one; `head="copy"` starts at g.
    """

    gamma: NonNegative = 1.0  # strength of the balancing; 0 is cross-entropy
    head: Literal["zeros", "copy"] = "zeros"  # how h starts: as zeros, or as the initial g

    def initial(self, net: Net) -> Tensors:
        if net.criterion in (*REGRESSION, hinge, binary_cross_entropy):
            raise ValueError(
                "loss: FedRoD balances the scores of classes; expected a loss of those, got "
                f"{loss_name(net.criterion)}."
            )
        return super().initial(net)

    def newcomer(self, down: Payload, net: Net, n: int) -> Tensors:
        h = net.w0[None, net.head_slice]
        return {"h": h if self.head == "copy" else torch.zeros_like(h)}

    def train(self, down: Payload, own: Tensors, clients: Clients) -> Trained:
        if clients.net not in CHECKED:
            check_head(clients)
        x = down["x"]
        n = onto(clients.counts, x.device).to(x.dtype)
        fit = clients.fit(torch.cat([x, own["h"]], 1), Objective(loss=self.loss, extra={"n": n}))
        P = x.shape[1]
        return {"h": fit.w[:, P:]}, {"delta": fit.w[:, :P] - x}, fit

    def loss(self, net: Net, w: Tensor, x: Tensor, y: Tensor, extra: Tensors) -> Tensor:
        """The sum of both losses at a row x | h [P + H]."""
        w, h = w.tensor_split([net.size])
        z = net.features(w, x)
        generic, personal = net.head(w, z), net.head(h, z.detach())
        more = generic.shape[1] - len(extra["n"])  # the model may know more classes than the data
        prior = (F.pad(extra["n"], (0, more)) ** self.gamma).log()
        if net.criterion is not cross_entropy:
            # as good as none, and finite for a loss of every class, as with label smoothing
            prior = prior.clamp(min=-100)
        prior = prior.view(-1, *[1] * (generic.dim() - 2))  # [B, C, T] are scores of T steps
        both = net.criterion(generic.detach() + personal, y)
        return net.criterion(generic + prior, y) + both

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        return {"w": down["x"], "h": own["h"]}

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """The scores of w [P] plus those that its head gives, with the parameters h [H], on the
        same features."""
        z = net.features(model["w"], x)
        return net.head(model["w"], z) + net.head(model["h"], z)


def check_head(clients: Clients) -> None:
    """ValueError where the model is not its head on its features."""
    net, x = clients.net, clients.setting.data.x[:2]
    fits = not any(name.startswith(f"{net.head_name}.") for name in net.buffer_names)
    row = net.w0 + torch.linspace(-0.1, 0.1, net.size).to(net.w0)
    sign = 1 - 2 * onto(head_mask(net), row.device).to(row)
    try:
        with torch.no_grad(), forward_mode(False, net.b0):
            # scores of both signs: a ReLU behind the head may not show else
            for w in (row, row * sign):
                fits &= torch.allclose(net.head(w, net.features(w, x)), net(w, x), 1e-3, 1e-4)
    except (RuntimeError, TypeError, IndexError, ValueError):  # whatever such a model says
        fits = False
    if not fits:
        raise ValueError(
            "model: FedRoD adds a second head's scores, so a head must be the last that the model "
            f"does, with weights of its own and no statistics, and {net.head_name!r} is not so; "
            "name it with Net(..., head=...)."
        )
    CHECKED.add(net)
