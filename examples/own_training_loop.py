"""Uses the servers of WAFFLE and FedDWA with a plain torch loop.

The server part of an algorithm takes rows and returns rows. It needs no model, no data
and no training loop. The client part stands in this file, as a function for each of the
two algorithms.

Symbols: N clients, P parameters of a model; x a model [P] that the server sends, w a
trained model [P], c a client's control variate [P].
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pflcore.algorithms import Algorithm, Cohort, FedDWA, Tensors, Waffle, apply

N = 6
ROUNDS = 5
LR = 0.1
gen = torch.Generator().manual_seed(0)
model = nn.Linear(8, 4)
labels = torch.randint(4, (N, 40), generator=gen)
inputs = 3 * torch.eye(4, 8)[labels] + torch.randn(N, 40, 8, generator=gen)
# The clients with an odd number name each class by the next label.
labels = (labels + torch.arange(N)[:, None] % 2) % 4


def epoch(
    row: Tensor, x: Tensor, y: Tensor, correction: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """The trained model [P] and the mean gradient [P] of an epoch.

    SGD starts from the model `row`. Each step adds `correction` to the
    gradient.
    """
    grads = []
    for batch, targets in zip(torch.split(x, 10), torch.split(y, 10), strict=True):
        vector_to_parameters(row, model.parameters())
        loss = cross_entropy(model(batch), targets)
        gradients = torch.autograd.grad(loss, tuple(model.parameters()))
        grads.append(parameters_to_vector(gradients))
        row = row - LR * (grads[-1] + correction)
    return row, torch.stack(grads).mean(0)


def waffle(down: Tensors, c: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
    """The client's new control variate, and its upload.

    The correction of a step is the server's control variate minus the client's.
    """
    w, mean_grad = epoch(down["x"], x, y, down["c"] - c)
    return mean_grad, {"delta": w - down["x"], "control": mean_grad}


def feddwa(down: Tensors, c: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
    """The client's unused state, and its upload.

    The upload is the trained model and the model after one more epoch.
    """
    w, _ = epoch(down["x"], x, y)
    return c, {"w": w, "g": epoch(w, x, y)[0]}


def play(
    rule: Algorithm,
    client: Callable[[Tensors, Tensor, Tensor, Tensor], tuple[Tensor, Tensors]],
) -> tuple[Tensor, Tensors]:
    """The clients' models [N, P] and the last round's report.

    Args:
        rule: the server part of an algorithm
        client: the client part. It takes the received tensors, the client's state, its
            inputs and its labels. It returns the new state and the upload.
    """
    x0 = parameters_to_vector(model.parameters()).detach()
    state = rule.init(x0, N)
    controls = [torch.zeros_like(x0)] * N
    for round in range(1, ROUNDS + 1):
        cohort = Cohort(torch.arange(N), torch.full((N,), 40), N, round, ROUNDS)
        down = rule.send(state, cohort)
        uploads = []
        for i in range(N):
            received = {key: rows[i] for key, rows in down.items()}
            controls[i], upload = client(received, controls[i], inputs[i], labels[i])
            uploads.append(upload)
        # The server takes one tensor of each name, with a row for each client.
        up = {key: torch.stack([u[key] for u in uploads]) for key in uploads[0]}
        changes, mix = rule.update(state, up, cohort)
        state = apply(state, changes)
    return rule.send(state, cohort)["x"], rule.report(state, mix, cohort)


if __name__ == "__main__":
    _, target = play(Waffle(target=0), waffle)
    # The weights of the clients' updates in the model of client 0.
    print("waffle:", target["weights"])
    models, mixed = play(FedDWA(k=3), feddwa)
    # Row i holds the clients whose models are mixed for client i.
    print("feddwa:", mixed["index"])
