"""Synthetic federations with known answers, which ``truth`` holds.

Symbols: N clients (`n` in code), C classes, D features (`dim`); client i has weights
w_i [D]; a and b [N, D] are the curvature and the optimum of quadratics.
"""

from __future__ import annotations

from string import ascii_lowercase
from typing import Annotated, Any

import annotated_types as at
import torch
from torch import Tensor

from pflcore.check import (
    NonNegativeFloat,
    PositiveInt,
    Seed,
    UnitFloat,
    checked,
    require,
)
from pflcore.data._federation import Federation

LetterCount = Annotated[int, at.Interval(ge=2, le=len(ascii_lowercase))]


@checked
def synthetic_linear(
    n: PositiveInt = 10,
    samples: PositiveInt = 60,
    dim: PositiveInt = 5,
    groups: PositiveInt = 2,
    spread: NonNegativeFloat = 0.0,
    noise: NonNegativeFloat = 0.1,
    held_out: PositiveInt = 200,
    seed: Seed = 0,
) -> Federation:
    """Linear regression: y = x . w_i + noise, with normal x.

    Client i belongs to group i mod groups. A client's best possible mean squared error
    is noise^2. ``truth`` holds "optimum" [N, D], the w_i, and "group" [N].

    Args:
        n: number of clients
        samples: training samples of a client
        dim: D, the number of features
        groups: groups of clients; clients of a group have the same w_i up to `spread`
        spread: standard deviation of a client's w_i around that of its group
        noise: standard deviation of the noise
        held_out: test samples of a client
        seed: seeds all draws
    """
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(n) % groups
    samples_of_client = samples + held_out
    group_w = torch.randn(groups, dim, generator=generator)
    w = group_w[group] + spread * torch.randn(n, dim, generator=generator)  # [N, D]
    x = torch.empty(n, samples_of_client, dim)
    y = torch.empty(n, samples_of_client)
    for i in range(n):
        x[i] = torch.randn(samples_of_client, dim, generator=generator)
        errors = torch.randn(samples_of_client, generator=generator)
        y[i] = x[i] @ w[i] + noise * errors
    x = x.flatten(0, 1)
    y = y.flatten()
    truth = {"optimum": w, "group": group}
    return _equal_clients(x, y, n, samples, name="synthetic_linear", truth=truth)


def synthetic_quadratic(
    curvature: Any = ((1.0,), (2.0,), (0.5,)), optimum: Any = ((1.0,), (-2.0,), (0.5,))
) -> Federation:
    """Linear regression without bias, in which a client's loss is a quadratic.

    The loss of client i is exactly sum_j a_ij (w_j - b_ij)^2, of the curvature a and
    the optimum b, both [N, D]. (Half of it is the usual quadratic.) The client has D
    samples, x = sqrt(D a_ij) e_j and y = sqrt(D a_ij) b_ij: the mean of (x . w - y)^2
    over them is that sum. One full batch gives the exact gradient. All numbers are
    float64. A client is tested on its training samples.

    ``truth`` holds "curvature" and "optimum", [N, D] each. The optimum of the clients'
    mean loss is sum_i a_i b_i / sum_i a_i.

    Args:
        curvature: a [N, D], numbers above 0
        optimum: b [N, D]
    """
    a = torch.as_tensor(curvature, dtype=torch.float64)
    b = torch.as_tensor(optimum, dtype=torch.float64)
    fits = a.dim() == 2 and a.shape == b.shape and bool((a > 0).all())
    expected = f"numbers above 0 [N, D] as the optimum, {list(b.shape)}"
    require(fits, "curvature", expected, a)
    n, dim = a.shape
    root = (a * dim).sqrt()
    x = torch.diag_embed(root)[:, None]  # [N, 1, D, D]
    y = (root * b)[:, None]  # [N, 1, D]
    # Every client has its samples twice: to train on, and to be tested on.
    x = torch.cat([x, x], 1).flatten(0, 2)
    y = torch.cat([y, y], 1).flatten(0, 2)
    truth = {"curvature": a, "optimum": b}
    return _equal_clients(x, y, n, dim, name="synthetic_quadratic", truth=truth)


@checked
def synthetic_clusters(
    n: PositiveInt = 10,
    groups: PositiveInt = 2,
    samples: PositiveInt = 60,
    classes: PositiveInt = 4,
    dim: PositiveInt = 8,
    separation: NonNegativeFloat = 3.0,
    held_out: PositiveInt = 100,
    seed: Seed = 0,
) -> Federation:
    """Gaussian clouds, one per class, which groups of clients label differently.

    All clients have the same clouds, but one model cannot serve two groups. Client i
    belongs to group i mod groups. Group g labels cloud c with ``(c + g) mod classes``
    (``relabel``). A model that ignores the groups has an accuracy of about 1 / groups
    at best. ``truth`` holds "group" [N] and "centre" [N, C, D], which is the same for
    all clients.

    Args:
        n: number of clients
        groups: groups of clients, at most as many as there are classes
        samples: training samples of a client
        classes: C, the number of clouds and of labels
        dim: D, the number of features
        separation: radius of the sphere on which the clouds' centres are drawn; clouds
            have unit variance
        held_out: test samples of a client
        seed: seeds all draws
    """
    require(groups <= classes, "groups", f"at most the {classes} classes", groups)
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(classes, dim, generator=generator)
    centre = torch.nn.functional.normalize(directions, dim=1) * separation
    y = torch.arange(n * (samples + held_out)) % classes
    x = centre[y] + torch.randn(len(y), dim, generator=generator)
    group = torch.arange(n) % groups
    relabel = (torch.arange(classes)[None] + group[:, None]) % classes
    return _equal_clients(
        x,
        y,
        n,
        samples,
        name="synthetic_clusters",
        classes=classes,
        relabel=relabel,
        truth={"group": group, "centre": centre.expand(n, -1, -1)},
    )


@checked
def synthetic_text(
    n: PositiveInt = 10,
    groups: PositiveInt = 2,
    samples: PositiveInt = 40,
    length: PositiveInt = 20,
    letters: LetterCount = 8,
    surprise: UnitFloat = 0.2,
    held_out: PositiveInt = 40,
    seed: Seed = 0,
) -> Federation:
    """Made-up text: the next letter, for each of T letters.

    In each group one letter calls for the next: with the probability 1 - surprise it
    is the letter that the group's random permutation gives, and else any letter, with
    equal probabilities. Client i belongs to group i mod groups. The best possible
    accuracy is 1 - surprise + surprise / letters for a client, while one model for two
    groups can only guess. x are tokens int64 [n, T], y the letters that follow [n, T].

    ``truth`` holds "group" [N] and "transition" [N, C, C], the probability of each
    letter after each letter.

    Args:
        n: number of clients
        groups: groups of clients; clients of a group have the same transitions
        samples: training samples of a client
        length: T, letters of a sample
        letters: C, the number of different letters, at most 26
        surprise: share of letters that are drawn at random
        held_out: test samples of a client
        seed: seeds all draws
    """
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(n) % groups
    orders = [torch.randperm(letters, generator=generator) for _ in range(groups)]
    successor = torch.stack(orders)[group]  # [N, C]
    certain = torch.nn.functional.one_hot(successor, letters).float()
    transition = (1 - surprise) * certain + surprise / letters
    size = samples + held_out
    text = torch.empty(n, size, length + 1, dtype=torch.int64)
    # Client after client, so that further clients change no text.
    for i in range(n):
        text[i, :, 0] = torch.randint(letters, (size,), generator=generator)
        for step in range(length):
            random = torch.randint(letters, (size,), generator=generator)
            is_random = torch.rand(size, generator=generator) < surprise
            following = successor[i, text[i, :, step]]
            text[i, :, step + 1] = torch.where(is_random, random, following)
    text = text.flatten(0, 1)
    return _equal_clients(
        text[:, :-1],
        text[:, 1:],
        n,
        samples,
        name="synthetic_text",
        classes=letters,
        class_names=tuple(ascii_lowercase[:letters]),
        truth={"group": group, "transition": transition},
    )


def _equal_clients(
    x: Tensor, y: Tensor, n: int, num_train: int, **options: Any
) -> Federation:
    """A federation of clients with equally many samples.

    The samples x and y are in the order of the clients. The first `num_train` samples
    of a client are for training, the others for testing.
    """
    rows = torch.arange(len(x)).view(n, -1)
    index = {"train": list(rows[:, :num_train]), "test": list(rows[:, num_train:])}
    return Federation(x, y, index, **options)
