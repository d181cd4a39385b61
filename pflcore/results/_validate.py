"""Checks of a record's lines, so that readers need no others."""

from collections.abc import Mapping, Sequence
from typing import Any

from pflcore.check import require

Facts = Mapping[str, Any]
MAX_WHOLE_NUMBER = 2**53  # a float represents every whole number up to this one
MAX_CLIENTS = 10**8
DICT_FIELDS = (
    "facts",
    "options",
    "training",
    "model_options",
    "partition_options",
    "adversary",
)
ID_FIELDS = ("cohort", "dropped", "clipped")


class EarlierFormatError(ValueError):
    """A line is in an earlier format."""


def check_line(line: Any) -> None:
    """Raises ValueError for a line that no `RecordWriter` writes.

    Raises EarlierFormatError for a line whose long lists are in another file.
    """
    require(isinstance(line, dict), "line", "a JSON object", line)
    if _has_side_file(line):
        raise EarlierFormatError
    stopped = line.get("stopped", "")
    require(isinstance(stopped, str), "stopped", "a sentence", stopped)
    if "header" in line:
        _check_header(line["header"])
    if "round" in line:
        _check_round(line)


def check_line_fits_run(line: Facts, header: Facts, evaluation: Facts | None) -> None:
    """Raises ValueError where a line does not fit its run.

    Args:
        header: The header of the run.
        evaluation: The first evaluation of the run; None before there is one.
    """
    n = header.get("n")
    if n is not None:
        for name, ids in _ids_by_field(line):
            require(all(i < n for i in ids), name, f"clients from 0 to {n - 1}", ids)
    values = line.get("eval")
    if not values:
        return
    count = _evaluation_length(values)
    expected = len(values["clients"]) if "clients" in values else n
    fits = expected in (None, count)
    require(fits, "eval", f"values of {expected} clients", values)
    if evaluation:
        layout = _evaluation_layout(values)
        first = _evaluation_layout(evaluation)
        words = f"the run's keys and lengths, {first}"
        require(layout == first, "eval", words, layout)


def _check_header(header: Any) -> None:
    """Raises ValueError for a header that no run has."""
    require(isinstance(header, dict), "header", "a JSON object", header)
    n = header.get("n")
    fits = n is None or (_is_whole_number(n) and 1 <= n <= MAX_CLIENTS)
    require(fits, "header.n", f"a whole number from 1 to {MAX_CLIENTS:,}", n)
    rounds = header.get("rounds")
    fits = rounds is None or _is_whole_number(rounds)
    require(fits, "header.rounds", "a whole number", rounds)
    target = header.get("target")
    if isinstance(target, int):
        fits = _is_whole_number(target) and (n is None or target < n)
        require(fits, "header.target", "a client", target)
    for name in DICT_FIELDS:
        value = header.get(name)
        fits = value is None or isinstance(value, dict)
        require(fits, f"header.{name}", "an object", value)
    for name in ("seed", "eval_split", "model_target"):
        value = header.get(name)
        fits = not isinstance(value, list | dict)
        require(fits, f"header.{name}", "a single value", value)
    held_out = (header.get("facts") or {}).get("held out for validation")
    fits = held_out is None or _are_numbers([held_out])
    require(fits, "header.facts", "a share held out for validation", held_out)
    size = header.get("size")
    if size is not None:
        fits = _are_numbers(size) and len(size) == (n or len(size))
        require(fits, "header.size", f"the samples of {n or 'all'} clients", size)
    adversary = header.get("adversary")
    if adversary:
        fits = "attack" in adversary and _are_ids(adversary.get("clients"))
        require(fits, "header.adversary", "an attack and its clients", adversary)


def _check_round(line: Facts) -> None:
    """Raises ValueError for a round's line that no run has."""
    require(_is_whole_number(line["round"]), "round", "a whole number", line["round"])
    for name in ID_FIELDS:
        ids = line.get(name)
        require(ids is None or _are_ids(ids), name, "a list of clients", ids)
    norms = line.get("relative_update_norm")
    fits = norms is None or _are_numbers(norms)
    require(fits, "relative_update_norm", "a list of numbers", norms)
    for name in ("bytes_down", "bytes_up"):
        value = line.get(name, 0)
        fits = _are_numbers([value]) and value is not None and 0 <= value < 2**63
        require(fits, name, "a number of bytes", value)
    for name in ("seconds", "train_loss"):
        require(_are_numbers([line.get(name)]), name, "a number", line.get(name))
    _check_evaluation(line.get("eval"))
    _check_report(line.get("report"))


def _check_evaluation(values: Any) -> None:
    """Raises ValueError for an evaluation that no round has."""
    fits = values is None or isinstance(values, dict)
    require(fits, "eval", "an object of lists", values)
    if not values:
        return
    for name, value in values.items():
        fits = value is None or _are_numbers(value)
        require(fits, f"eval.{name}", "a list of numbers, one a client", value)
    fits = _are_ids(values.get("clients", []))
    require(fits, "eval.clients", "clients", values.get("clients"))
    lengths = {len(value) for value in values.values() if value is not None}
    require(len(lengths) == 1, "eval", "lists of one length", lengths)
    measured = values.get("accuracy") is not None or values.get("loss") is not None
    require(measured, "eval", "an accuracy or a loss", [*values])


def _check_report(report: Any) -> None:
    """Raises ValueError where a report's mixing weights cannot be drawn.

    The other parts of a report may have any values.
    """
    require(report is None or isinstance(report, dict), "report", "an object", report)
    lists = {k: v for k, v in (report or {}).items() if isinstance(v, list)}
    for name in {"weights", "weight"} & {*lists}:
        fits = _numeric_shape(lists[name]) is not None
        require(fits, f"report.{name}", "a list or matrix of numbers", lists[name])
    if "index" not in lists or "weight" not in lists:
        return
    index = lists["index"]
    shape = _numeric_shape(lists["weight"])
    fits = _numeric_shape(index) == shape and _are_ids(_flatten_entries(index))
    require(fits, "report.index", "the clients of each weight", index)
    if "rows" in report:
        rows = report["rows"]
        fits = _are_ids(rows) and len(rows) == len(index)
        require(fits, "report.rows", "a client for each row of weights", rows)


def _ids_by_field(line: Facts) -> list[tuple[str, Sequence[int]]]:
    """Pairs of a field's name and its clients' ids in a line."""
    report = line.get("report") or {}
    values = line.get("eval") or {}
    fields = [(name, line.get(name) or []) for name in ID_FIELDS]
    fields.append(("eval.clients", values.get("clients") or []))
    if isinstance(report.get("weight"), list) and isinstance(report.get("index"), list):
        for name in ("index", "rows"):
            fields.append((f"report.{name}", _flatten_entries(report.get(name))))
    return fields


def _is_whole_number(value: Any) -> bool:
    """True for a whole number from 0 to `MAX_WHOLE_NUMBER`."""
    return type(value) is int and 0 <= value <= MAX_WHOLE_NUMBER


def _are_ids(values: Any) -> bool:
    """True for a list of ids of clients."""
    if not isinstance(values, list) or {*map(type, values)} - {int}:
        return False
    return not values or (min(values) >= 0 and max(values) <= MAX_WHOLE_NUMBER)


def _are_numbers(values: Any) -> bool:
    """True for a list of numbers that a float can represent.

    None is allowed, because it stands for a number that is not finite.
    """
    if not isinstance(values, list) or {*map(type, values)} - {int, float, type(None)}:
        return False
    return all(abs(v) < 2**63 for v in values if type(v) is int)


def _numeric_shape(values: Any) -> tuple[int, ...] | None:
    """The shape of a list or matrix of numbers, or None."""
    if _are_numbers(values):
        return (len(values),)
    if not isinstance(values, list) or not all(map(_are_numbers, values)):
        return None
    lengths = {*map(len, values)}
    return (len(values), *lengths) if len(lengths) == 1 else None


def _flatten_entries(values: Any) -> list[Any]:
    """The entries of a list or matrix; [] for any other value."""
    if not isinstance(values, list):
        return []
    entries = []
    for row in values:
        if isinstance(row, list):
            entries += row
        else:
            entries.append(row)
    return entries


def _evaluation_length(values: Facts) -> int:
    """The number of clients in an evaluation."""
    return len(next(v for v in values.values() if v is not None))


def _evaluation_layout(values: Facts) -> dict[str, int | None]:
    """The keys of an evaluation with the lengths of their lists."""
    return {k: None if v is None else len(v) for k, v in sorted(values.items())}


def _has_side_file(value: Any) -> bool:
    """True where a line has a long list in another file.

    In place of the list, such a line has {"array": [file, offset]}.
    """
    # The entries of a list are not searched, because only whole lists were moved.
    if not isinstance(value, dict):
        return False
    place = value.get("array")
    if isinstance(place, list) and [type(v) for v in place] == [str, int]:
        return len(value) == 1
    return any(map(_has_side_file, value.values()))
