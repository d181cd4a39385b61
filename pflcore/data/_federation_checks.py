"""What must hold in a federation, and the sentences where it does not.

Symbols: N clients, C classes; client i has n_i samples in a split; n samples in a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pflcore.check import is_dense, reject, require
from pflcore.data._inputs import DENSE_TEXT, IGNORED_LABEL
from pflcore.data._labels import VOID_BYTE
from pflcore.data._ragged import Ragged
from pflcore.data._read import SPLITS

if TYPE_CHECKING:
    from pflcore.data._federation import Federation


def check_federation(data: Federation) -> None:
    """Raises ValueError for values that do not fit together, and for NaN and Inf."""
    check_index(data)
    _check_has_samples(data)
    _check_names(data)
    _check_pool(data)
    _check_clients(data)


def check_index(data: Federation) -> None:
    """Raises ValueError for index lists that do not fit the pool."""
    known = "train" in data.index and set(data.index) <= set(SPLITS)
    expected = "the split 'train', and perhaps 'val' and 'test'"
    require(known, "index", expected, list(data.index))
    pool_size = len(data.x) if data.x.dim() else 0
    used = torch.zeros(pool_size, dtype=torch.bool, device=data.device)
    for split in data.index:
        _check_positions(data, split, pool_size)
        in_split = torch.zeros_like(used)
        in_split[data.index[split].flat] = True
        _check_repeats(data, split, in_split)
        used_twice = (in_split & used).nonzero()[:1, 0].tolist()
        expected = "samples of no other split"
        require(not used_twice, f"index[{split!r}]", expected, used_twice)
        used |= in_split


def _check_positions(data: Federation, split: str, pool_size: int) -> None:
    """Raises ValueError unless clients have lists of positions in the pool."""
    lists = data.index[split]
    name = f"index[{split!r}]"
    expected = f"a list for each of {data.n} clients"
    require(len(lists) == data.n, name, expected, len(lists))
    flat = lists.flat
    outside = ((flat < 0) | (flat >= pool_size)).nonzero()[:1, 0].tolist()
    if outside:
        position = outside[0]
        client = int(lists.owners()[position])
        expected = f"samples in 0..{pool_size - 1}"
        reject(f"{name}[{client}]", expected, int(flat[position]))


def _check_repeats(data: Federation, split: str, in_split: Tensor) -> None:
    """Raises ValueError where a sample is twice in a split.

    Clients may share test samples, but each client has a sample once.

    Args:
        in_split: bool, as long as the pool: True for samples of the split
    """
    lists = data.index[split]
    flat = lists.flat
    if int(in_split.sum()) == len(flat):
        return
    key = flat
    if split == "test":
        key = lists.owners() * len(in_split) + flat
    is_unique = len(key.unique()) == len(key)
    expected = "a sample once, in one client's list"
    require(is_unique, f"index[{split!r}]", expected, flat)


def _check_has_samples(data: Federation) -> None:
    """Raises ValueError for a client without any sample.

    A client without training samples is evaluated alone.
    """
    total = torch.stack([lists.size for lists in data.index.values()]).sum(0)
    empty = (total == 0).nonzero()[:, 0].tolist()
    expected = f"a sample of each, of any split; leave out the {len(empty)} without"
    names: Sequence[str | int] = range(data.n)
    if data.names and len(data.names) == data.n:
        names = data.names
    require(not empty, "clients", expected, [names[i] for i in empty[:5]])


def _check_pool(data: Federation) -> None:
    """Raises ValueError for values in the pool that no federation may have.

    x and y must be dense and finite, and the labels must be of known classes.
    """
    x = data.x
    y = data.y
    same_rows = x.dim() and y.dim() and len(x) == len(y)
    fits = same_rows and x.device == y.device
    require(fits, "y", f"a row per row of x, {list(x.shape)} on {x.device}", y)
    _check_numbers(data, "x", x)
    _check_numbers(data, "y", y)
    if data.classes is not None:
        _check_labels(data, data.classes)


def _check_numbers(data: Federation, name: str, values: Tensor) -> None:
    """Raises ValueError unless values are dense, and finite floats or int64."""
    is_float = values.is_floating_point()
    is_number = is_float or values.dtype == torch.int64
    fits = is_number and is_dense(values)
    require(fits, name, DENSE_TEXT, values)
    if not is_float or not values.numel():
        return
    # A NaN or Inf shows in the smallest or the largest value. To find these two
    # takes no mask as large as the pool.
    if bool(torch.stack(values.aminmax()).isfinite().all()):
        return
    in_sample = (~values.isfinite()).reshape(len(values), -1).any(1)
    sample = int(in_sample.nonzero()[0])
    column = ""
    if name == "x" and data.columns is not None and values.dim() == 2:
        position = int((~values[sample].isfinite()).nonzero()[0])
        column = f", column {data.columns[position]!r}"
    place = f"sample {sample}{column}{_describe_holder(data, sample)}"
    reject(name, f"finite numbers, also in {place}", values[sample])


def _check_labels(data: Federation, classes: int) -> None:
    """Raises ValueError unless labels are int64 in 0..classes-1, or ignored."""
    y = data.y
    expected = f"int64 labels in 0..{classes - 1} (classes=None for regression)"
    require(y.dtype == torch.int64, "y", expected, y)
    is_wrong = ((y < 0) | (y >= classes)) & (y != IGNORED_LABEL)
    samples = is_wrong.reshape(len(y), -1).any(1).nonzero()[:1, 0].tolist()
    if not samples:
        return
    low = int(y[y != IGNORED_LABEL].min())
    high = int(y.max())
    expected += f", also in sample {samples[0]}{_describe_holder(data, samples[0])}"
    if low == -1 and not bool((y == 0).any()):
        expected += "; of -1 and 1 give (y > 0)"
    elif low < 0 or y.dim() > 1 or high == VOID_BYTE:
        void = low if low < 0 else high
        expected += f"; of a label that counts in nothing give ignored_label={void}"
    reject("y", expected, [low, high])


def _describe_holder(data: Federation, sample: int) -> str:
    """Text that names the client that has a sample, or ""."""
    for split, lists in data.index.items():
        positions = (lists.flat == sample).nonzero()[:1, 0].tolist()
        if positions:
            client = int(lists.owners()[positions[0]])
            number = positions[0] - int(lists.begin[client])
            if data.names is None or len(data.names) != data.n:
                return f", number {number} of client {client}'s {split} samples"
            name = data.names[client]
            return f", number {number} of the {split} samples of client {name!r}"
    return ""


def _check_clients(data: Federation) -> None:
    """Raises ValueError unless what is known of the clients fits them."""
    for key, value in {**data.truth, "names": data.names}.items():
        fits = value is None or (np.ndim(value) > 0 and len(value) == data.n)
        require(fits, key, f"a row for each of {data.n} clients", value)
    if data.relabel is not None:
        _check_relabel(data, data.relabel)


def _check_names(data: Federation) -> None:
    """Raises ValueError unless columns and classes have one name each."""
    width = data.shape[0] if len(data.shape) == 1 and data.fields is None else 0
    counts = {"columns": width, "class_names": data.classes or 0}
    for key, count in counts.items():
        names = getattr(data, key)
        fits = names is None or len(set(names)) == len(names) == count
        require(fits, key, f"{count} different names", names)


def _check_relabel(data: Federation, relabel: Tensor) -> None:
    """Raises ValueError unless each client has a label for every class.

    Samples with ignored labels cannot be relabelled.
    """
    classes = data.classes or 0
    shape = (data.n, classes)
    has_form = relabel.dtype == torch.int64 and relabel.shape == shape
    fits = has_form and classes and relabel.device == data.device
    fits = fits and bool(((relabel >= 0) & (relabel < classes)).all())
    fits = fits and not bool((data.y == IGNORED_LABEL).any())
    expected = f"int64 {list(shape)}, labels in 0..{classes - 1} on {data.device}"
    expected += ", and a label at every step of every sample"
    require(fits, "relabel", expected, relabel)


def to_ragged(name: str, lists: Any, device: torch.device) -> Ragged:
    """The lists of a split as `Ragged`.

    Raises ValueError where one is not int64 [n_i] on the pool's device.
    """
    rows = [lists.flat] if isinstance(lists, Ragged) else lists
    has_lists = isinstance(rows, Sequence) and len(rows) > 0
    require(has_lists, name, "a list of index tensors, at least one", rows)
    expected = f"an int64 tensor [n] on {device}"
    for i, row in enumerate(rows):
        has_form = (
            isinstance(row, Tensor) and row.dtype == torch.int64 and row.dim() == 1
        )
        fits = has_form and row.device == device
        require(fits, f"{name}[{i}]", expected, row)
    return lists if isinstance(lists, Ragged) else Ragged.from_lists(rows)
