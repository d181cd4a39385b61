"""Plans of reproductions: small JSON files, one for a paper's table.

A plan has the following keys.

- `like`: The name of another plan. Its keys are taken over where the plan has none
  itself; of `options` each option is taken over by itself.
- `options`, `training`, `model_options`: The options of all runs, as `pflcore run` has
  them, without seeds.
- `seeds`: The seeds of the runs, [0, 1, 2] for instance.
- `settings`: For each name of a setting, its own values of:
  - options, "training", "model_options" and "partition_options".
  - "method_options": For each method, options that it has in this setting.
  - "grids": For each method, the grid that it has in this setting.
  - "leaves_out": For each method that is not played in this setting, the reason.
  - "work": For each method, the "work" that it has in this setting.
  - "protocol": How samples or clients are held out, as in Motley. It is
    {"kind": "cross-silo", "val", "test"}, with a split for each seed, or
    {"kind": "cross-device", "train", "val", "test", "seed"}. Without a protocol every
    client trains, and is tested on its test samples. With the option "target" that
    client alone is tested, and Local trains no other. With the target "all", a method
    with a target is run once for each client.
- `methods`: For each name of a method, "algorithm", "options", "training", and
  - "grid": For each option its values ("training.lr" and the like set how clients
    train). `pflcore.lab.tuning` searches the grid on validation data: the protocol's,
    or 20 % of each client's training samples. Only the point that is chosen there is
    tested.
  - "state_of": Another method, whose trained states are evaluated in this method's
    way. Nothing is trained.
  - "before": The method against which the share of hurt clients is counted.
  - "after_step": True for a method that is evaluated with what the server sends. Its
    models are also evaluated after a local step, which is the training of a round.
  - "work": The operations of a client's round, times those of FedAvg, as
    `bench.papers.costs` counts them.
  - "source": Where the values of its grid are from.
  - "rounds": The rounds, where they are not the options'. With 0 the fresh state is
    evaluated.
  - "looks_ahead": True for a method that gets no row of its own under
    `--equal-compute`, where the others train with the plan's "equal_compute".
  - "vary", with the values of an option that acts in evaluation only, and "sizes":
    Studies of the trained state, see `bench.papers.study`.
- `reported`: For each setting and method the paper's number, or [number, standard
  deviation].
- `expected`: The same for the numbers that must come out.
- `checks`: What else must come out: {"tolerance", "hurt" and "largest": {method:
  [percent, within]}, "below" and "above": {method: [others, in every run]}}.
- `grid`: The grid of each method that has none itself.
- `widen`: True where a grid is widened once, if the choice lies at its edge: see
  `bench.papers.search`.
- `by_seed`: True where the runs of each seed are a pass of their own. In each setting
  all methods are played with the first seed before the second one, each seed cuts the
  data anew, and grids are searched with the first seed alone.
- `baseline`: The method with which the others are compared, see
  `bench.papers.table.verdicts_of`.
- `equal_work_baseline`: The method with which those are compared, too, that have a
  "work" of 2 or more.
- `search_targets`: The clients for which a method with a target is run in the search of
  its grid, where the target is "all". Without them it is run for each client.
- `against`: An option against which results are drawn.
- `about`, `paper`: More words on the plan.
- `takes`: How long it takes on two free cores, in words.
- `groups`: True for the table of the last round and its subpopulations. Then
  "reported" names measures.
- `costs`: Is there instead of settings in a plan that counts the costs of a round, and
  trains nothing.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from bench.problem import Facts
from pflcore import Training, cross_device, cross_silo
from pflcore.check import require
from pflcore.data._protocols import DEFAULT_SHARES, StudyProtocol, without_roles
from pflcore.lab.cli._experiment import (
    Job,
    Options,
    load_federation,
    make_jobs,
)
from pflcore.lab.data import SOURCES, TABULAR
from pflcore.lab.tuning import Candidate, Grid
from pflcore.simulation.record import to_json
from pflcore.train._random import STREAM_VERSION

PLANS = Path(__file__).resolve().parent / "plans"
Plan = Mapping[str, Any]
KEYS: Facts = json.loads(
    Path(__file__).with_name("keys.json").read_text(encoding="utf-8")
)
EMPTY: Facts = KEYS["plan"]  # a plan with every key, and nothing in it


@dataclass(frozen=True)
class Task:
    """One run of a plan.

    Args:
        method: the method's name
        setting: the setting's name
        variant: "" or "equal compute"
        job: the run's algorithm and options; its rounds may be 0
        cut: the partition's own options
        shape: the model's own options
        roles: the setting's protocol, {} for none
        grid: the options that are not chosen yet, with their values
        base: the task whose trained states are evaluated; None: the run trains
        keeps: the trained states are needed again
        is_part: it is one of the runs that a method has for each target
        after_step: its models are also evaluated after a local step
        cell: a digest of what the plan says of its method in its setting, equal for all
            seeds and for every chosen point
        edges: options whose chosen value lies at an end of its grid, and which end
    """

    method: str
    setting: str
    variant: str
    job: Job
    cut: Facts
    shape: Facts
    roles: Facts
    grid: Grid
    base: Task | None = None
    keeps: bool = False
    is_part: bool = False
    after_step: bool = False
    cell: str = ""
    edges: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> Options:
        """The options of the run."""
        return self.job.options

    @property
    def key(self) -> tuple[str, str, str]:
        """Setting, method and variant, which runs of several seeds have in common."""
        return self.setting, self.method, self.variant

    @property
    def path(self) -> Path:
        """The path of its record in the output folder.

        A method that is run for each target has a folder of records.
        """
        words = [slug(word) for word in (self.method, self.variant) if word]
        name = f"{'-'.join(words)}-seed{self.options.seed}"
        path = Path("records") / slug(self.setting) / name
        if self.is_part:
            return path / f"target{self.options.target}.jsonl"
        return path if self.job.for_each else path.with_name(f"{name}.jsonl")

    def with_target(self, target: int) -> Task:
        """Its run for one target, of a method that is run for each target."""
        options = replace(self.options, target=target)
        return replace(self, job=replace(self.job, options=options), is_part=True)

    @property
    def digest(self) -> str:
        """A short digest of the facts on which the results of the run depend.

        Runs of equal facts give the same numbers up to rounding, whatever the device,
        the engine and the number of workers.
        """
        job = self.job
        options = asdict(job.options)
        for key in ("device", "engine", "workers", "clients_per_block", "graphs"):
            del options[key]
        if options["patience"] is None:
            del options["patience"]  # the facts of runs that end by themselves
        what = {
            "runs": [job.name],
            **options,
            "training": asdict(job.training),
            "partition_options": dict(self.cut),
            "model_options": dict(self.shape),
            "options": {job.name: dict(job.algorithm_options)},
        }
        base = self.base and self.base.digest
        facts = to_json([what, self.roles, base, STREAM_VERSION])
        words = json.dumps(facts, sort_keys=True)
        return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()

    def at(self, point: Candidate, edges: Mapping[str, str] | None = None) -> Task:
        """The run at a point of its grid.

        Args:
            edges: the options of the point that lie at an end of the grid
        """
        options = dict(self.job.algorithm_options)
        for name, value in point.options.items():
            if not name.startswith("training."):
                options[name] = value
        job = replace(self.job, training=point.training, algorithm_options=options)
        return replace(self, job=job, grid={}, edges=edges or {})

    def protocol(self) -> StudyProtocol:
        """Its data, and the clients that train, choose and are reported."""
        options = self.options
        shares = dict(self.roles)
        if not shares:
            return without_roles(load_federation(options, self.cut))
        cut = dict(self.cut)
        if options.data not in SOURCES:
            # Data that come with their clients are divided by the protocol, with the
            # run's seed, and are standardised after that.
            cut |= {"fractions": {}, "standardize": False}
        data = load_federation(options, cut)
        scaled = options.data in TABULAR
        kind = shares.pop("kind")
        if kind == "cross-silo":
            shares = shares or DEFAULT_SHARES
            return cross_silo(data, **shares, seed=options.seed, standardize=scaled)
        return cross_device(data, **shares, standardize=scaled)


def slug(text: str) -> str:
    """The text as a file's name."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")


def plans() -> list[str]:
    """The names of all plans."""
    return sorted(p.stem for p in PLANS.glob("*.json"))


def load(name: str) -> Facts:
    """A plan by name or path, whole: see `complete`."""
    path = Path(name) if name.endswith(".json") else PLANS / f"{name}.json"
    known = f"one of {', '.join(plans())} (see --list), or a .json file"
    require(path.is_file(), "name", known, name)
    try:
        return complete(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as e:
        raise ValueError(f"name: expected a plan in JSON, got {path} ({e}).") from None


def complete(plan: Plan) -> Facts:
    """The plan with every key.

    Raises ValueError for a key that is unknown or missing, and for a name that nothing
    in the plan has.
    """
    _known("plan", plan, EMPTY)
    like = plan.get("like")
    if like:
        # It is a name, and no path, so that no plan is like itself.
        require(like in plans(), "like", f"one of {', '.join(plans())}", like)
        base = load(like)
        options = {**base["options"], **plan.get("options", {})}
        plan = {**base, "takes": "", **plan, "options": options}
    plan = {**EMPTY, **plan}
    words = "the numbers of clients"
    fits = all(type(target) is int for target in plan["search_targets"])
    require(fits, "search_targets", words, plan["search_targets"])
    has_runs = plan["methods"] and (plan["settings"] or plan["costs"])
    words = "methods and settings (or costs), see bench.papers.plan"
    require(has_runs, "plan", words, [*plan["methods"]])
    option_names = {f.name for f in fields(Options)} - {"seed", "seeds"}
    known = {"options": option_names, "checks": KEYS["checks"]}
    for key, empty in EMPTY.items():
        if empty == {}:
            _known(key, plan[key], known.get(key, plan[key]))
    seeds = plan["seeds"]
    fits = isinstance(seeds, list | tuple) and all(type(seed) is int for seed in seeds)
    require(fits and seeds, "seeds", "a list of whole numbers, at least one", seeds)
    words = "the name of a method of the plan"
    for key in ("baseline", "equal_work_baseline"):
        fits = plan[key] is None or plan[key] in plan["methods"]
        require(fits, key, words, plan[key])
    for key in ("methods", "settings"):
        names = [*plan[key]]
        words = "names that differ as files' names"
        require(len({*map(slug, names)}) == len(names), key, words, names)
    _check_methods(plan["methods"])
    for key in {*KEYS["checks"]} - {"tolerance"}:
        _known(f"{key} of checks", plan["checks"].get(key, {}), plan["methods"])
    for name, setting in plan["settings"].items():
        _known(f"setting {name!r}", setting, option_names | {*KEYS["setting"]})
        _check_setting(name, setting, plan["methods"])
    return plan


def _check_methods(methods: Mapping[str, Facts]) -> None:
    """Raises ValueError where a method is not as described above."""
    trained = set[str]()  # of the methods above
    for name, method in methods.items():
        _known(f"method {name!r}", method, KEYS["method"])
        for key in {"state_of", "before"} & {*method}:
            words = f"{key} to be a method above it that is trained itself"
            require(method[key] in trained, f"method {name!r}", words, method[key])
        if "state_of" not in method:
            trained.add(name)


def _check_setting(name: str, setting: Facts, methods: Iterable[str]) -> None:
    """Raises ValueError where a setting names other methods, or no known protocol."""
    for key in ("method_options", "grids", "leaves_out", "work"):
        _known(f"{key} of {name!r}", setting.get(key, {}), methods)
    roles = setting.get("protocol")
    if roles is None:
        return
    kinds = KEYS["protocol"]
    kind = isinstance(roles, Mapping) and roles.get("kind")
    require(kind in kinds, "protocol", f"the kind {' or '.join(kinds)}", roles)
    _known(f"protocol of {name!r}", roles, {"kind", *kinds[kind]})


def _known(what: str, got: Any, keys: Iterable[str]) -> None:
    """Raises ValueError where `got` is no dict, or has other keys."""
    require(isinstance(got, Mapping), what, "a dict", got)
    unknown = ", ".join(sorted(set(got) - set(keys)))
    require(not unknown, what, f"no keys beside {', '.join(sorted(keys))}", unknown)


def shortened(plan: Facts, rounds: int) -> tuple[Facts, list[str]]:
    """The plan with other rounds, and sentences on the other changes.

    Methods and settings with rounds of their own, and warm-up rounds (HypCluster), keep
    their part of the whole. Expected numbers and checks are left out, since they hold
    for the plan as it stands.
    """
    require(rounds >= 1, "rounds", "at least 1", rounds)
    plan = copy.deepcopy({**plan, "expected": {}, "checks": {}})
    said = list[str]()
    planned = plan["options"].get("rounds", Options.rounds)
    plan["options"]["rounds"] = rounds
    for part in (*plan["methods"].values(), *plan["settings"].values()):
        if part.get("rounds"):
            part["rounds"] = max(1, round(part["rounds"] * rounds / planned))
    for name, m in plan["methods"].items():
        own = m.get("options", {})
        warm = own.get("warmup_rounds")
        if warm:
            own["warmup_rounds"] = round(warm * rounds / planned)
            said.append(
                f"{name}: {own['warmup_rounds']} warm rounds of {rounds}, as {warm} of "
                f"{planned}."
            )
    return plan, said


def seeds_of(given: Sequence[int], seeds: int | None) -> list[int]:
    """The first `seeds` seeds of those given; all where `seeds` is None.

    Where fewer are given, further ones follow at the distance of the last two.
    """
    count = len(given) if seeds is None else seeds
    require(count >= 1, "seeds", "at least 1", seeds)
    gap = given[-1] - given[-2] if len(given) > 1 else 1
    chosen_seeds = [*given[:count]]
    for i in range(1, count - len(given) + 1):
        chosen_seeds.append(given[-1] + gap * i)
    return chosen_seeds


def chosen(what: str, plan: Plan, names: Sequence[str] | None) -> list[str]:
    """Names of the plan's methods or settings, in the plan's order.

    They are those in `names`, or all where it is None, and the methods that these build
    upon. Raises ValueError for a name that is not in the plan.
    """
    there = plan[what]
    names = there if names is None else names
    wanted = set(names)
    unknown = ", ".join(sorted(wanted - {*there}))
    require(not unknown, what, f"some of {', '.join(there)}", unknown)
    for name in reversed(there):
        if name in wanted:
            wanted |= {there[name].get(key, name) for key in ("state_of", "before")}
    return [name for name in there if name in wanted]


def tasks(
    plan: Plan,
    *,
    seeds: int | None = None,
    methods: Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
    equal_compute: bool = False,
    **options: Any,
) -> list[Task]:
    """The runs of a plan, setting by setting; within one seed by seed if it says so.

    Raises ValueError for a wrong name or option of any run.

    Args:
        options: options that replace the plan's
    """
    wanted = chosen("methods", plan, methods)
    out = []
    bases = {m.get("state_of") for m in plan["methods"].values()}
    for setting in chosen("settings", plan, settings):
        own = dict(plan["settings"][setting])
        parts = {key: own.pop(key, None) or {} for key in KEYS["setting"]}
        cut = parts["partition_options"]
        roles = parts["protocol"]
        theirs = parts["method_options"]
        grids = parts["grids"]
        asked = Options(**{**plan["options"], **own, **options})
        shape = {**plan["model_options"], **parts["model_options"]}
        trained: dict[tuple[str, str, int], Task] = {}
        for method in wanted:
            if method in parts["leaves_out"]:
                continue
            m = plan["methods"][method]
            base = m.get("state_of")
            rounds = plan["methods"][base or method].get("rounds", asked.rounds)
            eval_every = asked.eval_every or max(1, rounds)
            of_run = replace(asked, rounds=rounds, eval_every=eval_every)
            variants = {"": m.get("training", {})}
            if equal_compute and plan["equal_compute"] and not m.get("looks_ahead"):
                variants["equal compute"] = {**variants[""], **plan["equal_compute"]}
            hyper = _method_options(m, theirs.get(method, {}))
            keeps = not base and (method in bases or "vary" in m or "sizes" in m)
            grid = {} if base else plan["grid"]
            part = (cut, shape, roles, grids.get(method, m.get("grid", grid)))
            cell = _cell(plan, own | options, parts, m, [hyper, part])
            for variant, seed in product(variants, seeds_of(plan["seeds"], seeds)):
                training = {
                    **plan["training"],
                    **parts["training"],
                    **variants[variant],
                }
                of_seed = replace(of_run, seed=seed)
                if plan["by_seed"]:
                    of_seed = replace(of_seed, data_seed=seed)
                job = _make_job(method, m["algorithm"], of_seed, training, hyper)
                # A base without this variant is trained as it is.
                same_base = trained.get((base, "", seed))
                of_base = trained.get((base, variant, seed), same_base)
                task = Task(
                    method,
                    setting,
                    variant,
                    job,
                    *part,
                    base=of_base,
                    keeps=keeps,
                    after_step=m.get("after_step", False),
                    cell=cell,
                )
                trained[method, variant, seed] = task
                out.append(task)
    if plan["by_seed"]:
        seed_order = seeds_of(plan["seeds"], seeds)
        setting_order = [*plan["settings"]]

        def place(task: Task) -> tuple[int, int]:
            of_seed = seed_order.index(task.options.seed)
            return setting_order.index(task.setting), of_seed

        out.sort(key=place)
    return out


# Options of a run that change no result.
HARDWARE_OPTIONS = ("device", "engine", "workers")


def _cell(
    plan: Plan, own: Facts, parts: Facts, method: Facts, more: Sequence[Any]
) -> str:
    """The digest of what a plan says of a method in a setting.

    It does not depend on defaults of options that the plan does not name. So a result
    stays that of its plan when an option is added to the program.

    Args:
        own: the setting's options, and those that replace the plan's
        parts: the other values of the setting
        method: the method's part of the plan
        more: values that were merged of several parts
    """
    options = {**plan["options"], **own}
    names = ("algorithm", "training", "state_of", "rounds", "after_step")
    facts = [
        {
            name: value
            for name, value in options.items()
            if name not in HARDWARE_OPTIONS
        },
        [plan["training"], parts["training"]],
        {name: method[name] for name in names if name in method},
        [plan[name] for name in ("by_seed", "widen", "search_targets")],
        more,
        STREAM_VERSION,
    ]
    words = json.dumps(to_json(facts), sort_keys=True)
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _method_options(method: Facts, of_setting: Facts) -> dict[str, Any]:
    """A method's options in a setting, with lists as tuples."""
    options = {**method.get("options", {}), **of_setting}
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = tuple(value)
    return options


def _make_job(
    method: str, algorithm: str, options: Options, training: Facts, hyper: Facts
) -> Job:
    """The job of a method.

    Raises ValueError, with the method's name, for a wrong option.
    """
    try:
        of_algorithm = {algorithm: hyper}
        (job,) = make_jobs([algorithm], options, Training(**training), of_algorithm)
    except TypeError as e:
        text = f"options: {method!r} does not take these ({e})."
        raise ValueError(text) from None
    except ValueError as e:
        raise ValueError(f"method {method!r}: {e}") from None
    return job
