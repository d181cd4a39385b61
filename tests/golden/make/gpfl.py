"""Golden numbers of GPFL.

Symbols: C classes, H features; a row holds a body (weights [H, F] and bias [H] of a
linear layer, then tanh), a head ([C, H] and [C]), two films of the valve (each [H, H]
and three vectors [H]), and the embeddings e [C, H].

Gradients are by complex steps: `f'(x) = Im f(x + i d) / d`, without cancellation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cases import Result, load, main

STEP = 1e-30


def relu(z: np.ndarray) -> np.ndarray:
    """Zero where the real part is negative."""
    return np.where(z.real > 0, z, 0)


def length(z: np.ndarray) -> np.ndarray:
    """Norms of the last axis, for complex steps: no number is conjugated."""
    return np.sqrt((z * z).sum(-1, keepdims=True))


def cross_entropy(scores: np.ndarray, y: np.ndarray) -> complex:
    """The mean over samples of `log sum exp(scores) - scores_y`."""
    chosen = scores[np.arange(len(y)), y]
    return (np.log(np.exp(scores).sum(1)) - chosen).mean()


def turned(valve: list, z: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The features after the valve under the condition c."""
    outputs = []
    for weight, bias, scale, offset in valve:
        hidden = relu(weight @ c + bias)
        hidden = hidden - hidden.mean()
        hidden = hidden / np.sqrt((hidden * hidden).mean() + 1e-5)
        outputs.append(hidden * scale + offset)
    a, b = outputs
    return relu(z * (1 + a) + b)


def pieces(row: np.ndarray, F: int, H: int, C: int) -> list[np.ndarray]:
    """The tensors of a row, in their order."""
    film = [(H, H), (H,), (H,), (H,)]
    shapes = [(H, F), (H,), (C, H), (C,), *film, *film, (C, H)]
    found = []
    first = 0
    for shape in shapes:
        size = int(np.prod(shape))
        found.append(row[first : first + size].reshape(shape))
        first += size
    return found


def loss(row, x, y, frozen, general, personal, lam, mu) -> complex:
    """GPFL's loss of a client on all of its samples."""
    C, H = frozen.shape
    body, bias, head, head_bias, *rest = pieces(row, x.shape[1], H, C)
    valve, e = [rest[:4], rest[4:8]], rest[8]
    z = np.tanh(x @ body.T + bias)
    z_personal = turned(valve, z, personal)
    z_general = turned(valve, z, general)
    cosines = (z_general / length(z_general)) @ (e / length(e)).T
    apart = (z_general - frozen[y]).reshape(-1)
    others = np.concatenate([part.reshape(-1) for part in rest])
    return (
        cross_entropy(z_personal @ head.T + head_bias, y)
        + cross_entropy(cosines, y)
        + lam * length(apart)[0]
        + mu / 2 * (others * others).sum()
    )


def gradient(row: np.ndarray, *fixed) -> np.ndarray:
    """The gradient of the loss, number by number."""
    slope = np.zeros(len(row))
    for k in range(len(row)):
        moved = row.astype(complex)
        moved[k] += STEP * 1j
        slope[k] = loss(moved, *fixed).imag / STEP
    return slope


def rounds(case: dict) -> Iterator[dict]:
    """The server's x and the clients' heads after each round."""
    C, H = np.array(case["embedding"]).shape
    num_body = H * len(case["clients"][0]["x"][0]) + H
    num_head = C * H + C
    x0 = [case["body"], case["valve"], np.ravel(case["embedding"])]
    common = np.concatenate([np.array(part, float) for part in x0])
    heads = np.tile(np.array(case["head"], float), (len(case["clients"]), 1))
    sizes = np.array([len(client["y"]) for client in case["clients"]])
    for cohort in case["cohorts"]:
        trained = []
        frozen = common[-C * H :].reshape(C, H)
        for i in cohort:
            samples = np.array(case["clients"][i]["x"], float)
            y = np.array(case["clients"][i]["y"])
            shares = np.bincount(y, minlength=C) / len(y)
            fixed = (samples, y, frozen, frozen.mean(0), shares @ frozen)
            row = np.concatenate([common[:num_body], heads[i], common[num_body:]])
            for _ in range(case["epochs"]):
                row = row - case["lr"] * gradient(row, *fixed, case["lam"], case["mu"])
            heads[i] = row[num_body : num_body + num_head]
            rest = row[num_body + num_head :]
            trained.append(np.concatenate([row[:num_body], rest]))
        weight = sizes[cohort] / sizes[cohort].sum()
        common = weight @ np.array(trained)
        yield {"x": common.tolist(), "h": heads.tolist()}


def results() -> Iterator[Result]:
    """The numbers of gpfl.json."""
    for i, found in enumerate(rounds(load("gpfl"))):
        for key, value in found.items():
            yield Result("gpfl", ("then", i, key), value)


if __name__ == "__main__":
    main(results())
