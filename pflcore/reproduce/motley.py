"""Runs a plan under Motley's protocol: tunes what the plan leaves open, trains, reports, compares with the paper.

A plan is a dict (plans/motley-*.json): data, protocol, model, methods, the paper's numbers, and what must hold. All of it is
kept in a folder as it comes (trials of grids, records of rounds, trained states, results): an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflcore import metrics
from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.base import FedAvg, State
from pflcore.algorithms.hypcluster import Ensemble, HypCluster, picks
from pflcore.data import federation_of
from pflcore.data.roles import Protocol, cross_device, cross_silo
from pflcore.local import Setting, Training, prepared
from pflcore.local.net import Net
from pflcore.models import model_for
from pflcore.reproduce import study
from pflcore.results.record import Record, plain
from pflcore.round import begin
from pflcore.simulation import Simulation
from pflcore.tuning import Trial, tune

KEYS = {
    "about", "paper", "data", "protocol", "model", "model_options", "criterion", "rounds", "participation", "training", "marks",
    "methods", "reported", "expected", "checks", "unit",
}  # fmt: skip
METHOD_KEYS = {"algorithm", "options", "training", "rounds", "grid", "per_client", "state_of", "before", "vary", "sizes"}
Say = Callable[[str], None]


@dataclass
class Result:
    """One method in one run (a split or a seed)."""

    method: str
    run: int
    values: Tensor  # [N] accuracy or loss of the reported clients, NaN for the others
    size: Tensor  # [N] training samples (of a reported client: its personalization set)
    largest: float | None  # share of the reported clients in the largest cluster
    sent: int  # bytes, down and up, all clients
    models: float  # the same as models per training client
    seconds: float
    stopped: str | None
    curve: list[tuple[int, int, float]]  # round, bytes so far, mean over reported clients
    chosen: dict[str, Any] = field(default_factory=dict)


class Benchmark:
    """One plan and its folder."""

    def __init__(
        self, plan: Mapping[str, Any], folder: Path, seeds: int | None = None, workers: int | None = None, say: Say = print
    ) -> None:
        unknown = set(plan) - KEYS | {k for m in plan.get("methods", {}).values() for k in set(m) - METHOD_KEYS}
        if unknown or not {"data", "protocol", "model", "methods", "rounds"} <= set(plan):
            raise ValueError(f"plan: expected data, protocol, model, methods and rounds, and no other keys, got {sorted(unknown or plan)}.")
        self.plan, self.folder, self.workers, self.say = plan, folder, workers, say
        self.protocols = protocols(plan, seeds)
        first = self.protocols[0].data
        own = plan.get("model_options", {})
        criterion = plan.get("criterion") or ("squared" if first.classes is None else "cross_entropy")
        outputs = None if criterion == "hinge" else first.classes

        def make() -> torch.nn.Module:
            return model_for(plan["model"], first.shape, outputs, **own)

        self.nets = [Net(make, criterion, seed=j) for j in range(len(self.protocols))]
        self.states: dict[tuple[str, int], list[tuple[int, int, State]]] = {}  # (round, bytes so far, state)
        self.results: dict[str, list[Result]] = {}
        self.trials: dict[str, list[Trial]] = {}
        self.algorithms: dict[str, tuple[FedAvg, Training]] = {}

    @property
    def higher_is_better(self) -> bool:
        return self.protocols[0].data.classes is not None

    @property
    def unit(self) -> str:
        return str(self.plan.get("unit", "accuracy" if self.higher_is_better else "loss"))

    def play(self, methods: Sequence[str] | None = None) -> dict[str, list[Result]]:
        """Every method (those whose states others use included), in the plan's order."""
        wanted = list(self.plan["methods"]) if methods is None else list(methods)
        for name in wanted:
            if name not in self.plan["methods"]:
                raise ValueError(f"methods: expected some of {', '.join(self.plan['methods'])}, got {name!r}.")
            for other in (self.plan["methods"][name].get(k) for k in ("state_of", "before")):
                if other and other not in wanted:
                    wanted.insert(wanted.index(name), other)
        for name in wanted:
            self.say(name)
            algorithm, training, chosen = self.tuned(name)
            self.algorithms[name] = algorithm, training
            self.results[name] = [self.result(name, j, algorithm, training, chosen) for j in range(len(self.protocols))]
            means = [metrics.mean(r.values) for r in self.results[name]]
            self.say(f"{name}: {metrics.mean(means):.5f}")
        return self.results

    def tuned(self, name: str) -> tuple[FedAvg, Training, dict[str, Any]]:
        """The method's algorithm and training, with what a grid left open chosen on validation data."""
        m = self.plan["methods"][name]
        if m["algorithm"] not in ALGORITHMS:
            raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {m['algorithm']!r} for {name!r}.")
        try:
            options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in m.get("options", {}).items()}
            algorithm = ALGORITHMS[m["algorithm"]](**options)
            training = Training(**{**self.plan.get("training", {}), **m.get("training", {})})
        except TypeError as e:
            raise ValueError(f"options: {name!r} does not take these ({e}).") from None
        if not m.get("grid"):
            return algorithm, training, {}
        base = m.get("state_of")
        found = tune(
            self.protocols,
            self.nets,
            algorithm,
            training,
            m["grid"],
            m.get("rounds", self.plan["rounds"]),
            states=[self.states[base, j][-1][2] for j in range(len(self.protocols))] if base else None,
            participation=self.plan.get("participation", 1.0),
            workers=self.workers,
            folder=self.folder / "tuning" / _slug(name),
            say=lambda text: self.say(f"{name}, candidate {text}"),
        )
        self.trials[name] = found.trials
        best = found.best.candidate
        return best.algorithm, best.training, best.options

    def setting(self, j: int, training: Training, rounds: int) -> Setting:
        data, net = self.protocols[j].data, self.nets[j]
        return prepared(net, data, training, workers=self.workers, seed=self.seed(j), rounds=max(1, rounds))[0]

    def seed(self, j: int) -> int:
        return seeds_of(self.plan["protocol"]["seeds"], len(self.protocols))[j]

    def result(self, name: str, j: int, algorithm: FedAvg, training: Training, chosen: dict[str, Any]) -> Result:
        """Trains (or takes what was trained), then reports on test data, along the way too where the plan asks for marks."""
        m, p = self.plan["methods"][name], self.protocols[j]
        rounds, base = m.get("rounds", self.plan["rounds"]), m.get("state_of")
        what = [self.plan["data"], self.plan["protocol"], self.plan["model"], self.plan.get("model_options"), self.plan.get("criterion")]
        what += [asdict(algorithm), type(algorithm).__name__, asdict(training), rounds, base, self.plan.get("participation"), j]
        digest = hashlib.blake2b(json.dumps(plain(what), sort_keys=True).encode(), digest_size=8).hexdigest()
        file = self.folder / "results" / f"{_slug(name)}-{j}.json"
        began = time.perf_counter()
        stopped = None
        if base:
            self.states[name, j] = self.states[base, j]
        else:
            stopped = self.train(name, j, algorithm, training, rounds, digest)
        if file.is_file():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept.pop("digest") == digest:
                nan = {
                    k: torch.tensor([float("nan") if v is None else v for v in kept.pop(k)], dtype=torch.float64)
                    for k in ("values", "size")
                }
                return Result(**{**kept, **nan, "curve": [tuple(c) for c in kept["curve"]]})
        setting = self.setting(j, training, rounds)
        curve = []
        for round, sent, state in self.states[name, j]:
            values = study.results(algorithm, state, setting, p)
            curve.append((round, sent, metrics.mean(values)))
        largest = None
        if isinstance(algorithm, HypCluster | Ensemble):
            largest = metrics.largest_share(picks(state, setting, p.report))
        models = sent / (4 * setting.net.size * len(p.train))
        seconds = time.perf_counter() - began
        found = Result(name, j, values, p.data.size().double(), largest, sent, models, seconds, stopped, curve, chosen)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(plain({**{f.name: getattr(found, f.name) for f in fields(found)}, "digest": digest})), encoding="utf-8")
        return found

    def train(self, name: str, j: int, algorithm: FedAvg, training: Training, rounds: int, digest: str) -> str | None:
        """Fills `states` with the state after the last round, and after every `marks`-th part of the rounds before."""
        p, place = self.protocols[j], self.folder / "states" / f"{_slug(name)}-{j}.pt"
        if place.is_file():
            kept = torch.load(place, weights_only=True)
            if kept["digest"] == digest:
                self.states[name, j] = [(r, sent, State(**state)) for r, sent, state in kept["states"]]
                return None if kept["stopped"] is None else str(kept["stopped"])
        simulation = Simulation(
            algorithm,
            self.nets[j],
            p.data,
            training,
            rounds=max(1, rounds),
            participation=self.plan.get("participation", 1.0),
            clients=p.train,
            seed=self.seed(j),
            workers=self.workers,
            eval_every=0,
            eval_clients=p.report,
        )
        states, sent, marks = [], 0, self.plan.get("marks", 1)
        stopped: str | None = None

        def on_round(round: int, line: dict[str, Any]) -> None:
            nonlocal sent
            sent += line["bytes_down"] + line["bytes_up"]
            if round == rounds or (round * marks) // rounds > ((round - 1) * marks) // rounds:
                states.append((round, sent, copy.deepcopy(simulation.state)))
            record.write(line)

        if rounds == 0:
            states = [(0, 0, begin(algorithm, self.nets[j], p.data.n))]
        else:
            with Record(self.folder / "records" / f"{_slug(name)}-{j}.jsonl", overwrite=True) as record:
                record.write({"header": {**simulation.header(), "method": name, "setting": p.setting}})
                history = simulation.run(on_round)
                stopped = history.stopped
                if stopped:
                    record.write({"stopped": stopped})
            if history.failed:  # not the method's doing
                raise MemoryError(stopped)
            if stopped and stopped.startswith("Interrupted"):
                raise KeyboardInterrupt
            if not states or states[-1][0] < len(history.rounds):
                states.append((len(history.rounds), sent, copy.deepcopy(simulation.state)))
        self.states[name, j] = states
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"digest": digest, "stopped": stopped, "states": [(r, s, dict(vars(t))) for r, s, t in states]}, place)
        return stopped

    # what is said of it ------------------------------------------------------------------------------------------------------------
    def rows(self) -> list[dict[str, Any]]:
        """One row per method: means over runs, deviations over clients and over runs, and the paper's numbers beside them."""
        out = []
        for name, found in self.results.items():
            m, up = self.plan["methods"][name], self.higher_is_better
            before = self.results.get(m.get("before", ""))
            each = [study.summary(r.values, before[r.run].values if before else None, up) for r in found]
            mean = {k: metrics.mean([e[k] for e in each]) for k in each[0]}
            largest = [r.largest for r in found if r.largest is not None]
            out.append(
                {
                    "method": name,
                    **mean,
                    "std_over_runs": metrics.std([e["mean"] for e in each]) if len(each) > 1 else None,
                    "runs": len(each),
                    "by_run": [e["mean"] for e in each],
                    "largest": 100 * metrics.mean(largest) if largest else None,
                    "reported": self.plan.get("reported", {}).get(name),
                    "expected": self.plan.get("expected", {}).get(name),
                    "models": metrics.mean([r.models for r in found]),
                    "bytes": metrics.mean([float(r.sent) for r in found]),
                    "seconds": metrics.mean([r.seconds for r in found]),
                    "chosen": found[0].chosen,
                    "stopped": next((r.stopped for r in found if r.stopped), None),
                }
            )
        return out

    def verdicts(self) -> list[tuple[bool, str]]:
        """What the plan says must hold, and whether it does. Methods that were not played are passed over."""
        checks, rows = self.plan.get("checks", {}), {r["method"]: r for r in self.rows()}
        whole = len(self.protocols) == len(self.plan["protocol"]["seeds"])  # numbers are means over all of the plan's runs
        out = []
        for name, want in self.plan.get("expected", {}).items():
            if name in rows and "tolerance" in checks and whole:
                got = rows[name]["mean"]
                out.append((abs(got - want) <= checks["tolerance"], f"{name}: {got:.5f}, expected {want:.5f} ± {checks['tolerance']:g}"))
        for what in ("hurt", "largest"):
            for name, (want, within) in checks.get(what, {}).items():
                if name in rows and whole:
                    got = rows[name][what]
                    out.append((abs(got - want) <= within, f"{name}: {what} {got:.1f} %, expected {want:g} ± {within:g}"))
        for base, others in checks.get("below", {}).items():
            for name in others:
                out += self._ordered(rows, name, base)
        for base, others in checks.get("above", {}).items():
            for name in others:
                out += self._ordered(rows, base, name)
        return out

    def _ordered(self, rows: Mapping[str, Any], low: str, high: str) -> list[tuple[bool, str]]:
        if low not in rows or high not in rows:
            return []
        pairs = list(zip(rows[low]["by_run"], rows[high]["by_run"], strict=True))
        good = sum(a < b for a, b in pairs)
        return [(good == len(pairs), f"{low} below {high} in {good} of {len(pairs)} runs")]

    def table(self) -> str:
        """Markdown."""
        percent = self.higher_is_better
        scale, digits = (100.0, 2) if percent else (1.0, 5)

        def number(x: float | None, scale: float = scale, digits: int = digits) -> str:
            return "" if x is None else f"{scale * x:.{digits}f}"

        rows, (n, p) = self.rows(), (len(self.protocols), self.protocols[0])
        known = any(r["reported"] is not None or r["expected"] is not None for r in rows)
        head = ["method", "mean", "std over clients", *(["std over runs"] if n > 1 else []), *(["paper", "expected"] if known else [])]
        head += ["% hurt", "worst decile", "% in largest cluster", "models sent per client", "chosen"]
        lines = [f"### {self.plan.get('about', p.data.name)}", ""]
        lines += [
            f"{p.setting}, {len(p.train)} clients train, {len(p.report)} are reported, {self.plan['rounds']} rounds, {n} run(s). "
            f"Test {self.unit}{' in percent' if percent else ''}.",
            "",
        ]
        lines += ["| " + " | ".join(head) + " |", "|:---" + "|---:" * (len(head) - 2) + "|:---|"]
        for r in rows:
            cells = [r["method"], number(r["mean"]), number(r["std"]), *([number(r["std_over_runs"])] if n > 1 else [])]
            cells += [number(r["reported"]), number(r["expected"])] if known else []
            cells += [number(r.get("hurt"), 1, 1), number(r["worst_decile"]), number(r["largest"], 1, 1), number(r["models"], 1, 1)]
            cells.append("; ".join(filter(None, [", ".join(f"{k} {v}" for k, v in r["chosen"].items()), r["stopped"]])))
            lines.append("| " + " | ".join(cells) + " |")
        goal = self.goal()
        if goal is not None:
            lines += ["", f"Bytes sent, down and up by all clients, until the mean over clients first reaches {number(goal)}:", ""]
            for name, found in self.results.items():
                sent = [metrics.bytes_to_reach([c[2] for c in r.curve], [c[1] for c in r.curve], goal, percent) for r in found]
                whole = [float(s) for s in sent if s is not None]
                lines.append(f"- {name}: " + (f"{metrics.mean(whole) / 2**20:.1f} MiB" if len(whole) == len(sent) else "never"))
        verdicts = self.verdicts()
        lines += ["", *(f"- {'holds' if good else 'FAILS'}: {text}" for good, text in verdicts)] if verdicts else []
        return "\n".join(lines) + "\n"

    def goal(self) -> float | None:
        """The accuracy whose cost is compared: what the first method with several marks ends at, less 2 %."""
        curves = [found[0].curve for found in self.results.values() if len(found[0].curve) > 1]
        if not curves:
            return None
        return curves[0][-1][2] * (0.98 if self.higher_is_better else 1.02)

    def last(self, name: str, j: int = 0) -> tuple[FedAvg, State, Setting, Protocol]:
        """What an evaluation of a method's trained state takes."""
        algorithm, training = self.algorithms[name]
        rounds = self.plan["methods"][name].get("rounds", self.plan["rounds"])
        return algorithm, self.states[name, j][-1][2], self.setting(j, training, rounds), self.protocols[j]


def protocols(plan: Mapping[str, Any], seeds: int | None = None) -> list[Protocol]:
    """The plan's splits: cross-silo a split per seed; cross-device one split for all seeds."""
    how = dict(plan["protocol"])
    kind, given, cut = how.pop("setting"), how.pop("seeds"), how.pop("federation", {})
    wanted = seeds_of(given, seeds)
    if kind == "cross-silo":
        return [cross_silo(federation_of(plan["data"], seed=s, **cut)) for s in wanted]
    if kind != "cross-device":
        raise ValueError(f"setting: expected 'cross-silo' or 'cross-device', got {kind!r}.")
    one = cross_device(federation_of(plan["data"], **cut), **how)
    return [one] * len(wanted)


def seeds_of(given: Sequence[int], seeds: int | None) -> list[int]:
    """The first `seeds` of the plan's (all where None), and further ones at the same distance where it has fewer."""
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds: expected at least 1, got {seeds}.")
    gap = given[-1] - given[-2] if len(given) > 1 else 1
    more = range(given[-1] + gap, given[-1] + gap * max(1, (seeds or 0) - len(given) + 1), gap)
    return [*given, *more][:seeds]


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("_")


def reproduce(
    plan: Mapping[str, Any],
    folder: str | Path,
    *,
    seeds: int | None = None,
    methods: Sequence[str] | None = None,
    workers: int | None = None,
    say: Say = print,
) -> int:
    """Plays a plan, writes result.json, table.md and the pictures into `folder`; 1 where something that must hold does not, else 0."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    bench = Benchmark(plan, folder, seeds, workers, say)
    began = time.perf_counter()
    bench.play(methods)
    text = bench.table() + f"\n{time.perf_counter() - began:.0f} seconds.\n"
    result = {"plan": plan.get("about"), "paper": plan.get("paper"), "date": time.strftime("%Y-%m-%d"), "rows": bench.rows()}
    result["checks"] = [{"holds": good, "what": text} for good, text in bench.verdicts()]
    (folder / "result.json").write_text(json.dumps(plain(result), indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(text, encoding="utf-8")
    try:
        pictures(bench, folder)
    except ImportError as e:
        say(str(e))
    return 0 if all(good for good, _ in bench.verdicts()) else 1


def pictures(bench: Benchmark, folder: Path) -> list[Path]:
    """Boxes, gains by size, and, where the plan asks for them, the trade-offs of the first run."""
    from pflcore.results import tradeoffs

    unit, up = bench.unit, bench.higher_is_better
    first = {name: found[0] for name, found in bench.results.items()}
    made = [tradeoffs.boxes({n: torch.cat([r.values for r in found]) for n, found in bench.results.items()}, folder / "boxes.png", unit)]
    pairs = {
        n: first[n].values - first[b].values for n, m in bench.plan["methods"].items() if (b := m.get("before")) in first and n in first
    }
    if pairs:
        made.append(tradeoffs.deltas(next(iter(first.values())).size, pairs, folder / "deltas.png", unit, "up" if up else "down"))
    if any(len(r.curve) > 1 for r in first.values()):
        series = {n: ([c[1] for c in r.curve], [c[2] for c in r.curve]) for n, r in first.items()}
        made.append(tradeoffs.cost(series, folder / "cost.png", unit))
    spread: dict[str, list[tuple[Any, float, float]]] = {}
    fewer: dict[str, dict[float, Tensor]] = {}
    for name in first:
        m = bench.plan["methods"][name]
        algorithm, state, setting, p = bench.last(name)
        if m.get("sizes"):
            fewer[name] = study.by_size(algorithm, state, setting, p)
        for what, choices in m.get("vary", {}).items():
            points = study.vary(algorithm, state, setting, p, what, choices)
            before = first[m["before"]].values if m.get("before") else first[name].values
            by = [(q.value, metrics.mean(q.own), metrics.hurt(q.own, before, up)) for q in points]
            made.append(tradeoffs.option(by, folder / f"{_slug(name)}-{what}.png", what, unit, log=what.endswith("lr")))
            if what != "finetune_lr":
                spread[name] = [(q.value, metrics.mean(q.own), metrics.mean(q.others)) for q in points]
        if "vary" in m and name not in spread:
            other = replace(p, data=p.out_of_distribution())
            own, others = (metrics.mean(study.results(algorithm, state, setting, q)) for q in (p, other))
            spread[name] = [(name, own, others)]
    if spread:
        made.append(tradeoffs.distributions(spread, folder / "distributions.png", unit))
    if fewer:
        made.append(tradeoffs.sizes(fewer, folder / "sizes.png", unit))
    (folder / "studies.json").write_text(
        json.dumps(
            plain({"distributions": spread, "sizes": {n: {str(f): metrics.mean(v) for f, v in by.items()} for n, by in fewer.items()}})
        )
    )
    return made
