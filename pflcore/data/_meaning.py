"""The meaning of targets and inputs: one table for every reader.

It is applied to all clients at once. A client's own samples never decide it: one client
may have whole numbers, one class or no -1 by chance. Nor are labels changed that a
caller hands over: a loss of the caller's own may count on them.

"Objects" are values of Python that have a type (arrays, tensors, lists, data frames).
"Files" are CSV, JSON, npz and .mat, whose numbers often have lost their type.

Symbols: n samples, of T steps each where they have steps.

targets                    of objects                     of files
-------------------------  -----------------------------  -----------------------------
int, bool                  labels                         labels
floats, all of them whole  numbers; labels if `classes`   labels, where one a sample
floats                     numbers                        numbers
-1 and 1, nothing else     refused                        labels 0 and 1
labels [n, 1]              labels [n] if x has no steps   labels [n] if x has no steps
-100 in [n, T]             left out of losses             left out of losses
words, dates, complex      refused                        refused

`classes` is the number of classes. Where it is to be inferred, it is the largest label
plus one, and more classes than labels are refused: the numbers are prices, years or
ids. With `classes=None` all targets are numbers, which are predicted by regression.
With the names of the classes their number is known, and words among the targets of
objects are labels.

Inputs become:

- floats, bool: floats of one dtype
- int16, int32, int64: int64, exactly (tokens); in JSON where all are written as
  integers
- whole numbers in a CSV: floats, as its columns have no type
- floats of one client and integers of another: floats, and refused where a whole
  number would be rounded
- uint8 and other bytes: refused; images are to be floats, and normalized
- words, dates, complex: refused
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from pflcore.check import Expectation, PositiveInt, reject, require
from pflcore.data._inputs import IGNORED_LABEL


def _are_class_names(value: Any) -> bool:
    """True for a list of different strings, at least one."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(isinstance(name, str) for name in value):
        return False
    return 0 < len(value) == len(set(value))


ClassNames = Annotated[
    Sequence[str],
    Expectation("a list of the classes' names, each once", _are_class_names),
]
Classes = PositiveInt | Literal["infer"] | ClassNames | None
MAX_EXACT_FLOAT32 = 2**24  # whole numbers up to here are exact in float32
# Larger whole numbers in floats are clamped to this before they become int64, which
# could not hold all of them. No number of classes is as large, so they are refused.
MAX_LABEL = 2**62


class ReaderOptions(NamedTuple):
    """Options that say which column of the table a reader uses.

    Attributes:
        classes: number of classes, or their names; "infer" for the largest label plus
            one; None for numbers to predict
        dtype: dtype that floats are converted to; None keeps the dtype they have
        from_files: True for the column "of files", False for "of objects"
        single_client: True for one client of a federation whose other clients are not
            seen
        columns: order of the columns of tables; None for that of the first table
        ignored_label: label that counts in nothing, and becomes `IGNORED_LABEL`; None
            for no other label than that
    """

    classes: Classes = "infer"
    dtype: torch.dtype | None = torch.float32
    from_files: bool = False
    single_client: bool = False
    columns: tuple[str, ...] | None = None
    ignored_label: int | None = None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, where `classes` has them."""
        classes = self.classes
        has_names = isinstance(classes, Sequence) and not isinstance(classes, str)
        return tuple(classes) if has_names else None  # type: ignore[arg-type]

    @property
    def num_classes(self) -> int | Literal["infer"] | None:
        """`classes`, with the number of classes in place of their names."""
        names = self.class_names
        return self.classes if names is None else len(names)  # type: ignore[return-value]


def interpret_targets(
    y: Tensor,
    reader: ReaderOptions,
    float_dtype: torch.dtype,
    *,
    single_step: bool = False,
    name: str = "y",
) -> tuple[Tensor, int | None]:
    """The targets [n, ...] by the table, and their number of classes.

    Numbers get the reader's dtype; where it has none, floats stay, and whole numbers
    become `float_dtype`. Raises ValueError where labels are negative or have more
    classes than there are labels.

    Args:
        y: the targets of all clients, as they were read
        reader: options that say which column of the table counts
        float_dtype: dtype of whole numbers that become floats, where the reader has
            none
        single_step: True where labels [n, 1] are those of sequences of one step
        name: name of the targets in errors
    """
    is_column = y.dim() == 2 and y.shape[1] == 1 and not single_step
    one_per_sample = y.dim() == 1 or is_column
    num_classes = reader.num_classes
    infers_classes = num_classes == "infer"
    has_untyped_numbers = reader.from_files or not infers_classes
    may_be_labels = num_classes is not None and has_untyped_numbers
    if may_be_labels and one_per_sample and _are_whole_numbers(y):
        y = y.clamp(-MAX_LABEL, MAX_LABEL).long()
    if reader.ignored_label is not None:
        expected = "None, as these targets are numbers to predict"
        are_labels = num_classes is not None and not y.is_floating_point()
        require(are_labels, "ignored_label", expected, reader.ignored_label)
        y = y.masked_fill(y == reader.ignored_label, IGNORED_LABEL)
    if num_classes is None or y.is_floating_point():
        stays = y.is_floating_point() and reader.dtype is None
        numbers = y if stays else y.to(reader.dtype or float_dtype)
        # Floats with a number of classes are refused later, by the checks of the pool.
        return numbers, None if num_classes == "infer" else num_classes
    if is_column:
        y = y[:, 0]
    if reader.from_files and num_classes in ("infer", 2) and _are_signs(y):
        signs = (y > 0).long()
        return signs.where(y != IGNORED_LABEL, IGNORED_LABEL), 2
    if num_classes != "infer":
        return y, num_classes
    return y, _count_classes(y, reader, name)


def _are_whole_numbers(y: Tensor) -> bool:
    """True where all numbers are finite and whole."""
    return bool((y.isfinite() & (y == y.round())).all())


def _are_signs(y: Tensor) -> bool:
    """True for targets [n] that are -1 and 1, and nothing else."""
    if y.dim() != 1 or not y.numel():
        return False
    y = y[y != IGNORED_LABEL]
    if not y.numel():
        return False
    lowest, highest = y.aminmax()
    has_zero = bool((y == 0).any())
    return int(lowest) == -1 and int(highest) == 1 and not has_zero


def _count_classes(y: Tensor, reader: ReaderOptions, name: str) -> int:
    """The largest label plus one.

    Raises ValueError where that is more than the number of labels.
    """
    labels = y[y != IGNORED_LABEL]
    count = labels.numel()
    low = int(labels.min()) if count else 0
    high = int(labels.max()) if count else 0
    numbers = "classes=None (--classes None or --loss squared) for numbers to predict"
    if reader.from_files:
        require(low >= 0, name, f"labels that count from 0, or {numbers}", [low, high])
    if not reader.single_client and high >= max(count, 1):
        remedy = ""
        if high < MAX_LABEL:
            num = high + 1
            remedy = f" or classes={num} (--classes {num}) for so many classes,"
        expected = f"labels below {count}, the number of samples,{remedy} or {numbers}"
        reject(name, expected, high)
    return max(high + 1, 1)


def merge_inputs(
    parts: Sequence[Tensor], names: Sequence[str], float_dtype: torch.dtype
) -> Tensor:
    """All clients' inputs [n, ...] as one tensor: int64 where all are, else floats.

    Raises ValueError where a whole number of one client would be rounded because
    another client has floats.

    Args:
        parts: inputs of each client and split
        names: their clients, for errors
        float_dtype: dtype of the floats
    """
    if len({part.is_floating_point() for part in parts}) > 1:
        expected = (
            "floats, as other clients have, or whole numbers within "
            f"+-{MAX_EXACT_FLOAT32:,}"
        )
        for part, name in zip(parts, names, strict=True):
            if not part.is_floating_point():
                fits = bool((part.abs() <= MAX_EXACT_FLOAT32).all())
                require(fits, f"x of {name}", expected, part)
        parts = [part.to(float_dtype) for part in parts]
    return torch.cat(list(parts))
