"""WAFFLe: weights anonymized by factorization. The server knows a dictionary of weight factors, each client alone which of them it uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn as nn
from torch import Tensor

from pflcore import ops
from pflcore.algorithms import ibp
from pflcore.algorithms.base import FedAvg, Payload, Tensors, only_sgd
from pflcore.nn.factorized import Init, factorize, factorized_layers
from pflcore.ops.kinds import Count, Fraction, NonNegative, Positive, Weighting
from pflcore.train import Training
from pflcore.train.bridge import Local
from pflcore.train.losses import REGRESSION, binary_cross_entropy, hinge
from pflcore.train.net import Net
from pflcore.train.random import client_seeds, uniforms

PRESETS: dict[str, tuple[str, float]] = {"recommended": ("adam", 0.01), "paper_literal": ("sgd", 1.0)}  # optimizer, kl_weight
BOUNDS = (7.0, 9.0, 9.0)  # of |logit|, |log c| and |log d|


@dataclass(frozen=True)
class FactorizedWaffle(FedAvg):
    """Hao et al. 2020 (WAFFLe, weight factorization), Algorithm 1: W_i = W_a diag(r * b_i) W_b, b_i the client's private choice of factors.

    server: x [P], the dictionary (W_a, r, W_b of each factorized layer, the other layers plain) · client: q [3 F] (logit pi, log c,
    log d of each factor), Adam's moments m, v [3 F], steps taken t [1] · down: x [S, P] · up: delta [S, P] (1 model; q stays).
    A step draws b (binary concrete) and v (Kumaraswamy), and moves x and q by the gradient of
    NLL(minibatch) + kl_weight (KL_b + KL_v) / n_i (Eqs. 12 and 13). Evaluated is the server's dictionary with the client's own scores.
    A model without factorized layers gets them, in the place of all layers but the head: see `pflcore.nn.factorize`.
    Presets: "paper_literal" is the text's one SGD for everything and the full KL: scores then hardly move from the prior, and the method
    stays near FedAvg. "recommended" gives the beliefs an Adam of their own and a weak KL; both are measured in docs/factorized.md.
    Decisions where the paper is silent: alpha is F, tau 2/3, biases and the output layer are plain and shared, averaging is uniform,
    r starts at 1, evaluation is `thr_soft`, logits of beliefs stay within 7 (pi) and 9 (c, d), noise within [1e-4, 1 - 1e-4], and a run's
    momentum is the dictionary's alone.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    preset: Literal["recommended", "paper_literal"] = "recommended"  # what optimizer and kl_weight are unless given
    optimizer: Literal["adam", "sgd"] | None = None  # of the beliefs: "adam" or "sgd"
    lr_var: NonNegative | None = None  # step size of the beliefs; default: .05 with "adam", the run's own with "sgd"
    kl_weight: NonNegative | None = None  # of the divergence from the prior; 1 is the variational bound
    ranks: tuple[int, ...] = ()  # factors of each layer, or one number for all; none: 3 for 5 outputs
    alpha: Positive | None = None  # the prior's; default: a layer's number of factors
    start: Init = "match"  # initial strengths and scale: "match" (Glorot's variance) or "ibpwf" (N(0, .1^2))
    tau: Positive = 2 / 3  # the relaxation's final temperature
    tau_start: Positive | None = None  # its first; default: tau throughout
    tau_decay: Fraction = 0.99  # its factor for each of the client's steps, down to tau
    eval_mode: Literal["thr_soft", "mean", "relaxed_mean", "hard", "mc"] = "thr_soft"  # b in evaluation: thr_soft is pi where >= .5
    samples: Count = 10  # of "mc"
    never: Literal["all", "prior", "adapt"] = "all"  # what a client that never trained uses; "adapt": its beliefs first
    adapt_epochs: Count = 5  # of "adapt": beliefs alone, the dictionary frozen

    late: ClassVar[tuple[str, ...]] = ("eval_mode", "samples", "never", "adapt_epochs")

    @property
    def adam(self) -> bool:
        return (self.optimizer or PRESETS[self.preset][0]) == "adam"

    def prepare(self, net: Net) -> Net:
        if factorized_layers(net.module):
            return net
        if net.head_name is None and any(isinstance(m, nn.Linear) for m in net.module.modules()):
            net.head_slice  # noqa: B018  (says in a sentence that it is not known)
        return Net(partial(factorized, self, net), net.criterion, net.head_name, net.seed)

    def check_training(self, training: Training) -> None:
        only_sgd(self, training, "moves its dictionary by steps of SGD along one gradient with the beliefs'")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        layers = factorized_layers(net.module).values()
        if not layers:
            raise ValueError("model: expected one with factorized layers, got none; make it with pflcore.nn.factorize(model, ranks).")
        alphas = [float(m.factors) if self.alpha is None else self.alpha for m in layers]
        pi = torch.cat([ibp.prior_mean(a, m.factors) for a, m in zip(alphas, layers, strict=True)])
        c = torch.cat([torch.full((m.factors,), a, dtype=torch.float64) for a, m in zip(alphas, layers, strict=True)])
        q = torch.cat([pi.logit(), c.log(), torch.zeros_like(c)]).to(net.w0)
        return {"x": net.w0}, {"q": q, "m": torch.zeros_like(q), "v": torch.zeros_like(q), "t": torch.zeros_like(q[:1])}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        rows = self.train(down["x"], own, local)
        return {k: rows[k] for k in own}, {"delta": rows["x"] - down["x"]}

    def train(self, x: Tensor, own: Tensors, local: Local, frozen: bool = False, **how: Any) -> Tensors:
        """The rows x [S, P] and beliefs after local training; `frozen`: x stays."""
        t, at, count = local.setting.training, strengths(local.net), len(local.ids)
        epochs = how.get("epochs") or t.epochs
        steps = epochs * max(-(-n // t.batch_size) for n in local.size.tolist())
        seeds = client_seeds(local.ids.numpy(), local.setting.seed, local.round, "beliefs")
        u = uniforms(seeds, steps * 2 * len(at)).mul_(1 - 2e-4).add_(1e-4).to(x)
        u_b, u_v = u.view(count, steps, 2, -1).unbind(2)
        rows = {"x": x, **own, "taken": torch.zeros(count, dtype=torch.int64), "noise": torch.stack([u_b.logit(), u_v], 2)}
        rows |= {"n": local.size.to(x)[:, None]} | ({"momentum": torch.zeros_like(x)} if t.momentum else {})

        def update(rows: Tensors, grad: Callable[..., Tensor], k: int) -> Tensors:  # in place: nothing is copied
            x, taken = rows["x"], rows["taken"]
            noise = rows["noise"][torch.arange(len(taken)), taken]  # a client's own count: k depends on who else trains
            rows["t"] += 1
            taken += 1
            b, by_b, slope = self.beliefs(rows, noise, local)
            r = x[:, at]
            x[:, at] = r * b  # for the moment the row is the client's own model
            g = grad(x)
            x[:, at], by_strength = r, g[:, at]
            g[:, at] = by_strength * b
            slope[:, : len(at)] += by_strength * r * by_b
            if not frozen:
                ops.sgd_step_(x, g, local.lr, momentum=t.momentum, buffer=rows.get("momentum"), weight_decay=t.weight_decay)
            self.move(rows, slope, local.lr)
            return {}

        return local.each_batch(rows, update, together=True, **how)

    def beliefs(self, rows: Tensors, noise: Tensor, local: Local) -> tuple[Tensor, Tensor, Tensor]:
        """Samples b [s, F], their derivative by the logits [s, F], and kl_weight / n times the divergence's gradient [s, 3 F]."""
        tau: float | Tensor = self.tau
        if self.tau_start is not None:
            tau = (self.tau_start * self.tau_decay ** (rows["t"] - 1)).clamp(min=self.tau)
        (logit, log_c, log_d), (noise_b, u_v) = rows["q"].chunk(3, 1), noise.unbind(1)
        b = ((logit + noise_b) / tau).sigmoid_()
        sizes = [m.factors for m in factorized_layers(local.net.module).values()]
        alpha = torch.cat([torch.full((f,), float(self.alpha or f)) for f in sizes]).to(b)
        slope = ibp.kl_slope(logit, log_c, log_d, torch.log1p(-u_v), alpha, sizes)
        weight = PRESETS[self.preset][1] if self.kl_weight is None else self.kl_weight
        return b, b * (1 - b) / tau, slope.mul_(weight / rows["n"])

    def move(self, rows: Tensors, slope: Tensor, lr: float) -> None:
        """The beliefs one step on, within their bounds, in place."""
        q, m, v, t = (rows[k] for k in "qmvt")
        if self.adam:
            m.mul_(0.9).add_(slope, alpha=0.1)
            v.mul_(0.999).addcmul_(slope, slope, value=0.001)
            q -= (0.05 if self.lr_var is None else self.lr_var) / (1 - 0.9**t) * m / ((v / (1 - 0.999**t)).sqrt_() + 1e-8)
        else:
            q.sub_(slope, alpha=lr if self.lr_var is None else self.lr_var)
        for part, bound in zip(q.chunk(3, 1), BOUNDS, strict=True):
            part.clamp_(-bound, bound)

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        x, new = down["x"], own["t"][:, 0] == 0
        if self.never == "adapt" and new.any():
            newcomers = Local(local.setting, local.ids[new.cpu()], local.round, local.buffers[new])
            fitted = self.train(x[new], {k: v[new] for k, v in own.items()}, newcomers, frozen=True, probe=True, epochs=self.adapt_epochs)
            own = {k: v.masked_scatter(new[:, None].expand_as(v), fitted[k]) for k, v in own.items()}
        b = self.scores(own["q"].chunk(3, 1)[0], local)
        return {"w": x, "b": torch.where(new[:, None, None], torch.ones_like(b), b) if self.never == "all" else b}

    def scores(self, logit: Tensor, local: Local) -> Tensor:
        """b [S, samples, F] of clients with beliefs `logit` [S, F], as `eval_mode` has it."""
        pi = logit.sigmoid()[:, None]
        if self.eval_mode in ("mean", "thr_soft", "hard"):
            above = (pi >= 0.5).to(pi)
            return {"mean": pi, "thr_soft": pi * above, "hard": above}[self.eval_mode]
        if self.eval_mode == "relaxed_mean":
            u = (torch.arange(256, dtype=pi.dtype, device=pi.device) + 0.5) / 256
            return ibp.concrete(logit[:, None, :, None], u.logit(), self.tau).mean(3)
        seeds = client_seeds(local.ids.numpy(), local.setting.seed, local.round, "scores")
        u = uniforms(seeds, self.samples * logit.shape[1]).to(pi)
        return ibp.concrete(logit[:, None], u.logit().unflatten(1, (self.samples, -1)), self.tau)

    def predict(self, view: Tensors, net: Net, x: Tensor) -> Tensor:
        """The factorized model w, its layers' `strength` times a row of b: the logarithm of the probabilities' mean over the rows; of
        numbers their mean, of single labels its logit."""
        at = strengths(net)
        scores = torch.stack([net(view["w"].index_copy(0, at, view["w"][at] * b), x) for b in view["b"]])
        if net.criterion is binary_cross_entropy:
            return scores.sigmoid().mean(0).logit()
        if len(scores) == 1 or scores.dim() < 3 or scores.shape[2] == 1 or net.criterion in (*REGRESSION, hinge):
            return scores.mean(0)
        return scores.log_softmax(2).logsumexp(0)  # the logarithm of the mean of the probabilities, but for a constant


def factorized(alg: FactorizedWaffle, net: Net) -> nn.Module:
    """The net's model with its layers factorized; a function of the module, so that models can be pickled."""
    plain = net.module if isinstance(net.build, nn.Module) else net.build()
    return factorize(plain, alg.ranks, alg.start, alg.alpha, net.head_name)


def strengths(net: Net) -> Tensor:
    """Where the factors' strengths stand in a row: int64 [F], layer after layer."""
    return torch.cat([torch.arange(s.start, s.stop) for s in map(net.slices.__getitem__, strength_names(net))]).to(net.w0.device)


def strength_names(net: Net) -> list[str]:
    return [f"{name}.strength" if name else "strength" for name in factorized_layers(net.module)]
