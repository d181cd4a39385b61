"""Means of each column without its numbers that are far out.

- `trimmed_mean` leaves out the least and largest numbers. The median is the trimmed
  mean that leaves the one or two numbers in the middle.
- `mean_around_median` takes the numbers that are nearest to the median.

The kernels read the rows once and sort all columns by one sorting network; columns of
more than 8,192 rows one by one.

Symbols: N rows; P columns; f numbers that are left out at either end of a column.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pflcore.check import reject

from ._check import check_tensor, is_int
from ._library import call_op, define, in_forward_ad, lib, warn_of_references

# Columns that the reference sorts together, so that their block stays in a CPU's cache.
SORT_BLOCK_COLUMNS = 1 << 14
# Numbers that are summed before their sum is added to the total.
SUM_CHUNK = 16


def trimmed_mean(
    rows: Tensor,  # [N, P]
    removed: int,
) -> Tensor:  # [P]
    """The mean of each column without its `removed` least and largest numbers.

    With `removed = (N - 1) // 2` it is the median: the number in the middle, or the
    mean of the two in the middle where N is even. Yin et al. 2018, Definitions 1 and 2.

    - A column with a NaN gives NaN. Infinities are numbers like others: those that are
      left out do not matter.
    - Sums are float64 for float64 rows and float32 otherwise. They begin with the least
      number; each 16 numbers are added up before their sum is added to the total.
    - The gradient goes to the rows whose numbers were averaged. Of equal numbers, that
      of the earlier row counts as smaller.

    Raises TypeError for a wrong type or dtype, and ValueError where `removed` leaves no
    number.

    Args:
        rows: Rows in float32, float64, float16 or bfloat16, with any row stride.
        removed: f, the count of numbers that are left out at either end of a column.

    Returns:
        The means in the dtype of `rows`.
    """
    op = "trimmed_mean"
    _check_rows_and_count(op, rows, "removed", removed)
    n = rows.shape[0]
    if not 0 <= removed < (n + 1) // 2:
        expected = f"0 to {(n - 1) // 2}, so that a number of {n} rows is left"
        reject(f"{op}(removed)", expected, removed)
    return _call(_trimmed_mean, trimmed_mean_reference, trimmed_places, rows, removed)


def mean_around_median(
    rows: Tensor,  # [N, P]
    kept: int,
) -> Tensor:  # [P]
    """The mean of the `kept` numbers of each column that are nearest to its median.

    It is the mean around the median of Xie et al. 2018. The median of an even number of
    numbers is the mean of the two in the middle; it is not rounded. Of two equally near
    numbers the smaller one is taken.

    - A column with a NaN, or with -inf and inf in the middle, gives NaN. Infinities are
      numbers like others.
    - From an infinite median all other numbers are equally far. Of these, the ones next
      to it in order are taken.
    - Sums are float64 for float64 rows and float32 otherwise. They begin with the least
      number, and every 16 places of the sorted column their sum is added to the total.
    - The gradient goes to the rows whose numbers were averaged, which may be any of
      equal ones.

    Raises TypeError for a wrong type or dtype, and ValueError for a `kept` that is not
    1 to N.

    Args:
        rows: Rows in float32, float64, float16 or bfloat16, with any row stride.
        kept: The count of numbers of a column that are averaged.

    Returns:
        The means in the dtype of `rows`.
    """
    op = "mean_around_median"
    _check_rows_and_count(op, rows, "kept", kept)
    n = rows.shape[0]
    if not 1 <= kept <= n:
        reject(f"{op}(kept)", f"1 to {n}, the number of rows", kept)
    return _call(
        _mean_around_median, mean_around_median_reference, nearest_places, rows, kept
    )


def _check_rows_and_count(op: str, rows: Tensor, name: str, count: Any) -> None:
    """Checks the rows, and that `count`, the argument `name`, is a whole number."""
    check_tensor(op, "rows", rows, "[N, P]")
    if type(count) is not int and not is_int(count):
        reject(f"{op}({name})", "a whole number", count, error=TypeError)
    if rows.shape[0] == 0:
        reject(f"{op}(rows)", "at least one row", rows)


# The numbers that are averaged, [N, P], and how many of a column they are.
Places = Callable[[Tensor, int], tuple[Tensor, int]]


def _call(
    op: Callable[..., Tensor],
    reference: Callable[[Tensor, int], Tensor],
    places: Places,
    rows: Tensor,
    count: int,
) -> Tensor:
    """The op's result on checked arguments."""
    if not isinstance(count, int | torch.SymInt):
        count = int(count)  # numpy's whole numbers are none for torch
    warn_of_references()
    if in_forward_ad():
        return _plain_mean(reference, places, rows, count)
    return call_op(op, rows, count)


def _plain_mean(
    reference: Callable[[Tensor, int], Tensor],
    places: Places,
    rows: Tensor,
    count: int,
) -> Tensor:
    """The reference's result by operations that support forward mode.

    Its derivative is that of the numbers that were averaged. The reference's own would
    be shared among equal numbers.
    """
    fixed = rows.detach()
    value = reference(fixed, count)
    averaged, taken = places(fixed, count)
    mean = torch.where(averaged, _widened(rows), 0.0).sum(0) / taken
    change = (mean - mean.detach()).to(rows.dtype)
    return torch.where(value.isfinite(), value + change, value)


def _widened(rows: Tensor) -> Tensor:
    """The rows in the dtype of their sums."""
    return rows if rows.dtype is torch.float64 else rows.float()


def sorting_network(n: int) -> Iterator[tuple[int, int]]:
    """Pairs of positions that, put in order one by one, sort n numbers.

    This is Batcher's odd-even merge sort (1968).
    """
    p = k = 1
    while p < n:
        for j in range(k % p, n - k, 2 * k):
            for i in range(j, min(j + k, n - k)):
                if i // (2 * p) == (i + k) // (2 * p):
                    yield i, i + k
        k //= 2
        if not k:
            p = k = 2 * p


def sort_columns(rows: Tensor) -> list[Tensor]:
    """The rows [N, P] with each column sorted; one with a NaN becomes NaN.

    For few rows, `torch.sort` takes four times as long.
    """
    ordered = list(rows)
    for i, j in sorting_network(len(ordered)):
        low = torch.minimum(ordered[i], ordered[j])
        high = torch.maximum(ordered[i], ordered[j])
        ordered[i] = low
        ordered[j] = high
    return ordered


def sorted_blocks(rows: Tensor) -> Iterator[Tensor]:
    """The sorted columns in blocks [N, some of P], wide enough to sum them.

    They are float64 where `rows` are, and float32 otherwise.
    """
    width = SORT_BLOCK_COLUMNS if rows.device.type == "cpu" else max(1, rows.shape[1])
    wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
    for block in rows.split(width, 1):
        yield torch.stack(sort_columns(block)).to(wide)


def mean_in_chunks(
    rows: Tensor,  # [n, P]
    count: int,
) -> Tensor:  # [P]
    """The sum of the rows over `count`, one row after another, in chunks."""
    total = rows.new_zeros(rows.shape[1])
    for chunk in rows.split(SUM_CHUNK):
        chunk_sum = torch.zeros_like(total)
        for row in chunk:
            chunk_sum = chunk_sum + row
        total = total + chunk_sum
    # A tensor: on a GPU torch multiplies by the reciprocal of a number.
    return total / total.new_full((), count)


def trimmed_mean_reference(
    rows: Tensor,  # [N, P]
    removed: int,
) -> Tensor:  # [P]
    """The mean without the least and largest numbers: the specification of the op."""
    last = rows.shape[0] - removed
    means = [
        mean_in_chunks(ordered[removed:last], last - removed)
        for ordered in sorted_blocks(rows)
    ]
    return torch.cat(means).to(rows.dtype)


def middle_of_sorted(ordered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two numbers in the middle of sorted columns [N, P], and their mean, [P] each.

    The two are one where N is odd. An infinite mean takes the place of both.
    """
    n = len(ordered)
    low, high = ordered[(n - 1) // 2], ordered[n // 2]
    # The halves, because a sum of large numbers would be infinite.
    median = low * 0.5 + high * 0.5
    is_infinite = median.isinf()
    low = torch.where(is_infinite, median, low)
    high = torch.where(is_infinite, median, high)
    return low, high, median


def are_nearest(
    ordered: Tensor,  # [N, P]
    kept: int,
) -> Tensor:  # [N, P]
    """True where a number of a sorted column is one of the `kept` nearest its median.

    These are neighbours. Their first place moves up by one as long as the number that
    is gained is not above the lower one in the middle, or is less above the higher one
    than the number that is lost is below the lower one. The median itself would be
    rounded, and could be nearer to one of two equally near numbers.
    """
    n = len(ordered)
    low, high, _ = middle_of_sorted(ordered)
    lost, gained = ordered[: n - kept], ordered[kept:]
    first = ((gained <= low) | (low - lost > gained - high)).sum(0)
    place = torch.arange(n, device=ordered.device)[:, None]
    return (place >= first) & (place < first + kept)


def mean_around_median_reference(
    rows: Tensor,  # [N, P]
    kept: int,
) -> Tensor:  # [P]
    """The mean of the numbers nearest the median: the specification of the op."""
    means = []
    for ordered in sorted_blocks(rows):
        nearest = torch.where(are_nearest(ordered, kept), ordered, 0.0)
        *_, median = middle_of_sorted(ordered)
        mean = mean_in_chunks(nearest, kept)
        means.append(torch.where(median.isnan(), median, mean))
    return torch.cat(means).to(rows.dtype)


def _fake(
    rows: Tensor,  # [N, P]
    count: int,
) -> Tensor:  # [P]
    """The shape and dtype of the result."""
    return rows.new_empty(rows.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves what the backward pass needs."""
    rows, ctx.count = inputs
    ctx.save_for_backward(rows)


def trimmed_places(rows: Tensor, removed: int) -> tuple[Tensor, int]:
    """The numbers that `trimmed_mean` averages, and how many of a column they are."""
    n = rows.shape[0]
    # The place of each number in the order of its column, [N, P].
    place = rows.argsort(dim=0, stable=True).argsort(dim=0)
    return (place >= removed) & (place < n - removed), n - 2 * removed


def nearest_places(rows: Tensor, kept: int) -> tuple[Tensor, int]:
    """The numbers that `mean_around_median` averages, and how many they are."""
    ordered = _widened(rows).sort(dim=0, stable=True)
    nearest = are_nearest(ordered.values, kept)
    return torch.zeros_like(nearest).scatter(0, ordered.indices, nearest), kept


def _backward(
    places: Places,
    ctx: Any,
    grad: Tensor,  # [P]
) -> tuple[Tensor | None, ...]:
    """The gradient of the rows: equal parts for the numbers that were averaged."""
    (rows,) = ctx.saved_tensors
    averaged, taken = places(rows, ctx.count)
    return torch.where(averaged, grad / taken, 0.0), None


_trimmed_mean = define(
    "trimmed_mean(Tensor rows, int removed) -> Tensor", trimmed_mean_reference, _fake
)
torch.library.register_autograd(
    "pflcore::trimmed_mean",
    partial(_backward, trimmed_places),
    setup_context=_setup,
    lib=lib,
)
_mean_around_median = define(
    "mean_around_median(Tensor rows, int kept) -> Tensor",
    mean_around_median_reference,
    _fake,
)
torch.library.register_autograd(
    "pflcore::mean_around_median",
    partial(_backward, nearest_places),
    setup_context=_setup,
    lib=lib,
)
