"""Checkpoints: a run that went on is the run that was never broken; whatever happens to a file is
one sentence and costs nothing whole."""

import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from doors import sentence
from methods import Scaffold
from parts.checkpoint import DATA, OPTIONS, TRAINING, broken_off, make, saved
from parts.memory import KINDS, fails
from small import SIX, grouped, images, swept, tiny_model
from torch import nn

from pflcore import (
    Adversary,
    Checkpoint,
    EarlyStopping,
    Evaluation,
    FedAvg,
    Hardware,
    History,
    Robustness,
    Simulation,
    Stop,
    Training,
    evaluate,
    for_everyone,
)
from pflcore.algorithms import ALGORITHMS
from pflcore.simulation import checkpoint
from pflcore.simulation.checkpoint import load, save


def text_of(history):
    """Records as text, so that every bit of a number counts and NaN equals NaN."""
    lines = [{k: v for k, v in r.items() if k != "seconds"} for r in history.rounds]
    return json.dumps(lines, default=lambda v: v.tolist())


def unbroken(simulation, folder, after=2):
    """Plays all rounds, and leaves the checkpoint of one on the way."""
    return simulation.run(lambda round, _: simulation.save(folder) if round == after else None)


def loaded(folder, **options):
    return Simulation.load(folder, **{"model": tiny_model(), "data": DATA, **options})


def refused(call, words, kind=ValueError):
    with pytest.raises(kind, match=words) as e:
        call()
    assert "\n" not in str(e.value) and str(e.value).endswith(".")


def tensors_of(s):
    own = {f"own.{k}": v for k, v in s.clients.items()}
    return s.server | own | {"b": s.batch_norm, "j": s.seen}


def same(a, b):
    one, two = tensors_of(a), tensors_of(b)
    assert one.keys() == two.keys()
    for k in one:
        torch.testing.assert_close(one[k], two[k], rtol=0, atol=0, equal_nan=True)
    return True


# the same run ---------------------------------------------------------------
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", swept(quick=(*SIX, "clustered_fl")))
def test_two_rounds_and_two_more_are_four(name, tmp_path):
    # it splits on both sides of the break
    options = {"first": 1, "relative": True, "eps1": 10.0} if name == "clustered_fl" else {}
    whole = make(ALGORITHMS[name](**options))
    history = unbroken(whole, tmp_path, after=1 if options else 2)
    rest = loaded(tmp_path)
    went_on = rest.run()
    assert text_of(went_on) == text_of(history) and len(went_on.rounds) == 4
    assert went_on.stopped == history.stopped and rest.state.round == 4
    assert same(whole.state, rest.state)
    x = DATA.client(1, "test")[0]
    assert torch.equal(history.model(1)(x), went_on.model(1)(x))
    if options:
        assert len(load(tmp_path)[0]["server.x"]) < len(rest.state.server["x"])


def normed():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


LARGE, MANY = images((4,) * 40), {"rounds": 3}
LOOKED = {"every": 3, "train_loss": True, "evaluated": [0, 1, 2, 3], "metrics": ("f1",)}
LOOKED |= {"clip": 0.3, "clients": [0, 1, 2], "seed": 5, "rounds": 5}
BAD = Robustness(adversary=Adversary("noise", [1]))


@pytest.mark.parametrize(
    "algorithm, model, data, options",
    [
        *(("fedavg", normed, DATA, {"batch_norm": p, **LOOKED}) for p in ("local", "average")),
        ("fedavg", tiny_model(), DATA, {**OPTIONS, "evaluated": 2, "robustness": BAD}),
        *((a, tiny_model(), LARGE, MANY) for a in ("fedamp", ALGORITHMS["feddwa"](k=30))),
    ],
)
def test_a_run_of_any_options_goes_on(algorithm, model, data, options, tmp_path):
    """A report of more than a thousand numbers is a tensor in the record, and in the checkpoint."""
    run = Simulation(algorithm, model, data, TRAINING, **grouped(options))
    whole, again = unbroken(run, tmp_path), loaded(tmp_path, model=model, data=data).run()
    assert text_of(again) == text_of(whole)
    for a, b in zip(whole.rounds, again.rounds, strict=True):
        kinds, same = ({k: type(v) for k, v in r["report"].items()} for r in (a, b))
        assert kinds == same and (torch.Tensor in kinds.values()) == (data is LARGE)
        assert options.get("evaluated") != 2 or len(b["eval"]["accuracy"]) == 2


def test_functions_are_given_again(tmp_path):
    given = {
        "algorithm": ALGORITHMS["waffle"](omega=lambda round, rounds: 0.5),
        "training": Training(lr=0.1, schedule=lambda round, rounds: 1 / round),
        "evaluation": Evaluation(metrics={"first": lambda scores, y: float(scores[0, 0])}),
        "loss": nn.functional.cross_entropy,
    }
    history = unbroken(Simulation(model=tiny_model(), data=DATA, **given, **OPTIONS), tmp_path)
    for key in given:
        others = {k: v for k, v in given.items() if k != key}
        refused(lambda o=others: loaded(tmp_path, **o), f"^{key}: .*function")
    assert text_of(loaded(tmp_path, **given).run()) == text_of(history)


@dataclass(frozen=True)
class Odd(FedAvg):
    """State of every dtype and shape, some of it one memory, one key there only from the second
    round on."""

    def init(self, x0, n):
        names = ["bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "complex64"]
        g = {d: torch.arange(6).view(2, 3).to(getattr(torch, d)).T for d in names}
        more = {"none": torch.empty(0, 3), "cube": torch.ones(2, 3, 4, dtype=torch.float64)}
        return {"x": x0, "a.b/c": torch.tensor(math.nan), "one": torch.tensor(7), **g, **more}

    def update(self, state, up, cohort):
        new, mix = super().update(state, up, cohort)
        return {**new, "view": new["x"][2:5], "again": new["x"]}, mix


def test_every_dtype_and_shape_comes_back(tmp_path):
    simulation = make(Odd)
    broken_off(simulation, 2)
    simulation.save(tmp_path)
    refused(lambda: loaded(tmp_path), "algorithm: the checkpoint is of Odd")
    assert same(simulation.state, loaded(tmp_path, algorithm=Odd).state)
    odd = {"z": torch.zeros(1, dtype=torch.complex128)}
    refused(lambda: checkpoint.save(tmp_path, odd, {}), "complex128", TypeError)
    # what stood there stands
    assert loaded(tmp_path, algorithm=Odd).state.round == 2


@dataclass(frozen=True)
class Spoils(FedAvg):
    """Client 1 moves far in round 2; from round 4 on the server's model is none."""

    def train(self, down, own, clients):
        own, up, fit = super().train(down, own, clients)
        up["delta"][(clients.ids == 1) & (clients.round == 2)] *= 30
        return own, up, fit

    def update(self, state, up, cohort):
        new, mix = super().update(state, up, cohort)
        return ({**new, "x": new["x"] * math.nan} if cohort.round > 3 else new), mix


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after", [2, 3, 4, 5])
def test_void_rounds_are_counted_over_the_break(after, tmp_path):
    """The run ends at the third void round in a row, wherever it was broken off, and names the same
    culprit."""
    options = {"rounds": 9, "participation": 1.0}
    history = make(Spoils, **options).run()
    for words in ("rounds 4 to 6 were void", "client 1's update was"):
        assert words in history.stopped
    again = loaded(saved(tmp_path, after, name=Spoils, **options), algorithm=Spoils).run()
    assert again.stopped == history.stopped and text_of(again) == text_of(history)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after", [3, 4])
def test_early_stopping_remembers_the_rounds_before(after, tmp_path):
    """In the middle of its patience, and where it had stopped."""
    whole = make(rounds=9).run(EarlyStopping(patience=3, min_delta=10.0))
    folder = saved(tmp_path, after, rounds=9)
    again = loaded(folder).run(EarlyStopping(patience=3, min_delta=10.0))
    assert whole.stopped.startswith("Stopped early after round 4")
    assert text_of(again) == text_of(whole) and bool(again.stopped) and len(again.rounds) == 4


def test_a_run_leaves_checkpoints_as_it_was_told(tmp_path, monkeypatch):
    at = []
    monkeypatch.setattr(checkpoint, "save_run", lambda keeper, run: at.append(run.state.round))
    make(rounds=7).run(checkpoint=Checkpoint(tmp_path, every=3, minutes=0))
    assert at == [0, 3, 6, 7]  # the beginning and the end in any case
    at.clear()
    clock = iter(range(0, 10**6, 40))
    # 40 seconds a look
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: float(next(clock)))
    keeper = Checkpoint(tmp_path, minutes=2)
    keeper._since = 0.0
    make(rounds=9).run(checkpoint=keeper)
    assert at[0] == 0 and at[-1] == 9 and 3 <= len(at) <= 6


def noted(round, record):
    record["gap"], record["many"], record["row"] = np.float32(0.5), np.arange(2), torch.ones(2)


PRESSED, KEY = KeyboardInterrupt(), KeyError("my own mistake")
PLACES = {"evaluate": evaluate, "callback": noted, "update": Scaffold.update}
MEMORY = "Out of memory in round 4.* needs about .*participation"
EVALUATION = "Out of memory in the evaluation after round 3, when 20.00 MiB more were asked for"
ENDS = [  # a function and the call of it that fails, after which round, and what is said
    ("callback", 3, Stop("That will do."), 3, "That will do[.]$"),
    ("callback", 3, PRESSED, 3, "Interrupted after round 3 of 5[.]$"),
    ("callback", 3, KEY, 3, "KeyError in round 3: 'my own mistake'"),
    ("evaluate", 3, PRESSED, 3, "Interrupted after round 3 of 5[.]$"),
    ("evaluate", 5, PRESSED, 5, "Interrupted after round 5 of 5[.]$"),
    ("evaluate", 3, KEY, 3, "KeyError in round 3: 'my own mistake'"),
    ("evaluate", 3, KINDS["on a GPU"][0], 3, EVALUATION),
    ("update", 4, KEY, 3, "KeyError in round 3: 'my own mistake'"),
    *(("update", 4, e, 3, MEMORY.replace(".*", f".*{asked}.*", 1)) for e, asked in KINDS.values()),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place, at, error, last, words", ENDS)
def test_a_run_that_ends_early_keeps_its_rounds_and_goes_on(
    place, at, error, last, words, tmp_path, monkeypatch
):
    """By itself, and from its checkpoint, which has the evaluation of each of its rounds."""
    whole = make("scaffold", rounds=5).run(noted)
    called = {**PLACES, place: fails(PLACES[place], at, error)}
    monkeypatch.setattr(Scaffold, "update", called["update"])
    monkeypatch.setattr("pflcore.simulation.loop.evaluate", called["evaluate"])
    run = make("scaffold", rounds=5)
    passed_on = pytest.raises(KeyError) if error is KEY else nullcontext()
    with passed_on:
        run.run(called["callback"], Checkpoint(tmp_path, every=1))
    history = run.history
    assert re.match(words, history.stopped) and "device='cpu'" not in history.stopped
    assert len(history.rounds) == run.state.round == last and history.model(0) is not None
    assert history.interrupted is (error is PRESSED)
    assert list(history.lines())[-1] == {"stopped": history.stopped}
    broke_off = history.rounds[-1]
    assert (broke_off["eval"] is None) == (place == "evaluate")
    broke_off |= {k: whole.rounds[last - 1][k] for k in ("eval", "gap", "many", "row")}
    rest = run.run(noted)
    history.rounds += rest.rounds
    assert text_of(history) == text_of(whole) and rest.stopped is None
    assert same(run.state, whole.state)
    for callbacks in (noted, ()):  # at last it has ended, and nothing is played again
        again = loaded(tmp_path)
        assert text_of(again.run(callbacks, tmp_path)) == text_of(whole)
        assert same(again.state, whole.state)


def test_a_newcomer_after_the_break_is_who_he_would_have_been(tmp_path):
    """His fresh state comes from the initial weights, which a module drawn anew does not have."""
    simulation = Simulation("ditto", tiny_model()(), DATA, TRAINING, **OPTIONS)
    history = simulation.run()
    simulation.save(tmp_path)
    again = loaded(tmp_path, model=tiny_model()()).run()
    samples, x = DATA.client(2), DATA.client(3, "test")[0]
    assert torch.equal(history.adapt(samples, 2)(x), again.adapt(samples, 2)(x))


def test_runs_for_everyone_go_on_and_are_exported(tmp_path):
    def play(**options):
        return for_everyone("waffle", tiny_model(), DATA, TRAINING, **options, **OPTIONS)

    def die(target, round, _):
        if (target, round) == (2, 3):
            raise RuntimeError("power cut")

    history, keeper, played = play(), Checkpoint(tmp_path / "kept", every=1), []
    with pytest.raises(RuntimeError, match="power cut"):
        play(on_round=die, checkpoint=keeper)
    again = play(on_round=lambda t, r, _: played.append((t, r)), checkpoint=keeper)
    assert text_of(again) == text_of(history)
    assert played == [(2, 3), (2, 4), *((t, r) for t in (3, 4) for r in range(1, 5))]
    history.export(tmp_path)
    assert len(list(tmp_path.glob("client-*.safetensors"))) == 5
    refused(lambda: History(history.header).export(tmp_path), "model: expected a history with")
    (tmp_path / "file").write_text("x")
    beside = tmp_path / "file" / "x"
    refused(lambda: history.export(beside), r"export: .* cannot be written", OSError)


# another run ----------------------------------------------------------------
def frozen():
    model = tiny_model()()
    model.register_parameter("constant", nn.Parameter(torch.ones(3), requires_grad=False))
    return model


def wide():
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))


OTHERS = {
    "clients": {"data": images((8, 20, 30, 9))},
    "training samples": {"data": images((8, 20, 30, 12, 9))},
    "digest of the samples": {"data": images((8, 20, 30, 9, 12), seed=1)},
    "0.weight": {"model": wide},
    "what is not trained": {"model": frozen},
    "seed": {"seed": 3},
    "rounds": {"rounds": 9},
    "lam": {"algorithm": ALGORITHMS["ditto"](lam=7.0)},
    "criterion": {"loss": nn.NLLLoss()},
    "adversary": {"robustness": BAD},
}


def test_what_differs_is_named(tmp_path):
    saved(tmp_path, name="ditto")
    for word, options in OTHERS.items():
        refused(lambda o=options: loaded(tmp_path, **o), f"another run: .*{word}")
    loaded(tmp_path, hardware=Hardware(workers=1))  # which never changes a result
    with pytest.warns(UserWarning, match="last digits"):
        loaded(tmp_path, hardware=Hardware(engine="loop"))


# damaged files: see test_damage too -------------------------------------------
def test_an_exchanged_file_is_refused(tmp_path, monkeypatch):
    a, b = saved(tmp_path / "a", name="waffle"), saved(tmp_path / "b", name="waffle", seed=1)
    (mine,), (theirs,) = (list(f.glob("*.safetensors")) for f in (a, b))
    shutil.copy(theirs, mine)
    refused(lambda: load(a), "exchanged")
    mine.unlink()
    refused(lambda: load(a), "damaged")
    shutil.copy(b / checkpoint.NAME, a / checkpoint.NAME)
    shutil.copy(theirs, a)
    refused(lambda: make("waffle").restore(a), "another run: seed")
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    refused(lambda: load(b), "expected format 3, got 2")
    refused(lambda: load(tmp_path), r"has no checkpoint\.json")


def test_a_disk_that_is_full_leaves_the_checkpoint_before(tmp_path):
    """By a limit on the size of files: the kernel refuses to write as it does on a full disk."""
    saved(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    _, hard = kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 10, 5000):  # of which the last has room for the tensors
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            with sentence("checkpoint: it cannot be written into .* stands", OSError):
                save(tmp_path, {"x": torch.zeros(1000)}, {"long": "x" * 9000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert loaded(tmp_path).state.round == 2


def test_a_run_outlives_a_full_disk(tmp_path, monkeypatch):
    """And one whose folders cannot be synced."""
    history, sync, wanted = make().run(), os.fsync, [1]

    def full(handle):
        path = Path(f"/proc/self/fd/{handle}").resolve()
        if path.is_dir() or (path.suffix == ".part" and not wanted):
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    keeper = Checkpoint(tmp_path, every=1)
    with pytest.warns(RuntimeWarning, match=r"No space left.*The run goes on\.$"):
        again = make().run(lambda round, _: wanted.clear() if round == 2 else None, keeper)
    assert text_of(again) == text_of(history)
    assert loaded(tmp_path).state.round == 1 and not list(tmp_path.glob("*.part"))


@pytest.mark.skipif(os.name == "nt", reason="no links: not POSIX")
def test_only_the_last_checkpoint_and_no_leavings_stay(tmp_path):
    """Nor is what a link points to written over."""
    (tmp_path / "checkpoint-notes.safetensors").write_text("the user's own")
    (tmp_path / "checkpoint-0123456789abcdef.safetensors.part").write_text("of a killed process")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "checkpoint.json.part").symlink_to(victim)
    make().run(checkpoint=Checkpoint(tmp_path, every=1))
    names = {p.name for p in tmp_path.iterdir()}
    assert {".lock", "checkpoint-notes.safetensors", checkpoint.NAME, "victim"} < names
    assert len(names) == 5 and victim.read_text() == "mine"


def test_a_full_disk_is_a_sentence_and_no_killed_process(tmp_path, monkeypatch):
    """A mapped file that cannot grow ends the process (SIGBUS)."""
    run = make("ditto", rows=tmp_path)

    def look(round, record):
        assert run.state.round == round  # the run goes on with a copy
        monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Full", (), {"free": 100}))

    with sentence("rows: a copy of the state needs up to .* make room", OSError):
        run.run(look)


# one run a folder -----------------------------------------------------------
def test_two_runs_in_one_folder_are_refused_until_the_first_has_died(tmp_path):
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('in', flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "in\n"
        for attempt in (lambda: make().save(tmp_path), lambda: make().run(checkpoint=tmp_path)):
            refused(attempt, "another run is writing into")
        owner.kill()
    saved(tmp_path)
    assert load(tmp_path)[1]["round"] == 2


def test_what_is_saved_has_each_round_once(tmp_path):
    """Of a run that went on by itself, was put back or restored."""
    simulation, whole = make(), make().run()

    def check(saved, name):
        saved.save(tmp_path / name)
        assert text_of(loaded(tmp_path / name).run()) == text_of(whole)

    broken_off(simulation, 2)
    simulation.save(tmp_path / "two")
    state = simulation.state
    assert [r["round"] for r in simulation.run().rounds] == [3, 4]
    check(simulation, "went on")
    simulation.state = state
    check(simulation, "put back")
    simulation.restore(tmp_path / "two")
    check(simulation, "restored")
