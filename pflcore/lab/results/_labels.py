"""Groups of runs that differ in the seed, and their labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pflcore.check import require
from pflcore.data._partition import PARTITIONS, options_of
from pflcore.simulation._history import History
from pflcore.simulation.record import DATA_FIELDS, Line, Runs, to_json

# Fields of a header that hold options, in the order in which labels name them.
OPTION_GROUPS = ("model_options", "training", "options")
# Fields of a header that all runs of one table share.
TABLE_FIELDS = ("data", "partition", "model", "n")
# Fields of a header that a reader expects to be equal in all rows of a table. Where
# they differ, the labels show them.
COMPARED_FIELDS = (
    *TABLE_FIELDS,
    "clients",
    "eval_clients",
    "rounds",
    "participation",
    "sampling",
    "batch_norm",
    "loss",
    "clip",
    "adversary",
    "eval_split",
    "stream",
    *DATA_FIELDS,
)


def label_runs(runs: Runs) -> dict[str, list[History]]:
    """Groups of runs that differ in the seed alone, by label.

    A label is the algorithm's name, followed by the options in which the group differs
    from other groups: from those of the same algorithm in the algorithm's options, and
    from all in the `COMPARED_FIELDS`.
    """
    by_options: dict[str, list[History]] = {}
    for run in runs:
        key = json.dumps(to_json([run.algorithm, run_options(run)]), sort_keys=True)
        by_options.setdefault(key, []).append(run)
    groups = list(by_options.values())
    options = [run_options(members[0]) for members in groups]
    by_label: dict[str, list[History]] = {}
    for members, own_options in zip(groups, options, strict=True):
        algorithm = members[0].algorithm
        namesakes = []
        for others, other_options in zip(groups, options, strict=True):
            if others[0].algorithm == algorithm:
                namesakes.append(other_options)
        words = _distinctive_options(own_options, options, namesakes)
        label = f"{algorithm} ({', '.join(words)})" if words else algorithm
        by_label.setdefault(label, []).extend(members)
    return by_label


def one_run_per_seed(runs: Runs) -> list[History]:
    """The first finished run of each seed, or else its first run.

    Two folders may hold the same run, which counts once.
    """
    by_seed: dict[Any, History] = {}
    for run in sorted(runs, key=lambda run: run.unfinished):
        seed = run.header.get("seed", id(run))  # every run without a seed counts
        by_seed.setdefault(seed, run)
    return list(by_seed.values())


def _distinctive_options(
    options: Line, all_options: Sequence[Line], namesakes: Sequence[Line]
) -> list[str]:
    """The options that distinguish a group from others, as "name=value".

    Args:
        options: The options of the group.
        all_options: The options of all groups. `COMPARED_FIELDS` and the partition's
            options are compared with these.
        namesakes: The options of the groups of the same algorithm. All other options
            are compared with these.
    """
    distinctive = []
    for name, value in options.items():
        is_shared = name in COMPARED_FIELDS or name.startswith("partition.")
        peers = all_options if is_shared else namesakes
        if any(name not in peer or peer[name] != value for peer in peers):
            distinctive.append(f"{name}={value}")
    return distinctive


def baseline_label(groups: Mapping[str, list[History]], name: str) -> str | None:
    """The label of the baseline: `name` itself, or that of the group of this algorithm.

    None where there is no such group. Raises ValueError where the algorithm has several
    groups, which differ in their options.
    """
    if name in groups:
        return name
    labels = [label for label, runs in groups.items() if runs[0].algorithm == name]
    expected = f"one of the rows {', '.join(labels)}"
    require(len(labels) < 2, "baseline", expected, name)
    return labels[0] if labels else None


def run_options(run: History) -> Line:
    """The options of a run except its seed, the algorithm's last."""
    header = run.header
    shared_names = [*COMPARED_FIELDS, "parameters"]
    groups = [{name: header[name] for name in shared_names if name in header}]
    partition = header.get("partition_options") or {}
    # The prefix is there because an algorithm may have an option "alpha", too.
    groups.append({f"partition.{name}": value for name, value in partition.items()})
    groups += [header.get(group) or {} for group in OPTION_GROUPS]
    options = {}
    for group in groups:
        for name, value in group.items():
            # A run without clipping is the usual case, so a label does not name it.
            if name != "clip" or value is not None:
                options[name] = value
    return options


def settings_of(runs: Runs) -> dict[str, list[History]]:
    """The runs of each setting, by the setting's title."""
    settings: dict[str, list[History]] = {}
    for run in runs:
        settings.setdefault(setting_title(run), []).append(run)
    return settings


def setting_words(run: History, cut: Sequence[str] = ()) -> list[str]:
    """The words for a run's setting: data, partition, model and clients.

    Args:
        run: The run.
        cut: The words on the partition's options, as of `cut_words`.
    """
    header = run.header
    words = []
    if header.get("data"):
        words.append(str(header["data"]))
    if header.get("partition"):
        options = f" ({', '.join(cut)})" if cut else ""
        words.append(f"partition {header['partition']}{options}")
    if header.get("model"):
        words.append(f"model {header['model']}")
    if "n" in header:
        words.append(f"{header['n']} clients")
    return words


def setting_title(run: History) -> str:
    """The title of a run's setting."""
    return ", ".join(setting_words(run)) or "runs"


def cut_words(runs: Runs) -> list[str]:
    """The partition's options that no label shows, where they are not the defaults.

    Labels show those in which the runs differ.
    """
    header = runs[0].header
    if header.get("partition") not in PARTITIONS:
        return []
    cuts = [run.header.get("partition_options") or {} for run in runs]
    words = []
    for name, default in options_of(header["partition"]).items():
        value = cuts[0].get(name, default)
        is_shared = all(cut.get(name, default) == value for cut in cuts)
        if is_shared and value != default:
            words.append(f"{name} {value}")
    return words


def split_name(run: History) -> str:
    """The word for the split that a run was evaluated on."""
    names = {"test": "test", "val": "validation"}
    return names.get(run.header.get("eval_split", "test"), "training")
