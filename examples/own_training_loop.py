"""Somebody else's training loop, in plain torch, with the server's rules of WAFFLE and
FedDWA.

A server's rule takes rows and gives rows: it knows no model, no data and no training
loop. What a client receives names the term that its steps add: WAFFLE's corrections are
`down["c"]` less its own.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pflcore.algorithms import Algorithm, Cohort, FedDWA, Tensors, Waffle, apply

# what a client received, what it keeps, its inputs and labels -> what it keeps, sends
Client = Callable[[Tensors, Tensor, Tensor, Tensor], tuple[Tensor, Tensors]]
N, ROUNDS, LR = 6, 5, 0.1
gen, model = torch.Generator().manual_seed(0), nn.Linear(8, 4)
labels = torch.randint(4, (N, 40), generator=gen)
inputs = 3 * torch.eye(4, 8)[labels] + torch.randn(N, 40, 8, generator=gen)
# odd clients disagree with even ones
labels = (labels + torch.arange(N)[:, None] % 2) % 4


def epoch(
    row: Tensor, x: Tensor, y: Tensor, correction: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """One epoch of SGD from `row` [P]: the trained row, and the mean gradient [P]."""
    grads = []
    for batch, targets in zip(torch.split(x, 10), torch.split(y, 10), strict=True):
        vector_to_parameters(row, model.parameters())
        loss = cross_entropy(model(batch), targets)
        grads.append(
            parameters_to_vector(torch.autograd.grad(loss, tuple(model.parameters())))
        )
        row = row - LR * (grads[-1] + correction)
    return row, torch.stack(grads).mean(0)


def waffle(down: Tensors, c: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
    """A client's new control variate, and what it uploads."""
    w, new = epoch(down["x"], x, y, down["c"] - c)
    return new, {"delta": w - down["x"], "control": new}


def feddwa(down: Tensors, c: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
    """What it uploads: the trained model, and where one more epoch would lead."""
    w, _ = epoch(down["x"], x, y)
    return c, {"w": w, "g": epoch(w, x, y)[0]}


def play(rule: Algorithm, client: Client) -> tuple[Tensor, Tensors]:
    """Each client's model [N, P] after the rounds, and what the rule reports of the
    last one: the mixing weights."""
    x0 = parameters_to_vector(model.parameters()).detach()
    state, own = rule.init(x0, N), [torch.zeros_like(x0)] * N
    for round in range(1, ROUNDS + 1):
        cohort = Cohort(torch.arange(N), torch.full((N,), 40), N, round, ROUNDS)
        down = rule.send(state, cohort)
        each = [{k: v[i] for k, v in down.items()} for i in range(N)]
        done = [client(each[i], own[i], inputs[i], labels[i]) for i in range(N)]
        own = [c for c, _ in done]
        up = {k: torch.stack([sent[k] for _, sent in done]) for k in done[0][1]}
        changes, mix = rule.update(state, up, cohort)
        state = apply(state, changes)
    return rule.send(state, cohort)["x"], rule.report(state, mix, cohort)


if __name__ == "__main__":
    _, target = play(Waffle(target=0), waffle)
    # of the clients' updates in the model of client 0
    print("waffle:", target["weights"])
    models, mixed = play(FedDWA(k=3), feddwa)
    print("feddwa:", mixed["index"])  # the clients whose models each one's is made of
