"""Sums by index, and running sums, whose bits a GPU repeats.

On a GPU, torch's `index_add`, `scatter_add` and `cumsum` add in the order in which
threads happen to come. Two runs may then differ in their last bits. `index_put` sorts
by index first, and so has one order. On a CPU all of them add one after another.

Symbols: S the size of a vector, n the values that are added to it; M, N rows and
columns of a matrix, L values that are added to each row; s, F rows and columns of
running sums.
"""

import torch
from torch import Tensor


def index_add(
    base: Tensor,  # [S]
    index: Tensor,  # [n] int64
    values: Tensor,  # [n]
) -> Tensor:  # [S]
    """`base` with each value added at its index."""
    if base.device.type != "cuda":
        return base.index_add(0, index, values)
    return base.index_put((index,), values, accumulate=True)


def scatter_add(
    base: Tensor,  # [M, N]
    index: Tensor,  # [M, L] int64
    values: Tensor,  # [M, L]
) -> Tensor:  # [M, N]
    """`base` with each value added to its row, in the column `index`."""
    if base.device.type != "cuda":
        return base.scatter_add(1, index, values)
    rows = torch.arange(len(base), device=base.device)[:, None]
    return base.index_put((rows, index), values, accumulate=True)


def running_sums(
    values: Tensor,  # [s, F]
) -> Tensor:  # [s, F]
    """The sum of each row up to and with each column."""
    if values.device.type != "cuda":
        return values.cumsum(1)
    # Each turn doubles the number of columns that a sum spans: the sum over `width`
    # columns is added to that over the `width` columns before.
    width = 1
    while width < values.shape[1]:
        wider_sums = values[:, width:] + values[:, :-width]
        values = torch.cat([values[:, :width], wider_sums], 1)
        width *= 2
    return values
