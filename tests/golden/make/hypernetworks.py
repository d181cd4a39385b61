"""Golden numbers of pFedHN.

Symbols: x_i = h(v_i) is client i's model; phi are the parameters of the hypernetwork's
hidden layers, layer by layer the weight, row by row, and the bias; output are the
weight and the bias of its last layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cases import Result, main, round_results
from clients import KINDS, slope_of

# The order of the steps in each round, as the package draws it for seed 0: positions in
# the cohort.
ORDERS = ([0, 2, 1], [1, 0])


def pfedhn(
    clients,
    cohorts,
    start,
    embedding_size,
    hidden_size,
    hidden_layers,
    server_lr,
    fixed_step=False,
) -> Iterator[dict]:
    """Rounds of pFedHN (Shamsian et al. 2021), with a step for each client in turn.

    All parameters of the hypernetwork and v_i move along the slope of `r_i . h(v_i)`,
    where r_i leads from h(v_i) to the model that client i trained. The step's size is
    `server_lr |r_i|^2` over the squared length of the slope, or a fixed `server_lr`.
    """
    given = start["server"]
    phi, output, v = (np.array(given[key]) for key in ("phi", "output", "v"))

    def model(theta, embedding):
        """The output of h, whose parameters are one vector, phi first."""
        a = embedding
        at = 0
        for _ in range(hidden_layers):
            weight = theta[at : at + hidden_size * len(a)].reshape(hidden_size, -1)
            at += weight.size
            z = weight @ a + theta[at : at + hidden_size]
            at += hidden_size
            a = np.where(z.real > 0, z, 0)
        last = theta[at:].reshape(output.shape)
        return a @ last[:-1] + last[-1]

    theta = np.concatenate([phi, output.ravel()])
    v = v.copy()
    for cohort, order in zip(cohorts, ORDERS, strict=True):
        trained = {i: clients.train(i, model(theta, v[i])) for i in cohort}
        for i in (cohort[position] for position in order):
            r = trained[i] - model(theta, v[i])
            q = len(theta)
            start = np.concatenate([theta, v[i]])
            slope = slope_of(lambda e, r=r, q=q: r @ model(e[:q], e[q:]), start)
            size = server_lr if fixed_step else server_lr * (r @ r) / (slope @ slope)
            moved = start + size * slope
            theta, v[i] = moved[:q], moved[q:]
        phi, output = theta[: len(phi)], theta[len(phi) :].reshape(output.shape)
        yield {"server": {"phi": phi, "output": output, "v": v.copy()}}


def results() -> Iterator[Result]:
    """The numbers of this family in rounds.json."""
    yield from round_results({"pfedhn": pfedhn}, KINDS)


if __name__ == "__main__":
    main(results())
