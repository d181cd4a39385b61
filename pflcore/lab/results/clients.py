"""The clients that a method helps: a table with a row for each; it needs scipy.

A method is compared with a baseline on the same samples: each sample that one of the
two classifies correctly and the other does not counts for the better one. A client's
interval is that of a paired bootstrap over its samples.

Symbols: n samples of a client; K seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from pflcore.check import OpenUnitFloat, checked, import_optional, require
from pflcore.lab.results._labels import (
    baseline_label,
    label_runs,
    one_run_per_seed,
    setting_title,
    settings_of,
    split_name,
)
from pflcore.lab.results.table import are_comparable, markdown_table
from pflcore.simulation._history import History
from pflcore.simulation.record import Runs

__all__ = ["client_frame", "client_table"]
NUM_RESAMPLES = 9999
VERDICTS = ("helped", "hurt", "undecided")
# The intervals of fewer samples are too short: of six samples, 13 % of the clients of
# equal methods would be helped or hurt in place of 5 %.
MIN_SAMPLES = 20


class Interval(NamedTuple):
    """A mean difference with its bootstrap interval.

    Attributes:
        mean: The mean over the samples.
        low: The lower end.
        high: The upper end.
    """

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """The words "helped" or "hurt" where the interval does not hold 0."""
        if self.low > 0:
            return "helped"
        return "hurt" if self.high < 0 else "undecided"


@checked
def client_frame(
    runs: Runs, baseline: str, confidence: OpenUnitFloat = 0.95
) -> Any:  # a pandas.DataFrame
    """A frame with a row for each client and method, of the runs of one setting.

    Its columns are client, samples (those of the evaluation), method, accuracy,
    baseline (its accuracy), difference, low, high, verdict. Numbers are in percent, at
    the last round. A client of fewer than 20 samples is always "undecided".

    Args:
        runs: The runs, as from `pflcore.lab.results.read`.
        baseline: The name of an algorithm among the runs.
        confidence: The share of intervals that hold the true difference.

    Raises ValueError where no run has the baseline's name, and for records without the
    outcome of each sample.
    """
    groups = label_runs(runs)
    groups = {label: one_run_per_seed(members) for label, members in groups.items()}
    names = list(groups)
    expected = f"one of {', '.join(names)}"
    label_of_baseline = baseline_label(groups, baseline) or ""
    require(label_of_baseline, "baseline", expected, baseline, names)
    baseline_runs = groups[label_of_baseline]
    header = baseline_runs[0].header
    has_one_cut = header.get("data_seed") != "each" or header.get("partition") is None
    words = "runs with one cut, because with --data-seed each no client stays the same"
    require(has_one_cut, "runs", words, setting_title(runs[0]))
    rows = []
    for label, members in groups.items():
        if label == label_of_baseline:
            continue
        pairs = list(_pairs_by_seed(members, baseline_runs))
        for client in _clients_of(pairs):
            rows.append(_client_row(label, client, pairs, confidence))
    words = f"methods with the seeds, samples and clients of {baseline}"
    require(rows, "runs", words, ", ".join(names))
    return import_optional("pandas").DataFrame(rows)


def _pairs_by_seed(
    runs: Runs, baseline_runs: Runs
) -> Iterator[tuple[History, History]]:
    """Yields each run with the baseline's run of the same seed and the same samples."""
    by_seed = {run.header.get("seed"): run for run in baseline_runs}
    for run in runs:
        other = by_seed.get(run.header.get("seed"))
        if other is None or not are_comparable(run, other, "accuracy"):
            continue
        has_samples = bool(run.samples) and bool(other.samples)
        words = "records with the outcome of each sample; play the runs anew"
        require(has_samples, "runs", words, f"those of {run.name} and {other.name}")
        rounds = {one.header.get("rounds") for one in (run, other)}
        require(len(rounds) == 1, "runs", "records of as many rounds", rounds)
        digests = {_samples_digest(one) for one in (run, other)}
        require(len(digests) == 1, "runs", "records of the same samples", digests)
        yield run, other


def _samples_digest(run: History) -> str | None:
    """The digest of a run's samples; None where its header has none."""
    digests = run.header.get("digests", {})
    digest: str | None = digests.get("digest of the samples")
    return digest


def _clients_of(pairs: Sequence[tuple[History, History]]) -> list[int]:
    """The clients that all runs have evaluated, in ascending order."""
    ids = [{*map(int, run.samples["correct"])} for pair in pairs for run in pair]
    return sorted(set.intersection(*ids)) if ids else []


def _client_row(
    label: str, client: int, pairs: Sequence[tuple[History, History]], confidence: float
) -> dict[str, Any]:
    """The row of one client and one method."""
    # Seeds that share the cut have the same samples, others have more of them.
    has_cuts = pairs[0][0].header.get("data_seed") == "each"
    outcomes = []  # of the method and of the baseline, [K, n] each
    for runs in zip(*pairs, strict=True):
        by_seed = [_outcomes(run, client) for run in runs]
        joined = [np.concatenate(by_seed)] if has_cuts else by_seed
        outcomes.append(np.stack(joined))
    method, other = outcomes
    interval = bootstrap_mean((method - other).mean(0), confidence)
    return {
        "client": pairs[0][0].client_name(client),
        "samples": method.shape[1],
        "method": label,
        "accuracy": 100 * method.mean(),
        "baseline": 100 * other.mean(),
        "difference": 100 * interval.mean,
        "low": 100 * interval.low,
        "high": 100 * interval.high,
        "verdict": interval.verdict if method.shape[1] >= MIN_SAMPLES else "undecided",
    }


def _outcomes(run: History, client: int) -> np.ndarray:
    """The outcomes [n] of a client's samples: 1.0 where the class is correct."""
    text = run.samples["correct"][str(client)]
    return np.array([float(letter) for letter in text])


def bootstrap_mean(differences: np.ndarray, confidence: float = 0.95) -> Interval:
    """The mean of paired differences [n], with its percentile bootstrap interval."""
    mean = float(differences.mean())
    if np.ptp(differences) == 0:  # every resample is the same
        return Interval(mean, mean, mean)
    result = import_optional("scipy.stats").bootstrap(
        (differences,),
        np.mean,
        n_resamples=NUM_RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return Interval(mean, float(low), float(high))


@checked
def client_table(
    runs: Runs,
    baseline: str,
    format: Literal["md", "csv"] = "md",  # noqa: A002 (the name of the option)
    confidence: OpenUnitFloat = 0.95,
) -> str:
    """A row for each client, and a table for each setting, as text.

    The arguments are those of `client_frame`.
    """
    settings = settings_of(runs)
    frames = {}
    for title, members in settings.items():
        frames[title] = client_frame(members, baseline, confidence)
    if format == "csv":
        pandas = import_optional("pandas")
        frame = pandas.concat(frames, names=["setting"]).reset_index(level=0)
        text: str = frame.to_csv(index=False, float_format="%.6g")
        return text
    texts = []
    for title, frame in frames.items():
        run = settings[title][0]
        texts += _markdown_lines(title, frame, baseline, confidence, run)
    return "\n".join(texts)


def _markdown_lines(
    title: str, frame: Any, baseline: str, confidence: float, run: History
) -> list[str]:
    """The lines of one setting's table, and those below it."""
    methods = list(dict.fromkeys(frame["method"]))
    heading = ["client", f"{split_name(run)} samples", baseline]
    for method in methods:
        heading += [method, f"{method} - {baseline}", ""]
    rows = [heading]
    for client, members in frame.groupby("client", sort=False):
        by_method = members.set_index("method")
        first = by_method.iloc[0]
        row = [str(client), str(first["samples"]), f"{first['baseline']:.1f}"]
        for method in methods:
            one = by_method.loc[method]
            interval = f"[{one['low']:+.1f}, {one['high']:+.1f}]"
            row += [f"{one['accuracy']:.1f}", f"{one['difference']:+.1f} {interval}"]
            row.append("" if one["verdict"] == "undecided" else one["verdict"])
        rows.append(row)
    percent = f"{100 * confidence:g} %"
    lines = [f"### {title}, by client\n"]
    lines.append(
        f"{split_name(run).capitalize()} accuracy in percent at the last round, with "
        f"the {percent} interval of a paired bootstrap over a client's samples.\n"
    )
    lines += markdown_table(rows)
    lines.append("")
    counts = frame.groupby("method", sort=False)["verdict"].value_counts()
    for method in methods:
        words = [f"{counts.get((method, v), 0)} {v}" for v in VERDICTS]
        lines.append(f"{method} against {baseline}: {', '.join(words)}.\n")
    num_judged = frame.loc[frame["samples"] >= MIN_SAMPLES, "client"].nunique()
    expected = (1 - confidence) * num_judged
    seeds = "whose outcomes are averaged"
    if run.header.get("data_seed") == "each":
        seeds = "each of which has samples of its own"
    lines.append(
        f"Clients of fewer than {MIN_SAMPLES} samples are undecided. Of the others "
        f"without a difference, {100 * (1 - confidence):.0f} % look helped or hurt by "
        f"chance: here about {expected:.1f} of {num_judged}. The interval has no "
        f"spread of the seeds, {seeds}.\n"
    )
    return lines
