"""A resumed run equals the unbroken run; damaged checkpoints are refused.

The refusal is one sentence, and it changes neither the run nor a whole checkpoint.
"""

import json
import math
import os
import re
import resource
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from entry_points import sentence
from parts.checkpoint import DATA, OPTIONS, TRAINING, make, saved
from parts.memory import fails
from parts.states import same
from small import SIX, equals, images, layers, normed_model, swept, tiny_model
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from pflcore import (
    Adversary,
    Checkpoint,
    EarlyStopping,
    Evaluation,
    FedAvg,
    Hardware,
    History,
    Robustness,
    Stop,
    Training,
    evaluate,
    run_each_target,
    step,
)
from pflcore.algorithms import ALGORITHMS, Scaffold, VoidRound
from pflcore.simulation import checkpoint
from pflcore.simulation.checkpoint import load


def text_of(history):
    """Records as text, in which all bits count and NaN equals NaN."""
    lines = [{k: v for k, v in r.items() if k != "seconds"} for r in history.rounds]
    return json.dumps(lines, default=lambda v: v.tolist())


def unbroken(simulation, folder, after=2):
    """Plays all rounds and saves the checkpoint of round `after`."""
    return simulation.run(
        lambda round, _: simulation.save(folder) if round == after else None
    )


def loaded(folder, algorithm="fedavg", **options):
    return make(algorithm, **options).restore(folder)


def refused(call, words, kind=ValueError):
    with pytest.raises(kind, match=words) as e:
        call()
    assert "\n" not in str(e.value) and str(e.value).endswith(".")


# the same run ---------------------------------------------------------------
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", swept(quick=(*SIX, "clustered_fl"), one_in=1))
def test_two_rounds_and_two_more_are_four(name, tmp_path):
    """A run that resumes after two rounds equals the unbroken run.

    One run resumes from a checkpoint, and one from the state itself. A newcomer's state
    comes from the initial weights, which the model of the restored run does not have:
    the checkpoint restores them too.
    """
    # With these options, clustered_fl splits clusters before and after the break.
    options = (
        {"first": 1, "relative": True, "eps1": 10.0} if name == "clustered_fl" else {}
    )
    alg = ALGORITHMS[name](**options)
    after = 1 if options else 2
    first = tiny_model()()
    other_model = tiny_model()()
    whole = make(alg, model=first)
    history = unbroken(whole, tmp_path, after)
    rest = loaded(tmp_path, alg, model=other_model)
    warm = make(alg, model=first)
    warm.state = rest.state
    resumed = rest.run()
    assert text_of(resumed) == text_of(history) and len(resumed.rounds) == 4
    assert resumed.stopped == history.stopped and rest.state.round == 4
    assert [r["round"] for r in warm.run().rounds] == [*range(after + 1, 5)]
    assert same(whole.state, rest.state) and same(whole.state, warm.state)
    x = DATA.client(1, "test")[0]
    samples = DATA.client(2)
    equals(history.model(1)(x), resumed.model(1)(x))
    equals(history.adapt(samples, 2)(x), resumed.adapt(samples, 2)(x))
    if options:
        assert len(load(tmp_path)[0]["server.x"]) < len(rest.state.server["x"])


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", swept(quick=("fedavg", "scaffold", "ditto", "waffle")))
def test_five_rounds_and_four_more_are_nine(name, tmp_path):
    """A finished run goes on to the records and the state of a longer one.

    An algorithm whose rounds depend on their number refuses that in one sentence.
    """
    first = tiny_model()()
    make(name, model=first, rounds=5).run(checkpoint=tmp_path)
    longer = make(name, model=first, rounds=9)
    reason = longer.config.algorithm.traits.rounds_reason
    if reason:
        words = f"rounds is 5 there and 9 here, and {name} {reason}"
        refused(lambda: longer.restore(tmp_path), words)
        return
    more = longer.run(checkpoint=tmp_path, resume=True)
    whole = make(name, model=first, rounds=9)
    history = whole.run()
    assert text_of(more) == text_of(history) and len(more.rounds) == 9
    assert same(whole.state, longer.state)
    x = DATA.client(1, "test")[0]
    equals(history.model(1)(x), more.model(1)(x))


def halves(round, rounds):
    """The step size of the second half of a run is smaller."""
    return 1.0 if 2 * round <= rounds else 0.5


@pytest.mark.deep("it takes a second")
def test_a_schedule_decides_whether_a_run_goes_on(tmp_path):
    """Equal step sizes in the rounds so far let a run go on, others do not."""
    torch_one = lambda optimizer: CosineAnnealingLR(optimizer, T_max=20)  # noqa: E731
    for number, (schedule, played, goes_on) in enumerate(
        [
            (torch_one, 4, True),
            (lambda round, rounds: 1 / round, 4, True),
            (lambda round, rounds: 1 - round / (2 * rounds), 4, False),
            (halves, 4, False),
            (halves, 2, True),
        ]
    ):
        folder = tmp_path / str(number)
        options = {"training": replace(TRAINING, schedule=schedule)}
        unbroken(make(rounds=4, **options), folder, played)
        longer = make(rounds=8, **options)
        if not goes_on:
            refused(
                lambda r=longer, f=folder: r.restore(f),
                "4 there and 8 here, and the schedule's",
            )
            continue
        more = longer.restore(folder).run()
        whole = make(rounds=8, **options)
        assert text_of(more) == text_of(whole.run())
        assert same(whole.state, longer.state)


def test_a_run_cannot_become_shorter_than_it_is(tmp_path):
    make(rounds=4).run(checkpoint=tmp_path)
    words = "rounds is 4 there and 3 here, and 4 are played; give what"
    refused(lambda: loaded(tmp_path, rounds=3), words)
    every = {"evaluation": Evaluation(every=2)}
    make(rounds=3, **every).run(checkpoint=tmp_path / "other")
    more = loaded(tmp_path / "other", rounds=6, **every).run()
    # Round 3 was the last one, and keeps its evaluation.
    assert [r["round"] for r in more.evaluations] == [2, 3, 4, 6]
    assert more.header["rounds"] == 6 and more.complete


@pytest.mark.parametrize(
    "options, words",
    [
        ({"seed": 5}, "holds that of another run: seed is 0 there and 5 here;"),
        ({"rounds": 6}, "holds round 4 of this run, which would begin with round 1;"),
        ({"rounds": 3}, "holds that of another run: rounds is 4 there and 3 here"),
        ({}, "holds round 4 of this run, which would begin with round 1; give resume"),
    ],
)
def test_a_run_overwrites_no_checkpoint_of_value(options, words, tmp_path):
    make(rounds=4).run(checkpoint=tmp_path)
    before = (tmp_path / checkpoint.FILE_NAME).read_bytes()

    refused(lambda: make(**{"rounds": 4, **options}).run(checkpoint=tmp_path), words)

    assert (tmp_path / checkpoint.FILE_NAME).read_bytes() == before


def test_a_run_goes_on_into_its_own_checkpoint(tmp_path):
    def stop(round, record):
        if round == 2:
            raise Stop("enough")

    run = make(rounds=4)
    every = Checkpoint(tmp_path, every=1)
    run.run(stop, checkpoint=every)
    history = run.run(checkpoint=every)

    assert load(tmp_path)[1]["round"] == history.rounds[-1]["round"] == 4


def test_every_dtype_and_shape_comes_back(tmp_path):
    names = [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "float16",
        "bfloat16",
        "complex64",
    ]
    tensors = {d: torch.arange(6).view(2, 3).to(getattr(torch, d)).T for d in names}
    tensors |= {
        "none": torch.empty(0, 3),
        "cube": torch.ones(2, 3, 4, dtype=torch.float64),
    }
    tensors |= {"a.b/c": torch.tensor(math.nan), "one": torch.tensor(7)}
    checkpoint.save(tmp_path, tensors, {})
    odd = {"z": torch.zeros(1, dtype=torch.complex128)}
    refused(lambda: checkpoint.save(tmp_path, odd, {}), "complex128", TypeError)
    restored, _ = load(tmp_path)  # the refused save left the first file as it was
    torch.testing.assert_close(restored, tensors, rtol=0, atol=0, equal_nan=True)


def test_tensors_that_share_memory_come_back(tmp_path):
    x = torch.arange(6.0)
    tensors = {"x": x, "again": x, "part": x[2:5], "every second": x[::2]}
    checkpoint.save(tmp_path, tensors, {})
    equals(load(tmp_path)[0], tensors)


@dataclass(frozen=True)
class Spoils(FedAvg):
    """FedAvg with a huge update, void rounds and tensors that share memory.

    Client 1's update is huge in round 1. In rounds 2, 4, 5 and 6 the server's model is
    NaN. The tensors "part" and "again" share the memory of "x".
    """

    def init(self, x0, n):
        return {"x": x0, "part": x0[2:5], "again": x0}

    def train(self, down, client_state, clients):
        client_state, up, fit = super().train(down, client_state, clients)
        up["delta"][(clients.ids == 1) & (clients.round == 1)] *= 30
        return client_state, up, fit

    def update(self, state, up, cohort):
        new, mix = super().update(state, up, cohort)
        factor = math.nan if cohort.round in (2, 4, 5, 6) else 1.0
        x = new["x"] * factor
        return {"x": x, "part": x[2:5], "again": x}, mix


BAD = Robustness(adversary=Adversary("noise", [1]))
LARGE = {"data": images((4,) * 40), "rounds": 3, "participation": 1.0}
EVALUATED = {
    "every": 3,
    "train_loss": True,
    "evaluated": [0, 1, 2, 3],
    "metrics": ("f1",),
    "clip": 0.3,
    "clients": [0, 1, 2],
    "seed": 5,
    "rounds": 5,
    "model": normed_model,
}
FUNCTIONS = {  # options that a checkpoint cannot hold
    "algorithm": ALGORITHMS["waffle"](omega=lambda round, rounds: 0.5),
    "training": Training(lr=0.1, schedule=lambda round, rounds: 1 / round),
    "evaluation": Evaluation(metrics={"first": lambda scores, y: float(scores[0, 0])}),
    "loss": nn.functional.cross_entropy,
}
VOID = ".*ounds 4 to 6 were void.*client 1's update was"
LONG = {"rounds": 9, "participation": 1.0}
RUNS = [  # options of the run, the round of the checkpoint, and the reason of the end
    *(
        ({"batch_norm": policy, **EVALUATED}, 2, "None")
        for policy in ("local", "average")
    ),
    ({"evaluated": 2, "robustness": BAD}, 2, "None"),
    *(
        ({"algorithm": a, **LARGE}, 2, "None")
        for a in ("fedamp", ALGORITHMS["feddwa"](k=30))
    ),
    (FUNCTIONS, 2, "None"),
    *(({"rounds": 9}, after, "Stopped early after round 4") for after in (3, 4)),
    # The third void round in a row ends a run; a round with an effect ends the count.
    *(({"algorithm": Spoils, **LONG}, k, VOID) for k in (2, 3, 4, 5)),
]


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options, after, words", RUNS)
def test_a_run_of_any_options_goes_on(options, after, words, tmp_path):
    """A run with any options resumes with the same records.

    A report of more than a thousand numbers is a tensor in the record and in the
    checkpoint. Early stopping keeps its best value, and the count of void rounds goes
    on after the break.
    """

    def callbacks():
        return (
            [EarlyStopping(patience=3, min_delta=10.0)]
            if options == {"rounds": 9}
            else []
        )

    run = make(**options)
    whole = run.run(
        [lambda round, _: run.save(tmp_path) if round == after else None, *callbacks()]
    )
    rest = loaded(tmp_path, **options).run(callbacks())
    assert text_of(rest) == text_of(whole) and rest.stopped == whole.stopped
    assert re.match(words, str(whole.stopped))
    for a, b in zip(whole.rounds, rest.rounds, strict=True):
        kinds, others = ({k: type(v) for k, v in r["report"].items()} for r in (a, b))
        assert kinds == others and (torch.Tensor in kinds.values()) == (
            "data" in options
        )
        assert options.get("evaluated") != 2 or len(b["eval"]["accuracy"]) == 2


def test_a_run_leaves_checkpoints_as_it_was_told(tmp_path, monkeypatch):
    """Checkpoints follow `every` or `minutes`, with one at the start and end."""
    saved_rounds = []
    monkeypatch.setattr(
        checkpoint,
        "save_run",
        lambda _folder, _header, _config, state, _: saved_rounds.append(state.round),
    )
    make(rounds=7).run(checkpoint=Checkpoint(tmp_path, every=3, minutes=0))
    assert saved_rounds == [0, 3, 6, 7]
    saved_rounds.clear()
    # Each reading of the clock is 40 seconds after the one before.
    clock = iter(range(0, 10**6, 40))
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: float(next(clock)))
    keeper = Checkpoint(tmp_path, minutes=2)
    keeper._since = 0.0
    make(rounds=9).run(checkpoint=keeper)
    assert saved_rounds[0] == 0 and saved_rounds[-1] == 9
    assert 3 <= len(saved_rounds) <= 6


class Voiding(FedAvg):
    """A method whose server can use nothing in round 2."""

    def update(self, state, up, cohort):
        if cohort.round == 2:
            raise VoidRound("Nothing is of use.")
        return super().update(state, up, cohort)


def test_a_void_round_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """A run that ends there goes on from the last round that was none."""
    saved_rounds = []
    save_run = checkpoint.save_run

    def save(folder, header, config, state, records):
        saved_rounds.append(state.round)
        save_run(folder, header, config, state, records)

    monkeypatch.setattr(checkpoint, "save_run", save)
    make(Voiding(), rounds=4).run(checkpoint=Checkpoint(tmp_path, every=1))
    assert saved_rounds == [0, 1, 3, 4]


def noted(round, record):
    record["gap"] = np.float32(0.5)
    record["many"] = np.arange(2)
    record["row"] = torch.ones(2)


PRESSED = KeyboardInterrupt()
KEY = KeyError("my own mistake")
MEMORY = MemoryError("out of memory")
PLACES = {"evaluate": evaluate, "callback": noted, "update": Scaffold.update}
# The function that fails, which of its calls, the error, the last round, the reason.
ENDS = [
    ("callback", 3, Stop("That will do."), 3, "That will do[.]$"),
    ("callback", 3, PRESSED, 3, "Interrupted after round 3 of 5[.]$"),
    ("callback", 3, KEY, 3, "KeyError after round 3: 'my own mistake'"),
    ("evaluate", 3, PRESSED, 3, "Interrupted after round 3 of 5[.]$"),
    ("evaluate", 5, PRESSED, 5, "Interrupted after round 5 of 5[.]$"),
    ("evaluate", 3, KEY, 3, "KeyError after round 3: 'my own mistake'"),
    ("update", 4, KEY, 3, "KeyError after round 3: 'my own mistake'"),
    ("update", 4, MEMORY, 3, "MemoryError after round 3: out of memory"),
]


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "place, at, error, last, words",
    [
        *ENDS[:4],
        *(pytest.param(*end, marks=pytest.mark.deep("other ends")) for end in ENDS[4:]),
    ],
)
def test_a_run_that_ends_early_keeps_its_rounds_and_goes_on(
    place, at, error, last, words, tmp_path, monkeypatch
):
    """A run that ended early resumes, by itself and from its checkpoint.

    The checkpoint has the evaluation of each of its rounds. A checkpoint that is saved
    later has each round once, for a run that was resumed, set back or restored.
    """
    whole = make("scaffold", rounds=5).run(noted)
    called = {**PLACES, place: fails(PLACES[place], at, error)}
    monkeypatch.setattr(Scaffold, "update", called["update"])
    monkeypatch.setattr("pflcore.simulation._loop.evaluate", called["evaluate"])
    run = make("scaffold", rounds=5)
    is_failure = error in (KEY, MEMORY)
    passed_on = pytest.raises(type(error)) if is_failure else nullcontext()
    with passed_on:
        run.run(called["callback"], Checkpoint(tmp_path, every=1))
    history, state = run.history, run.state
    assert re.match(words, history.stopped) and "device='cpu'" not in history.stopped
    assert (
        len(history.rounds) == run.state.round == last and history.model(0) is not None
    )
    assert history.interrupted is (error is PRESSED)
    assert list(history.lines())[-1]["stopped"] == history.stopped
    last_record = history.rounds[-1]
    assert (last_record["eval"] is None) == (place == "evaluate")
    added_keys = ("eval", "gap", "many", "row")
    last_record |= {k: whole.rounds[last - 1][k] for k in added_keys}
    rest = run.run(noted)
    history.rounds += rest.rounds
    assert text_of(history) == text_of(whole) and rest.stopped is None
    assert same(run.state, whole.state)
    for back in (
        list,
        lambda: setattr(run, "state", state),
        lambda: run.restore(tmp_path),
    ):
        back()
        run.save(tmp_path / "again")
        again = loaded(tmp_path / "again", "scaffold", rounds=5)
        assert text_of(again.run(noted)) == text_of(whole)
    for callbacks in (noted, ()):  # after the end of the run, no round is played again
        again = loaded(tmp_path, "scaffold", rounds=5)
        assert text_of(again.run(callbacks, tmp_path)) == text_of(whole)
        assert same(again.state, whole.state)


@pytest.mark.deep("it takes a second")
def test_runs_for_everyone_go_on_and_are_exported(tmp_path, monkeypatch):
    def play(**options):
        return run_each_target(
            "waffle", tiny_model(), DATA, TRAINING, **options, **OPTIONS
        )

    def die(target, round, _):
        if (target, round) == (2, 3):
            raise RuntimeError("power cut")

    history = play()
    keeper = Checkpoint(tmp_path / "kept", every=1)
    with pytest.raises(RuntimeError, match="power cut"):
        play(on_round=die, checkpoint=keeper)
    steps = []
    monkeypatch.setattr(
        "pflcore.simulation._loop.step", lambda *given: steps.append(1) or step(*given)
    )
    reported = []
    again = play(on_round=lambda t, r, _: reported.append((t, r)), checkpoint=keeper)
    assert text_of(again) == text_of(history)
    # Rounds from the checkpoint are reported again, but not played again.
    assert reported == [(t, r) for t in range(5) for r in range(1, 5)]
    assert len(steps) == 10
    tmp_path.chmod(0o755)
    history.export(tmp_path)  # the files are as readable as the folder
    modes = [p.stat().st_mode & 0o777 for p in tmp_path.glob("client-*.safetensors")]
    assert modes == [0o644] * 5
    refused(
        lambda: History(history.header).export(tmp_path),
        "model: expected a history with",
    )
    (tmp_path / "file").write_text("x")
    inside_file = tmp_path / "file" / "x"
    words = r"export: .* cannot be written"
    refused(lambda: history.export(inside_file), words, OSError)


# another run ----------------------------------------------------------------
def frozen():
    model = tiny_model()()
    model.register_parameter(
        "constant", nn.Parameter(torch.ones(3), requires_grad=False)
    )
    return model


OTHERS = {
    "data is": {"data": images((8, 20, 30, 9))},
    "size is": {"data": images((8, 20, 30, 12, 9))},
    "data is .* there": {"data": images((8, 20, 30, 9, 12), seed=1)},
    "model": {"model": normed_model},
    "digest of the model": {"model": frozen},
    "seed": {"seed": 3},
    "lam": {"algorithm": ALGORITHMS["ditto"](lam=7.0)},
    "loss": {"loss": nn.NLLLoss()},
    "adversary": {"robustness": BAD},
}


@pytest.mark.deep("it takes a second")
def test_what_differs_is_named(tmp_path):
    saved(tmp_path, algorithm="ditto")
    for word, options in OTHERS.items():
        other = {"algorithm": "ditto", **options}
        refused(lambda o=other: loaded(tmp_path, **o), f"another run: .*{word}")
    # The number of workers never changes a result.
    loaded(tmp_path, "ditto", hardware=Hardware(workers=1))
    with pytest.warns(UserWarning, match="last digits"):
        loaded(tmp_path, "ditto", hardware=Hardware(engine="loop"))
    with pytest.warns(
        UserWarning, match="clients_per_block is 64 there and 5 here; .* last digits"
    ):
        loaded(tmp_path, "ditto", hardware=Hardware(clients_per_block=5))


class Own(nn.Module):
    """A loss that holds a function, whose address differs in every process."""

    def __init__(self):
        super().__init__()
        self.weigh = lambda v: 2 * v

    def forward(self, scores, y):
        return self.weigh(nn.functional.cross_entropy(scores, y))


def smooth(share):
    return nn.CrossEntropyLoss(label_smoothing=share)


def weighted(factor):
    return nn.CrossEntropyLoss(weight=factor * torch.ones(4))


OWN = {"loss": Own()}, {"loss": Own()}  # both exist at once, at two addresses
ALIKE = [  # options of a run, of a run that differs, and the difference that is named
    (
        {"model": layers("Linear 6 4, ReLU")},
        {"model": layers("Linear 6 4, Tanh")},
        "model is 'Sequential",
    ),
    ({"loss": weighted(1)}, {"loss": weighted(2)}, "loss is 'CrossEntropyLoss"),
    ({"loss": smooth(0.1)}, {"loss": smooth(0.5)}, "loss is 'CrossEntropyLoss"),
]


@pytest.mark.deep("it takes a second")
def test_another_model_or_loss_does_not_go_on(tmp_path):
    for first, then, words in ALIKE:
        saved(tmp_path, **first)
        assert loaded(tmp_path, **first).state.round == 2
        refused(lambda o=then: loaded(tmp_path, **o), f"that of another run: {words}")
    saved(tmp_path, **OWN[0])
    assert loaded(tmp_path, **OWN[1]).state.round == 2


# damaged files: see also test_damage ------------------------------------------
def test_an_exchanged_file_is_refused(tmp_path, monkeypatch):
    a = saved(tmp_path / "a", algorithm="waffle")
    b = saved(tmp_path / "b", algorithm="waffle", seed=1)
    shutil.copy(b / checkpoint.FILE_NAME, a / checkpoint.FILE_NAME)
    refused(lambda: make("waffle").restore(a), "another run: seed")
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 8)
    refused(lambda: load(b), "expected format 8, got 7")
    refused(lambda: load(tmp_path), r"has no checkpoint\.safetensors")


def test_a_disk_that_is_full_leaves_the_checkpoint_before(tmp_path):
    """A write that fails leaves the last checkpoint whole.

    With a limit on the size of files, the kernel refuses to write as it does on a full
    disk.
    """
    saved(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    hard = limits[1]
    for size in (0, 10, 5000):  # the last suffices for the tensors
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            with sentence("checkpoint: it cannot be written into .* stands", OSError):
                checkpoint.save(
                    tmp_path, {"x": torch.zeros(1000)}, {"long": "x" * 9000}
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert loaded(tmp_path).state.round == 2


def test_a_run_outlives_a_full_disk(tmp_path, monkeypatch):
    """A run goes on with a full disk or without synced folders."""
    history = make().run()
    sync = os.fsync
    free_space = [1]  # empty when the disk is full

    def full(handle):
        path = Path(f"/proc/self/fd/{handle}").resolve()
        if path.is_dir() or (path.suffix == ".part" and not free_space):
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    keeper = Checkpoint(tmp_path, every=1)
    with pytest.warns(RuntimeWarning, match=r"No space left.*The run goes on\.$"):
        again = make().run(
            lambda round, _: free_space.clear() if round == 2 else None, keeper
        )
    assert text_of(again) == text_of(history)
    assert loaded(tmp_path).state.round == 1 and not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("what", ["a key", "itself"])
def test_a_run_outlives_a_record_that_no_file_holds(what, tmp_path):
    def spoil(round, record):
        if round == 2:
            record.update({(1, 2): 3} if what == "a key" else {"again": record})

    with pytest.warns(
        RuntimeWarning, match=r"a record holds what JSON does not.* The run goes on"
    ):
        history = make().run(spoil, Checkpoint(tmp_path, every=1))
    assert len(history.rounds) == 4 and history.stopped is None
    assert loaded(tmp_path).state.round == 1


@pytest.mark.skipif(os.name == "nt", reason="no links: not POSIX")
def test_only_the_last_checkpoint_and_no_leavings_stay(tmp_path):
    """A folder keeps the last checkpoint and the files of the user.

    Partial files of a killed process go away, also where one is a link: the file that
    the link points to stays.
    """
    (tmp_path / "checkpoint-notes.safetensors").write_text("the user's own")
    (tmp_path / "checkpoint.safetensors.0123abcd.part").write_text(
        "of a killed process"
    )
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "checkpoint.safetensors.4567abcd.part").symlink_to(victim)
    make().run(checkpoint=Checkpoint(tmp_path, every=1))
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {
        "checkpoint-notes.safetensors",
        checkpoint.FILE_NAME,
        "victim",
    }
    assert victim.read_text() == "mine"
