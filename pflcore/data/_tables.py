"""Tables: data frames, and CSV and parquet files, which pandas reads.

A table of another package becomes a data frame by its own `to_pandas`. The cells of a
CSV file are texts. Whether its first line names the columns, and which columns are of
words, is decided by all files together.

Symbols: a table has n rows, one per sample, and D columns of features.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pflcore.check import Words, import_optional, reject, require
from pflcore.data._read_errors import explain_read_errors, one_line

Array = NDArray[Any]
# Since this version pandas reads numbers as Python does; before, only if it is told to.
EXACT_PANDAS = (3, 1)
OTHER_SEPARATORS = (";", "\t", "|", " ")
GAPS_HELP = "docs/data.md, Missing values and categories"
# Evidence of a file's first line, from `header_evidence`.
Evidence = Literal["names", "numbers in a row", "data"]


# data frames --------------------------------------------------------------------------


def column_names(table: Any) -> list[Any] | None:
    """The names of a table's columns; None where a value has none.

    Raises ValueError for a dict of tables by split.
    """
    # `columns` comes second: of an Arrow table these are no names, but the columns.
    names = getattr(table, "column_names", None)
    if names is None:
        names = getattr(table, "columns", None)
    if names is None or (isinstance(table, Mapping) and not isinstance(names, Mapping)):
        return None
    expected = "one table, as x['train'] is"
    require(not isinstance(names, Mapping), "x", expected, names)
    return list(names)


def text_names(table: Any) -> tuple[str, ...] | None:
    """The names of a table's columns, where each is a string that it has alone."""
    if isinstance(table, Mapping):
        return None
    names = column_names(table)
    if not names or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names) if len(set(names)) == len(names) else None


def is_frame(value: Any) -> bool:
    """True for a table whose columns are arrays: a data frame, or an Arrow table.

    The rows of a Hugging Face Dataset may be pictures. It is read as a Dataset.
    """
    names = None if isinstance(value, Mapping) else column_names(value)
    return names is not None and not hasattr(value, "features")


def order_of(names: Sequence[str], wanted: Sequence[str], holder: str) -> list[int]:
    """The positions in `names` of the columns `wanted`.

    Raises ValueError where one is missing, or where there are others.

    Args:
        names: the columns that a table has
        wanted: the columns in the order in which they are needed
        holder: name of the table in errors
    """
    missing = [name for name in wanted if name not in names]
    others = [name for name in names if name not in wanted]
    expected = f"the columns {list(wanted)}, as other samples have"
    require(not missing and not others, holder, expected, list(names))
    return [names.index(name) for name in wanted]


def select_columns(table: Any, wanted: Sequence[str], name: str) -> Array:
    """The columns `wanted` of a table or a dict, in this order, as floats [n, D].

    Other columns of the table are ignored. Raises ValueError where one is missing, or
    is not of numbers.
    """
    names = list(table) if isinstance(table, Mapping) else column_names(table) or []
    missing = [column for column in wanted if column not in names]
    if missing:
        expected = f"the columns {', '.join(wanted)}"
        got = Words(f"a table without {', '.join(map(repr, missing))}")
        reject(name, expected, got)
    twice = [column for column in wanted if names.count(column) > 1]
    require(not twice, name, "each column once", twice)
    columns = {key: read_column(table, key) for key in wanted}
    return stack_columns(columns, name, gaps_fit=True)  # a model answers them with NaN


def read_column(table: Any, name: Any) -> Array:
    """A column as an array [n, ...]; words, and rows of arrays, as what they hold.

    Raises ValueError where numpy cannot read it.
    """
    try:
        column = table[name]
        if hasattr(column, "to_numpy"):
            column = column.to_numpy()
        array = np.asarray(column)
        if array.dtype != object and not isinstance(column, list):
            return array
        values = column if isinstance(column, list) else array.tolist()
        # Words with a gap stay objects: numpy would make of the gap the word "nan".
        are_mixed = len({isinstance(value, str) for value in values}) > 1
        return np.array(values, dtype=object) if are_mixed else np.asarray(values)
    except Exception as error:  # Each package raises exceptions of its own.
        expected = (
            "a table whose columns numpy reads; give arrays, from_table(x, y, client) "
            f"(column {name!r}: {one_line(error)})"
        )
        reject("x", expected, type(table))


def stack_columns(
    columns: Mapping[Any, Array], name: str, *, gaps_fit: bool = False
) -> Array:
    """The columns side by side, [n, D]; a single one of arrays as it is.

    They are float32 if all columns are, else float64. Raises ValueError that names the
    columns of words, those with gaps, and those of arrays beside others.

    Args:
        columns: the columns [n] by name
        name: name of the table in errors
        gaps_fit: True where NaN stays as it is
    """
    columns = {key: _with_gaps(column) for key, column in columns.items()}
    words = [key for key, column in columns.items() if column.dtype.kind not in "fiub"]
    gaps = [key for key in columns if key not in words and _has_gap(columns[key])]
    if words or (gaps and not gaps_fit):
        found = f"words, dates or objects in {words}" if words else ""
        found += " and " * bool(words and gaps) + (f"gaps in {gaps}" if gaps else "")
        reject(name, f"columns of numbers without gaps ({GAPS_HELP})", Words(found))
    arrays = list(columns.values())
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]
    shapes = {key: list(column.shape) for key, column in columns.items()}
    are_flat = all(column.ndim == 1 for column in arrays)
    expected = "one number a row in each column, or a single column of arrays"
    require(are_flat, name, expected, shapes)
    are_float32 = all(column.dtype == np.float32 for column in arrays)
    dtype = np.float32 if are_float32 else np.float64
    return np.stack([column.astype(dtype) for column in arrays], 1)


def _with_gaps(column: Array) -> Array:
    """A column of texts as numbers, where some are empty and all others are numbers.

    NaN stands for an empty text. Texts without a gap stay words, as they may be codes.
    """
    if column.dtype.kind not in "UO" or not all(isinstance(c, str) for c in column):
        return column
    filled = [cell for cell in column if cell]
    has_gaps = 0 < len(filled) < len(column)
    numbers = to_numbers(filled) if has_gaps else None
    if numbers is None:
        return column
    with_gaps = np.full(len(column), np.nan)
    with_gaps[[bool(cell) for cell in column]] = numbers
    return with_gaps


def _has_gap(column: Array) -> bool:
    """True for a column with NaN."""
    return column.dtype.kind == "f" and bool(np.isnan(column).any())


def split_table(table: Any, y: Any, client: Any) -> tuple[dict[Any, Array], Any, Any]:
    """The columns of the inputs by name, the targets, and the samples' clients.

    Args:
        table: the table
        y: the targets [n], or the name of their column; None for the column "y"
        client: ids [n], or the name of their column; None for the column "client"
    """
    names = column_names(table) or []
    values = {}
    taken = []
    for argument, given in (("y", y), ("client", client)):
        value = argument if given is None else given
        if isinstance(value, str | int):
            expected = f"one of the columns {names}, or a value for each row"
            fits = value in names and value not in taken
            require(fits, argument, expected, value, list(map(str, names)))
            taken.append(value)
            value = read_column(table, value)
        values[argument] = value
    inputs = {name: read_column(table, name) for name in names if name not in taken}
    require(inputs, "x", f"columns of inputs beside {taken}", names)
    return inputs, values["y"], values["client"]


def frame_to_inputs(table: Any, name: str) -> Array:
    """All columns of one client's table, [n, D]; int64 where all are integers."""
    names = column_names(table) or []
    if len(set(names)) < len(names):  # columns of one name are read by position
        return np.asarray(table)
    columns = {key: read_column(table, key) for key in names}
    if all(column.dtype.kind in "iu" for column in columns.values()):
        return np.stack(list(columns.values()), 1)
    return stack_columns(columns, name)


# files --------------------------------------------------------------------------------


def read_tables(
    paths: Sequence[Path], target: int | str, class_names: Sequence[str] | None
) -> list[tuple[Any, Any]]:
    """For each file a frame of its inputs, and its targets, numbers [n] or words [n].

    Raises ValueError or OSError, which name the file, where the first lines of the
    files do not agree, or where an input is no number.

    Args:
        paths: CSV files, which may have a line of names, and parquet files
        target: the column of the targets, by number or by name
        class_names: names of the classes, if they are known
    """
    # A class may be called "7", so its texts are needed.
    all_words = any(to_numbers([name]) is not None for name in class_names or ())
    words = None if all_words else ()
    cells = {}
    tables = {}
    for path in paths:
        if path.suffix == ".csv":
            cells[path] = _read_csv(path, words)
            width, first = len(cells[path].first), cells[path].first[0]
        else:
            tables[path] = _read_parquet(path)
            width, first = tables[path].shape[1], tables[path].iloc[0, 0]
        require(width > 1, str(path), "several values, with ',' between them", first)
    named = bool(cells) and have_header(list(cells.values()), list(cells), target)
    for path, table in cells.items():
        if named:
            _check_names(table.first, path)
        tables[path] = _samples_of(table, path, words, named=named)
    return [_split_target(tables[path], target, class_names, path) for path in paths]


def read_frame(path: Path, *words: str) -> Any:
    """The data frame of a file: a parquet file, or a CSV file with a line of names.

    A column of numbers has floats; others, and the columns `words`, have texts.
    """
    if path.suffix != ".csv":
        return _read_parquet(path)
    return _named_frame(_read_csv(path, words), path, words)


def _named_frame(cells: Cells, path: Path, words: Sequence[str] = ()) -> Any:
    """The data frame of a CSV file whose first line has the names."""
    _check_names(cells.first, path)
    _check_row_numbers(cells.first, path)
    return cells.frame(named=True, words=words)


def _check_row_numbers(names: Sequence[Any], path: Path) -> None:
    """Raises ValueError where the first column has no name, as the numbers of rows."""
    expected = "a name for every column (row numbers of pandas: index=False)"
    has_row_numbers = names[0] in ("", "Unnamed: 0")
    require(not has_row_numbers, str(path), expected, list(names))


def _check_names(names: Sequence[str], path: Path) -> None:
    """Raises ValueError where two columns of a file have one name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, str(path), "each column once", twice)


def read_lines(path: Path, *, named: bool) -> tuple[Any, Array]:
    """The samples of a CSV file, and the mask [lines] of the lines that have one.

    A line of empty cells has none. The line of names is not counted, nor are blank
    lines before it and at the end. Raises ValueError where no line has a sample.

    Args:
        path: The file.
        named: True for a data frame, by the names in the first line; False for numbers,
            float64 [n, D], with or without a line of names.
    """
    cells = _read_csv(path, (), keep_empty=True)
    has_values = cells.has_values
    is_named = named or have_header([cells], [path], -1)
    samples: Any
    if named:
        samples = _named_frame(cells, path)
    else:
        rows = _samples_of(cells, path, (), named=is_named)
        numbers = _number_frame(list(rows.columns), _columns_of(rows), path)
        samples = np.array(numbers)
    require(len(samples), str(path), "rows of values below the names", Words("none"))
    if is_named:
        has_values = has_values[int(has_values.argmax()) + 1 :]
    return samples, has_values


class Cells(NamedTuple):
    """The cells of a CSV file.

    Attributes:
        first: the texts of the first line that has one
        rows: a data frame of the lines below that have a text; numbers where all of a
            column are numbers, else texts
        has_values: bool, for each line: True where it has a text
    """

    first: list[str]
    rows: Any
    has_values: Array

    def frame(self, *, named: bool, words: Sequence[str] | None) -> Any:
        """The samples as a data frame, float64 where all of a column are numbers.

        Args:
            named: True where the first line has the names of the columns
            words: names of columns whose texts are kept; None for all columns
        """
        pandas = import_optional("pandas", "data: a table")
        columns: dict[int, Any] = {}
        for k, cell in enumerate(self.first):
            column = self.rows.iloc[:, k].to_numpy()
            if column.dtype.kind in "iu":
                column = column.astype(np.float64)
            if not named:
                number = to_numbers([cell]) if column.dtype.kind == "f" else None
                first = np.array([cell], dtype=object) if number is None else number
                column = np.concatenate([first, column])
            is_text = column.dtype == object and words is not None and cell not in words
            numbers = to_numbers(column) if is_text else None
            columns[k] = column if numbers is None else numbers
        table = pandas.DataFrame(columns)
        if named:
            table.columns = self.first
        return table


def _samples_of(
    cells: Cells, path: Path, words: Sequence[str] | None, *, named: bool
) -> Any:
    """The frame of a CSV file's samples, of which the first line may be one."""
    columns = [cells.rows.iloc[:, k] for k in range(len(cells.first))]
    pairs = zip(cells.first, columns, strict=True)
    if not named and any(
        to_numbers([cell]) is None and column.dtype.kind in "iuf"
        for cell, column in pairs
    ):
        cells = _read_csv(path, None)  # a column of words has numbers below the first
    return cells.frame(named=named, words=words)


def _read_parquet(path: Path) -> Any:
    """The data frame of a parquet file."""
    pandas = import_optional("pandas", "data: a table")
    with explain_read_errors(f"{path}: expected a table"):
        require(path.is_file(), "file", "a regular one", path.name)
        return pandas.read_parquet(path)


def _read_csv(
    path: Path, words: Sequence[str] | None, *, keep_empty: bool = False
) -> Cells:
    """The cells of a CSV file.

    Args:
        path: the file
        words: names of columns whose texts are kept, also where they are numbers; None
            for all columns
        keep_empty: True where lines between the first and the last that are not blank
            count, also without a text
    """
    import_optional("pandas", "data: a table")
    text = f"{path}: expected rows of values in UTF-8, all of one length, got others"
    with explain_read_errors(text):
        require(path.is_file(), "file", "a regular one", path.name)
        source: Any = path
        if keep_empty:
            source = path.read_text(encoding="utf-8-sig").strip("\n")
        cells = None if words is None else _read_numbers(source, words, keep_empty)
        cells = cells or _read_texts(source, keep_empty)
        fits = not any(_has_separator(cell) for cell in cells.first)
        expected = "several values, with ',' between them and a point in decimals"
        require(fits, "line 1", expected, cells.first)
        return cells


def _read_texts(source: Any, keep_empty: bool) -> Cells:
    """The cells of a CSV file, all of them as texts."""
    table = _parse(source, keep_empty, header=None, dtype=object).map(str.strip)
    has_values = (table != "").any(axis=1).to_numpy()
    filled = table[has_values].reset_index(drop=True)
    require(len(filled), "file", "lines of values", Words("none"))
    return Cells(list(filled.iloc[0]), filled.iloc[1:], has_values)


def _read_numbers(source: Any, words: Sequence[str], keep_empty: bool) -> Cells | None:
    """The cells of a CSV file, columns of numbers as numbers: many times faster.

    The numbers are those of Python's `float`. None where a line may be empty, short or
    long: only the texts tell which.
    """
    try:
        first_line = _parse(source, keep_empty, header=None, dtype=object, nrows=1)
        rows = _parse(source, keep_empty, header=0, low_memory=False)
    except Exception:  # pandas raises errors of many kinds, which the texts explain
        return None
    first = [str(cell).strip() for cell in first_line.iloc[0]]
    is_longer = type(rows.index).__name__ != "RangeIndex"  # its first cells are there
    if not any(first) or rows.shape[1] != len(first) or is_longer:
        return None
    places = []
    for k, name in enumerate(first):
        column = rows.iloc[:, k]
        is_number = column.dtype.kind in "iuf" and not column.isna().any()
        if not is_number or name in words:
            places.append(k)
    if len(places) == len(first):
        return None  # an empty line has no number in any column
    if places:
        options = {"usecols": places, "dtype": object}
        texts = _parse(source, keep_empty, header=0, **options).map(str.strip)
        rows.columns = range(len(first))
        for at, k in enumerate(places):
            rows[k] = texts.iloc[:, at].to_numpy()
    return Cells(first, rows, np.ones(1 + len(rows), dtype=bool))


def _parse(source: Any, keep_empty: bool, **options: Any) -> Any:
    """The data frame that pandas reads from a file, or from the text of one."""
    pandas = import_optional("pandas", "data: a table")
    version = tuple(map(int, pandas.__version__.split(".")[:2]))
    if version < EXACT_PANDAS:
        options["float_precision"] = "round_trip"
    return pandas.read_csv(
        io.StringIO(source) if isinstance(source, str) else source,
        keep_default_na=False,
        encoding="utf-8-sig",
        skipinitialspace=True,
        skip_blank_lines=not keep_empty,
        **options,
    )


def _has_separator(cell: str) -> bool:
    """True for a cell that is several numbers with another separator than a comma."""
    parts = [cell.split(mark) for mark in OTHER_SEPARATORS if mark in cell]
    return any(to_numbers(numbers) is not None for numbers in parts)


def have_header(
    tables: Sequence[Cells], paths: Sequence[Path], target: int | str
) -> bool:
    """True where the first line of every file names its columns.

    Raises ValueError where only some files have such a line, and where numbers in the
    first line may be names or a sample.

    Args:
        tables: the cells of each file
        paths: the files, for errors
        target: the column of the targets, by number or by name
    """
    first_lines = {tuple(table.first) for table in tables}
    remedy = "; put a line of names into every file, such as a,b,label, or into none"
    if isinstance(target, str):
        for table, path in zip(tables, paths, strict=True):
            line = table.first
            expected = f"the column {target!r} once in the first line{remedy}"
            require(line.count(target) == 1, str(path), expected, line)
        return True
    evidence = [header_evidence(table, target) for table in tables]
    if set(evidence) == {"names"}:
        return True
    if "names" in evidence:
        without = paths[next(i for i, kind in enumerate(evidence) if kind != "names")]
        named = paths[evidence.index("names")]
        expected = f"names in the first line, as {named.name} has{remedy}"
        line = tables[paths.index(without)].first
        reject(str(without), expected, line)
    counts = "numbers in a row" in evidence
    if counts:
        place = str(paths[evidence.index("numbers in a row")])
        line = tables[evidence.index("numbers in a row")].first
        # The numbers of a single file may be its sample, unless they count from 0.
        are_names = len(first_lines) == 1 and (len(tables) > 1 or line[0] == "0")
        expected = f"the same first line in every file, where one counts{remedy}"
        require(are_names, place, expected, line)
        return True
    if len(first_lines) == 1 and len(tables) > 1:
        _check_first_target(tables, paths, target, remedy)
    return False


def _check_first_target(
    tables: Sequence[Cells], paths: Sequence[Path], target: int, remedy: str
) -> None:
    """Raises ValueError where all files begin with one label that no other row has.

    Such a line may be the names of columns that were chosen by number.
    """
    line = tables[0].first
    if not -len(line) <= target < len(line):
        return
    first = line[target]
    labels = {str(cell) for table in tables for cell in table.rows.iloc[:, target]}
    are_whole = first.isdecimal() and all(label.isdecimal() for label in labels)
    is_alone = bool(labels) and first not in labels
    expected = f"no first line of numbers that all files have{remedy}"
    require(not (are_whole and is_alone), str(paths[0]), expected, line)


def header_evidence(cells: Cells, target: int) -> Evidence:
    """Evidence for names in the first line of a file, by all of its rows.

    - "names": words in every column, above numbers, or that their columns do not have
      again; or two words at least, one of them above the targets (a single word may be
      a gap, as "?" is)
    - "numbers in a row": three or more whole numbers, each greater by 1 than the one
      before, or 0 and 1, as pandas writes the names of columns without names
    - "data": anything else
    """
    first = cells.first
    below = cells.rows
    are_words = [to_numbers([cell]) is None for cell in first]
    words = [k for k, is_word in enumerate(are_words) if is_word]
    repeats = [(below.iloc[:, k] == first[k]).any() for k in words]
    has_numbers_below = any(_are_numbers(below.iloc[:, k]) for k in words)
    are_different = len({first[k] for k in words}) == len(words)
    if len(words) == len(first):
        is_new = are_different and not any(repeats)
        return "names" if is_new or (has_numbers_below and len(below)) else "data"
    if target % len(first) in words and len(words) > 1 and are_different:
        is_new = has_numbers_below and not repeats[words.index(target % len(first))]
        return "names" if is_new and len(below) else "data"
    if not all(cell.isdecimal() for cell in first):
        return "data"
    numbers = list(map(int, first))
    rises = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    if rises and (len(numbers) > 2 or numbers[0] == 0):
        return "numbers in a row"
    return "data"


def _are_numbers(column: Any) -> bool:
    """True where all cells of a column are numbers."""
    return column.dtype.kind in "iuf" or to_numbers(column) is not None


def _split_target(
    table: Any, target: int | str, class_names: Sequence[str] | None, path: Path
) -> tuple[Any, Any]:
    """The frame of the inputs, and the targets, numbers [n] or words [n]."""
    names = list(table.columns)
    require(len(table), str(path), "rows of values", "none")
    _check_row_numbers(names, path)
    place = [k for k, name in enumerate(names) if name == target]
    if isinstance(target, int):
        place = [target % len(names)] if -len(names) <= target < len(names) else []
    expected = f"one of the columns {names} of {path}, by a name that it has alone"
    fits = len(names) > 1 and len(place) == 1
    require(fits, "target", expected, target, [n for n in names if isinstance(n, str)])
    columns = _columns_of(table)
    y = columns.pop(place[0])
    del names[place[0]]
    if y.dtype.kind in "UO":
        are_names = class_names is not None and set(y.tolist()) <= set(class_names)
        numbers = None if are_names else to_numbers(y)
        y = y if numbers is None else numbers
    return _number_frame(names, columns, path), y


def _columns_of(table: Any) -> list[Array]:
    """The columns of a data frame by position, as two may have one name."""
    places = range(table.shape[1])
    return [read_column({k: table.iloc[:, k]}, k) for k in places]


def _number_frame(names: list[Any], columns: list[Array], path: Path) -> Any:
    """A data frame of these columns, texts as floats.

    Raises OSError that names the first cell of each column that is no number.
    """
    wrong = []
    numbers = {}
    for k, (name, column) in enumerate(zip(names, columns, strict=True)):
        is_text = column.dtype.kind in "UO"
        numbers[k] = to_numbers(column) if is_text else column
        if numbers[k] is None:
            first = next(cell for cell in column if to_numbers([cell]) is None)
            wrong.append(f"{str(first)!r} in column {name!r}")
    if wrong:
        raise OSError(
            f"{path}: expected numbers, a point in decimals, got {', '.join(wrong)} "
            f"({GAPS_HELP}; or read it yourself, and take Federation.from_table)."
        )
    frame = import_optional("pandas", "data: a table").DataFrame(numbers)
    frame.columns = names
    return frame


def to_numbers(cells: Any) -> Array | None:
    """The cells as float64, by Python's rule for floats; None where one is no number.

    Python allows "_" in a number, and a CSV file here does not.
    """
    try:
        numbers = np.array([float(cell) for cell in cells], dtype=np.float64)
    except (TypeError, ValueError):
        return None
    has_marks = any(isinstance(cell, str) and "_" in cell for cell in cells)
    return None if has_marks else numbers
