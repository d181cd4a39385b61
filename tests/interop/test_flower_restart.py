"""A strategy on the folder of a killed one goes on to the same models."""

import tempfile
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import torch
from entry_points import sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from parts.flower import Nodes, maker
from parts.interop import DATA, ROUNDS, SEED, TRAINING, algorithm
from parts.interop import bn_model as model
from small import layers

from pflcore import Client, Server, Simulation
from pflcore.algorithms import ALGORITHMS
from pflcore.interop import flower
from pflcore.interop.flower import PflStrategy, client_app
from pflcore.simulation import checkpoint as store

N = DATA.n
NAMES = ["fedavg", "fedadam", "scaffold", "ditto", "feddwa", "fedper", "clustered_fl"]


class Killed(BaseException):
    """The end of the server's process."""


class Mortal(Nodes):
    """Nodes whose server ends at a message, before or after the node's answer."""

    lives = None  # messages until the server ends; None: it lives on
    answers_first = False

    def push(self, message):
        if self.lives is None:
            return super().push(message)
        self.lives -= 1
        if self.lives < 0 and not self.answers_first:
            raise Killed
        pushed = super().push(message)
        if self.lives < 0:
            raise Killed
        return pushed


def new_run(alg, folder, part, models, **options):
    """A strategy and its nodes as a new start of Flower makes them.

    Flower gives every run new contexts, so the nodes have only what is in `folder`.
    """

    def keep(personal, context):
        state = personal.state_dict()
        number = context.node_config["partition-id"]
        models[number] = {name: value.clone() for name, value in state.items()}
        return {"loss": float(number)}

    folders = {}
    if folder is not None:
        folders = {"checkpoint": folder / "clients"}
        options["checkpoint"] = folder / "server"
    server = Server(alg, model, N, rounds=ROUNDS, seed=SEED)
    strategy = PflStrategy(server, fraction_train=part, **options)
    return strategy, Mortal(client_app(maker(alg), evaluate=keep, **folders), range(N))


@cache
def unbroken(name, part):
    """The server's state and the clients' models of a run that was not killed."""
    models = {}
    strategy, grid = new_run(algorithm(name), None, part, models)
    result = strategy.start(grid)
    metrics = {k: dict(v) for k, v in result.evaluate_metrics_clientapp.items()}
    return strategy.server.state_dict(), models, metrics


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def check_killed_run(name, part, lives, answers_first):
    """Asserts that killed servers and the last one give the unbroken run's models.

    Each number of `lives` is the number of messages until a server ends.
    """
    want, want_models, _ = unbroken(name, part)
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in [*lives, None]:
            strategy, grid = new_run(algorithm(name), Path(folder), part, models)
            grid.lives = number
            grid.answers_first = answers_first
            try:
                strategy.start(grid)
            except Killed:
                continue

    got = strategy.server.state_dict()
    assert got["round"] == want["round"] == ROUNDS
    assert got["clients"] == want["clients"]
    assert_equal(got["state"], want["state"])
    assert models.keys() == want_models.keys()
    for number, state in want_models.items():
        assert_equal(models[number], state)


@pytest.mark.long("some forty runs")
@settings(max_examples=15)
@given(
    name=st.sampled_from(NAMES),
    part=st.sampled_from([0.5, 1.0]),
    lives=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    answers_first=st.booleans(),
)
def test_killed_runs_end_with_the_models_of_the_unbroken_one(
    name, part, lives, answers_first
):
    check_killed_run(name, part, lives, answers_first)


# Four nodes are asked who they are, train in messages 4 to 7, are evaluated in 8 to 11,
# and train again from 12 on.
@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("name, lives", [("ditto", 13), ("fedavg", 9), ("feddwa", 5)])
def test_a_killed_run_ends_with_the_models_of_the_unbroken_one(name, lives):
    check_killed_run(name, 1.0, [lives], answers_first=True)


def play(folder, rounds, name="ditto", models=None, **options):
    models = {} if models is None else models
    strategy, grid = new_run(algorithm(name), folder, 1.0, models, **options)
    return strategy, strategy.start(grid, num_rounds=rounds)


@pytest.mark.deep("it takes a second")
def test_rounds_of_the_result_continue(tmp_path):
    _, _, metrics = unbroken("ditto", 1.0)
    play(tmp_path, 1)
    _, result = play(tmp_path, None)
    got = result.evaluate_metrics_clientapp
    assert {k: dict(v) for k, v in got.items()} == {k: metrics[k] for k in (2, 3)}


@pytest.mark.deep("it takes a second")
def test_a_finished_run_is_evaluated_again(tmp_path):
    want, want_models, metrics = unbroken("ditto", 1.0)
    play(tmp_path, None)
    models = {}
    strategy, result = play(tmp_path, None, models=models)
    assert_equal(strategy.server.state_dict()["state"], want["state"])
    assert models.keys() == want_models.keys()
    for number, state in models.items():
        assert_equal(state, want_models[number])
    got = result.evaluate_metrics_clientapp
    assert {k: dict(v) for k, v in got.items()} == {ROUNDS: metrics[ROUNDS]}


@pytest.mark.deep("it takes a second")
def test_evaluated_clients_and_round_numbers_continue(tmp_path):
    def played(folder, cuts):
        seen = []
        for rounds in cuts:
            strategy, grid = new_run(
                algorithm("fedavg"), folder, 1.0, {}, fraction_evaluate=0.5
            )
            strategy.start(grid, num_rounds=rounds)
            evaluated = [node for kind, node in grid.asked if kind == "evaluate"]
            seen += evaluated
        return seen

    assert played(tmp_path / "cut", [1, 1, 1]) == played(tmp_path / "whole", [3])


@pytest.mark.deep("it takes a second")
def test_the_node_that_was_known_first_stays_the_client(tmp_path):
    play(tmp_path, 1)
    strategy, grid = new_run(algorithm("ditto"), tmp_path, 1.0, {})
    contexts = {5: grid.contexts[101], **grid.contexts}  # a node that says it is 1
    grid.contexts = contexts
    strategy.start(grid, num_rounds=1)
    assert grid.trainers() == [100, 101, 102, 103]


OTHERS = {
    "algorithm is 'ditto' there and 'fedavg' here": {"alg": "fedavg"},
    "lam is": {"alg": ALGORITHMS["ditto"](lam=0.25)},
    "weight is": {"template": lambda: layers("Linear 6 3").double()},
    "dtype is": {"template": lambda: model().float()},
    "rounds is 3 there and 4 here": {"rounds": 4},
    "seed is 5 there and 6 here": {"seed": 6},
    "clip is None there and 1.0 here": {"clip": 1.0},
}


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("words", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(words, tmp_path):
    play(tmp_path, 1)
    options = {"rounds": ROUNDS, "seed": SEED, "alg": "ditto", "template": model}
    options |= OTHERS[words]
    alg, template = options.pop("alg"), options.pop("template")
    server = Server(alg, template, N, **options)
    before = server.state_dict()
    with sentence(f"state: expected that of this server, got one .*({words})"):
        PflStrategy(server, checkpoint=tmp_path / "server")
    assert server.round == 0
    assert_equal(server.state_dict()["state"], before["state"])


def test_checkpoints_of_other_things_are_refused(tmp_path):
    Simulation("ditto", model, DATA, TRAINING, 1).save(tmp_path / "simulation")
    server = Server("ditto", model, N)
    with sentence("checkpoint: expected the checkpoint of a PflStrategy"):
        PflStrategy(server, checkpoint=tmp_path / "simulation")
    server.save(tmp_path / "alone")
    with sentence("checkpoint: expected the checkpoint of a PflStrategy"):
        PflStrategy(server, checkpoint=tmp_path / "alone")
    file = tmp_path / "alone" / store.FILE_NAME
    file.write_bytes(file.read_bytes()[:-1])
    with sentence("checkpoint: .* holds one that is damaged"):
        PflStrategy(server, checkpoint=tmp_path / "alone")


def test_a_folder_has_one_run_at_a_time(tmp_path):
    strategy, grid = new_run(algorithm("ditto"), tmp_path, 1.0, {})
    with (
        flower.lock_folder(tmp_path / "server"),
        sentence("checkpoint: another run is writing into"),
    ):
        strategy.start(grid)


def test_a_checkpoint_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("checkpoint: it cannot be written.")

    warnings = []
    monkeypatch.setattr(flower, "log", lambda level, *text: warnings.append(text))
    monkeypatch.setattr(store, "save", full)
    strategy, grid = new_run(algorithm("fedavg"), tmp_path, 1.0, {})
    grid.app = client_app(maker("fedavg"))
    strategy.start(grid)
    assert strategy.server.round == ROUNDS
    assert [str(text[-1]) for text in warnings] == [
        "checkpoint: it cannot be written."
    ] * ROUNDS


@pytest.mark.deep("it takes a second")
def test_a_new_run_reads_no_state_of_an_earlier_one(tmp_path):
    """A client's folder may have the state of another run of the same settings."""
    want, want_models, _ = unbroken("ditto", 1.0)
    play(tmp_path, 2)
    models = {}
    grid = new_run(algorithm("ditto"), tmp_path, 1.0, models)[1]
    server = Server("ditto", model, N, rounds=ROUNDS, seed=SEED)
    PflStrategy(server, checkpoint=tmp_path / "new").start(grid)
    assert_equal(server.state_dict()["state"], want["state"])
    for number, state in want_models.items():
        assert_equal(models[number], state)


def test_ids_that_look_alike_have_folders_of_their_own(tmp_path):
    def make(context):
        return Client("ditto", model, DATA.subset([0]), TRAINING, seed=SEED)

    ids = {0: 1, 1: "1", 2: "../1", 3: "a/b"}
    app = client_app(
        make,
        client_id=lambda context: ids[context.node_config["partition-id"]],
        checkpoint=tmp_path / "clients",
    )
    server = Server("ditto", model, N, rounds=1, seed=SEED)
    PflStrategy(server).start(Nodes(app, range(N)))
    assert len([*(tmp_path / "clients").iterdir()]) == N
    assert [*tmp_path.iterdir()] == [tmp_path / "clients"]
