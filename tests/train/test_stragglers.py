"""Clients that take different numbers of local steps (`Training(steps=)`)."""

from dataclasses import replace

import pytest
import torch
from entry_points import sentence
from parts.states import same
from small import images, swept, tiny_model
from torch import nn

from pflcore import Hardware, Simulation, Training
from pflcore.algorithms import ALGORITHMS, Scaffold

SIZES = (12, 12, 12, 20, 7)
DATA = images(SIZES)
TRAINING = Training(lr=0.1, batch_size=5)
TAKEN = (5, 2, 7, 1, 4)


def own(round, client, generator):
    """Steps that depend on the client and the round."""
    return TAKEN[client] + (round > 1)


def drawn(round, client, generator):
    return 1 + int(torch.randint(6, (), generator=generator))


def run(algorithm, steps, data=DATA, training=TRAINING, **options):
    settings = {"rounds": 3, "participation": 0.8, **options}
    made = Simulation(
        algorithm, tiny_model(), data, replace(training, steps=steps), **settings
    )
    made.run()
    return made


def test_a_rule_draws_by_the_runs_seed():
    """The record and the training call it, and see one number."""
    draws = {}

    def steps(round, client, generator):
        count = drawn(round, client, generator)
        draws.setdefault((round, client), set()).add(count)
        return count

    def draws_of(seed):
        draws.clear()
        made = run("fedavg", steps, participation=1.0, seed=seed)
        recorded = [n for record in made.history.rounds for n in record["steps"]]
        assert [draws[key] for key in sorted(draws)] == [{n} for n in recorded]
        return recorded

    assert draws_of(1) == draws_of(1) != draws_of(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", swept(quick=("scaffold", "ditto")))
def test_a_constant_function_is_the_constant(name):
    """Bit by bit, also where they are more than an epoch."""
    cls = ALGORITHMS[name]
    a, b = (run(cls, steps, rounds=2) for steps in (4, lambda *_: 4))
    assert same(a.state, b.state)
    assert [r["train_loss"] for r in a.history.rounds] == [
        r["train_loss"] for r in b.history.rounds
    ]


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
def test_as_many_steps_as_epochs_have_are_the_same(engine):
    """Where all clients have equally many samples."""
    data = images((12, 12, 12))
    hardware = {"hardware": Hardware(engine=engine)}
    for options in ({}, {"momentum": 0.9}, {"lr": 0.01, "local_optimizer": "adamw"}):
        training = replace(TRAINING, **options)
        by_steps = run("fedavg", 6, data, training, **hardware)
        training = replace(training, epochs=2)
        by_epochs = run("fedavg", None, data, training, **hardware)
        assert same(by_steps.state, by_epochs.state)


@pytest.mark.parametrize("option", ["mean_grad", "II"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_scaffold_divides_by_the_steps_that_were_taken(option, engine):
    """Two rounds beside a plain loop over whole batches, worked out by hand."""
    x, y = DATA.x.double(), DATA.y.double()
    data = replace(DATA, x=x, y=(y - 1.5)[:, None], relabel=None, classes=None)
    model = nn.Linear(6, 1).double()
    training = Training(lr=0.02, batch_size=100)
    made = Simulation(
        Scaffold(option=option),
        model,
        data,
        replace(training, steps=own),
        rounds=2,
        loss="half_squared",
        hardware=Hardware(engine=engine),
    )
    made.run()
    w = torch.cat([model.weight.detach(), model.bias.detach()[None]], 1)[0]
    c, own_c = torch.zeros(7).double(), torch.zeros(5, 7).double()
    for round in (1, 2):
        deltas, controls = [], []
        for i in range(5):
            inputs, targets = data.client(i)
            inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
            v, grads = w.clone(), []
            steps = TAKEN[i] + (round > 1)
            for _ in range(steps):
                error = inputs @ v - targets[:, 0]
                grads.append(inputs.T @ error / len(inputs))
                v = v - 0.02 * (grads[-1] - own_c[i] + c)
            new = own_c[i] - c + (w - v) / (steps * 0.02)
            torch.testing.assert_close(new, torch.stack(grads).mean(0))
            deltas.append(v - w)
            controls.append(new - own_c[i])
            own_c[i] = new
        w = w + torch.stack(deltas).mean(0)
        c = c + torch.stack(controls).mean(0)
    torch.testing.assert_close(made.state.server["x"], w, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(made.state.clients["c"], own_c, rtol=1e-9, atol=1e-11)


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", ["scaffold", "pfedme", "per_fedavg", "fedrep"])
def test_engines_agree_on_different_numbers_of_steps(name):
    """Also where a client between two of its size has taken its last step."""
    data = replace(DATA, x=DATA.x.double())
    states = []
    for engine in ("loop", "vmap", "auto"):
        made = Simulation(
            name,
            lambda: tiny_model()().double(),
            data,
            replace(TRAINING, steps=own),
            rounds=2,
            hardware=Hardware(engine=engine, clients_per_block=5),
        )
        made.run()
        states.append(made.state.server["x"])
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=1e-9, atol=1e-11)


def test_steps_do_not_depend_on_the_other_clients_nor_on_a_break(tmp_path):
    """A client's draws are its own, and a resumed run has them again."""
    training = replace(TRAINING, steps=drawn)
    ids = torch.arange(5)
    counts = training.steps_of(2, ids, seed=3)
    assert training.steps_of(2, ids[[4, 1]], seed=3).tolist() == counts[[4, 1]].tolist()
    assert len({*counts.tolist()}) > 1
    assert training.steps_of(3, ids, seed=3).tolist() != counts.tolist()
    options = {"rounds": 4, "participation": 0.6}
    whole = Simulation("scaffold", tiny_model(), DATA, training, **options)
    whole.run(lambda round, _: round == 2 and whole.save(tmp_path))
    rest = Simulation("scaffold", tiny_model(), DATA, training, **options)
    rest.restore(tmp_path).run()
    assert same(whole.state, rest.state)
    assert whole.header()["training"]["steps"] == "drawn"
    for record in whole.history.rounds:
        taken = training.steps_of(record["round"], torch.tensor(record["cohort"]), 0)
        assert record["steps"] == taken.tolist()


def test_what_is_no_number_of_steps_is_refused():
    for steps in (0, -1, 2.5, True, "five", "math:pi", "no.module:f"):
        with pytest.raises(ValueError, match=r"^steps: ") as e:
            replace(TRAINING, steps=steps)
        assert sentence(e)
    with pytest.raises(ValueError, match="epochs: steps takes their place, got") as e:
        replace(TRAINING, epochs=2, steps=5)
    assert sentence(e)
    for count in (0, 1.5, None):
        with pytest.raises(ValueError, match=r"^steps, of client \d in round 1: ") as e:
            run("fedavg", lambda *_, count=count: count)
        assert sentence(e)
    with pytest.raises(ValueError, match="steps: WeightErosion with size_unit") as e:
        run(ALGORITHMS["weight_erosion"](size_unit="epochs"), 3)
    assert sentence(e)
    place = f"{__name__}:own"
    assert replace(TRAINING, steps=place).steps.__name__ == "own"


def test_a_function_of_other_arguments_is_refused():
    words = r"steps: expected a function of \(round, client, generator\) that returns a"
    with sentence(rf"{words} whole number, at least 1, got <lambda>\(round, client\)"):
        Training(steps=lambda round, client: 2)
