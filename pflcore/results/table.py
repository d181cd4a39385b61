"""Runs told as a Markdown table."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pflcore import metrics
from pflcore.check import PositiveInt, checked, require
from pflcore.metrics import human_bytes
from pflcore.results.record import (
    DATA_FIELDS,
    TABLE_FIELDS,
    Run,
    Runs,
    find_runs,
    label_runs,
)

__all__ = ["table"]


def experiment_title(run: Run) -> str:
    """What must agree for runs to stand in one table: data, partition, model, number
    of clients."""
    head = run.header
    named = {k: head[k] for k in ("data", "partition", "model") if head.get(k)}
    words = [str(v) if k == "data" else f"{k} {v}" for k, v in named.items()]
    return (
        ", ".join(words + ([f"{head['n']} clients"] if "n" in head else [])) or "runs"
    )


def split_name(run: Run) -> str:
    """On which of the clients' data the run was evaluated, in words."""
    names = {"test": "test", "val": "validation"}
    return names.get(run.header.get("eval_split", "test"), "training")


@checked
def table(runs: Runs, last: PositiveInt = 10, baseline: str | None = None) -> str:
    """Markdown: one row per algorithm, one table per setting; accuracies in percent;
    several seeds as mean ± std over seeds.

    `baseline`, the name of an algorithm among the runs, adds the percent of clients
    that are worse off than with it.
    """
    names = list(label_runs(runs))
    known = baseline in {None, *names, *(r.algorithm for r in runs)}
    require(known, "baseline", f"one of {', '.join(names)}", baseline, names)
    settings: dict[str, list[Run]] = {}
    for run in runs:
        settings.setdefault(experiment_title(run), []).append(run)
    return "\n".join(
        _table(name, members, last, baseline) for name, members in settings.items()
    )


def _table(name: str, runs: Runs, last: int, baseline: str | None) -> str:
    measure = next((r.main_metric for r in runs if r.evaluations), "accuracy")
    groups = label_runs(runs)
    kept = {k: _one_of_each_seed(members) for k, members in groups.items()}
    split = split_name(runs[0])
    seeds = max(map(len, kept.values()))
    fewer = ", ".join(f"{k} {len(m)}" for k, m in kept.items() if len(m) < seeds)
    spread = (
        f"; mean ± std over {seeds} seeds{f' ({fewer})' if fewer else ''}"
        if seeds > 1
        else ""
    )
    said = "accuracy in percent" if measure == "accuracy" else "loss"
    optimistic = " (optimistic, as in the papers)" if split == "test" else ""
    rounds = max(r.rounds_played for r in runs)
    return "\n".join(
        [
            f"### {name}, {rounds} rounds\n",
            f"{split.capitalize()} {said}, mean over clients unless a client is "
            f"named{spread}.\n",
            *markdown_table(_rows(runs, kept, measure, last, baseline)),
            f"\n\\* the best round, selected on {split} data{optimistic}; std and "
            "worst decile: at "
            "the last evaluation.",
            *_footnotes(groups, kept),
            "",
        ]
    )


def _rows(
    runs: Runs,
    groups: dict[str, list[Run]],
    measure: str,
    last: int,
    baseline: str | None,
) -> list[list[str]]:
    """The table's heading and a row for each algorithm."""
    clients = [None, *sorted({r.target for r in runs if r.target is not None})]
    # no mean of more rounds than the longest run has
    last = max(1, min(last, max(r.rounds_played for r in runs)))
    columns = list(_run_numbers(runs[0], clients, measure, last))
    extras = sorted({k for r in runs for k in r.extra_metrics} - {measure})
    base = find_runs(groups, baseline) if baseline else None
    of_seed = {b.header.get("seed"): b for b in reversed(base or [])}
    hurt = [f"% hurt vs {baseline}"] if base else []
    rows = [["algorithm", *columns, *extras, *hurt, "bytes sent", "note"]]
    scale, digits = (100.0, 2) if measure == "accuracy" else (1.0, 5)
    for algorithm, members in groups.items():
        numbers = [_run_numbers(r, clients, measure, last) for r in members]
        row = [_cell([scale * each[k] for each in numbers], digits) for k in columns]
        if any(
            r.rounds_played < last for r in members
        ):  # the mean of fewer rounds is another number
            both = zip(columns, row, strict=True)
            row = [
                "-" if name.endswith(last_mean_heading(last)) else cell
                for name, cell in both
            ]
        for k in extras:
            row.append(
                _cell(
                    [
                        metrics.mean(r.last_values(k))
                        for r in members
                        if k in r.extra_metrics
                    ],
                    4,
                )
            )
        if base:
            lost = [
                _percent_hurt(r, of_seed.get(r.header.get("seed")), measure)
                for r in members
            ]
            row.append(_cell(lost, 1))
        sent = human_bytes(
            metrics.mean([float((r.cumulative_bytes() or [0])[-1]) for r in members])
        )
        each = [", ".join(_notes(r)) for r in members]
        notes = "; ".join(dict.fromkeys(filter(None, each)))
        rows.append([algorithm, *row, sent, notes])
    return rows


def _footnotes(
    groups: dict[str, list[Run]], kept: dict[str, list[Run]]
) -> Iterator[str]:
    """What stands below the table."""
    made_for = {name: m[0].header.get("model_target") for name, m in groups.items()}
    for_one = [f"{k} for client {c}" for k, c in made_for.items() if isinstance(c, int)]
    for_each = [name for name, client in made_for.items() if client == "each client"]
    if for_one:
        yield f"\nMade for one client, whose columns count: {', '.join(for_one)}."
    if for_each:
        yield f"\nMade for each client in a run of its own: {', '.join(for_each)}."
    for algorithm, members in kept.items():
        for r in members:
            run = f"\n{algorithm}, seed {r.header.get('seed', '?')}"
            seed = r.header.get("seed")
            if far := describe_outliers(r):
                yield f"{run}, moved far: {far}; look at the data or set clip."
            times = [other.header.get("seed") for other in groups[algorithm]].count(
                seed
            )
            if seed is not None and times > 1:
                yield f"{run}: the same run is here {times} times, and counts once."
            if r.stopped:
                yield f"{run}, stopped: {r.stopped}"


def _percent_hurt(run: Run, base: Run | None, measure: str) -> float:
    """Percent of clients that are worse off than in a run of the same seed; NaN where
    there is none, or other clients were evaluated."""
    if base is None or not (run.last_evaluation and base.last_evaluation):
        return math.nan
    keys = (*TABLE_FIELDS, *DATA_FIELDS, "partition_options", "eval_split")
    (cut, a), (other, b) = (
        ([r.header.get(k) for k in keys], r.last_evaluation) for r in (run, base)
    )
    same = a.get("clients") == b.get("clients") and len(a[measure]) == len(b[measure])
    if not same or cut != other:
        return math.nan
    return metrics.hurt(
        run.last_values(measure),
        base.last_values(measure),
        metrics.is_higher_better(measure),
    )


def _one_of_each_seed(runs: Runs) -> list[Run]:
    """One run of each seed, the first whole one."""
    kept: dict[Any, Run] = {}
    for run in sorted(runs, key=lambda r: r.unfinished):
        kept.setdefault(run.header.get("seed", id(run)), run)
    return list(kept.values())


def _run_numbers(
    run: Run, clients: Sequence[int | None], measure: str, last: int
) -> dict[str, float]:
    """A run's numbers by column; of `clients` None is the mean over all."""
    up = metrics.is_higher_better(measure)
    at_last = run.last_values(measure)
    out = dict[str, float]()
    for client in clients:
        rounds, values = run.curve(client, measure)
        who = "" if client is None else f"client {client}: "
        out[f"{who}best\\*"] = metrics.best(values, up).value
        out[f"{who}final"] = metrics.final(values)
        out[f"{who}{last_mean_heading(last)}"] = metrics.last_mean(values, rounds, last)
    out["std over clients"] = metrics.std(at_last)
    out["worst decile"] = metrics.worst_decile(at_last, higher_is_better=up)
    return out


def last_mean_heading(rounds: int) -> str:
    """The heading of the mean over so many rounds."""
    return f"mean of last {rounds}"


def _cell(values: Sequence[float], digits: int) -> str:
    """One number per seed: the number, or mean ± population standard deviation over
    the seeds."""
    if not metrics.count(values) or any(map(math.isinf, values)):
        return "-"
    text = f"{metrics.mean(values):.{digits}f}"
    return f"{text} ± {metrics.std(values):.{digits}f}" if len(values) > 1 else text


def describe_incidents(run: Run) -> list[str]:
    """Void rounds, and clients that were dropped, in words."""
    void = sum(bool(r.get("void")) for r in run.rounds)
    dropped = sum(len(r.get("dropped") or []) for r in run.rounds)
    said = {
        f"{void} void rounds": void,
        f"{dropped} times a client was dropped": dropped,
    }
    return [words for words, times in said.items() if times]


def _notes(run: Run) -> Iterator[str]:
    """What stands beside the run's numbers."""
    planned = run.header.get("rounds")
    if isinstance(planned, int) and run.rounds_played < planned:
        yield f"{run.rounds_played} of {planned} rounds"
    elif run.stopped:
        yield f"stopped after round {run.rounds_played}"
    yield from describe_incidents(run)
    lacking = {
        f"no {k}": run.last_values(k).isnan() & (run.last_values("size") > 0)
        for k in run.extra_metrics
    }
    if "loss" in run.last_evaluation:
        lacking = {"no finite loss": run.last_values("loss").isinf(), **lacking}
    for what, who in lacking.items():
        if count := int(who.sum()):
            yield f"{count} client{'s have' if count > 1 else ' has'} {what}"
    if run.held_out:
        yield run.held_out
    if cut := len({i for r in run.rounds for i in r.get("clipped") or []}):
        yield f"the updates of {cut} client{'s' * (cut > 1)} were clipped"
    if bad := run.header.get("adversary"):
        ids = ", ".join(map(str, bad["clients"]))
        yield f"{bad['attack']} by client{'s' * (len(bad['clients']) > 1)} {ids}"


def describe_outliers(run: Run) -> str:
    """Who moved much farther than the others, the farthest first; "" for nobody."""
    far = sorted(run.outliers().items(), key=lambda item: -item[1][0])
    said = [
        f"client {i} by up to {ratio:.3g} times the median ({times} "
        f"round{'s' * (times > 1)})"
        for i, (ratio, times) in far[:3]
    ]
    return ", ".join(said) + (f" and {len(far) - 3} more" if len(far) > 3 else "")


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as Markdown, padded so that they read as a table in a terminal too; first
    and last column left, numbers right."""
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = [str.ljust, *[str.rjust] * (len(width) - 2), str.ljust][: len(width)]
    each = (
        " | ".join(p(c, w) for p, c, w in zip(pad, row, width, strict=True))
        for row in rows
    )
    head, *lines = (f"| {cells} |" for cells in each)
    dashes = zip(pad, ("-" * (w + 1) for w in width), strict=True)
    rule = [f"{dash}:" if p is str.rjust else f":{dash}" for p, dash in dashes]
    return [head, f"|{'|'.join(rule)}|", *lines]
