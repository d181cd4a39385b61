"""The runs of a plan: played, kept, and found again."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.papers import table
from bench.papers.plan import Plan, Task, slug
from bench.papers.search import add_trials, grid_beyond, merge_trials
from bench.papers.table import Key, Row
from bench.problem import Facts
from bench.table import clock, processor
from pflcore import Clients, History, Simulation, tune
from pflcore.algorithms._clusters import Ensemble, HypCluster, loss_per_model
from pflcore.data._protocols import StudyProtocol, with_validation
from pflcore.lab.cli._experiment import make_algorithm, make_model, make_net
from pflcore.lab.results._progress import Progress
from pflcore.lab.tuning import Grid, Tuned
from pflcore.simulation._evaluate import personalized_models
from pflcore.simulation._files import atomic_write, remove_part_files, write_text
from pflcore.simulation._history import RunEnd
from pflcore.simulation._per_target import merge_records
from pflcore.simulation._state import RunConfig, State
from pflcore.simulation.record import OnRound, RecordWriter, read, to_json

# A round, the bytes down and up since the last kept one, and the state after it.
Kept = tuple[int, int, int, State]


class Reproduction:
    """The runs of a plan and their folder.

    Attributes:
        runs: the runs that are there, by setting, method and variant, one for each seed
        tasks: their tasks, with the values that a grid chose
        cells: the digests of what is played, by setting, method and variant
        skipped: setting, method and variant of runs for which there was no time

    Args:
        minutes: the time after which no further run begins; None for no limit
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        progress: Progress,
        minutes: float | None = None,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.progress = progress
        self.runs: dict[Key, list[History]] = {}
        self.tasks: dict[Key, list[Task]] = {}
        self.cells: dict[Key, str] = {}
        self.skipped: dict[Key, None] = {}  # in the order of the plan
        self.ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.setting = ""
        # The protocols of this setting, by seed where each seed has its own.
        self.protocols: dict[int | None, StudyProtocol] = {}

    def play(self, todo: Sequence[Task]) -> list[Facts]:
        """Plays the runs that are missing; returns the rows of all.

        It writes result.json and table.md after every method, so that there is a result
        at any time. When the time is over, it only reads what is there.
        """
        by_key: dict[Key, list[Task]] = {}
        for task in todo:
            by_key.setdefault(task.key, []).append(task)
            self.cells[task.key] = task.cell
        rows: list[Facts] = []
        for key, group in groupby(todo, lambda task: task.key):
            try:
                self.play_group(key, by_key[key], [task.options.seed for task in group])
            except _NoTimeError:
                self.skipped[key] = None
            if not self.is_over:
                rows = self.write_rows()
        return self.write_rows() if self.is_over else rows

    def play_group(self, key: Key, tasks: Sequence[Task], seeds: Sequence[int]) -> None:
        """Adds the runs of a method in a setting, with some of its seeds.

        Raises _NoTimeError where a run is missing and the time is over.

        Args:
            tasks: the method's tasks with all seeds, at which its grid is searched
        """
        if key in self.skipped:
            raise _NoTimeError
        if key not in self.tasks:
            of_key = []
            for i, task in enumerate(tasks):
                if task.base:
                    # Its states are those of the point that the base's grid chose.
                    bases = self.tasks.get(task.base.key)
                    if bases is None:
                        raise _NoTimeError
                    task = replace(task, base=bases[i])
                of_key.append(task)
            self.tasks[key] = self.tuned(of_key)
        for task in self.tasks[key]:
            if task.options.seed in seeds:
                run = self.run(task)
                self.runs.setdefault(key, []).append(run)

    def write_rows(self) -> list[Facts]:
        """Writes result.json and table.md of the runs so far; returns their rows."""
        if self.plan["groups"]:
            rows = table.rows_of_groups(self.plan, self.runs)
            text = table.table_of_groups(self.plan, rows)
        else:
            rows = table.rows_of(self.plan, self.runs)
            for row in rows:
                key = (row["setting"], row["method"], row["variant"])
                row["cell"] = self.cells[key]
            text = table.table(self.plan, rows)
        checks = [*table.verdicts(self.plan, rows)]
        write(self.folder, self.plan, rows, text, checks)
        return rows

    @property
    def is_over(self) -> bool:
        """True when no further run may begin."""
        return time.monotonic() >= self.ends

    def protocol(self, task: Task) -> StudyProtocol:
        """The task's data and roles, which are made once.

        With a target, that client alone is reported. Under "local" it alone trains.
        """
        options = task.options
        if task.setting != self.setting:  # The earlier setting is over.
            self.setting = task.setting
            self.protocols = {}
        has_own_cut = self.plan["by_seed"] or task.roles.get("kind") == "cross-silo"
        seed = options.seed if has_own_cut else None
        if seed not in self.protocols:
            self.protocols[seed] = task.protocol()
        p = self.protocols[seed]
        if not isinstance(options.target, int):
            return p
        one = torch.tensor([options.target])
        train = one if task.job.algorithm == "local" else p.train_clients
        return replace(p, tuning_clients=one, report_clients=one, train_clients=train)

    def simulation(self, task: Task) -> tuple[Simulation, StudyProtocol]:
        """The task's simulation, not begun, and its protocol."""
        p = self.protocol(task)
        options = task.options
        rounds = max(1, options.rounds)
        job = replace(task.job, options=replace(options, rounds=rounds))
        make = make_model(options, p.data, task.shape)
        simulation = job.simulation(
            p.data, make, clients=p.train_clients, reported=p.report_clients
        )
        return simulation, p

    def tuned(self, group: list[Task]) -> list[Task]:
        """The runs of a method at the best point of its grid.

        Validation data choose the point.

        There is one run for each seed.
        """
        task = group[0]
        if not task.grid:
            return group
        if self.is_over and not any((self.folder / t.path).exists() for t in group):
            raise _NoTimeError
        searched = group[:1] if self.plan["by_seed"] else group
        tuned = self.search(searched, task.grid)
        if self.plan["widen"]:
            wider = self.search(searched, grid_beyond(tuned, task.grid))
            tuned = add_trials(tuned, wider.trials)
        self._remove_states(task)
        return [t.at(tuned.best.candidate, tuned.edges) for t in group]

    def _remove_states(self, task: Task) -> None:
        """Removes the trained states of a search that is over; its scores stay."""
        for path in self._search_folder(task).glob("**/state-*"):
            shutil.rmtree(path)

    def _search_folder(self, task: Task) -> Path:
        """The folder of the search of a task's method in its setting."""
        return self.folder / "tuning" / Path(*map(slug, filter(None, task.key)))

    def search(self, group: list[Task], grid: Grid) -> Tuned:
        """The trials of a grid, with the group's seeds.

        A method with a target is searched with several targets. Raises _NoTimeError
        after a trial when the time is over.
        """
        if not group[0].job.for_each:
            return self._search_once(group, grid)
        n = self.protocol(group[0]).data.n
        searches = []
        for target in self.plan["search_targets"] or range(n):
            of_target = [task.with_target(target) for task in group]
            searches.append(self._search_once(of_target, grid))
        return merge_trials(searches)

    def _search_once(self, group: list[Task], grid: Grid) -> Tuned:
        """The trials of a grid, of a method that is run once for each seed."""
        task = group[0]
        options = task.options
        protocols = []
        nets = []
        states = []  # of the method that this one evaluates, if it does
        for t in group:
            p = self.protocol(t)
            if not task.roles:
                p = replace(p, data=with_validation(p.data, t.options.seed))
            protocols.append(p)
            model = make_model(t.options, p.data, t.shape)
            nets.append(make_net(t.options, p.data, model))
            # Without roles, a state was trained on samples that are validation samples
            # now, so another one is trained.
            if t.base and t.roles:
                states.append(self.states(t.base)[-1][3])
        folder = self._search_folder(task)
        name = f"{task.setting}, {task.method}"
        if task.is_part:
            folder /= f"target{options.target}"
            name += f", target {options.target}"
        has_record = (self.folder / task.path).exists()

        def log(text: str) -> None:
            self.progress.say(f"{name}, candidate {text}")
            if self.is_over and not has_record:
                raise _NoTimeError

        job = task.job
        return tune(
            protocols,
            nets,
            make_algorithm(job.algorithm, job.algorithm_options, options.target),
            job.training,
            grid,
            options.rounds,
            states=states or None,
            participation=options.participation,
            seed=[t.options.seed for t in group],
            robustness=options.robustness,
            batch_norm=options.batch_norm,
            hardware=options.hardware,
            folder=folder,
            log=log,
        )

    def run(self, task: Task) -> History:
        """The record of a task; a missing one is played.

        Raises _NoTimeError where it is missing and the time is over.
        """
        if task.job.for_each:
            return self.run_each(task)
        rounds = task.options.rounds
        name = ", ".join(filter(None, task.key))
        self.progress.name(f"{name}, seed {task.options.seed}")
        run = self.whole(task)
        if run is not None:
            if not task.base:
                self.progress.skip(rounds)
            return run
        if self.is_over:
            raise _NoTimeError
        self.progress.begin(f"{name}, seed {task.options.seed}")
        simulation, p = self.simulation(task)
        keeper = _RoundKeeper(simulation, p, task)

        def on_round(round: int, line: Facts) -> None:
            keeper.add(round, line)
            if not task.base:
                self.progress.step(line)

        play: Callable[..., History] = simulation.run
        if task.base:
            play = partial(later, simulation, self.states(task.base))
        elif not rounds:
            play = partial(later, simulation, [(0, 0, 0, simulation.state)])
        path = self.folder / task.path
        header = task.job.header(simulation) | self._own_fields(task, p)
        with RecordWriter(path, overwrite=True) as record:
            history = record.run(header, play, on_round)
        if history.stopped:
            self.progress.skip(rounds - len(history.rounds))
            self.progress.say(f"{name}: {history.stopped}")
        if history.interrupted:
            raise KeyboardInterrupt
        if task.keeps:
            states = [(*sent, dict(vars(state))) for *sent, state in keeper.states]
            remove_part_files(path.with_suffix(".pt"))
            with atomic_write(path.with_suffix(".pt")) as part:
                torch.save({"digest": task.digest, "states": states}, part)
        return read(path)[0]

    def run_each(self, task: Task) -> History:
        """The runs of a method for each target, as one.

        A client's values are those of the run for it. Bytes and seconds are sums.
        """
        n = self.protocol(task).data.n
        runs = [self.run(task.with_target(target)) for target in range(n)]
        header = dict(runs[0].header)
        header["options"] = {**header["options"], "target": "each client"}
        header |= {"target": None, "model_target": "each client"}
        lines = zip(*(run.rounds for run in runs), strict=False)
        end = next((run.end for run in runs if run.stopped), None)
        alone = [[target] for target in range(n)]
        rounds = [merge_records(line, alone) for line in lines]
        return History(header, rounds, end)

    def _own_fields(self, task: Task, protocol: StudyProtocol) -> Facts:
        """The fields of a record's header that only a reproduction has."""
        own_fields = {
            "digest": task.digest,
            "method": task.method,
            "setting": task.setting,
            "variant": task.variant,
            "protocol": task.roles,
            "partition_options": task.cut,
            "model_options": task.shape,
            "takes_part": len(protocol.train_clients),
            "rounds": task.options.rounds,
            "edges": dict(task.edges),
        }
        truth = protocol.data.truth
        if self.plan["groups"] and "group" in truth:
            own_fields["group"] = truth["group"].tolist()
        if task.roles.get("kind") == "cross-silo":
            own_fields["data_seed"] = "each run's seed"
        return own_fields

    def whole(self, task: Task) -> History | None:
        """The record of a task; None if a part is missing.

        The kept states are parts, too.

        A record is whole with all rounds, or where the run was stopped because it
        diverged. Raises ValueError where the record is that of another task.
        """
        path = self.folder / task.path
        if not path.is_file():
            return None
        run = next(iter(read(path)), History())
        if run.header and run.header.get("digest") != task.digest:
            raise ValueError(
                f"out: {path} holds a run with other options; name another folder, or "
                "take that file away."
            )
        is_over = False
        for line in run.rounds[-1:]:
            is_over = line["round"] == task.options.rounds and bool(line["eval"])
        if not is_over and (run.stopped is None or run.unfinished):
            return None
        needs_states = task.keeps and bool(run.evaluations)
        return None if needs_states and not self.states(task) else run

    def states(self, task: Task) -> list[Kept]:
        """The states of a task at its evaluations, if they were kept."""
        path = (self.folder / task.path).with_suffix(".pt")
        saved = load_states(path, task.options.device) if path.is_file() else {}
        if saved.get("digest") != task.digest:
            return []
        return [(*at, State(**state)) for *at, state in saved["states"]]


class _NoTimeError(Exception):
    """A run is missing, and the time is over."""


class _RoundKeeper:
    """Adds to the evaluations of a run, and keeps its states.

    What it adds are clusters: the model that a client picks, where the algorithm has
    several. And "val", the clients' results on validation samples that no client trains
    on, where the task holds such samples out. And "after_step", the clients' results
    after a local step.
    """

    def __init__(
        self, simulation: Simulation, protocol: StudyProtocol, task: Task
    ) -> None:
        self.simulation = simulation
        self.protocol = protocol
        self.keeps = task.keeps  # whether the states are needed again
        holds_out = task.options.val > 0
        has_val = not task.roles and "val" in protocol.data.index
        self.has_val = holds_out or has_val
        self.after_step = task.after_step
        self.states: list[Kept] = []
        self.down = 0  # bytes since the last state that was kept
        self.up = 0

    def add(self, round: int, line: Facts) -> None:
        """Adds to a round's line before writing, and keeps the state."""
        self.down += line["bytes_down"]
        self.up += line["bytes_up"]
        if not line["eval"]:
            return
        simulation = self.simulation
        if isinstance(simulation.algorithm, HypCluster | Ensemble):
            clients = self.protocol.report_clients
            picked = picks(simulation.config, simulation.state, clients).cpu()
            clusters = torch.full((self.protocol.data.n,), -1)
            clusters = clusters.index_copy(0, clients, picked)
            line["eval"]["cluster"] = clusters.tolist()
        if self.has_val:
            values = simulation.evaluate("val")
            line["eval"]["val"] = values.get("accuracy", values["loss"]).tolist()
        if self.after_step:
            config = simulation.config
            ids = self.protocol.report_clients
            stepped = results_after_step(config, simulation.state, ids)
            line["eval"]["after_step"] = stepped.tolist()
        if self.keeps:
            self.states.append((round, self.down, self.up, simulation.state))
            self.down = 0
            self.up = 0


def picks(config: RunConfig, state: State, clients: Tensor) -> Tensor:
    """The index of the model that suits each client's training data.

    They are [len(clients)], for the clients of these ids, as for an evaluation.
    """
    some = Clients(config, clients, max(1, state.round), state.buffers[clients])
    return loss_per_model(state.server["x"], state.server["b"], some).argmin(1)


def results_after_step(config: RunConfig, state: State, ids: Tensor) -> Tensor:
    """Test results [N] of the clients `ids` after a local step; NaN for the others.

    A client trains the model that it is evaluated with, as it trains in a round but by
    the run's loss alone. The results are accuracies, or losses without classes.
    """
    size = config.data.size("test")
    ids = ids[size[ids] > 0]
    model, clients = personalized_models(config, state, ids)
    fit = clients.fit(model["w"], stream="after step")
    loss, accuracy = clients.after(fit).evaluate({"w": fit.w}, "test")
    values = loss if accuracy is None else accuracy
    everybody = torch.full((config.data.n,), math.nan, dtype=torch.float64)
    return everybody.index_copy(0, ids, values.double().cpu())


def later(simulation: Simulation, states: Sequence[Kept], on_round: OnRound) -> History:
    """The history of a run that trained as another one did.

    It is made of the other run's states, evaluated in this algorithm's way.
    """
    history = History(simulation.header())

    def evaluate() -> Mapping[str, Tensor]:
        return simulation.evaluate(simulation.evaluation.split)

    own_names = simulation.state.server
    for round, down, up, state in states:
        # The other method's server may keep more, such as a momentum.
        server = {name: state.server[name] for name in own_names}
        simulation.state = replace(state, server=server)
        seconds, values = clock(evaluate)
        line = {
            "round": round,
            "cohort": [],
            "void": False,
            "bytes_down": down,
            "bytes_up": up,
        }
        line |= {"seconds": seconds, "eval": {k: v.tolist() for k, v in values.items()}}
        history.rounds.append(line)
        on_round(round, line)
    if not states:
        reason = "What it builds upon was stopped before it was evaluated."
        history.end = RunEnd("stopped", reason)
    return history


def write(
    folder: Path, plan: Plan, rows: Sequence[Row], text: str, checks: Sequence[Any] = ()
) -> None:
    """Writes result.json and table.md into a folder.

    Args:
        text: the tables as Markdown
        checks: for each check whether it holds, and a sentence
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "plan": plan["about"],
        "paper": plan["paper"],
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "rows": rows,
        "checks": [{"holds": good, "what": what} for good, what in checks],
    }
    lines = [text]
    for holds, what in checks:
        word = "holds" if holds else "FAILS"
        lines.append(f"- {word}: {what}\n")
    texts = {
        "result.json": json.dumps(to_json(about), indent=1) + "\n",
        "table.md": "".join(lines),
    }
    for name, words in texts.items():
        remove_part_files(folder / name)
        write_text(folder / name, words)


def load_states(path: Path, device: str = "cpu") -> Facts:
    """Trained states that `torch.save` wrote, read without running code in them.

    Raises ValueError where they are damaged.
    """
    try:
        saved: Facts = torch.load(path, weights_only=True, map_location=device)
    except Exception as e:  # torch raises many kinds of exceptions.
        raise ValueError(
            f"folder: {path} is damaged ({type(e).__name__}); remove it, and what it "
            "holds is trained again."
        ) from None
    return saved
