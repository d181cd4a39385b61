"""The meaning of targets and inputs: one table for every reader.

It is applied to all clients, splits and files at once. No part of the data ever decides
it alone: one client may have whole numbers, one class or no -1 by chance, and the same
number may name another class there. So labels that have names are joined by name.
Labels are not changed that a caller hands over without names: a loss of the caller's
own may count on them.

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
words, labels with names   labels, by name                labels, by name
dates, complex             refused                        refused

`classes` is the number of classes. Where it is to be inferred, it is the number of
names, or else the largest label plus one, and more classes than labels are refused: the
numbers are prices, years or ids. With `classes=None` all targets are numbers, which are
predicted by regression.

Names come from words among the targets, from the folders of an ImageFolder, and from
the features of a Hugging Face Dataset. `classes=["no", "yes"]` says their order.
Without it the order is that of the parts, where all have the same list, and else the
alphabetical one.

Inputs become:

- floats, bool: floats of one dtype
- int16, int32, int64: int64, exactly (tokens); in JSON where all are written as
  integers
- whole numbers in a CSV: floats, as its columns have no type
- floats of one client and integers of another: floats, and refused where a whole
  number would be rounded
- pictures of PIL: floats [C, H, W] from 0 to 1
- uint8 and other bytes: refused; images are to be floats, and normalized
- words, dates, complex: refused
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Expectation, PositiveInt, reject, require
from pflcore.data._inputs import IGNORED_LABEL, to_tensor_or_bool


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
SampleKey = str | int
VOID_BYTE = 255  # the usual label of a pixel that counts in nothing
MAX_EXACT_FLOAT32 = 2**24  # whole numbers up to here are exact in float32
# Larger whole numbers in floats are clamped to this before they become int64, which
# could not hold all of them. No number of classes is as large, so they are refused.
MAX_LABEL = 2**62


class SampleKeys(NamedTuple):
    """The parts of a sample that are its input and its target.

    Attributes:
        x: name or position of the input; of several, the input is a dict of them
        y: name or position of the target
    """

    x: SampleKey | Sequence[SampleKey]
    y: SampleKey

    @property
    def inputs(self) -> list[SampleKey]:
        """The names or positions of all parts of the input."""
        return [self.x] if isinstance(self.x, str | int) else list(self.x)


class ReaderOptions(NamedTuple):
    """Options that say which column of the table a reader uses.

    Attributes:
        classes: number of classes, or their names; "infer" for the number of names, or
            the largest label plus one; None for numbers to predict
        dtype: dtype that floats are converted to; None keeps the dtype they have
        from_files: True for the column "of files", False for "of objects"
        single_client: True for one client of a federation whose other clients are not
            seen
        ignored_label: label that counts in nothing, and becomes `IGNORED_LABEL`; None
            for no other label than that
        keys: the parts of each sample that are its input and its target; None where
            samples are pairs
    """

    classes: Classes = "infer"
    dtype: torch.dtype | None = torch.float32
    from_files: bool = False
    single_client: bool = False
    ignored_label: int | None = None
    keys: SampleKeys | None = None

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


class Targets(NamedTuple):
    """The targets of one part of the data, such as a client's samples of a split.

    Attributes:
        values: numbers [n, ...]; of words, their places in `names`
        names: what the numbers 0, 1, ... mean in this part; None where nothing says it
        place: name of the part in errors
        are_words: True where the part has words, and `names` are those that occur
    """

    values: Tensor
    names: tuple[str, ...] | None = None
    place: str = "y"
    are_words: bool = False


def read_targets(value: Any, place: str, names: Sequence[str] | None = None) -> Targets:
    """Targets of any array: unchanged floats, words, or int64 for whole numbers.

    Raises ValueError for other values, and for whole numbers that int64 does not hold.

    Args:
        value: the targets
        place: name of the part of the data in errors
        names: what the numbers mean in this part, where that is said
    """
    if not isinstance(value, Tensor):
        array = np.asarray(value)
        if array.dtype.kind in "UTO" and array.size:
            return _read_words(array, place)
    targets = to_tensor_or_bool(value, place)
    require(not targets.is_complex(), place, "real numbers", targets)
    if targets.is_floating_point():
        return Targets(targets, place=place)
    whole = targets.long()
    wraps = targets.dtype == torch.uint64 and bool((whole < 0).any())
    require(not wraps, place, "whole numbers below 2**63", targets)
    return Targets(whole, None if names is None else tuple(names), place)


def _read_words(words: Any, place: str) -> Targets:
    """Words as numbers of the names that occur.

    Raises ValueError for a missing value, and for other objects.
    """
    values = words.ravel().tolist()
    others = [value for value in values if not isinstance(value, str)]
    expected = "numbers, or a word for each sample"
    require(not others, place, expected, others[0] if others else None)
    names = sorted(set(values))
    number_of = {name: number for number, name in enumerate(names)}
    labels = torch.tensor([number_of[value] for value in values])
    return Targets(labels.reshape(words.shape), tuple(names), place, are_words=True)


def interpret_targets(
    parts: Sequence[Targets],
    reader: ReaderOptions,
    float_dtype: torch.dtype,
    *,
    single_step: bool = False,
    name: str = "y",
) -> tuple[Tensor, int | None, tuple[str, ...] | None]:
    """The targets [n, ...] of all parts, the number of classes, and their names.

    Numbers get the reader's dtype; where it has none, floats stay, and whole numbers
    become `float_dtype`. Raises ValueError where labels are negative, have more classes
    than there are labels, or have names that do not fit together.

    Args:
        parts: the targets of all clients, splits and files, as they were read
        reader: options that say which column of the table counts
        float_dtype: dtype of whole numbers that become floats, where the reader has
            none
        single_step: True where labels [n, 1] are those of sequences of one step
        name: name of the targets in errors
    """
    y = torch.cat([part.values for part in parts])
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
        y = _mask_ignored(y, parts, reader.ignored_label)
    class_names = reader.class_names
    if any(part.names is not None for part in parts):
        y, class_names = join_by_name(y, parts, reader)
        if infers_classes and class_names is not None:
            num_classes = len(class_names)
    if num_classes is None or y.is_floating_point():
        stays = y.is_floating_point() and reader.dtype is None
        numbers = y if stays else y.to(reader.dtype or float_dtype)
        # Floats with a number of classes are refused later, by the checks of the pool.
        count = None if num_classes == "infer" else num_classes
        return numbers, count, class_names
    if is_column:
        y = y[:, 0]
    if reader.from_files and num_classes in ("infer", 2) and _are_signs(y):
        signs = (y > 0).long()
        return signs.where(y != IGNORED_LABEL, IGNORED_LABEL), 2, class_names
    if num_classes != "infer":
        return y, num_classes, class_names
    return y, _count_classes(y, reader, name), class_names


def _mask_ignored(y: Tensor, parts: Sequence[Targets], label: int) -> Tensor:
    """The labels with `IGNORED_LABEL` in place of `label`; words have no such label."""
    pieces = y.split([len(part.values) for part in parts])
    masked = []
    for piece, part in zip(pieces, parts, strict=True):
        is_ignored = (piece == label) & (not part.are_words)
        masked.append(piece.masked_fill(is_ignored, IGNORED_LABEL))
    return torch.cat(masked)


# names of classes ---------------------------------------------------------------------


def join_by_name(
    y: Tensor, parts: Sequence[Targets], reader: ReaderOptions
) -> tuple[Tensor, tuple[str, ...] | None]:
    """Labels of all parts, numbered by one list of names, and that list.

    The list is that of ``classes=``; else the one that all parts have; else all names
    in alphabetical order. Raises ValueError where a label that occurs has no name in
    it, and where some parts have names and others have none.

    Args:
        y: the labels [n, ...] of all parts, as they are numbered in each part
        parts: the parts, with their names
        reader: the options of the reader
    """
    for part in parts:
        is_float = part.values.is_floating_point() and y.is_floating_point()
        expected = "labels, as other parts have words or names"
        require(not is_float, part.place, expected, part.values)
    names = reader.class_names or _common_names(parts)
    if reader.classes is None:
        _check_numbers_to_predict(parts)
        return y, None
    if reader.classes == "infer":
        _check_are_labels(parts, names)
    number_of = {name: number for number, name in enumerate(names)}
    pieces = y.split([len(part.values) for part in parts])
    joined = []
    for piece, part in zip(pieces, parts, strict=True):
        if part.names is None:
            # Numbers of a part without names are places in a list that was given.
            has_list = reader.class_names is not None
            expected = f"labels with names, as other parts have ({', '.join(names)})"
            require(has_list, part.place, expected, "numbers without names")
            joined.append(piece)
        elif part.names == names:
            joined.append(_checked_labels(piece, part, names))
        else:
            joined.append(_renumber(piece, part, number_of))
    if isinstance(reader.classes, int):
        expected = f"at least {len(names)}, as there are names of so many classes"
        require(reader.classes >= len(names), "classes", expected, reader.classes)
        return torch.cat(joined), names if reader.classes == len(names) else None
    return torch.cat(joined), names


def _common_names(parts: Sequence[Targets]) -> tuple[str, ...]:
    """The list of names that all parts have, or all names in alphabetical order."""
    lists = {part.names for part in parts if part.names is not None}
    if len(lists) == 1:
        return next(iter(lists))
    return tuple(sorted({name for names in lists for name in names}))


def _checked_labels(y: Tensor, part: Targets, names: Sequence[str]) -> Tensor:
    """The labels of a part, unchanged.

    Raises ValueError where one has no name.
    """
    known = y[y != IGNORED_LABEL]
    if not known.numel():
        return y
    low, high = map(int, known.aminmax())
    expected = f"labels in 0..{len(names) - 1}, of the names {', '.join(names)}"
    if low < 0:
        expected += f" (of a label that counts in nothing give ignored_label={low})"
    require(low >= 0 and high < len(names), part.place, expected, [low, high])
    return y


def _renumber(y: Tensor, part: Targets, number_of: dict[str, int]) -> Tensor:
    """The labels of a part by their numbers in the list of all.

    Raises ValueError where a label that occurs has no name there.
    """
    names = part.names or ()
    y = _checked_labels(y, part, names)
    numbers = torch.tensor([number_of.get(name, -1) for name in names])
    is_known = y != IGNORED_LABEL
    renumbered = numbers[y.where(is_known, 0)]
    unknown = y[is_known & (renumbered < 0)]
    if unknown.numel():
        expected = f"one of the classes {', '.join(number_of)}"
        reject(part.place, expected, names[int(unknown[0])], list(number_of))
    return renumbered.where(is_known, IGNORED_LABEL)


def _check_numbers_to_predict(parts: Sequence[Targets]) -> None:
    """Raises ValueError where the parts' numbers do not mean the same."""
    for part in parts:
        same = part.names == parts[0].names and not part.are_words
        expected = "numbers to predict, as classes=None says, that mean the same"
        require(same, part.place, expected, part.names)


def _check_are_labels(parts: Sequence[Targets], names: Sequence[str]) -> None:
    """Raises ValueError for words that are numbers, gaps, ids or texts.

    Where nobody said which classes there are, words have to be few.
    """
    words = [part for part in parts if part.are_words]
    if not words:
        return
    place = words[0].place
    numbers = [name for name in names if _is_no_class(name)]
    expected = "words that name classes, or numbers (or classes=[...], their names)"
    require(not numbers, place, expected, numbers[:1])
    count = sum(part.values.numel() for part in parts)
    expected = "fewer different words than samples (or classes=[...], their names)"
    require(len(names) < max(count, 2), place, expected, len(names))


def _is_no_class(word: str) -> bool:
    """True for a number, and for an empty word."""
    if not word.strip():
        return True
    with contextlib.suppress(ValueError):
        float(word)
        return True
    return False


# numbers ------------------------------------------------------------------------------


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
        if high == VOID_BYTE:
            remedy = f" or ignored_label={high} where that counts in nothing,"
        if high < MAX_LABEL:
            num = high + 1
            remedy += f" or classes={num} (--classes {num}) for so many classes,"
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
