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


def pfedhn(
    clients,
    cohorts,
    start,
    embedding_size,
    hidden_size,
    hidden_layers,
    server_lr,
    embedding_lr,
    weighting="samples",
) -> Iterator[dict]:
    """pFedHN (Shamsian et al. 2021), with the mean of a cohort's steps.

    All parameters of the hypernetwork move along the slope of `sum_i p_i delta_i .
    h(v_i)`, and v_i along that of `delta_i . h(v_i)`.
    """
    given = start["server"]
    phi, output, v = (np.array(given[key]) for key in ("phi", "output", "v"))

    def model(theta, embedding):
        """h of all parameters in one vector, phi first."""
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

    for cohort in cohorts:
        theta = np.concatenate([phi, output.ravel()])
        step = np.zeros_like(theta)
        new_v = v.copy()
        for i, share in zip(cohort, clients.shares(cohort, weighting), strict=True):
            x = model(theta, v[i])
            delta = clients.train(i, x) - x
            step += share * slope_of(lambda t, d=delta, i=i: d @ model(t, v[i]), theta)
            slope = slope_of(lambda e, d=delta, t=theta: d @ model(t, e), v[i])
            new_v[i] = v[i] + embedding_lr * slope
        theta = theta + server_lr * step
        v = new_v
        phi, output = theta[: len(phi)], theta[len(phi) :].reshape(output.shape)
        yield {"server": {"phi": phi, "output": output, "v": v}}


def results() -> Iterator[Result]:
    """The numbers of this family in rounds.json."""
    yield from round_results({"pfedhn": pfedhn}, KINDS)


if __name__ == "__main__":
    main(results())
