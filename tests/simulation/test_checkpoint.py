"""Checkpoints: a run that went on is the run that was never broken; whatever happens to a file is
one sentence and costs nothing whole."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
from parts.checkpoint import DATA, OPTIONS, TRAINING, broken_off, make, saved
from small import SIX, grouped, images, swept, tiny_model, with_test
from torch import nn

from examples import examples
from pflcore import (
    Checkpoint,
    EarlyStopping,
    Evaluation,
    FedAvg,
    Federation,
    Hardware,
    History,
    Simulation,
    Stop,
    Training,
    for_everyone,
)
from pflcore.algorithms import ALGORITHMS
from pflcore.results.record import Record
from pflcore.simulation import checkpoint
from pflcore.simulation.checkpoint import load, save


def without_seconds(rounds):
    """Records as text, so that every bit of a number counts and NaN equals NaN."""
    return json.dumps([{k: v for k, v in r.items() if k != "seconds"} for r in rounds])


def unbroken(simulation, folder, after=2):
    """Plays all rounds, and leaves the checkpoint of one on the way."""
    return simulation.run(lambda round, _: simulation.save(folder) if round == after else None)


def sentence(error):
    text = str(error.value)
    assert "\n" not in text and text.endswith(".") and "Traceback" not in text
    return text


def tensors_of(simulation):
    s = simulation.state
    return {
        **{f"g.{k}": v for k, v in s.server.items()},
        **{f"own.{k}": v for k, v in s.clients.items()},
        "b": s.batch_norm,
        "j": s.seen,
    }


# the same run ---------------------------------------------------------------
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", swept(quick=(*SIX, "clustered_fl")))
def test_two_rounds_and_two_more_are_four(name, tmp_path):
    # it splits on both sides of the break
    options = {"first": 1, "relative": True, "eps1": 10.0} if name == "clustered_fl" else {}
    algorithm = ALGORITHMS[name](**options)
    whole = make(algorithm)
    history = unbroken(whole, tmp_path)
    rest = Simulation.load(tmp_path, model=tiny_model(), data=DATA)
    went_on = rest.run()
    assert (
        without_seconds(went_on.rounds) == without_seconds(history.rounds)
        and len(went_on.rounds) == 4
    )
    assert went_on.stopped == history.stopped and rest.state.round == 4
    one, two = tensors_of(whole), tensors_of(rest)
    assert one.keys() == two.keys() and all(
        torch.equal(one[k], two[k]) and one[k].dtype == two[k].dtype for k in one
    )
    x = DATA.client(1, "test")[0]
    assert torch.equal(history.model(1)(x), went_on.model(1)(x))


def test_clustered_fl_changes_its_shape_between_checkpoints(tmp_path):
    """Or the case above would try nothing."""
    for after, folder in ((1, tmp_path / "a"), (3, tmp_path / "b")):
        saved(folder, after, name=ALGORITHMS["clustered_fl"](first=1, relative=True, eps1=10.0))
    few, many = (checkpoint.load(tmp_path / f)[0]["server.x"] for f in "ab")
    assert len(few) == 1 < len(many)


def test_batch_norm_clip_and_evaluation_options_go_on(tmp_path):
    def model():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    options = grouped(
        {
            "clip": 0.3,
            "every": 3,
            "train_loss": True,
            "clients": [0, 1, 2, 3],
            "seed": 5,
            "metrics": ("f1",),
            "rounds": 5,
        }
    )
    for policy in ("local", "average"):
        history = unbroken(
            Simulation("fedavg", model, DATA, TRAINING, batch_norm=policy, **options), tmp_path
        )
        assert without_seconds(
            Simulation.load(tmp_path, model=model, data=DATA).run().rounds
        ) == without_seconds(history.rounds)


def test_functions_are_given_again(tmp_path):
    training = Training(lr=0.1, schedule=lambda round, rounds: 1 / round)
    options: dict[str, Any] = {
        "training": training,
        "evaluation": Evaluation(metrics={"first": lambda scores, y: float(scores[0, 0])}),
    }
    algorithm = ALGORITHMS["waffle"](omega=lambda round, rounds: 0.5)
    history = unbroken(make(algorithm, loss=nn.functional.cross_entropy, **options), tmp_path)
    given_: dict[str, Any] = {"algorithm": algorithm, **options}
    for key in given_:
        with pytest.raises(ValueError, match=f"^{key}: .*function") as e:
            Simulation.load(
                tmp_path,
                model=tiny_model(),
                data=DATA,
                **{
                    k: v
                    for k, v in {**given_, "loss": nn.functional.cross_entropy}.items()
                    if k != key
                },
            )
        sentence(e)
    again = Simulation.load(
        tmp_path, model=tiny_model(), data=DATA, loss=nn.functional.cross_entropy, **given_
    ).run()
    assert without_seconds(again.rounds) == without_seconds(history.rounds)
    with pytest.raises(ValueError, match=r"^loss: ") as e:
        Simulation.load(tmp_path, model=tiny_model(), data=DATA, **given_)
    sentence(e)


@dataclass(frozen=True)
class Odd(FedAvg):
    """State of every dtype and shape, some of it one memory, one key there only from the second
    round on."""

    def init(self, x0, n):
        dtypes = (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
        )
        g = {str(d): torch.arange(6).view(2, 3).to(d).T for d in dtypes}
        more = {
            "none": torch.empty(0, 3),
            "cube": torch.ones(2, 3, 4, dtype=torch.float64),
            "one": torch.tensor(7),
        }
        return {"x": x0, "a.b/c": torch.tensor(math.nan), "empty": torch.empty(3, 0), **g, **more}

    def update(self, state, up, cohort):
        new, mix = super().update(state, up, cohort)
        return {**new, "view": new["x"][2:5], "again": new["x"]}, mix


def test_every_dtype_and_shape_comes_back(tmp_path):
    simulation = make(Odd)
    broken_off(simulation, 2)
    simulation.save(tmp_path)
    with pytest.raises(ValueError, match="algorithm: the checkpoint is of Odd") as e:
        Simulation.load(tmp_path, model=tiny_model(), data=DATA)
    sentence(e)
    other = Simulation.load(tmp_path, model=tiny_model(), data=DATA, algorithm=Odd)
    one, two = tensors_of(simulation), tensors_of(other)
    assert list(one) == list(two) or set(one) == set(two)
    for k in one:
        assert one[k].shape == two[k].shape and one[k].dtype == two[k].dtype, k
        assert (
            torch.equal(one[k].nan_to_num(), two[k].nan_to_num())
            if one[k].is_floating_point()
            else torch.equal(one[k], two[k])
        ), k
    with pytest.raises(TypeError, match="complex128") as e:
        checkpoint.save(tmp_path, {"z": torch.zeros(1, dtype=torch.complex128)}, {})
    sentence(e)
    # what stood there stands
    assert Simulation.load(tmp_path, model=tiny_model(), data=DATA, algorithm=Odd).state.round == 2


def test_numbers_that_are_not_finite_come_back_in_the_records(tmp_path):
    lonely = replace(
        DATA,
        index={
            **DATA.index,
            "test": [DATA.index["test"][0], *[torch.empty(0, dtype=torch.long)] * 4],
        },
    )
    simulation = Simulation("fedavg", tiny_model(), lonely, TRAINING, **OPTIONS)
    broken_off(simulation, 2)
    simulation.save(tmp_path)
    rounds = Simulation.load(tmp_path, model=tiny_model(), data=lonely).run().rounds
    assert math.isnan(rounds[0]["eval"]["loss"][1]) and without_seconds(
        rounds[:2]
    ) == without_seconds(simulation.history.rounds)


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
def test_void_rounds_are_counted_over_the_break(tmp_path):
    """The run ends at the third void round in a row, wherever it was broken off, and names the same
    culprit."""
    options = {"rounds": 9, "participation": 1.0}
    history = make(Spoils, **options).run()
    assert (
        history.stopped
        and "rounds 4 to 6 were void" in history.stopped
        and "client 1's update was" in history.stopped
    )
    for after in (2, 3, 4, 5):
        saved(tmp_path, after, name=Spoils, **options)
        again = Simulation.load(tmp_path, model=tiny_model(), data=DATA, algorithm=Spoils).run()
        assert again.stopped == history.stopped and without_seconds(
            again.rounds
        ) == without_seconds(history.rounds)


def test_early_stopping_remembers_the_rounds_before(tmp_path):
    def watch():
        return EarlyStopping(patience=3, min_delta=10.0)

    with pytest.warns(RuntimeWarning, match="Stopped early after round 4"):
        whole = make(rounds=9).run(watch())
    with pytest.warns(RuntimeWarning, match="Stopped early after round 4"):
        again = Simulation.load(
            saved(tmp_path, after=3, rounds=9), model=tiny_model(), data=DATA
        ).run(watch())
    assert (
        without_seconds(again.rounds) == without_seconds(whole.rounds)
        and again.stopped == whole.stopped
    )


def test_a_run_leaves_checkpoints_as_it_was_told(tmp_path, monkeypatch):
    at = []
    monkeypatch.setattr(
        "pflcore.simulation.loop.Simulation._save", lambda run, keeper: at.append(run.state.round)
    )
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
    for wrong in ({"every": -1}, {"every": 1.5}, {"minutes": -1.0}, {"minutes": math.nan}):
        with pytest.raises(ValueError, match=r"every|minutes") as e:
            Checkpoint(tmp_path, **wrong)
        sentence(e)


def test_a_run_that_raised_goes_on_from_its_checkpoint(tmp_path):
    def fail(round, _):
        if round == 3:
            raise RuntimeError("power cut")

    history = make(rounds=5).run()
    with pytest.raises(RuntimeError, match="power cut"):
        make(rounds=5).run(fail, checkpoint=Checkpoint(tmp_path, every=2))
    simulation = Simulation.load(tmp_path, model=tiny_model(), data=DATA)
    assert simulation.state.round == 2
    seen: list[int] = []
    again = simulation.run(lambda round, _: seen.append(round), checkpoint=tmp_path)
    assert seen == [3, 4, 5] and without_seconds(again.rounds) == without_seconds(history.rounds)
    # it had ended: nothing is played again
    over = Simulation.load(tmp_path, model=tiny_model(), data=DATA).run()
    assert without_seconds(over.rounds) == without_seconds(history.rounds)


def test_a_newcomer_after_the_break_is_who_he_would_have_been(tmp_path):
    """His fresh state comes from the initial weights, which a module drawn anew does not have."""
    torch.manual_seed(0)
    simulation = Simulation("ditto", tiny_model()(), DATA, TRAINING, **OPTIONS)
    history = simulation.run()
    simulation.save(tmp_path)
    other = Simulation.load(tmp_path, model=tiny_model()(), data=DATA)
    samples, x = DATA.client(2), DATA.client(3, "test")[0]
    assert torch.equal(history.adapt(samples, 2)(x), other.run().adapt(samples, 2)(x))


def test_runs_for_everyone_go_on(tmp_path):
    history = for_everyone("waffle", tiny_model(), DATA, TRAINING, **OPTIONS)
    keeper = Checkpoint(tmp_path, every=1)

    def die(target, round, _):
        if (target, round) == (2, 3):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        for_everyone(
            "waffle", tiny_model(), DATA, TRAINING, on_round=die, checkpoint=keeper, **OPTIONS
        )
    played = []
    again = for_everyone(
        "waffle",
        tiny_model(),
        DATA,
        TRAINING,
        on_round=lambda t, r, _: played.append((t, r)),
        checkpoint=keeper,
        **OPTIONS,
    )
    assert without_seconds(again.rounds) == without_seconds(history.rounds)
    assert played == [(2, 3), (2, 4), *((t, r) for t in (3, 4) for r in range(1, 5))]


# another run ----------------------------------------------------------------
def test_what_differs_is_named(tmp_path):
    saved(tmp_path, name="ditto")
    other = {
        "clients": (images((8, 20, 30, 9)), tiny_model()),
        "training samples": (images((8, 20, 30, 12, 9)), tiny_model()),
        "digest of the samples": (images((8, 20, 30, 9, 12), seed=1), tiny_model()),
        "0.weight": (DATA, lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))),
        "0.weight is": (
            DATA,
            lambda: nn.Sequential(__import__("collections").OrderedDict(first=nn.Linear(6, 4))),
        ),
        "what is not trained": (DATA, frozen),
    }
    for word, (data, model) in other.items():
        with pytest.raises(ValueError, match=f"another run: .*{word}") as e:
            Simulation.load(tmp_path, model=model, data=data)
        sentence(e)
    for word, options in {
        "seed": {"seed": 3},
        "rounds": {"rounds": 9},
        "lam": {"algorithm": ALGORITHMS["ditto"](lam=7.0)},
    }.items():
        with pytest.raises(ValueError, match=f"another run: .*{word}") as e:
            Simulation.load(tmp_path, model=tiny_model(), data=DATA, **options)
        sentence(e)
    with pytest.raises(ValueError, match="another run: criterion") as e:
        Simulation.load(tmp_path, model=tiny_model(), data=DATA, loss=nn.NLLLoss())
    sentence(e)
    # which never changes a result
    Simulation.load(tmp_path, model=tiny_model(), data=DATA, hardware=Hardware(workers=1))
    with pytest.warns(UserWarning, match="last digits"):
        Simulation.load(tmp_path, model=tiny_model(), data=DATA, hardware=Hardware(engine="loop"))


def frozen():
    model = tiny_model()()
    model.register_parameter("constant", nn.Parameter(torch.ones(3), requires_grad=False))
    return model


def test_a_folder_without_a_checkpoint_is_one_sentence(tmp_path):
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"has no checkpoint\.json") as e:
            checkpoint.load(place)
        sentence(e)


# damaged files --------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("whole"), name="waffle")


@examples(150)
@given(
    which=st.sampled_from([".json", ".safetensors"]),
    how=st.sampled_from(["alter", "cut", "insert", "empty"]),
    at=st.floats(0, 1, exclude_max=True),
    byte=st.integers(1, 255),
)
@example(which=".json", how="cut", at=0.999999, byte=1)
def test_an_altered_checkpoint_is_refused_or_is_what_it_was(whole, which, how, at, byte):
    tensors, facts = checkpoint.load(whole)
    (path,) = whole.glob(f"checkpoint*{which}")
    before = path.read_bytes()
    i = int(at * len(before))
    altered = {
        "alter": before[:i] + bytes([before[i] ^ byte]) + before[i + 1 :],
        "cut": before[:i],
        "insert": before[:i] + bytes([byte]) + before[i:],
        "empty": b"",
    }[how]
    try:
        path.write_bytes(altered)
        try:
            new, other = checkpoint.load(whole)
        except ValueError as e:
            assert (
                str(e).startswith("checkpoint: ")
                and str(e).count("\n") == 0
                and "damaged" in str(e)
            )
        else:  # white space, for instance
            assert (
                other == facts
                and new.keys() == tensors.keys()
                and all(torch.equal(new[k], tensors[k]) for k in tensors)
            )
    finally:
        path.write_bytes(before)


def test_an_exchanged_file_is_refused(tmp_path):
    a, b = saved(tmp_path / "a", name="waffle"), saved(tmp_path / "b", name="waffle", seed=1)
    (mine,), (theirs,) = (list(f.glob("*.safetensors")) for f in (a, b))
    shutil.copy(theirs, mine)
    with pytest.raises(ValueError, match="exchanged") as e:
        checkpoint.load(a)
    sentence(e)
    mine.unlink()
    with pytest.raises(ValueError, match="damaged") as e:
        checkpoint.load(a)
    sentence(e)
    shutil.copy(b / checkpoint.NAME, a / checkpoint.NAME)
    shutil.copy(theirs, a)
    with pytest.raises(ValueError, match="another run: seed") as e:
        make("waffle").restore(a)
    sentence(e)


def test_one_of_a_later_format_is_refused(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    with pytest.raises(ValueError, match="expected format 3, got 2") as e:
        checkpoint.load(tmp_path)
    sentence(e)


def test_a_disk_that_is_full_leaves_the_checkpoint_before(tmp_path):
    """By a limit on the size of files: the kernel refuses to write as it does on a full disk."""
    saved(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    _, hard = kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 10, 5000):  # of which the last has room for the tensors
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            with pytest.raises(OSError, match="checkpoint: it cannot be written into") as e:
                checkpoint.save(tmp_path, {"x": torch.zeros(1000)}, {"long": "x" * 9000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        assert "stands" in sentence(e)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert Simulation.load(tmp_path, model=tiny_model(), data=DATA).state.round == 2


def test_a_run_outlives_a_full_disk(tmp_path, monkeypatch):
    history = make().run()
    sync = os.fsync

    def full(handle):
        if Path(f"/proc/self/fd/{handle}").resolve().name.endswith(".part") and not wanted:
            raise OSError(28, "No space left on device")
        sync(handle)

    wanted = [1]
    monkeypatch.setattr(os, "fsync", full)
    simulation = make()
    with pytest.warns(RuntimeWarning, match=r"No space left.*The run goes on\.$"):
        again = simulation.run(
            lambda round, _: wanted.clear() if round == 2 else None,
            checkpoint=Checkpoint(tmp_path, every=1),
        )
    assert without_seconds(again.rounds) == without_seconds(history.rounds)
    assert Simulation.load(tmp_path, model=tiny_model(), data=DATA).state.round == 1
    assert not list(tmp_path.glob("*.part"))


def test_only_the_last_checkpoint_and_no_leavings_stay(tmp_path):
    (tmp_path / "checkpoint-notes.safetensors").write_text("the user's own")
    (tmp_path / "checkpoint-0123456789abcdef.safetensors.part").write_text(
        "of a process that was killed"
    )
    make().run(checkpoint=Checkpoint(tmp_path, every=1))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert (
        names[0] == ".lock"
        and "checkpoint-notes.safetensors" in names
        and checkpoint.NAME in names
        and len(names) == 4
    )


# one run a folder -----------------------------------------------------------
def test_two_runs_in_one_folder_are_refused_until_the_first_has_died(tmp_path):
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "in\n"
        for attempt in (lambda: make().save(tmp_path), lambda: make().run(checkpoint=tmp_path)):
            with pytest.raises(ValueError, match="another run is writing into") as e:
                attempt()
            sentence(e)
        owner.kill()
    saved(tmp_path)
    assert checkpoint.load(tmp_path)[1]["round"] == 2


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="can be written") as e:
        make().save(tmp_path / "file" / "folder")
    sentence(e)


# records --------------------------------------------------------------------
def test_a_record_is_cut_back_to_its_mark(tmp_path):
    path = tmp_path / "record.jsonl"
    with Record(path) as record:
        for i in range(3):
            record.write({"round": i})
        mark, kept = record.mark(), path.read_bytes()
        record.write({"round": 3})
    with open(path, "ab") as file:
        file.write(b'{"round": 4, "ev')  # torn
    with Record(path, mark=mark) as record:
        assert path.read_bytes() == kept
        record.write({"round": 3})
        later = record.mark()
    assert path.read_bytes() == kept + b'{"round":3}\n' and later["bytes"] == path.stat().st_size
    for text in (kept[:-5], b"x" + kept[1:]):
        path.write_bytes(text)
        with pytest.raises(
            ValueError, match="not the record that its checkpoint was made with"
        ) as e:
            Record(path, mark=mark)
        sentence(e)
        assert path.read_bytes() == text


def test_models_of_runs_for_everyone_are_exported_and_others_are_refused(tmp_path):
    history = for_everyone("waffle", tiny_model(), DATA, TRAINING, **OPTIONS)
    history.export(tmp_path)
    assert len(list(tmp_path.glob("client-*.safetensors"))) == 5
    with pytest.raises(ValueError, match="holds no models") as e:
        History(history.header).export(tmp_path)
    sentence(e)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"export: .* cannot be written") as e:
        history.export(tmp_path / "file" / "x")
    sentence(e)


@pytest.mark.parametrize("name", ["fedamp", "sfl", "l2c", "fedfomo", "feddwa"])
def test_a_report_of_more_than_a_thousand_numbers(tmp_path, name):
    """It is a tensor in the record, and in the checkpoint, too."""
    data = images((4,) * 40)

    def run(folder=None):
        algorithm = ALGORITHMS[name](k=30) if name == "feddwa" else name
        simulation = Simulation(algorithm, tiny_model(), data, TRAINING, rounds=4)
        return (
            simulation.run(checkpoint=folder and Checkpoint(folder, every=1))
            if folder is None
            else broken_off_at(simulation, 2, folder)
        )

    whole, began = run(), run(tmp_path)
    gone_on = Simulation.load(tmp_path, model=tiny_model(), data=data).run()
    assert len(began.rounds) == 2 and len(gone_on.rounds) == 4
    for a, b in zip(whole.rounds, gone_on.rounds, strict=True):
        assert list(a["report"]) == list(b["report"]) and any(
            isinstance(v, torch.Tensor) for v in a["report"].values()
        )
        for k, v in a["report"].items():
            assert torch.equal(torch.as_tensor(v), torch.as_tensor(b["report"][k])) and type(
                v
            ) is type(b["report"][k])


def broken_off_at(simulation, round, folder):
    def stop(r, _):
        if r == round:
            simulation.save(folder)
            raise Stop("Enough.")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulation.run(stop)


def test_a_run_that_went_on_by_itself_is_whole_in_its_checkpoint(tmp_path):
    run = make()
    broken_off(run, 2)
    later = run.run(checkpoint=tmp_path)
    assert [r["round"] for r in later.rounds] == [3, 4]
    again = Simulation.load(tmp_path, model=tiny_model(), data=DATA).run()
    assert without_seconds(again.rounds) == without_seconds(make().run().rounds)


def test_a_run_that_had_stopped_early_stops_again(tmp_path):
    run = make(training=replace(TRAINING, lr=0.0), rounds=9)
    with pytest.warns(RuntimeWarning, match="stopped early"):
        first = run.run(EarlyStopping(patience=2))
    run.save(tmp_path)
    with pytest.warns(RuntimeWarning, match="stopped early"):
        again = Simulation.load(tmp_path, model=tiny_model(), data=DATA).run(
            EarlyStopping(patience=2)
        )
    assert len(again.rounds) == len(first.rounds) < 9 and again.stopped is not None


def test_a_run_that_was_put_back_holds_each_round_once(tmp_path):
    run = make()
    run.save(tmp_path / "start")
    run.run()
    run.restore(tmp_path / "start")
    run.run(checkpoint=tmp_path / "end")
    again = Simulation.load(tmp_path / "end", model=tiny_model(), data=DATA).run()
    assert [r["round"] for r in again.rounds] == [1, 2, 3, 4]


def test_a_number_of_evaluated_clients_goes_on(tmp_path):
    simulation = make(evaluated=2)
    broken_off(simulation, 2)
    simulation.save(tmp_path)
    history = Simulation.load(tmp_path, model=tiny_model(), data=simulation.data).run()
    assert [len(r["eval"]["accuracy"]) for r in history.rounds] == [2] * len(history.rounds)
    assert (
        len({str(r["eval"]["clients"]) for r in history.rounds}) == 1
        and len(history.rounds) == simulation.rounds
    )


def test_what_is_saved_has_each_round_once(tmp_path):
    simulation, states = make(), []

    def rounds_of(name, saved):
        saved.save(tmp_path / name)
        return [
            r["round"]
            for r in Simulation.load(tmp_path / name, model=tiny_model(), data=simulation.data)
            .run()
            .rounds
        ]

    def keep(round, record):
        if round == 2:
            states.append(simulation.state)
            simulation.save(tmp_path / "two")

    simulation.run(keep)
    want = list(range(1, simulation.rounds + 1))
    simulation.state = states[0]
    assert rounds_of("put back", simulation) == want
    simulation.restore(tmp_path / "two")
    assert rounds_of("restored", simulation) == want
    assert (
        rounds_of(
            "loaded", Simulation.load(tmp_path / "two", model=tiny_model(), data=simulation.data)
        )
        == want
    )


def test_a_folder_that_cannot_be_synced_costs_no_checkpoint(tmp_path, monkeypatch):
    sync = os.fsync

    def failing(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(5, "Input/output error")
        sync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    for k in (1, 2):
        save(tmp_path, {"x": torch.full((3,), float(k))}, {"k": k})
    tensors, facts = load(tmp_path)
    assert tensors["x"].tolist() == [2, 2, 2] and facts["k"] == 2


@pytest.mark.skipif(os.name == "nt", reason="no links: not POSIX")
def test_what_a_link_points_to_is_not_written_over(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "checkpoint.json.part").symlink_to(victim)
    save(tmp_path / "folder", {"x": torch.zeros(2)}, {})
    assert victim.read_text() == "mine"


def test_what_a_callback_adds_to_a_record_is_kept(tmp_path):
    parts = [(torch.randn(6, 2), torch.arange(6) % 2) for _ in range(2)]
    data = Federation.from_clients(with_test(parts, parts))

    def more(round, record):
        record["gap"], record["many"], record["row"] = np.float32(0.5), np.arange(2), torch.ones(2)

    run = Simulation("fedavg", nn.Linear(2, 2), data, Training(lr=0.1), rounds=2)
    run.run(on_round=more, checkpoint=tmp_path)
    again = Simulation.load(tmp_path, model=nn.Linear(2, 2), data=data).run()
    assert (
        again.rounds[0]["gap"] == 0.5
        and again.rounds[0]["many"] == [0, 1]
        and again.rounds[0]["row"] == [1, 1]
    )


def test_a_full_disk_is_a_sentence_and_no_killed_process(tmp_path, monkeypatch):
    """A mapped file that cannot grow ends the process (SIGBUS)."""
    parts = [(torch.randn(6, 2), torch.arange(6) % 2) for _ in range(3)]
    data = Federation.from_clients(with_test(parts, parts))
    run = Simulation(
        "ditto", nn.Linear(2, 2), data, Training(lr=0.1), rounds=2, hardware=Hardware(rows=tmp_path)
    )

    def look(round, record):
        assert run.state.round == round  # the run goes on with a copy
        monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Full", (), {"free": 100}))

    with pytest.raises(
        OSError, match=r"rows: a copy of the (clients' rows|state) needs up to .* make room"
    ):
        run.run(look)
