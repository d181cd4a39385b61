"""WAFFLe: weights anonymized by factorization. The server knows a dictionary of weight
factors, each client alone which of them it uses.

The prior is the Indian buffet process over a layer's F factors: v_k ~ Beta(alpha, 1),
b_k ~ Bernoulli(v_1 ... v_k), so later factors are rarer. Beliefs, mean field: b_k ~
Bernoulli(sigmoid(l_k)), v_k ~ Kumaraswamy(c_k, d_k), whose distribution function is 1 -
(1 - v^c)^d. Functions of it are elementwise or run along the last axis, [..., F], in
the inputs' dtype, and are differentiable.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import pad

from pflcore import ops
from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._protocol import (
    VECTOR_NUMBERS,
    GradientFn,
    Payload,
    Tensors,
    TrainResult,
    Traits,
    algorithm_options,
    map_rows,
)
from pflcore.check import NonNegativeFloat, PositiveFloat, PositiveInt, Weighting
from pflcore.data._ragged import to_device
from pflcore.nn._factorized import Init, factorize, factorized_layers
from pflcore.ops._sums import running_sums
from pflcore.train import Clients, Fit, Net
from pflcore.train._losses import REGRESSION_LOSSES, binary_cross_entropy, hinge
from pflcore.train._random import client_seeds, client_uniforms

EULER_GAMMA = 0.5772156649015329
# a product of v's stays this far below 1 (in its logarithm), where the divergence would
# be infinite
MAX_LOG_PRODUCT = -1e-6


def prior_mean(alpha: float, factors: int) -> Tensor:
    """The prior's probability of each factor, (alpha / (alpha + 1))^k, within
    [.001, .999]: float64 [F]."""
    k = torch.arange(1, factors + 1, dtype=torch.float64)
    return ((alpha / (alpha + 1)) ** k).clamp(0.001, 0.999)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact to rounding at both ends, and its gradient
    too."""
    far = torch.log1p(-torch.exp(x.clamp(max=-math.log(2))))
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), far)


def kl_slope(
    logit: Tensor,
    log_c: Tensor,
    log_d: Tensor,
    log_rest: Tensor,
    alpha: Tensor,
    sizes: list[int],
) -> Tensor:
    """The gradient of both divergences in (logit, log c, log d), [s, 3 F], written out:
    autograd takes three times as long. They are KL(Bernoulli(sigmoid(logit)) ||
    Bernoulli(v_1 ... v_k)) and KL(Kumaraswamy(c, d) || Beta(alpha, 1)) (Nalisnick and
    Smyth 2017).

    Arguments are [s, F], layers of `sizes` factors side by side; `log_rest` is log(1 -
    u) of the draws of v = (1 - (1 - u)^(1/d))^(1/c).
    """
    pi = logit.sigmoid()
    c = log_c.exp()
    d = log_d.exp()
    s = log_rest / d
    log_v = log1mexp(s) / c
    log_p = cumsum_by_layer(log_v, sizes).clamp_(max=MAX_LOG_PRODUCT)
    logit_p = log_p - log1mexp(log_p)
    # at the bound nothing moves
    by_p = ((1 - pi) * logit_p.exp() - pi) * (log_p < MAX_LOG_PRODUCT)
    # v_k is part of every later p
    by_v = cumsum_by_layer(by_p.flip(1), sizes[::-1]).flip(1)
    rest = 1 - alpha / c
    harmonic = torch.digamma(d + 1) + EULER_GAMMA  # H_d; E[log v] = -H_d / c
    by_c = 1 - alpha * harmonic / c - by_v * log_v
    by_s = by_v * s / (c * torch.expm1(s)) * s.exp()
    by_d = 1 - 1 / d - rest * d * torch.polygamma(1, d + 1) - by_s
    return torch.cat([pi * (1 - pi) * (logit - logit_p), by_c, by_d], 1)


def cumsum_by_layer(values: Tensor, sizes: list[int]) -> Tensor:
    """Sums over the factors up to each, layer by layer: [s, F]."""
    return torch.cat([running_sums(part) for part in values.split(sizes, 1)], 1)


def sample_concrete(logit: Tensor, noise: Tensor, tau: float) -> Tensor:
    """A binary concrete sample, the soft b, for `noise` = logit u with u uniform on (0,
    1) (Maddison et al. 2017)."""
    return torch.sigmoid((logit + noise) / tau)


BELIEF_BOUNDS = (7.0, 9.0, 9.0)  # of |logit|, |log c| and |log d|
# optimizer, kl_weight
BELIEF_PRESETS = {"recommended": ("adam", 0.01), "paper_literal": ("sgd", 1.0)}


@algorithm_options
class FactorizedWaffle(FedAvg):
    """Hao et al. 2020 (WAFFLe, weight factorization), Algorithm 1: W_i = W_a diag(r *
    b_i) W_b, b_i the client's private choice of factors.

    server: x [P], the dictionary (W_a, r, W_b of each factorized layer, the other
    layers plain) · client: q [3 F] (logit pi, log c, log d of each factor), Adam's
    moments m, v [3 F], steps taken t [1], and with dictionary="cached" x [P] (the last
    download) · down: x [S, P] (1 model) · up: delta [S, P] (1 model; q stays).

    A step draws b (binary concrete) and v (Kumaraswamy), and moves x and q by the
    gradient of NLL(minibatch) + kl_weight (KL_b + KL_v) / n_i (Eqs. 12 and 13).
    Evaluated is the server's dictionary with the client's own scores;
    `dictionary="cached"` takes the one that the client downloaded in its last round
    (section 2.3, for clients without a connection; client: x [P], too). A model without
    factorized layers gets them, instead of all layers but the head: see
    `pflcore.nn.factorize`. Presets: "paper_literal" is the text's one SGD for
    everything and the full KL: scores then hardly move from the prior, and the method
    stays near FedAvg. "recommended" gives the beliefs an Adam of their own and a weak
    KL; both are measured in docs/factorized.md. Decisions where the paper is silent:
    alpha is F, tau 2/3, biases and the output layer are plain and shared, averaging is
    uniform, r starts at 1, evaluation is `thr_soft`, logits of beliefs stay within 7
    (pi) and 9 (c, d), noise within [1e-4, 1 - 1e-4], and a run's momentum is the
    dictionary's alone.
    """

    weighting: Weighting = "uniform"  # "uniform" as in the paper, or "samples"
    # of optimizer and kl_weight
    preset: Literal["recommended", "paper_literal"] = "recommended"
    # of the beliefs; default: adam | sgd
    optimizer: Literal["adam", "sgd"] | None = None
    # of the beliefs; default: .05 with "adam", or the run's
    lr_var: NonNegativeFloat | None = None
    # default .01 | 1; 1 is the variational bound
    kl_weight: NonNegativeFloat | None = None
    # factors of each layer, or one number for all; none: 3 for 5 outputs
    ranks: tuple[int, ...] = ()
    # the prior's; default: a layer's number of factors
    alpha: PositiveFloat | None = None
    # strengths: "match" (Glorot's variance) or "ibpwf" (N(0, .1^2))
    start: Init = "match"
    tau: PositiveFloat = 2 / 3  # the relaxation's temperature
    # pi if >= .5
    eval_mode: Literal["thr_soft", "mean", "relaxed_mean", "hard", "mc"] = "thr_soft"
    samples: PositiveInt = 10  # of "mc"
    # at evaluation: a client's last download
    dictionary: Literal["current", "cached"] = "current"
    # of who never trained: its factors
    untrained_factors: Literal["all", "prior"] = "all"

    @property
    def traits(self) -> Traits:
        late = ("eval_mode", "samples", "untrained_factors")
        why = (
            "moves its dictionary by steps of SGD along one gradient with the beliefs'"
        )
        return super().traits._replace(
            evaluation_only=late, sgd_only_reason=why, no_clip_grad_reason=why
        )

    def prepare(self, net: Net) -> Net:
        if factorized_layers(net.module):
            return net
        return Net(
            partial(factorized_module, self, net), net.loss_fn, net.head_name, net.seed
        )

    def server_init_args(self, net: Net) -> Tensors:
        if not factorized_layers(net.module):
            raise ValueError(
                "model: expected one with factorized layers, got none; make it with "
                "pflcore.nn.factorize(model, ranks)."
            )
        return super().server_init_args(net)

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        alphas = self.alphas(net)
        pi = torch.cat([prior_mean(float(a[0]), len(a)) for a in alphas])
        c = torch.cat(alphas)
        q = torch.cat([pi.logit(), c.log(), torch.zeros_like(c)])[None].to(net.w0)
        zero = torch.zeros_like(q)
        cached = {"x": down["x"]} if self.dictionary == "cached" else {}
        return {"q": q, "m": zero, "v": zero, "t": zero[:, :1], **cached}

    def alphas(self, net: Net) -> list[Tensor]:
        """The prior's alpha for each layer's factors, float64 [F] each."""
        sizes = [m.factors for m in factorized_layers(net.module).values()]
        return [
            torch.full((f,), self.alpha or float(f), dtype=torch.float64) for f in sizes
        ]

    def widen_state(self, state: Any, old: Net, new: Net) -> Any:
        """A run's state with as many factors as the net `new` has, in no layer fewer
        than `old`: "increasing server-side capacity" (section 2.2). The columns of W_a
        for new factors start at 0, so that everybody's model stays what it is; W_b, r
        and the clients' beliefs in them are a newcomer's."""
        few, many = (
            [m.factors for m in factorized_layers(n.module).values()]
            for n in (old, new)
        )
        x = new.w0.clone()
        for name, size, shape in zip(old.names, old.shapes, new.shapes, strict=True):
            whole = x[new.slices[name]].view(shape)
            if name.endswith("w_a"):
                whole.zero_()
            whole[tuple(map(slice, size))] = state.server["x"][old.slices[name]].view(
                size
            )
        had = torch.cat([torch.arange(b) < a for a, b in zip(few, many, strict=True)])
        clients = {"t": state.clients["t"].clone()}
        for key, row in self.init_client({"x": x[None]}, new, 1).items():
            clients.setdefault(key, row.repeat(len(state.participated), 1))
            if key in ("q", "m", "v"):
                mine = state.clients[key].unflatten(1, (3, -1))
                clients[key].unflatten(1, (3, -1))[:, :, had] = mine
        return replace(state, server={"x": x}, clients=clients)

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = self.train_rows(down["x"], client_state, clients)
        kept = {k: fit.rows[k] if k != "x" else down["x"] for k in client_state}
        return kept, {"delta": fit.rows["x"] - down["x"]}, fit

    def train_rows(self, x: Tensor, client_state: Tensors, clients: Clients) -> Fit:
        """The rows x [S, P] and beliefs after local training."""
        t, at = clients.context.training, strength_columns(clients.net)
        rows = {
            **client_state,
            "x": x,
            "noise": self.draw_noise(clients, len(at)).to(x),
        }
        rows["n"] = clients.num_samples.to(x)[:, None]
        if t.momentum:
            rows["momentum"] = torch.zeros_like(x)

        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            x = rows["x"]
            taken = to_device(taken, rows["x"].device)  # in place: nothing is copied
            noise = rows["noise"][torch.arange(len(x)), taken]
            rows["t"] += 1
            b, by_b, slope = self.sample_beliefs(rows, noise, clients.net)
            r = x[:, at]
            x[:, at] = r * b  # for the moment the row is the client's own model
            g = grad(x)
            x[:, at], by_strength = r, g[:, at]
            g[:, at] = by_strength * b
            slope[:, : len(at)] += by_strength * r * by_b
            ops.sgd_step_(
                x,
                g,
                clients.lr,
                momentum=t.momentum,
                buffer=rows.get("momentum"),
                weight_decay=t.weight_decay,
            )
            self.step_beliefs(rows, slope, clients.lr)
            return {}

        return clients.each_batch(rows, update, together=True)

    def draw_noise(self, clients: Clients, factors: int) -> Tensor:
        """A draw for b (a logit) and one for v of each step: [S, steps, 2, F]."""
        t = clients.context.training
        steps = t.epochs * -(-int(clients.num_samples.max()) // t.batch_size)
        u = (
            client_uniforms_of(clients, "beliefs", steps * 2 * factors)
            .mul_(1 - 2e-4)
            .add_(1e-4)
        )
        u = u.to(clients.net.w0).view(len(u), steps, 2, factors)
        # client by client, as in `sample_choices`: beside others a client's last digits
        # would be others
        u[:, :, 0] = torch.stack([own.logit() for own in u[:, :, 0]])
        return u

    def sample_beliefs(
        self, rows: Tensors, noise: Tensor, net: Net
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples b [s, F], their derivative by the logits [s, F], and kl_weight / n
        times the divergence's gradient [s, 3 F]."""
        alphas = self.alphas(net)
        sizes = [len(a) for a in alphas]
        alpha = torch.cat(alphas).to(noise)
        # A layer of nobody's factors fills each row up to whole vectors: see
        # `map_rows`.
        F = len(alpha)
        more = -len(alpha) % VECTOR_NUMBERS
        q, noise = (pad(v, (0, more)) for v in (rows["q"].unflatten(1, (3, F)), noise))
        logit, log_c, log_d = q.unbind(1)
        noise_b, u_v = noise.unbind(1)
        b = sample_concrete(logit, noise_b, self.tau)[:, :F]
        alpha = pad(alpha, (0, more), value=1.0)
        slope = kl_slope(logit, log_c, log_d, torch.log1p(-u_v), alpha, [*sizes, more])
        slope = slope.unflatten(1, (3, -1))[:, :, :F].flatten(1)
        weight = (
            BELIEF_PRESETS[self.preset][1] if self.kl_weight is None else self.kl_weight
        )
        return b, b * (1 - b) / self.tau, slope.mul_(weight / rows["n"])

    def step_beliefs(self, rows: Tensors, slope: Tensor, lr: float) -> None:
        """The beliefs one step on along `slope` [s, 3 F], within their bounds, in
        place."""
        q, m, v, t = (rows[k] for k in "qmvt")
        if (self.optimizer or BELIEF_PRESETS[self.preset][0]) == "adam":
            rate = 0.05 if self.lr_var is None else self.lr_var
            m.mul_(0.9).add_(slope, alpha=0.1)
            v.mul_(0.999).addcmul_(slope, slope, value=0.001)
            first, second = (map_rows(partial(torch.pow, b), t) for b in (0.9, 0.999))
            q -= rate / (1 - first) * m / ((v / (1 - second)).sqrt_() + 1e-8)
        else:
            q.sub_(slope, alpha=lr if self.lr_var is None else self.lr_var)
        for part, bound in zip(q.chunk(3, 1), BELIEF_BOUNDS, strict=True):
            part.clamp_(-bound, bound)

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        q = client_state["q"]
        x = down["x"]
        new = client_state["t"][:, 0] == 0
        x = (
            torch.where(new[:, None], x, client_state["x"])
            if "x" in client_state
            else x
        )
        b = self.sample_choices(q.chunk(3, 1)[0], clients)
        if self.untrained_factors == "all":
            b = b.masked_fill(new[:, None, None], 1)
        return {"w": x, "b": b}

    def sample_choices(self, logit: Tensor, clients: Clients) -> Tensor:
        """b [S, samples, F] of clients with beliefs `logit` [S, F], as `eval_mode`
        has it."""
        pi = torch.stack([own.sigmoid() for own in logit])[:, None]
        above = (pi >= 0.5).to(pi)
        simple = {"mean": pi, "thr_soft": pi * above, "hard": above}
        if self.eval_mode in simple:
            return simple[self.eval_mode]
        if self.eval_mode == "relaxed_mean":
            u = (torch.arange(256, dtype=pi.dtype, device=pi.device) + 0.5) / 256
            each = [sample_concrete(own[:, None], u.logit(), self.tau) for own in logit]
            return torch.stack(each)[:, None].mean(3)
        u = client_uniforms_of(clients, "scores", self.samples * logit.shape[1]).to(pi)
        noise = u.unflatten(1, (self.samples, -1))
        each = [
            sample_concrete(own, v.logit(), self.tau)
            for own, v in zip(logit, noise, strict=True)
        ]
        return torch.stack(each)

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """The factorized model w [P], its layers' `strength` times a row of b
        [samples, F]: the logarithm of the probabilities' mean over the rows; of numbers
        their mean, of single labels its logit."""
        at = strength_columns(net)
        w = model["w"]
        each = [net(w.index_copy(0, at, w[at] * b), x) for b in model["b"]]
        scores = torch.stack(each)
        numbers = net.loss_fn in (*REGRESSION_LOSSES, hinge)
        if net.loss_fn is binary_cross_entropy:
            return scores.sigmoid().mean(0).logit()
        if numbers or len(scores) == 1 or scores.dim() < 3 or scores.shape[2] == 1:
            return scores.mean(0)
        return scores.log_softmax(2).logsumexp(0)  # but for a constant


def client_uniforms_of(clients: Clients, stream: str, count: int) -> Tensor:
    """Uniform numbers [S, count], each client's own of this round."""
    key = (clients.context.seed, clients.round, stream)
    return client_uniforms(client_seeds(clients.ids.numpy(), *key), count)


def factorized_module(alg: FactorizedWaffle, net: Net) -> nn.Module:
    """The net's model with its layers factorized; a function of the module, so that
    models can be pickled."""
    plain = net.module if isinstance(net.build, nn.Module) else net.build()
    return factorize(plain, alg.ranks, alg.start, alg.alpha, net.head_name)


def strength_columns(net: Net) -> Tensor:
    """Where the factors' strengths stand in a row: int64 [F], layer after layer."""
    names = (f"{k}.strength".removeprefix(".") for k in factorized_layers(net.module))
    places = torch.arange(net.size, device=net.w0.device)
    return torch.cat([places[net.slices[name]] for name in names])
