"""pFedHN: a hypernetwork of the server makes each client's model of an embedding.

Symbols: S clients are in the cohort, N in the federation; a model has P parameters; an
embedding has D numbers; a hidden layer of the hypernetwork has H; phi are the Q
parameters of its hidden layers, `delta` the updates, a_i [H] the last hidden layer's
output for client i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    Algorithm,
    Changes,
    Cohort,
    MixingWeights,
    Payload,
    RowUpdate,
    Tensors,
    Traits,
    UpdateResult,
    algorithm_options,
    lazy_zeros,
)
from pflcore.check import NonNegativeFloat, PositiveInt, Weighting
from pflcore.train import Net
from pflcore.train._random import generator_of


@algorithm_options
class PFedHN(Algorithm):
    """pFedHN (Shamsian et al. 2021): a hypernetwork makes each client's model.

    server: phi [Q], output [H + 1, P] (the last layer's weight and, in its last row,
    its bias), v [N, D] (the embeddings) · client: nothing · down: x [S, P] (1 model) ·
    up: delta [S, P] (1 model).

    The model of client i is `x_i = h(v_i)`. h is a network of `hidden_layers` linear
    layers with ReLU, and of a linear layer with P outputs. A client trains from x_i as
    in FedAvg, and uploads delta_i. With J the derivatives of x_i by the hypernetwork's
    parameters, or by v_i, the server takes `parameters <- parameters + server_lr *
    sum_i p_i J_i^T delta_i` and `v_i <- v_i + embedding_lr * J_i^T delta_i`. p_i are
    the clients' shares. An absent client keeps its v_i. A client is evaluated with its
    x_i.

    The server needs much memory: `output` has H + 1 times the numbers of a model, and a
    round makes a second one. With H = 100 and a million parameters in float32 each
    takes 400 MB.

    All embeddings start at 0, and the bias of the last layer at the value with which
    h(0) is the run's initial model. So all clients begin with that model, and a client
    that joins begins with h(0). Its training in `History.adapt` moves its embedding
    alone. The other parameters of h start as torch's layers do.

    The paper's full text was not at hand: the rule is taken from its abstract and first
    pages and from FL-bench's code. Deviations from that code: there a round's clients
    follow one another, and each moves the hypernetwork; embeddings and biases start at
    random; its steps have momentum, weight decay and a bound of the gradient's length.

    Args:
        embedding_size: D, the length of an embedding.
        hidden_size: H, the width of the hidden layers.
        hidden_layers: Number of the hidden layers.
        server_lr: Step size of the hypernetwork.
        embedding_lr: Step size of the embeddings; None takes `server_lr`.
        weighting: Shares of the clients in a step of the hypernetwork: "samples" or
            "uniform".
    """

    embedding_size: PositiveInt = 8
    hidden_size: PositiveInt = 100
    hidden_layers: PositiveInt = 2
    server_lr: NonNegativeFloat = 0.1
    embedding_lr: NonNegativeFloat | None = None
    weighting: Weighting = "samples"

    # The models are never mixed, so statistics of batch norm are the clients' own.
    traits = Traits(batch_norm=("local",), per_client_state=("v",))

    def server_init_args(self, net: Net) -> Tensors:
        generator = generator_of(net.seed, "pFedHN")

        def uniform(count: int, inputs: int) -> Tensor:
            draws = torch.rand(count, generator=generator, dtype=torch.float64)
            return ((2 * draws - 1) / math.sqrt(inputs)).to(net.w0)

        phi = []
        inputs = self.embedding_size
        for _ in range(self.hidden_layers):
            phi.append(uniform(self.hidden_size * (inputs + 1), inputs))
            inputs = self.hidden_size
        weight = net.w0.new_empty(self.hidden_size, net.size)
        for row in weight:  # all draws at once would take memory in float64
            row.copy_(uniform(net.size, self.hidden_size))
        return {"x0": net.w0, "phi": torch.cat(phi), "weight": weight}

    def init(self, x0: Tensor, n: int, **more: Tensor) -> Tensors:
        phi = more["phi"]
        weight = more["weight"]
        v = lazy_zeros(n, phi[: self.embedding_size])
        hidden = self.hidden_output(phi, torch.zeros_like(v[:1]))
        bias = ops.aggregate(weight, hidden, base=x0, lr=-1.0)
        return {"phi": phi, "output": torch.cat([weight, bias]), "v": v}

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
        v = self._embeddings(state, cohort)
        factors = with_one(self.hidden_output(state["phi"], v))
        return {"x": ops.aggregate(state["output"], factors)}

    def _embeddings(self, state: Tensors, cohort: Cohort) -> Tensor:
        """The embeddings [S, D] of a cohort."""
        v = state["v"]
        return v[to_device(cohort.ids, v.device)]

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> UpdateResult:
        share = cohort.mean_weights(self.weighting).weight[0]  # [S]
        hidden, by_phi, by_v = self.slopes(state, up["delta"], cohort)
        share = to_device(share, hidden.device)
        factors = with_one(hidden).double() * share[:, None]
        output = ops.aggregate(
            up["delta"], factors.T.contiguous(), base=state["output"], lr=self.server_lr
        )
        mean = MixingWeights(share[None])
        phi = mean.aggregate(by_phi, state["phi"], self.server_lr)[0]
        changes: Changes = {"phi": phi, "output": output}
        return {**changes, **self._moved_embeddings(state, by_v, cohort)}, None

    def assign_new_client(self, state: Tensors, up: Tensors, cohort: Cohort) -> Changes:
        # The hypernetwork stays: the others' models must not change with a newcomer.
        by_v = self.slopes(state, up["delta"], cohort)[2]
        return self._moved_embeddings(state, by_v, cohort)

    def _moved_embeddings(
        self, state: Tensors, by_v: Tensor, cohort: Cohort
    ) -> Changes:
        """The embeddings of a cohort after a step along `by_v` [S, D]."""
        lr = self.server_lr if self.embedding_lr is None else self.embedding_lr
        return {"v": RowUpdate(cohort.ids, self._embeddings(state, cohort) + lr * by_v)}

    def slopes(
        self,
        state: Tensors,
        delta: Tensor,  # [S, P]
        cohort: Cohort,
    ) -> tuple[Tensor, Tensor, Tensor]:  # [S, H], [S, Q], [S, D]
        """The outputs a_i, and J_i^T delta_i by phi and by the embedding.

        By the last layer J_i^T delta_i is the product of delta_i and a_i, which
        `update` computes without a table for each client.
        """
        weight = state["output"][:-1]
        hidden, by_phi, by_v = [], [], []
        for v, row in zip(self._embeddings(state, cohort), delta, strict=True):
            by_hidden = weight @ row.to(weight)
            with torch.enable_grad():
                inputs = [state["phi"].detach().requires_grad_()]
                inputs.append(v.detach().requires_grad_())
                a = self._hidden_row(*inputs)
                slope_phi, slope_v = torch.autograd.grad(a, inputs, by_hidden)
            hidden.append(a.detach())
            by_phi.append(slope_phi)
            by_v.append(slope_v)
        return torch.stack(hidden), torch.stack(by_phi), torch.stack(by_v)


def with_one(hidden: Tensor) -> Tensor:
    """The rows of `hidden` [S, H] with a 1 behind each, which the bias is weighed by."""
    return torch.nn.functional.pad(hidden, (0, 1), value=1.0)
