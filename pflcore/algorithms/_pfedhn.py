"""pFedHN: a hypernetwork of the server makes each client's model of an embedding.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters; an
embedding has D numbers; a hidden layer of the hypernetwork has H; phi are the Q
parameters of its hidden layers, `delta` the updates, a_i [H] the last hidden layer's
output for client i.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Cohort,
    Payload,
    RowUpdate,
    Tensors,
    Traits,
    UpdateResult,
    Uploads,
    algorithm_options,
    squared_norms,
)
from pflcore.check import NonNegativeFloat, PositiveInt
from pflcore.train import Net
from pflcore.train._random import generator_of
from pflcore.train._workers import single_threaded


class _Step(NamedTuple):
    """A step of the hypernetwork and of one client's embedding.

    Attributes:
        size: [] float64, the factor of the slopes.
        phi: [Q] the slope of the hidden layers.
        v: [D] the slope of the embedding.
        factors: [H + 1] a_i and a 1. The last layer's slope is their outer product with
            the client's residual.
    """

    size: Tensor
    phi: Tensor
    v: Tensor
    factors: Tensor


@algorithm_options
class PFedHN(Algorithm):
    """pFedHN (Shamsian et al. 2021): a hypernetwork makes each client's model.

    server: phi [Q], output [H + 1, P] (the last layer's weight and, in its last row,
    its bias), v [N, D] (the embeddings) · client: nothing · down: x [S, P] (1 model) ·
    up: delta [S, P] (1 model).

    The model of client i is `x_i = h(v_i)`. h is a network of `hidden_layers` linear
    layers with ReLU, and of a linear layer with P outputs. A client trains from x_i as
    in FedAvg, and uploads delta_i. Then the server takes one step for each client of
    the cohort, one after another. Each step moves h and v_i towards what the client
    trained: with the residual `r_i = x_i + delta_i - h(v_i)`, which the steps before
    have changed, and the derivatives J_i of h(v_i) by all parameters of h and by v_i,
    it adds `server_lr * |r_i|^2 / |J_i^T r_i|^2 * J_i^T r_i`. An absent client keeps
    its v_i. A client is evaluated with its h(v_i).

    The order of the steps is drawn anew in each round. To the first order, h(v_i) moves
    by the part `server_lr` of r_i along r_i, for every model and every size of h.

    The server needs much memory: `output` has H + 1 times the numbers of a model, and a
    round makes a second one. With H = 100 and a million parameters in float32 each
    takes 400 MB.

    The weight of the last layer starts at 0, and its bias at the run's initial model.
    So all clients begin with that model. The embeddings start as draws of mean 0 and
    variance 1, the same ones in all runs; the hidden layers start as torch's layers do.
    The training of a client that joins, in `History.adapt`, moves its embedding alone.

    With `fixed_step` the server adds `server_lr * J_i^T r_i`, which with one client in
    a round is the paper's step. A fixed size that suits one model lets another stand
    still or diverge, hence the default.

    Deviations from the authors' code: one client trains in each of its rounds; a cohort
    of one client gives that. Its step is SGD of the fixed size 0.01 with a momentum of
    0.9, with weight decay and a bound of the slope's length. The last layer's weight
    starts at random. D is 1 + N / 4, and the last hidden layer has no ReLU. Its
    `n_hidden` counts the layers after the first one, so that its 3 are
    `hidden_layers=4`.

    Args:
        embedding_size: D, the length of an embedding.
        hidden_size: H, the width of the hidden layers.
        hidden_layers: Number of the hidden layers.
        server_lr: The part of its residual by which a client's step moves its model;
            with `fixed_step` the step's factor.
        fixed_step: True for steps of a fixed size, as in the paper.
    """

    embedding_size: PositiveInt = 8
    hidden_size: PositiveInt = 100
    hidden_layers: PositiveInt = 3
    server_lr: NonNegativeFloat = 0.5
    fixed_step: bool = False

    # The models are never mixed, so statistics of batch norm are the clients' own.
    traits = Traits(batch_norm=("local",))

    def server_init_args(self, net: Net) -> Tensors:
        generator = generator_of(net.seed, "pFedHN")
        phi = []
        inputs = self.embedding_size
        for _ in range(self.hidden_layers):
            draws = _uniform_draws(self.hidden_size * (inputs + 1), generator)
            phi.append(draws / math.sqrt(inputs))
            inputs = self.hidden_size
        return {"x0": net.w0, "phi": torch.cat(phi).to(net.w0)}

    def init(self, x0: Tensor, n: int, **more: Tensor) -> Tensors:
        output = x0.new_zeros(self.hidden_size + 1, len(x0))
        output[-1] = x0
        generator = generator_of("pFedHN", "embeddings")
        draws = _uniform_draws(n * self.embedding_size, generator)
        v = math.sqrt(3) * draws.view(n, self.embedding_size)  # of variance 1
        return {"phi": more["phi"], "output": output, "v": v.to(x0)}

    def hidden_output(self, phi: Tensor, v: Tensor) -> Tensor:
        """The output [S, H] of the hidden layers for embeddings `v` [S, D].

        Each client is computed alone, so that no other one changes its bits.
        """
        return torch.stack([self._hidden_row(phi, row) for row in v])

    def _hidden_row(self, phi: Tensor, v: Tensor) -> Tensor:
        """The output [H] of the hidden layers for an embedding `v` [D]."""
        width = self.hidden_size
        a = v
        start = 0
        for _ in range(self.hidden_layers):
            bias_start = start + width * len(a)
            weight = phi[start:bias_start].view(width, len(a))
            start = bias_start + width
            a = torch.relu(weight @ a + phi[bias_start:start])
        return a

    def send(self, state: Tensors, cohort: Cohort) -> Payload:
        hidden = self.hidden_output(state["phi"], self._embeddings(state, cohort))
        return {"x": ops.aggregate(state["output"], _with_one(hidden))}

    def _embeddings(self, state: Tensors, cohort: Cohort) -> Tensor:
        """The embeddings [S, D] of a cohort."""
        v = state["v"]
        return v[to_device(cohort.ids, v.device)]

    def uploads(self, state: Tensors, down: Payload, cohort: Cohort) -> Uploads:
        return {"delta": state["output"][0]}

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        phi = state["phi"]
        output = state["output"].clone()
        v = self._embeddings(state, cohort)
        trained = ops.aggregate(output, _with_one(self.hidden_output(phi, v)))
        trained += up["delta"]
        for i in torch.randperm(len(v), generator=cohort.generator).tolist():
            x = ops.aggregate(output, _with_one(self.hidden_output(phi, v[i : i + 1])))
            residual = trained[i : i + 1] - x
            step = self._step(phi, output, v[i], residual)
            phi = phi + step.size * step.phi
            v[i] += step.size * step.v
            weight = step.size * step.factors[:, None]
            ops.aggregate(residual, weight, base=output, out=output)
        changes: Changes = {"phi": phi, "output": output}
        return {**changes, "v": RowUpdate(cohort.ids, v)}, None

    def assign_new_client(self, state: Tensors, up: Tensors, cohort: Cohort) -> Changes:
        # The hypernetwork stays: the others' models must not change with a newcomer.
        v = self._embeddings(state, cohort)
        for i, delta in enumerate(up["delta"].split(1)):
            step = self._step(state["phi"], state["output"], v[i], delta)
            v[i] += step.size * step.v
        return {"v": RowUpdate(cohort.ids, v)}

    def _step(
        self,
        phi: Tensor,  # [Q]
        output: Tensor,  # [H + 1, P]
        v: Tensor,  # [D]
        residual: Tensor,  # [1, P]
    ) -> _Step:
        """The step that moves the model h(v) along `residual`."""
        # A sum over all parameters would have other bits on other numbers of threads.
        with single_threaded():
            by_hidden = output[:-1] @ residual[0].to(output)
        with torch.enable_grad():
            inputs = [phi.detach().requires_grad_(), v.detach().requires_grad_()]
            a = self._hidden_row(*inputs)
            slope_phi, slope_v = torch.autograd.grad(a, inputs, by_hidden)
        factors = _with_one(a.detach()[None])[0].double()
        if self.fixed_step:
            size = factors.new_tensor(self.server_lr)
            return _Step(size, slope_phi, slope_v, factors)
        length = squared_norms(residual)[0]
        # The last layer's slope is an outer product, so its squared norm is a product.
        moved = slope_phi.double().square().sum() + slope_v.double().square().sum()
        slope_length = factors.square().sum() * length + moved
        # Where the residual is 0, so are all slopes.
        size = self.server_lr * length / slope_length.clamp_min(1e-300)
        return _Step(size, slope_phi, slope_v, factors)


def _uniform_draws(count: int, generator: torch.Generator) -> Tensor:
    """Uniform draws [count] between -1 and 1, float64."""
    return 2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1


def _with_one(hidden: Tensor) -> Tensor:
    """The rows of `hidden` [S, H] with a 1 behind each, the weight of the bias."""
    return torch.nn.functional.pad(hidden, (0, 1), value=1.0)
