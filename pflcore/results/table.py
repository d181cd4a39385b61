"""Runs told as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from pflcore import metrics
from pflcore.check import Count, checked
from pflcore.metrics import human
from pflcore.results.record import CUT, SETTING, Run, find, label

__all__ = ["table"]


def setting(run: Run) -> str:
    """What must agree for runs to stand in one table: data, partition, model, number of clients."""
    head = run.header
    words = [
        f"{head[k]}" if k == "data" else f"{k} {head[k]}"
        for k in ("data", "partition", "model")
        if head.get(k) not in (None, "")
    ]
    return ", ".join(words + ([f"{head['n']} clients"] if "n" in head else [])) or "runs"


def split_of(run: Run) -> str:
    """On which of the clients' data the run was evaluated, in words."""
    return {"test": "test", "val": "validation"}.get(
        run.header.get("eval_split", "test"), "training"
    )


@checked
def table(runs: Sequence[Run], last: Count = 10, baseline: str | None = None) -> str:
    """Markdown: one row per algorithm, one table per setting; accuracies in percent; several seeds
    as mean ± std over seeds.

    `baseline`, the name of an algorithm among the runs, adds the percent of clients that are worse
    off than with it.
    """
    names = list(label(runs))
    if baseline is not None and baseline not in {*names, *(r.algorithm for r in runs)}:
        raise ValueError(f"baseline: expected one of {', '.join(names)}, got {baseline!r}.")
    settings: dict[str, list[Run]] = {}
    for run in runs:
        settings.setdefault(setting(run), []).append(run)
    for members in settings.values():
        streams = sorted({str(r.header["stream"]) for r in members if "stream" in r.header})
        if len(streams) > 1:
            raise ValueError(
                "stream: expected runs of one version of the random streams, got "
                f"{' and '.join(streams)}; run the older ones again, or "
                "report them apart."
            )
    return "\n".join(_table(name, members, last, baseline) for name, members in settings.items())


def _table(name: str, runs: Sequence[Run], last: int, baseline: str | None) -> str:
    measure = next((r.measure for r in runs if r.evaluations), "accuracy")
    groups, repeated = one_of_each_seed(label(runs))
    split, seeds = split_of(runs[0]), max(map(len, groups.values()))
    fewer = ", ".join(f"{k} {len(m)}" for k, m in groups.items() if len(m) < seeds)
    said = "accuracy in percent" if measure == "accuracy" else "loss"
    spread = f"; mean ± std over {seeds} seeds{f' ({fewer})' if fewer else ''}"
    optimistic = " (optimistic, as in the papers)" if split == "test" else ""
    lines = [
        f"### {name}, {max((r.rounds[-1]['round'] for r in runs if r.rounds), default=0)} rounds",
        "",
        f"{split.capitalize()} {said}, mean over clients unless a client is named"
        f"{spread if seeds > 1 else ''}.",
        "",
        *_markdown(_rows(runs, groups, measure, last, baseline)),
        "",
        f"\\* the best round, selected on {split} data{optimistic}; std and worst decile: at the "
        "last evaluation.",
    ]
    return "\n".join([*lines, *_remarks(groups, repeated)]) + "\n"


def _rows(
    runs: Sequence[Run],
    groups: dict[str, list[Run]],
    measure: str,
    last: int,
    baseline: str | None,
) -> list[list[str]]:
    """The table's heading and a row for each algorithm."""
    up = measure == "accuracy"
    columns = _columns(runs, measure, up, last)
    seen = {k for r in runs for e in r.evaluations[-1:] for k in e["eval"]}
    asked = sorted(seen - {"size", "clients", "loss", "accuracy", measure})
    base = find(groups, baseline) if baseline else None
    of_seed = {b.header.get("seed"): b for b in reversed(base or [])}
    hurt = [f"% hurt vs {baseline}"] if base else []
    rows = [["algorithm", *columns, *asked, *hurt, "bytes sent", "note"]]
    for algorithm, members in groups.items():
        scale, digits = (100.0, 2) if up else (1.0, 5)
        row = [_cell([f(r) for r in members], scale, digits) for f in columns.values()]
        for k in asked:
            done = [r for r in members if r.evaluations and k in r.evaluations[-1]["eval"]]
            row.append(_cell([metrics.mean(r.last(k)) for r in done], 1.0, 4))
        if base:
            lost = [_hurt(r, of_seed.get(r.header.get("seed")), measure) for r in members]
            row.append(_cell(lost, 1.0, 1))
        sent = human(metrics.mean([float((r.sent() or [0])[-1]) for r in members]))
        notes = "; ".join(dict.fromkeys(n for n in map(_note, members) if n))
        rows.append([algorithm, *row, sent, notes])
    return rows


def _remarks(
    groups: dict[str, list[Run]], repeated: dict[str, list[tuple[int, int]]]
) -> Iterator[str]:
    """What stands below the table."""
    made_for = {name: m[0].header.get("made_for") for name, m in groups.items()}
    for_one = [f"{k} for client {c}" for k, c in made_for.items() if isinstance(c, int)]
    for_each = [name for name, client in made_for.items() if client == "each client"]
    if for_one:
        yield f"\nMade for one client, whose columns count: {', '.join(for_one)}."
    if for_each:
        yield f"\nMade for each client in a run of its own: {', '.join(for_each)}."
    for algorithm, members in groups.items():
        who = [(f"\n{algorithm}, seed {r.header.get('seed', '?')}", r) for r in members]
        for run, r in who:
            if whom := far_movers(r):
                yield f"{run}, moved far: {whom}; look at the data or set clip."
        for seed, k in repeated[algorithm]:
            yield (f"\n{algorithm}, seed {seed}: the same run is here {k} times, and counts once.")
        yield from (f"{run}, stopped: {r.stopped}" for run, r in who if r.stopped)


def _hurt(run: Run, base: Run | None, measure: str) -> float:
    """Percent of clients that are worse off than in a run of the same seed; NaN where there is
    none, or other clients were evaluated."""
    if base is None or not (run.evaluations and base.evaluations):
        return math.nan
    a, b = run.evaluations[-1]["eval"], base.evaluations[-1]["eval"]
    cut = [
        [r.header.get(k) for k in (*SETTING, *CUT, "partition_options", "eval_split")]
        for r in (run, base)
    ]
    if (
        a.get("clients") != b.get("clients")
        or len(a[measure]) != len(b[measure])
        or cut[0] != cut[1]
    ):
        return math.nan
    return metrics.hurt(run.last(measure), base.last(measure), measure == "accuracy")


def one_of_each_seed(
    groups: dict[str, list[Run]],
) -> tuple[dict[str, list[Run]], dict[str, list[tuple[int, int]]]]:
    """The groups with one run of each seed, the first whole one, and which seeds there were more
    of, and how many."""
    kept: dict[str, list[Run]] = {}
    repeated: dict[str, list[tuple[int, int]]] = {}
    for name, given in groups.items():
        members = sorted(given, key=lambda r: r.unfinished)
        seeds = [r.header.get("seed") for r in members]
        kept[name] = [
            r for i, r in enumerate(members) if seeds[i] is None or seeds.index(seeds[i]) == i
        ]
        repeated[name] = [
            (seed, seeds.count(seed))
            for seed in dict.fromkeys(seeds)
            if seed is not None and seeds.count(seed) > 1
        ]
    return kept, repeated


def _columns(
    runs: Sequence[Run], measure: str, up: bool, last: int
) -> dict[str, Callable[[Run], float]]:
    def best(run: Run, client: int | None) -> float:
        return metrics.best(run.curve(client, measure)[1], up).value

    def final(run: Run, client: int | None) -> float:
        return metrics.final(run.curve(client, measure)[1])

    def late(run: Run, client: int | None) -> float:
        rounds, values = run.curve(client, measure)
        return metrics.last_mean(values, rounds, last)

    def of(f: Callable[[Run, int | None], float], client: int | None) -> Callable[[Run], float]:
        return lambda run: f(run, client)

    columns: dict[str, Callable[[Run], float]] = {}
    for client in [None, *sorted({r.target for r in runs if r.target is not None})]:
        who = "" if client is None else f"client {client}: "
        columns |= {
            f"{who}best\\*": of(best, client),
            f"{who}final": of(final, client),
            f"{who}mean of last {last}": of(late, client),
        }
    columns["std over clients"] = lambda run: metrics.std(run.last(measure))
    columns["worst decile"] = lambda run: metrics.worst_decile(
        run.last(measure), higher_is_better=up
    )
    return columns


def _cell(values: Sequence[float], scale: float, digits: int) -> str:
    """One number per seed: the number, or mean ± population standard deviation over the seeds."""
    if not metrics.count(values) or any(map(math.isinf, values)):
        return "-"
    text = f"{scale * metrics.mean(values):.{digits}f}"
    return f"{text} ± {scale * metrics.std(values):.{digits}f}" if len(values) > 1 else text


def incidents(run: Run) -> list[str]:
    """Void rounds, and clients that were dropped, in words."""
    void, dropped = (
        sum(bool(r.get("void")) for r in run.rounds),
        sum(len(r.get("dropped") or []) for r in run.rounds),
    )
    return ([f"{void} void rounds"] if void else []) + (
        [f"{dropped} times a client was dropped"] if dropped else []
    )


def _note(run: Run) -> str:
    parts = (
        [f"stopped after round {run.rounds[-1]['round'] if run.rounds else 0}"]
        if run.stopped
        else []
    )
    parts += incidents(run)
    if run.planned is not None and run.played < run.planned:
        parts.insert(0, f"{run.played} of {run.planned} rounds")
        parts = [p for p in parts if not p.startswith("stopped after")]
    lost = (
        int(run.last("loss").isinf().sum())
        if run.evaluations and "loss" in run.evaluations[-1]["eval"]
        else 0
    )
    parts += [f"{lost} client{'s have' if lost > 1 else ' has'} no finite loss"] if lost else []
    last = run.evaluations[-1]["eval"] if run.evaluations else {}
    for key in sorted({*last} - {"size", "clients", "loss", "accuracy"}):
        none = int(run.last(key).isnan().sum()) - int((run.last("size") == 0).sum())
        parts += [f"{none} client{'s have' if none > 1 else ' has'} no {key}"] if none > 0 else []
    parts += [run.held_out] if run.held_out else []
    cut = len({i for r in run.rounds for i in r.get("clipped") or []})
    parts += [f"the updates of {cut} client{'s' if cut > 1 else ''} were clipped"] if cut else []
    bad = run.header.get("adversary")
    parts += (
        [
            f"{bad['attack']} by client{'s' if len(bad['clients']) > 1 else ''} "
            f"{', '.join(map(str, bad['clients']))}"
        ]
        if bad
        else []
    )
    return ", ".join(parts)


def far_movers(run: Run) -> str:
    """Who moved much farther than the others, the farthest first; "" for nobody."""
    far = sorted(run.outliers().items(), key=lambda item: -item[1][0])
    said = [
        f"client {i} by up to {ratio:.3g} times the median ({times} "
        f"round{'s' if times > 1 else ''})"
        for i, (ratio, times) in far[:3]
    ]
    return ", ".join(said) + (f" and {len(far) - 3} more" if len(far) > 3 else "")


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as Markdown, padded so that they read as a table in a terminal too; first and last
    column left, numbers right."""
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = [i in (0, len(width) - 1) for i in range(len(width))]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if flush else c.rjust(w)
            for c, w, flush in zip(row, width, left, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    rule = [
        f":{'-' * (w + 1)}" if flush else f"{'-' * (w + 1)}:"
        for w, flush in zip(width, left, strict=True)
    ]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]
