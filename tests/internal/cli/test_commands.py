"""Tests of a command between its runs, and of each algorithm's options."""

from dataclasses import fields
from types import NoneType
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from parts.commands import DIGITS, command
from small import swept

from pflcore import Training
from pflcore.algorithms import ALGORITHMS
from pflcore.lab import cli
from pflcore.lab.cli import _experiment as experiment
from pflcore.lab.cli import _run as commands
from pflcore.lab.cli._folder import new_folder
from pflcore.simulation.record import read

pytest.importorskip("tyro")
pytest.importorskip("sklearn")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.deep("it takes seconds")
def test_ctrl_c_between_two_runs(monkeypatch):
    honest = experiment.Job.simulation
    made = []

    def interrupted(self, *args):
        made.append(self.algorithm)
        # All simulations are made once before the first run. The second "local" runs.
        if made.count("local") == 2:
            raise KeyboardInterrupt
        return honest(self, *args)

    monkeypatch.setattr(experiment.Job, "simulation", interrupted)
    assert (
        command(f"compare --algorithms fedavg local scaffold {DIGITS} --out o") == 130
    )
    assert [(r.algorithm, len(r.rounds)) for r in read("o")] == [("fedavg", 3)]


@pytest.mark.deep("it takes a second")
def test_a_command_of_one_run_makes_one_simulation(monkeypatch):
    honest = experiment.Job.simulation
    made = []

    def counted(self, *args):
        made.append(self.name)
        return honest(self, *args)

    monkeypatch.setattr(experiment.Job, "simulation", counted)
    assert command(f"run fedavg {DIGITS} --out o") == 0
    assert len(made) == 1 and len(read("o")[0].rounds) == 3
    # Again, to more rounds, it goes on from its checkpoint.
    more = DIGITS.replace("--rounds 3", "--rounds 5")
    assert command(f"run fedavg {more} --out o") == 0
    assert len(made) == 2 and len(read("o")[0].rounds) == 5


def test_two_runs_that_start_at_once_take_two_folders():
    made = [new_folder(["fedavg"], "digits", "A*") for _ in range(3)]
    want = ["fedavg-digits-Astar", "fedavg-digits-Astar-2", "fedavg-digits-Astar-3"]
    assert [p.name for p in made] == want and all(p.is_dir() for p in made)


def test_poisoned_labels_of_runs_for_each_client_are_flipped_once(monkeypatch):
    """Each run flips them; it receives the honest labels."""
    given = []
    monkeypatch.setattr(
        experiment, "run_each_target", lambda *a, **_: given.append(a[2])
    )
    options = experiment.Options(
        "synthetic_clusters", target="all", attack="label_flip", attack_clients=(1,)
    )
    data = experiment.load_federation(options)
    (job,) = experiment.make_jobs(["waffle"], options, Training(), {})
    simulation = job.simulation(data, experiment.make_model(options, data))
    job.play(simulation, lambda *_: None)
    assert given[0] is data is not simulation.config.data


def test_a_job_counts_the_rounds_of_all_its_runs():
    """Attackers are no targets; one more run serves them."""
    options = experiment.Options(
        "synthetic_clusters",
        n=6,
        rounds=2,
        target="all",
        attack="sign_flip",
        attack_clients=(0, 1, 2),
        eval_every=0,
    )
    data = experiment.load_federation(options)
    (job,) = experiment.make_jobs(["waffle"], options, Training(), {})
    simulation = job.simulation(data, experiment.make_model(options, data))
    played = []
    job.play(simulation, lambda round, _: played.append(round))
    assert job.num_rounds(data) == len(played) == 2 * (3 + 1)


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", swept(one_in=1))
def test_every_algorithm_explains_its_options(name, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["run", name, "--help"])
    out = capsys.readouterr().out
    kinds = get_type_hints(ALGORITHMS[name])
    option_names = [
        f.name for f in fields(ALGORITHMS[name]) if kinds[f.name] is not NoneType
    ]
    # A field with a single choice is no option of the command line.
    own = {
        k
        for k in option_names
        if get_origin(kinds[k]) is not Literal or len(get_args(kinds[k])) > 1
    }
    assert e.value.code == 0 and (f"{name.replace('_', '-')} options" in out) == bool(
        own
    )
    for option, flag in {
        "server_lr": "--server-lr",
        "weighting": "--weighting",
    }.items():
        assert (flag in out) == (option in own)
    assert ALGORITHMS[name].__doc__.split()[0] in out


@pytest.mark.deep("together they take seconds", quick=2)
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("run fedavg", ["fedavg"]),
        (f"compare --algorithms {' '.join(ALGORITHMS)}", list(ALGORITHMS)),
    ],
    ids=["one", "all"],
)
def test_every_algorithm_keeps_its_defaults(words, names, monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "run_jobs", lambda todo, *_: seen.extend(todo) or 0)
    command(words)
    assert [job.algorithm for job in seen] == names
    for job in seen:
        made = experiment.make_algorithm(job.algorithm, job.algorithm_options)
        assert made == ALGORITHMS[job.algorithm]()
        assert job.training == Training() and job.options == experiment.Options()
