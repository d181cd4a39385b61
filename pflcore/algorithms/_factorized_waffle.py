"""WAFFLe (Hao et al. 2020): weights anonymized by factorization.

The server knows a dictionary of weight factors. Only the client knows which of them it
uses. (The WAFFLE of Beaussart et al. 2021 is another method, in `_waffle.py`.)

The prior is the Indian buffet process over a layer's F factors: `v_k ~ Beta(alpha, 1)`
and `b_k ~ Bernoulli(v_1 ... v_k)`, so later factors are rarer. The beliefs are mean
field: `b_k ~ Bernoulli(sigmoid(l_k))` and `v_k ~ Kumaraswamy(c_k, d_k)`, whose
distribution function is `1 - (1 - v^c)^d`.

Symbols:

- F factors: of one layer in `prior_mean`, of all layers side by side elsewhere.
- s clients take a step together; S clients are in the cohort; a model has P parameters.
- W_a, r and W_b are a layer's dictionary; r are the factors' strengths.
- b are a client's choices of factors, v the draws of the stick-breaking process.
- l (`logit`), c and d are a client's beliefs; q [3 F] are l, log c and log d.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import pad

from pflcore import ops
from pflcore._device import to_device
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
from pflcore.nn._factorized import Init, factorize, factorized_layers
from pflcore.ops._sums import running_sums
from pflcore.train import Clients, Fit, Net
from pflcore.train._losses import REGRESSION_LOSSES, binary_cross_entropy, hinge
from pflcore.train._random import client_seeds, client_uniforms

EULER_GAMMA = 0.5772156649015329
# Bound on the logarithm of a product of v's: at 0 the divergence is infinite.
MAX_LOG_PRODUCT = -1e-6


def prior_mean(alpha: float, factors: int) -> Tensor:
    """The prior's probability of each factor, float64 [F].

    It is `(alpha / (alpha + 1))^k`, within [.001, .999].
    """
    k = torch.arange(1, factors + 1, dtype=torch.float64)
    return ((alpha / (alpha + 1)) ** k).clamp(0.001, 0.999)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) [...] for x < 0, exact to rounding.

    It is exact at both ends. Its gradient is exact, too: the clamp keeps the branch
    that is not taken finite.
    """
    middle = -math.log(2)
    far_from_zero = torch.log1p(-torch.exp(x.clamp(max=middle)))
    near_zero = torch.log(-torch.expm1(x))
    return torch.where(x > middle, near_zero, far_from_zero)


def kl_slope(
    logit: Tensor,  # [s, F]
    log_c: Tensor,  # [s, F]
    log_d: Tensor,  # [s, F]
    log_rest: Tensor,  # [s, F]
    alpha: Tensor,  # [F]
    sizes: list[int],
) -> Tensor:  # [s, 3 F]
    """Gradient of both divergences in (logit, log c, log d), [s, 3 F].

    They are KL(Bernoulli(sigmoid(logit)) || Bernoulli(v_1 ... v_k)) and
    KL(Kumaraswamy(c, d) || Beta(alpha, 1)) (Nalisnick and Smyth 2017). The gradient is
    written out because autograd takes three times as long.

    Args:
        log_rest: log(1 - u) of the draws v = (1 - (1 - u)^(1/d))^(1/c)
        sizes: numbers of factors of the layers, which are side by side
    """
    pi = logit.sigmoid()
    c = log_c.exp()
    d = log_d.exp()
    s = log_rest / d
    log_v = log1mexp(s) / c
    log_p = cumsum_by_layer(log_v, sizes).clamp_(max=MAX_LOG_PRODUCT)
    logit_p = log_p - log1mexp(log_p)
    # A product that was clamped has no gradient.
    by_p = ((1 - pi) * logit_p.exp() - pi) * (log_p < MAX_LOG_PRODUCT)
    # v_k is a factor of p_k and of every later p of its layer.
    by_v = cumsum_by_layer(by_p.flip(1), sizes[::-1]).flip(1)
    rest = 1 - alpha / c
    harmonic = torch.digamma(d + 1) + EULER_GAMMA  # H_d; E[log v] = -H_d / c
    by_c = 1 - alpha * harmonic / c - by_v * log_v
    by_s = by_v * s / (c * torch.expm1(s)) * s.exp()
    by_d = 1 - 1 / d - rest * d * torch.polygamma(1, d + 1) - by_s
    return torch.cat([pi * (1 - pi) * (logit - logit_p), by_c, by_d], 1)


def cumsum_by_layer(values: Tensor, sizes: list[int]) -> Tensor:
    """Running sums over the factors of each layer: [s, F]."""
    return torch.cat([running_sums(part) for part in values.split(sizes, 1)], 1)


def sample_concrete(logit: Tensor, noise: Tensor, tau: float) -> Tensor:
    """A binary concrete sample, the soft b [...] (Maddison et al. 2017).

    `noise` is logit u, with u uniform on (0, 1).
    """
    return torch.sigmoid((logit + noise) / tau)


BELIEF_BOUNDS = (7.0, 9.0, 9.0)  # of |logit|, |log c| and |log d|
# For each preset the optimizer of the beliefs, and kl_weight.
BELIEF_PRESETS = {"recommended": ("adam", 0.01), "paper_literal": ("sgd", 1.0)}


@algorithm_options
class FactorizedWaffle(FedAvg):
    """WAFFLe (Hao et al. 2020): layers are made of factors that a client chooses.

    server: x [P], the dictionary (W_a, r, W_b of each factorized layer, the other
    layers plain) · client: q [3 F] (logit pi, log c, log d of each factor), Adam's
    moments m, v [3 F], steps taken t [1], and with dictionary="cached" x [P] (the last
    download) · down: x [S, P] (1 model) · up: delta [S, P] (1 model; q stays).

    (The WAFFLE of Beaussart et al. 2021, with weights by distance, is `Waffle`.)

    Algorithm 1: a layer of client i has the weights `W_i = W_a diag(r * b_i) W_b`; b_i
    is the client's private choice of factors. A local step draws b (binary concrete)
    and v (Kumaraswamy), and moves x and q by the gradient of `NLL(minibatch) +
    kl_weight (KL_b + KL_v) / n_i` (Eqs. 12 and 13).

    A client is evaluated with the server's dictionary and its own beliefs. A model
    without factorized layers gets them in place of all layers but the head, see
    `pflcore.nn.factorize`.

    Two presets are measured in bench/papers/factorized.md:

    - "paper_literal" is the text's: one SGD for everything, and the full KL. Beliefs
      then hardly move from the prior, and the method stays near FedAvg.
    - "recommended" gives the beliefs an Adam of their own and a weak KL.

    Decisions where the paper is silent:

    - alpha is F, tau is 2/3, r starts at 1, and evaluation is `thr_soft`.
    - Biases and the output layer are plain and shared. Averaging is uniform.
    - Logits of beliefs stay within 7 (pi) and 9 (c, d), noise within [1e-4, 1 - 1e-4].
    - A run's momentum is only the dictionary's.

    The other options are those of `FedAvg`.

    Args:
        weighting: Shares of the clients in the mean: "uniform" as in the paper,
            or "samples".
        preset: Defaults of `optimizer` and `kl_weight`: "recommended"
            or "paper_literal".
        optimizer: Optimizer of the beliefs: "adam" or "sgd". None takes the
            preset's: "adam" with "recommended", "sgd" with "paper_literal".
        lr_var: Step size of the beliefs. None takes .05 with "adam", or the run's `lr`
            with "sgd".
        kl_weight: Weight of the divergence from the prior; 1 is the variational bound.
            None takes the preset's: .01 with "recommended", 1 with "paper_literal".
        ranks: Numbers of factors of the layers, or one number for all of them. ()
            takes 3 factors for 5 outputs.
        alpha: The prior's alpha: the larger it is, the more factors it expects. None
            takes a layer's number of factors.
        start: Start of the strengths: "match" sets them to 1 and scales the factors to
            Glorot's variance; "ibpwf" draws them from N(0, .1^2).
        tau: Temperature of the relaxed choices b in training, above 0.
        eval_mode: Choice of factors at evaluation: "thr_soft" is pi where it is at
            least .5, else 0; "hard" is 1 there; "mean" is pi; "relaxed_mean" is the
            mean of the relaxed b; "mc" averages predictions over `samples` draws of it.
        samples: Number of draws with "mc".
        dictionary: Dictionary at evaluation: "current" is the server's newest; "cached"
            is the one that the client downloaded in its last round (section 2.3, for
            clients without a connection).
        untrained_factors: Factors of a client that never trained: "all", or as
            the "prior" has them.
    """

    weighting: Weighting = "uniform"
    preset: Literal["recommended", "paper_literal"] = "recommended"
    optimizer: Literal["adam", "sgd"] | None = None
    lr_var: NonNegativeFloat | None = None
    kl_weight: NonNegativeFloat | None = None
    ranks: tuple[int, ...] = ()
    alpha: PositiveFloat | None = None
    start: Init = "match"
    tau: PositiveFloat = 2 / 3
    eval_mode: Literal["thr_soft", "mean", "relaxed_mean", "hard", "mc"] = "thr_soft"
    samples: PositiveInt = 10
    dictionary: Literal["current", "cached"] = "current"
    untrained_factors: Literal["all", "prior"] = "all"

    @property
    def traits(self) -> Traits:
        """The traits of the algorithm, which depend on its options."""
        reason = (
            "moves its dictionary by steps of SGD along one gradient with the beliefs'"
        )
        return super().traits._replace(
            evaluation_only=("eval_mode", "samples", "untrained_factors"),
            fixed_training={"local_optimizer": reason, "clip_grad": reason},
        )

    def prepare(self, net: Net) -> Net:
        if factorized_layers(net.module):
            return net
        build = partial(factorized_module, self, net)
        return Net(build, net.loss_fn, net.head_name, net.seed)

    def server_init_args(self, net: Net) -> Tensors:
        if not factorized_layers(net.module):
            raise ValueError(
                "model: expected one with factorized layers, got none; make it with "
                "pflcore.nn.factorize(model, ranks)."
            )
        return super().server_init_args(net)

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        alphas = self.alphas(net)
        pi = torch.cat([prior_mean(float(alpha[0]), len(alpha)) for alpha in alphas])
        c = torch.cat(alphas)
        log_d = torch.zeros_like(c)
        q = torch.cat([pi.logit(), c.log(), log_d])[None].to(net.w0)
        zero = torch.zeros_like(q)
        client_state = {"q": q, "m": zero, "v": zero, "t": zero[:, :1]}
        if self.dictionary == "cached":
            client_state["x"] = down["x"]
        return client_state

    def alphas(self, net: Net) -> list[Tensor]:
        """The prior's alpha of each layer's factors, float64 [F of the layer] each."""
        alphas = []
        for factors in factor_counts(net):
            alpha = float(factors) if self.alpha is None else self.alpha
            alphas.append(torch.full((factors,), alpha, dtype=torch.float64))
        return alphas

    def widen_state(self, state: Any, old: Net, new: Net) -> Any:
        """A run's state with as many factors as the net `new` has.

        No layer may have fewer than in `old`: "increasing server-side capacity"
        (section 2.2). The columns of W_a for new factors start at 0, so that every
        client's model stays as it is. W_b, r and the clients' beliefs in new factors
        are those of a new client.

        Args:
            state: The state of the run, as `pflcore.step` returns it.
        """
        x = new.w0.clone()
        for name, shape, new_shape in zip(
            old.names, old.shapes, new.shapes, strict=True
        ):
            tensor = x[new.slices[name]].view(new_shape)
            if name.endswith("w_a"):
                tensor.zero_()
            corner = tuple(slice(length) for length in shape)
            tensor[corner] = state.server["x"][old.slices[name]].view(shape)
        is_old = is_old_factor(old, new)
        clients = {"t": state.clients["t"].clone()}
        for key, row in self.init_client({"x": x[None]}, new, 1).items():
            clients.setdefault(key, row.repeat(len(state.participated), 1))
            if key in ("q", "m", "v"):
                # [N, 3 F] by its three parts, each with the old factors' columns
                before = state.clients[key].unflatten(1, (3, -1))
                clients[key].unflatten(1, (3, -1))[:, :, is_old] = before
        return replace(state, server={"x": x}, clients=clients)

    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = self.train_rows(down["x"], client_state, clients)
        new_state = {key: fit.rows[key] for key in client_state}
        if "x" in client_state:  # the cached dictionary is the downloaded one
            new_state["x"] = down["x"]
        return new_state, {"delta": fit.rows["x"] - down["x"]}, fit

    def train_rows(self, x: Tensor, client_state: Tensors, clients: Clients) -> Fit:
        """The rows x [S, P] and beliefs after local training."""
        training = clients.context.training
        columns = strength_columns(clients.net)
        factors = len(columns)
        noise = self.draw_noise(clients, factors).to(x)
        n = clients.num_samples.to(x)[:, None]
        rows = {**client_state, "x": x, "noise": noise, "n": n}
        if training.momentum:
            rows["momentum"] = torch.zeros_like(x)

        # A step writes into the rows: nothing is copied.
        def update(rows: Tensors, grad: GradientFn, taken: Tensor) -> Tensors:
            x = rows["x"]
            taken = to_device(taken, x.device)  # steps that each client has taken
            noise = rows["noise"][torch.arange(len(x)), taken]
            rows["t"] += 1
            b, by_logit, slope = self.sample_beliefs(rows, noise, clients.net)
            g, by_choice = _gradients_by_choices(x, b, columns, grad)
            slope[:, :factors] += by_choice * by_logit
            ops.sgd_step_(
                x,
                g,
                clients.lr,
                momentum=training.momentum,
                buffer=rows.get("momentum"),
                weight_decay=training.weight_decay,
            )
            self.step_beliefs(rows, slope, clients.lr)
            return {}

        return clients.each_batch(rows, update, together=True)

    def draw_noise(self, clients: Clients, factors: int) -> Tensor:
        """Noise of each step, [S, steps, 2, F]: a logit for b and a draw for v."""
        training = clients.context.training
        largest = int(clients.num_samples.max())
        steps = training.epochs * math.ceil(largest / training.batch_size)
        if clients.own_steps is not None:
            steps = int(clients.own_steps.max())
        u = client_uniforms_of(clients, "beliefs", steps * 2 * factors)
        u = u.mul_(1 - 2e-4).add_(1e-4)  # within [1e-4, 1 - 1e-4]
        u = u.to(clients.net.w0).view(len(u), steps, 2, factors)
        # A client's last digits may depend on the other clients in a tensor. So each
        # client's logits are computed alone, as in `sample_choices`.
        noise_b = u[:, :, 0]
        u[:, :, 0] = torch.stack([of_client.logit() for of_client in noise_b])
        return u

    def sample_beliefs(
        self, rows: Tensors, noise: Tensor, net: Net
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples of b, their derivatives, and the slope of the divergence.

        They are b [s, F], its derivative by the logit [s, F], and the divergence's
        gradient by q, times kl_weight / n: [s, 3 F].
        """
        alphas = self.alphas(net)
        sizes = [len(alpha) for alpha in alphas]
        alpha = torch.cat(alphas).to(noise)
        factors = len(alpha)
        # A layer of factors that no client has fills each row up to whole vectors. The
        # reason is that of `map_rows`.
        padding = -factors % VECTOR_NUMBERS
        sizes.append(padding)
        q = pad(rows["q"].unflatten(1, (3, factors)), (0, padding))
        noise = pad(noise, (0, padding))
        alpha = pad(alpha, (0, padding), value=1.0)
        logit, log_c, log_d = q.unbind(1)
        noise_b, u_v = noise.unbind(1)
        b = sample_concrete(logit, noise_b, self.tau)[:, :factors]
        slope = kl_slope(logit, log_c, log_d, torch.log1p(-u_v), alpha, sizes)
        slope = slope.unflatten(1, (3, -1))[:, :, :factors].flatten(1)
        kl_weight = self.kl_weight
        if kl_weight is None:
            kl_weight = BELIEF_PRESETS[self.preset][1]
        return b, b * (1 - b) / self.tau, slope.mul_(kl_weight / rows["n"])

    def step_beliefs(self, rows: Tensors, slope: Tensor, lr: float) -> None:
        """Moves the beliefs along `slope` [s, 3 F], within their bounds, in place."""
        q = rows["q"]
        optimizer = self.optimizer or BELIEF_PRESETS[self.preset][0]
        if optimizer == "adam":
            self._adam_step(rows, slope)
        else:
            step_size = lr if self.lr_var is None else self.lr_var
            q.sub_(slope, alpha=step_size)
        for part, bound in zip(q.chunk(3, 1), BELIEF_BOUNDS, strict=True):
            part.clamp_(-bound, bound)

    def _adam_step(self, rows: Tensors, slope: Tensor) -> None:
        """Moves the beliefs by Adam along `slope` [s, 3 F], in place."""
        lr = 0.05 if self.lr_var is None else self.lr_var
        m = rows["m"].mul_(0.9).add_(slope, alpha=0.1)
        v = rows["v"].mul_(0.999).addcmul_(slope, slope, value=0.001)
        # The bias corrections: the steps t differ from client to client.
        decay_m = map_rows(partial(torch.pow, 0.9), rows["t"])
        decay_v = map_rows(partial(torch.pow, 0.999), rows["t"])
        root = (v / (1 - decay_v)).sqrt_() + 1e-8
        rows["q"] -= lr / (1 - decay_m) * m / root

    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        x = down["x"]
        never_trained = client_state["t"][:, 0] == 0
        if "x" in client_state:
            x = torch.where(never_trained[:, None], x, client_state["x"])
        logit = client_state["q"].chunk(3, 1)[0]
        b = self.sample_choices(logit, clients)
        if self.untrained_factors == "all":
            b = b.masked_fill(never_trained[:, None, None], 1)
        return {"w": x, "b": b}

    def sample_choices(self, logit: Tensor, clients: Clients) -> Tensor:
        """Choices b [S, samples, F] of clients with beliefs `logit` [S, F].

        `eval_mode` decides how they are made.
        """
        pi = torch.stack([of_client.sigmoid() for of_client in logit])[:, None]
        above = (pi >= 0.5).to(pi)
        simple = {"mean": pi, "thr_soft": pi * above, "hard": above}
        if self.eval_mode in simple:
            return simple[self.eval_mode]
        if self.eval_mode == "relaxed_mean":
            return self._relaxed_mean(logit)
        u = client_uniforms_of(clients, "scores", self.samples * logit.shape[1]).to(pi)
        u = u.unflatten(1, (self.samples, -1))
        choices = []
        for of_client, draws in zip(logit, u, strict=True):
            choices.append(sample_concrete(of_client, draws.logit(), self.tau))
        return torch.stack(choices)

    def _relaxed_mean(self, logit: Tensor) -> Tensor:
        """Mean of b [S, 1, F] over 256 quantiles of its noise."""
        u = (torch.arange(256, dtype=logit.dtype, device=logit.device) + 0.5) / 256
        choices = []
        for of_client in logit:
            choices.append(sample_concrete(of_client[:, None], u.logit(), self.tau))
        return torch.stack(choices)[:, None].mean(3)

    def predict(self, model: Tensors, net: Net, x: Tensor) -> Tensor:
        """Scores: the mean of the model's predictions over the choices b [samples, F].

        With each row of b, the strengths of the layers of w [P] are multiplied by it.
        Probabilities are averaged, and the scores are their logarithms, but for a
        constant; for single labels the logit of their mean. Numbers are averaged.
        """
        columns = strength_columns(net)
        w = model["w"]
        predictions = []
        for b in model["b"]:
            row = w.index_copy(0, columns, w[columns] * b)
            predictions.append(net(row, x))
        scores = torch.stack(predictions)
        if net.loss_fn is binary_cross_entropy:
            return scores.sigmoid().mean(0).logit()
        are_numbers = net.loss_fn in (*REGRESSION_LOSSES, hinge)
        has_classes = scores.dim() >= 3 and scores.shape[2] > 1
        if are_numbers or len(scores) == 1 or not has_classes:
            return scores.mean(0)
        return scores.log_softmax(2).logsumexp(0)


def _gradients_by_choices(
    x: Tensor,  # [s, P]
    b: Tensor,  # [s, F]
    columns: Tensor,  # [F]
    grad: GradientFn,
) -> tuple[Tensor, Tensor]:  # [s, P], [s, F]
    """Gradients of the dictionaries `x` and of the choices `b`.

    The loss is that of the clients' own models, whose strengths are multiplied by b.
    Only for it the rows are changed, and then restored: nothing is copied.
    """
    r = x[:, columns]
    x[:, columns] = r * b
    g = grad(x)
    x[:, columns] = r
    by_strength = g[:, columns]
    g[:, columns] = by_strength * b
    return g, by_strength * r


def client_uniforms_of(clients: Clients, stream: str, count: int) -> Tensor:
    """Uniform numbers [S, count], each client's own of this round."""
    key = (clients.context.seed, clients.round, stream)
    return client_uniforms(client_seeds(clients.ids.numpy(), *key), count)


def factorized_module(alg: FactorizedWaffle, net: Net) -> nn.Module:
    """The net's model with its layers factorized.

    `prepare` gives it to a net as a `partial`: unlike a lambda, that can be pickled.
    """
    plain = net.module if isinstance(net.build, nn.Module) else net.build()
    return factorize(plain, alg.ranks, alg.start, alg.alpha, net.head_name)


def strength_columns(net: Net) -> Tensor:
    """Columns of the factors' strengths in a row: int64 [F], layer after layer."""
    columns = torch.arange(net.size, device=net.w0.device)
    of_layers = []
    for layer in factorized_layers(net.module):
        name = f"{layer}.strength".removeprefix(".")  # "" is the module itself
        of_layers.append(columns[net.slices[name]])
    return torch.cat(of_layers)


def factor_counts(net: Net) -> list[int]:
    """Numbers of factors of the net's factorized layers."""
    return [layer.factors for layer in factorized_layers(net.module).values()]


def is_old_factor(old: Net, new: Net) -> Tensor:
    """Mask [F of `new`]: True for factors that the layers of `old` have."""
    masks = []
    for count, new_count in zip(factor_counts(old), factor_counts(new), strict=True):
        masks.append(torch.arange(new_count) < count)
    return torch.cat(masks)
