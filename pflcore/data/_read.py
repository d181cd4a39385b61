"""Readers: what users bring becomes tensors.

An input is one of three things: arrays or tensors; a Dataset, or a list, of samples;
a data frame. A Dataset of Hugging Face is a Dataset, whose rows are read some at a
time. Inputs and targets are read by rules of their own: a picture is an input of
floats, and a target of class numbers.

Symbols: n samples, m of them in a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from pflcore.check import Words, reject, require
from pflcore.data._inputs import (
    INPUT_HINT,
    Fields,
    has_single_step,
    read_array,
    to_inputs,
)
from pflcore.data._labels import (
    ReaderOptions,
    SampleKey,
    SampleKeys,
    Targets,
    interpret_targets,
    merge_inputs,
    read_targets,
)
from pflcore.data._ragged import Ragged
from pflcore.data._tables import (
    column_names,
    frame_to_inputs,
    is_frame,
    order_of,
    text_names,
)

SPLITS = ("train", "val", "test")
PAIR_TEXT = "a pair (x, y), or a Dataset of pairs (or a list of them)"
NO_STREAM = "a Dataset of known length (load it without streaming)"
PAIR_KEYS = SampleKeys(0, 1)
ROWS_AT_ONCE = 1000  # samples of a Dataset that are decoded at once
# Modes of pictures whose pixels are bytes from 0 to 255, one for each band.
BYTE_MODES = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LA")
# Modes that PIL converts to one of these without loss.
CONVERTED_MODES = {"1": "L", "P": "RGB"}
# Modes whose pixels may be numbers of classes; of "P" they are places in its palette.
CLASS_MODES = ("L", "P", "1", "I;16", "I")


class LabelledSamples(NamedTuple):
    """Samples that were read, and the names of their labels.

    Attributes:
        x: inputs [n, ...], or a dict of them
        y: targets [n, ...]
        names: what the numbers in `y` mean; None where that is not said
    """

    x: Any
    y: Any
    names: Sequence[str] | None


class Piece(NamedTuple):
    """One client's samples of one split, of which there is at least one.

    Attributes:
        owner: number of the client
        holder: name of the client in errors
        split: split of the samples
        x: inputs [m, ...]
        y: targets [m, ...], and the names of their numbers in this piece
        fields: fields of the inputs, if they were given as a dict
        columns: names of the inputs' columns, if they were given as a table
    """

    owner: int
    holder: str
    split: str
    x: Tensor
    y: Targets
    fields: Fields | None
    columns: tuple[str, ...] | None


def read_clients(
    clients: Any,
    reader: ReaderOptions,
    names: Sequence[str | int] | None,
    columns: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The arguments of a `Federation` of these clients' samples.

    What targets and inputs become is decided for all pieces together.

    Args:
        clients: for each client an entry, as `Federation.from_clients` takes them
        reader: options that say what targets and inputs become
        names: a name for each client, or None
        columns: order of the columns of tables; None for that of the first table
    """
    pieces, count = _read_pieces(clients, reader, names)
    require(count, "clients", "the data of at least one client", [])
    expected = f"a sample of each, of any split; leave out the {count} without"
    require(pieces, "clients", expected, "no samples at all")
    _check_val_alone(pieces)
    columns = columns or next((p.columns for p in pieces if p.columns), None)
    pieces = [piece._replace(x=_in_order(piece, columns)) for piece in pieces]
    typed = not reader.from_files and reader.classes == "infer"
    _check_same_form(pieces, typed=typed)
    xs = [piece.x for piece in pieces]
    float_dtypes = (x.dtype for x in xs if x.is_floating_point())
    float_dtype = next(float_dtypes, torch.float32)
    x = merge_inputs(xs, [piece.holder for piece in pieces], float_dtype)
    targets = [piece.y for piece in pieces]
    return {
        **interpret_pool(x, targets, reader, columns, pieces[0].fields),
        "index": _index_pieces(pieces, count),
        "names": None if names is None else tuple(names),
    }


def interpret_pool(
    x: Tensor,
    targets: Sequence[Targets],
    reader: ReaderOptions,
    columns: Sequence[Any] | None = None,
    fields: Fields | None = None,
) -> dict[str, Any]:
    """The arguments of a `Federation` that say what its samples mean.

    Args:
        x: inputs [n, ...] of all samples
        targets: their targets, in parts
        reader: options that say what targets become
        columns: names of the inputs' columns, if they came as a table
        fields: fields of the inputs, if they were given as a dict
    """
    float_dtype = x.dtype if x.is_floating_point() else torch.float32
    y, classes, class_names = interpret_targets(
        targets, reader, float_dtype, single_step=has_single_step(x, fields)
    )
    # Whole numbers that stay whole are tokens, whose columns have no names.
    has_columns = columns is not None and fields is None and x.is_floating_point()
    has_columns = has_columns and x.dim() == 2 and len(columns or ()) == x.shape[1]
    are_names = all(isinstance(name, str) for name in columns or ())
    return {
        "x": x,
        "y": y,
        "classes": classes,
        "fields": fields,
        "columns": tuple(columns or ()) if has_columns and are_names else None,
        "class_names": class_names,
    }


def _in_order(piece: Piece, columns: Sequence[str] | None) -> Tensor:
    """The inputs of a piece, a table's columns in the order of `columns`."""
    if piece.columns is None or columns is None:
        return piece.x
    place = f"{piece.holder} ({piece.split})"
    order = order_of(piece.columns, columns, place)
    return piece.x if order == [*range(len(order))] else piece.x[:, order]


def _read_pieces(
    clients: Any, reader: ReaderOptions, names: Sequence[str | int] | None
) -> tuple[list[Piece], int]:
    """The samples of all clients in pieces, and the number of clients."""
    count = 0
    pieces = []
    for i, entry in enumerate(clients):
        count = i + 1
        holder = f"client {i if names is None else names[i]}"
        for split, samples in _by_split(holder, entry, reader.keys).items():
            place = f"{holder} ({split})"
            x, y, fields, columns = read_samples(samples, reader, place)
            if len(y.values):
                pieces.append(Piece(i, holder, split, x, y, fields, columns))
    return pieces, count


def _by_split(holder: str, entry: Any, keys: SampleKeys | None) -> dict[str, Any]:
    """A client's pairs (x, y), or other samples, by split.

    Raises ValueError for a split of an unknown name, and where there is no split.

    Args:
        holder: name of the client in errors
        entry: the client's samples
        keys: the parts of a sample; a dict may then be one of columns
    """
    is_columns = keys is not None and isinstance(entry, Mapping) and keys.y in entry
    has_splits = isinstance(entry, Mapping) and not is_columns
    parts = dict(entry) if has_splits else {"train": entry}
    known = set(parts) <= set(SPLITS) and len(parts) > 0
    expected = "samples by split, one of 'train', 'val' and 'test' at least"
    require(known, holder, expected, list(parts))
    return parts


def _check_val_alone(pieces: Sequence[Piece]) -> None:
    """Raises ValueError for a client with validation samples alone.

    It could neither train nor be tested, so its samples decide on nothing of its own.
    """
    useful = {piece.owner for piece in pieces if piece.split != "val"}
    alone = [piece.holder for piece in pieces if piece.owner not in useful]
    expected = "samples to train on or to test beside those of 'val'"
    require(not alone, alone[0] if alone else "clients", expected, Words("none"))


def _index_pieces(pieces: Sequence[Piece], count: int) -> dict[str, Ragged]:
    """Lists of `count` clients, by split, of samples in the order of the pieces."""
    sizes = [len(piece.x) for piece in pieces]
    owner_of_sample = np.repeat([piece.owner for piece in pieces], sizes)
    splits = [piece.split for piece in pieces]
    split_of_sample = np.repeat(splits, sizes)
    index = {}
    for split in SPLITS:
        if split in splits or split == "train":
            is_in = split_of_sample == split
            rows = np.flatnonzero(is_in)
            index[split] = Ragged.from_owners(rows, owner_of_sample[is_in], count)
    return index


def _check_same_form(pieces: Sequence[Piece], *, typed: bool) -> None:
    """Raises ValueError where clients' samples differ in form.

    Args:
        typed: True: also where one client has labels and another has numbers
    """
    first_form = _describe_form(pieces[0], typed=typed)
    expected = f"inputs and targets {first_form}, as {pieces[0].holder} has"
    for piece in pieces:
        form = _describe_form(piece, typed=typed)
        require(form == first_form, piece.holder, expected, form)


def _describe_form(piece: Piece, *, typed: bool) -> str:
    """The shapes of a sample in words, with the kind of its target if `typed`."""
    inputs = piece.fields or list(piece.x.shape[1:])
    y = piece.y.values
    form = f"{inputs} and {list(y.shape[1:])}"
    if not typed:
        return form
    kind = "floats" if y.is_floating_point() else "int64"
    return f"{form} ({kind})"


# samples ------------------------------------------------------------------------------


def read_samples(
    samples: Any, reader: ReaderOptions, place: str
) -> tuple[Tensor, Targets, Fields | None, tuple[str, ...] | None]:
    """Inputs [n, ...], targets [n, ...], the fields and the columns of the inputs.

    The samples are the tuple (x, y), or a Dataset, a list or a table, which is read
    once. Raises ValueError unless there is one target for each input.

    Args:
        samples: one client's samples of one split
        reader: options of the reader
        place: name of the samples in errors
    """
    x, y, names = _split_parts(samples, reader.keys, place)
    columns = None
    if is_frame(x):
        columns = text_names(x)
        x = frame_to_inputs(x, f"x of {place}")
    x, fields = to_inputs(x, f"x of {place}", reader.dtype)
    targets = read_targets(y, f"y of {place}", names)
    has_rows = x.dim() and targets.values.dim()
    fits = has_rows and len(x) == len(targets.values)
    shapes = [list(x.shape), list(targets.values.shape)]
    require(fits, place, "one target for each input", shapes)
    return x, targets, fields, columns


def _split_parts(
    samples: Any, keys: SampleKeys | None, place: str
) -> tuple[Any, Any, Sequence[str] | None]:
    """The inputs, the targets, and the names of the targets' numbers, if it has them.

    Raises ValueError where the samples are neither a pair nor have parts.
    """
    if isinstance(samples, LabelledSamples):
        return samples
    if keys is None:
        if _is_pair(samples, place):
            return samples[0], samples[1], None
        if type(samples) is TensorDataset and len(samples.tensors) == 2:
            return samples.tensors[0], samples.tensors[1], None
        check_dataset(samples, place)
        parts = read_parts(samples, PAIR_KEYS, place)
        return parts[0], parts[1], names_of_labels(samples, 1, place)
    is_pair = isinstance(samples, tuple) and all(hasattr(v, "shape") for v in samples)
    expected = "samples with the parts that x= and y= name (or without them a pair)"
    require(not is_pair, place, expected, Words("arrays in a tuple"))
    parts = read_parts(samples, keys, place)
    names = names_of_labels(samples, keys.y, place)
    if isinstance(keys.x, str | int):
        return parts[keys.x], parts[keys.y], names
    return {str(key): parts[key] for key in keys.inputs}, parts[keys.y], names


def read_parts(samples: Any, keys: SampleKeys, place: str) -> dict[Any, Any]:
    """The parts of all samples that the keys name, each [n, ...].

    Raises ValueError where a sample has no part of such a name.

    Args:
        samples: a dict of arrays, a table, or a Dataset or list of samples
        keys: the parts of each sample
        place: name of the samples in errors
    """
    wanted = [*keys.inputs, keys.y]
    is_table = not isinstance(samples, Mapping) and column_names(samples) is not None
    has_length = not is_table or hasattr(samples, "__len__")
    require(has_length, place, NO_STREAM, Words(type(samples).__name__))
    if isinstance(samples, Mapping) or is_frame(samples):
        names = column_names(samples) if is_table else list(samples)
        _check_keys(dict.fromkeys(names or ()), wanted, place)
        return {key: stack_part(samples[key], keys, key, place) for key in wanted}
    if not is_table:
        check_dataset(samples, place)
    chunks: dict[Any, list[Any]] = {key: [] for key in wanted}
    for rows in _iterate_chunks(samples, keys, place, is_table=is_table):
        for key in chunks:
            chunks[key].append(stack_part(rows[key], keys, key, place))
    return {key: _join(parts, f"{key!r} of {place}") for key, parts in chunks.items()}


def _iterate_chunks(
    samples: Any, keys: SampleKeys, place: str, *, is_table: bool
) -> Iterator[Mapping[Any, Any]]:
    """Some samples at a time, as a dict of lists or arrays by the parts' names."""
    wanted = [*keys.inputs, keys.y]
    if is_table:
        samples = _without_other_columns(samples, wanted)
    for begin in range(0, max(len(samples), 1), ROWS_AT_ONCE):
        end = min(begin + ROWS_AT_ONCE, len(samples))
        if is_table:
            rows = samples[begin:end]
            # Functions that Hugging Face applies to rows may have made other columns.
            _check_keys(rows, wanted, place)
            yield rows
            continue
        items = [samples[k] for k in range(begin, end)]
        for item in items:
            if keys is PAIR_KEYS:
                _check_item(item, place)
            _check_keys(item, wanted, place)
        yield {key: [item[key] for item in items] for key in wanted}


def _without_other_columns(table: Any, wanted: Sequence[SampleKey]) -> Any:
    """A Hugging Face Dataset with the columns `wanted` alone; other tables as they are.

    A Dataset need not decode pictures that nobody reads. One that applies a function to
    its rows keeps its columns, as the function may need them.
    """
    select = getattr(table, "select_columns", None)
    style = getattr(table, "format", None)
    is_plain = isinstance(style, Mapping) and style.get("type") != "custom"
    if select is None or not is_plain or not set(wanted) <= set(table.column_names):
        return table
    return select(list(dict.fromkeys(wanted)))


def stack_part(values: Any, keys: SampleKeys, key: SampleKey, place: str) -> Any:
    """Values of one part of samples as an array [m, ...], by the rule for that part."""
    is_target = key == keys.y and key not in keys.inputs
    part = "xy"[is_target] if keys is PAIR_KEYS else repr(key)
    read_picture = picture_to_classes if is_target else picture_to_input
    return stack_values(values, read_picture, f"{part} of {place}")


def stack_values(
    values: Any, read_picture: Callable[[Any, str], Tensor], place: str
) -> Any:
    """Values of samples as one tensor or array [m, ...], or a dict of them.

    A list of numbers becomes a row. torch's `default_collate` would make it a column.
    Raises ValueError where the values differ in shape, or are no numbers or words.
    """
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    is_array = isinstance(values, np.ndarray) and values.dtype != object
    if isinstance(values, Tensor) or is_array:
        return values
    values = list(values)
    if not values:
        return torch.empty(0)
    first = values[0]
    if isinstance(first, Mapping):
        return {
            key: stack_values([value[key] for value in values], read_picture, place)
            for key in first
        }
    if all(isinstance(value, str) for value in values):
        return np.asarray(values)
    if is_picture(first):
        return _stack_pictures(values, read_picture, place)
    read = torch.stack if all(isinstance(v, Tensor) for v in values) else read_array
    try:
        return read(values)
    except (RuntimeError, TypeError, ValueError, KeyError):
        reject(place, INPUT_HINT, first)


def _join(parts: list[Any], place: str) -> Any:
    """The rows of all parts.

    Raises ValueError where parts differ in shape.
    """
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Mapping):
        return {key: _join([part[key] for part in parts], place) for key in parts[0]}
    try:
        if all(isinstance(part, Tensor) for part in parts):
            return torch.cat(parts)
        return np.concatenate([np.asarray(part) for part in parts])
    except (RuntimeError, TypeError, ValueError):
        shapes = sorted({str(list(part.shape[1:])) for part in parts})
        reject(place, "samples of one shape", shapes)


def _is_pair(value: Any, place: str) -> bool:
    """True for the pair (x, y), False for samples.

    A list of two samples has the length of a pair, so its members decide. Raises
    ValueError where the value may be either.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    if isinstance(value, list) and all(isinstance(m, tuple | Mapping) for m in value):
        return False
    are_tuples = all(isinstance(m, tuple) and len(m) == 2 for m in value)
    are_lists = all(isinstance(m, list) and len(m) == 2 for m in value)
    is_ambiguous = are_tuples or (are_lists and isinstance(value, list))
    expected = "(x, y) as a tuple of two arrays, or samples as a list of tuples"
    require(not is_ambiguous, place, expected, value)
    return True


def check_dataset(dataset: Any, place: str) -> None:
    """Raises ValueError, with a remedy, for a value without numbered samples."""
    kind = type(dataset).__name__
    remedy = ""
    if isinstance(dataset, tuple):
        has_samples = all(isinstance(member, tuple | list) for member in dataset)
        remedy = "" if has_samples else f"; this is a tuple of {len(dataset)}"
    elif hasattr(dataset, "columns"):
        remedy = (
            "; of a data frame give (frame[inputs], frame[target]), or say x= and y=, "
            "or give all clients' rows to from_table"
        )
    elif isinstance(dataset, str | Mapping):
        remedy = f"; this is a {kind}"
    elif isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        remedy = f"; of a {kind} give list(it)"
        if hasattr(dataset, "dataset"):
            remedy = f"; of a {kind} give its .dataset"
    elif not hasattr(dataset, "__len__"):
        remedy = f"; a {kind} has no length"
    got = Words(kind) if hasattr(dataset, "columns") else dataset
    require(not remedy, place, f"{PAIR_TEXT}{remedy}", got)


def _check_item(item: Any, place: str) -> None:
    """Raises ValueError, with a remedy, unless a Dataset's item is a pair."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return
    remedy = f"these samples are of type {type(item).__name__}"
    if isinstance(item, Mapping | tuple | list):
        parts = list(item if isinstance(item, Mapping) else range(len(item)))
        remedy = f"of samples of several parts say which are x= and y=, of {parts}"
    reject(place, f"{PAIR_TEXT}; {remedy}", item)


def _check_keys(sample: Any, wanted: Sequence[SampleKey], place: str) -> None:
    """Raises ValueError where a sample, or a dict of columns, lacks a part."""
    expected = "samples with parts that x and y name: dicts, tuples, or a table"
    has_parts = isinstance(sample, Mapping | tuple | list)
    require(has_parts, place, expected, sample)
    known = list(sample if isinstance(sample, Mapping) else range(len(sample)))
    names = [key for key in known if isinstance(key, str)]
    for key in wanted:
        expected = f"x and y to be among the parts of a sample, {known}"
        require(key in known, place, expected, key, names)


# names of labels ----------------------------------------------------------------------


def names_of_labels(
    dataset: Any, column: SampleKey, place: str
) -> tuple[str, ...] | None:
    """The names that the numbers of a Dataset's targets have, or None.

    They are those of a Hugging Face Dataset's features, or of torchvision's folders of
    classes. A `target_transform` makes other numbers, of which nothing is known.

    Raises ValueError where the parts of a ConcatDataset have other names.
    """
    if isinstance(dataset, Subset):
        return names_of_labels(dataset.dataset, column, place)
    if isinstance(dataset, ConcatDataset):
        lists = [names_of_labels(part, column, place) for part in dataset.datasets]
        expected = "parts of which each number names the same class (give each apart)"
        require(len(set(lists)) == 1, place, expected, lists)
        return lists[0]
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        names = getattr(features.get(column), "names", None)
        return None if names is None else tuple(names)
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or not hasattr(dataset, "class_to_idx"):
        return None
    is_changed = getattr(dataset, "target_transform", None) is not None
    is_target = column in (1, "y")
    if is_changed or not is_target or len(set(names)) < len(names):
        return None
    return tuple(map(str, names))


# pictures -----------------------------------------------------------------------------


def is_picture(value: Any) -> bool:
    """True for an image of PIL, which need not be installed."""
    return hasattr(value, "getbands") and hasattr(value, "convert")


def picture_to_input(picture: Any, place: str) -> Tensor:
    """The picture as float32 [C, H, W], pixels from 0 to 1, as `ToTensor` makes it.

    Raises ValueError for a mode whose pixels are no bytes.
    """
    picture = picture.convert(CONVERTED_MODES.get(picture.mode, picture.mode))
    if picture.mode not in BYTE_MODES:
        expected = f"one of the modes {', '.join([*BYTE_MODES, *CONVERTED_MODES])}"
        remedy = "convert it to an array of floats yourself"
        got = Words(f"a picture of mode {picture.mode}")
        reject(place, expected, got, remedy=remedy)
    pixels = torch.from_numpy(np.array(picture, dtype=np.float32) / 255)
    if pixels.dim() == 2:
        return pixels[None]
    return pixels.permute(2, 0, 1).contiguous()


def picture_to_classes(picture: Any, place: str) -> Tensor:
    """The numbers of classes int64 [H, W] that a picture's pixels are.

    Raises ValueError for a mode whose pixels are colours or fractions.
    """
    if picture.mode not in CLASS_MODES:
        expected = f"a picture of classes, one of the modes {', '.join(CLASS_MODES)}"
        remedy = "give the targets as arrays, numpy.array(mask) of what they mean"
        reject(place, expected, Words(f"mode {picture.mode}"), remedy=remedy)
    return torch.from_numpy(np.array(picture).astype(np.int64))


def _stack_pictures(
    pictures: Sequence[Any], read_picture: Callable[[Any, str], Tensor], place: str
) -> Tensor:
    """Pictures as one tensor [m, ...].

    Raises ValueError where one is no picture, or where sizes or numbers of bands
    differ.
    """
    others = [value for value in pictures if not is_picture(value)]
    require(not others, place, "pictures, as the first is one", others[:1])
    tensors = [read_picture(picture, place) for picture in pictures]
    forms = sorted({f"{p.mode} {p.height} x {p.width}" for p in pictures})
    shapes = {tensor.shape for tensor in tensors}
    expected = "pictures of one size and one number of bands (resize and convert them)"
    require(len(shapes) == 1, place, expected, Words(", ".join(forms[:5])))
    return torch.stack(tensors)
