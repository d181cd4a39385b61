"""A run gives the models of its clients and of a newcomer."""

import copy
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from entry_points import sentence
from parts.states import same
from parts.user import simulation
from small import SIX, equals, images, swept, tiny_model
from torch import nn

from pflcore import Evaluation, FedAvg, Hardware, Simulation, Training, run_each_target
from pflcore.algorithms import APFL, Ditto, VoidRound, Waffle, WeightErosion
from pflcore.simulation import record as records


def as_evaluated(history, data):
    """Checks each client's model against the last recorded accuracy."""
    for i in range(data.n):
        x, y = data.client(i, "test")
        right = (history.predict(i, x.numpy()) == y).double().mean().item()
        assert right == pytest.approx(history.rounds[-1]["eval"]["accuracy"][i])


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(
    "algorithm", swept(quick=(*SIX, "fedrod", "knnper", "hypcluster"))
)
def test_a_clients_model_is_what_was_evaluated(algorithm):
    """A client's model is the one that the run has evaluated.

    A newcomer does not change the run.
    """
    federation = images((7, 20, 31, 24))
    run = simulation(algorithm, federation.subset([0, 1, 2]), rounds=2)
    history = run.run()
    before = copy.deepcopy(history.state)
    newcomer = federation.client(3, "train")
    first, again = (history.adapt(newcomer, rounds=2) for _ in range(2))
    x, y = newcomer
    assert first.predict(x).shape == y.shape and first(x).isfinite().all()
    equals(first(x), again(x))
    assert same(before, history.state)
    as_evaluated(history, run.data)
    x = run.data.client(1, "test")[0]
    model = history.model(1)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again.load_state_dict(model.state_dict())
        equals(again(x), model(x))


@pytest.mark.parametrize("algorithm", ["finetune", "fedbabu", "per_fedavg"])
def test_what_begins_anew_takes_the_runs_step_size(algorithm):
    """Also after a schedule has ended at a step size of 0."""
    data = images((7, 20, 31, 24))
    newcomer = data.client(3, "train")
    options = {"data": data.subset([0, 1, 2]), "evaluation": Evaluation(every=0)}
    ends = []
    for rounds, schedule in ((1, None), (2, lambda round, rounds: 2 - round)):
        training = Training(0.1, batch_size=50, schedule=schedule)
        run = simulation(algorithm, rounds=rounds, training=training, **options)
        history = run.run()
        ends.append((run.state.server["x"], history.model(1)(newcomer[0])))
        adapted = history.adapt(newcomer, rounds=1)
        assert not torch.equal(adapted(newcomer[0]), ends[0][1])
    equals(ends[0][0], ends[1][0])
    torch.testing.assert_close(ends[0][1], ends[1][1])


@pytest.mark.parametrize(
    "algorithm", ["scaffold", "feddyn", "mocha", "heurfedamp", "fedamp", "fedfomo"]
)
def test_clients_that_never_take_part_count_nowhere(algorithm):
    """A run of some clients is one of a federation that has these alone."""
    data = images((7, 20, 31, 24, 9, 12))
    some = [0, 1, 2, 3]
    options = {"rounds": 4, "participation": 0.75}
    whole = simulation(algorithm, data, clients=some, **options).run()
    alone = simulation(algorithm, data.subset(some), **options).run()
    x = data.client(4, "train")[0]
    for i in some:
        torch.testing.assert_close(whole.model(i)(x), alone.model(i)(x))


def test_a_model_of_its_own_class():
    run = simulation(Ditto, rounds=2)
    history = run.run()
    module = history.model(1).module()
    x, _ = run.data.client(1, "test")
    assert isinstance(module, nn.Sequential) and not module.training
    equals(module(x), history.model(1)(x))
    pickle.dumps(module)
    with sentence("module: APFL predicts with more than one model"):
        simulation(APFL, rounds=1).run().model(0).module()
    for client in (3, -1, "0", True):
        with sentence("client: expected a number from 0 to 2, got"):
            history.model(client)


@pytest.mark.deep("it takes a second")
def test_a_newcomer_is_personalized_by_the_algorithms_rule():
    federation = images((40, 40, 40, 40))  # clients 1 and 3 permute their labels
    members = federation.subset([0, 2, 1])
    samples = federation.client(3, "train")
    x, y = federation.client(3, "test")

    def accuracy(algorithm, rounds=5):
        training = Training(lr=0.3, batch_size=8)
        history = simulation(algorithm, members, training=training, rounds=8).run()
        predicted = history.adapt(samples, rounds).predict(x)
        return (predicted == y).double().mean().item()

    shared = accuracy("fedavg")
    # FedAvg has no rule for newcomers: the newcomer gets the shared model.
    assert accuracy("fedavg", 0) == shared < 0.6
    for algorithm in ("ditto", "local", "finetune", "feddwa", "fedrod"):
        assert accuracy(algorithm) > shared + 0.15, algorithm


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_newcomer_trains_at_the_runs_step_size(rounds):
    """A newcomer begins anew: it does not train at the schedule's last step size."""

    def halved(round, rounds):
        return 0.5 ** (round - 1)

    def adapted(lr, schedule=None):
        training = Training(lr=lr, batch_size=8, schedule=schedule)
        run = Simulation("local", tiny_model(), members, training, rounds=rounds)
        history = run.run()
        model = history.adapt(federation.client(3, "train"), rounds=2)
        return model.get_buffer("view_w")

    federation = images((7, 20, 31, 24))
    members = federation.subset([0, 1, 2])
    assert torch.equal(adapted(0.3, halved), adapted(0.3))


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize(
    "algorithm", ["finetune", "fedbabu", "per_fedavg", "fedala", "ditto"]
)
def test_a_newcomers_streams_are_those_of_the_rounds_after_the_run(algorithm):
    """A newcomer draws the random numbers of the rounds after the run.

    It equals client 3 of four that takes part in round 3 alone and is evaluated after
    round 3.
    """
    federation = images((20, 20, 20, 20))
    members = federation.subset([0, 1, 2])
    options = {"hardware": Hardware(engine="loop"), "model": nn.Linear(6, 4)}
    history = simulation(algorithm, members, rounds=2, **options).run()
    first = simulation(
        algorithm, federation, rounds=2, clients=[0, 1, 2], **options
    ).run()
    alone = simulation(algorithm, federation, rounds=3, clients=[3], **options)
    alone.state = first.state
    after = alone.run().state
    x, y = federation.client(3, "train")
    for model, round in (
        (history.adapt((x, y), rounds=1), 3),
        (history.adapt((x, y), rounds=0), 2),
    ):
        state = replace(after if round == 3 else first.state, server=first.state.server)
        again = simulation(algorithm, federation, rounds=round, clients=[3], **options)
        again.state = state
        equals(model(x), again.run().model(3)(x))


def test_a_newcomer_that_does_not_fit_is_one_sentence():
    history = simulation(rounds=1).run()
    with sentence(r"samples: expected inputs of shape \(6,\)"):
        history.adapt((torch.randn(9, 5), torch.zeros(9, dtype=torch.long)))
    with sentence("samples: expected those of one client, got Federation"):
        history.adapt(images())
    with sentence("rounds: expected a whole number, at least 0, got -1"):
        history.adapt(images().client(0), rounds=-1)
    with sentence("model: expected a history with models"):
        type(history)({}).model(0)


# a run for each client ---------------------------------------------------------
@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("algorithm", [Waffle(do=2.0), WeightErosion(p_d=0.1)])
def test_each_clients_numbers_are_those_of_its_own_run(algorithm):
    data = images()
    training = Training(lr=0.1, batch_size=8)
    model = tiny_model()
    options = {"rounds": 3, "evaluation": Evaluation(every=2)}
    seen = []
    history = run_each_target(
        algorithm,
        model,
        data,
        training,
        on_round=lambda t, r, record: seen.append((t, r)),
        **options,
    )
    assert seen == [(t, r) for t in range(3) for r in (1, 2, 3)]
    each = [replace(algorithm, target=t) for t in range(3)]
    alone = [
        Simulation(alg, model, data, training, **options).run().rounds for alg in each
    ]
    assert [r["eval"] is None for r in history.rounds] == [True, False, False]
    for record, *singles in zip(history.rounds, *alone, strict=True):
        assert record["report"]["weights"] == [r["report"]["weights"] for r in singles]
        assert record["bytes_up"] == sum(r["bytes_up"] for r in singles)
        assert record["cohort"] == [0, 1, 2]
        if record["eval"]:
            for key in ("accuracy", "loss"):
                assert record["eval"][key] == [
                    r["eval"][key][t] for t, r in enumerate(singles)
                ]
    assert history.header["target"] is history.stopped is None
    as_evaluated(history, data)
    with sentence("client: expected a number from 0 to 2"):
        history.model(3)
    with sentence("adapt: expected the history that"):
        history.adapt(data.client(0, "train"))


def test_a_diverged_run_is_named():
    wild = Training(lr=1e200, batch_size=8)
    history = run_each_target(Waffle(), tiny_model(), images(), wild, rounds=5)
    assert "target 0: The run diverged" in history.stopped and len(history.rounds) == 3
    assert all(r["void"] for r in history.rounds)


def test_a_round_void_in_any_run_is_void():
    """A round that is void for one target is void.

    Target t has t void rounds. Round 1 is void for targets 1 and 2, and round 2 for
    target 2.
    """

    @dataclass(frozen=True)
    class Shy(FedAvg):
        target: int = 0

        def update(self, state, up, cohort):
            if cohort.round <= self.target:
                raise VoidRound("Not yet.")
            return super().update(state, up, cohort)

    history = run_each_target(Shy(), tiny_model(), images(), Training(lr=0.1), rounds=3)
    assert [r["void"] for r in history.rounds] == [True, True, False]
    assert [len(r["dropped"]) for r in history.rounds] == [0, 0, 0]


def test_what_it_does_not_take_is_refused():
    with sentence("algorithm: expected one with a target"):
        run_each_target(FedAvg(), tiny_model(), images())
    with sentence(r"evaluation\.clients: expected every client"):
        run_each_target(
            Waffle(), tiny_model(), images(), evaluation=Evaluation(clients=2)
        )


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"participation": 0.5}, {}])
def test_weights_have_a_row_for_each_target_whoever_took_part(options):
    """Weights have a row for each target, whatever the cohorts are.

    Each target's run has its own cohorts. Where client 1 drops out, the run for client
    1 has no weights.
    """
    data = images((6, 7, 8, 9))
    training = Training(lr=0.1, batch_size=8)
    if not options:
        data.x[data.index["train"][1]] = 3e38  # its scores overflow
    history = run_each_target(
        Waffle(), nn.Linear(6, 4), data, training, rounds=2, **options
    )
    _, dense = records.group_runs(history.lines())[0].weights()
    for record, weights in zip(history.rounds, dense, strict=True):
        assert list(record["report"]) == ["weights"] and weights.shape == (4, 4)
        sums = weights.sum(1)
        ones = torch.ones(4, dtype=torch.float64)
        if options:
            assert torch.allclose(sums, ones) and int((weights > 0).sum(1).max()) < 4
        elif record["round"] == 2:  # in round 1 its update is finite, if barely
            assert weights[1].isnan().all() and weights[[0, 2, 3], 1].eq(0).all()
            assert torch.allclose(sums[[0, 2, 3]], ones[1:])


def test_who_ran_away_is_named_whoever_took_part():
    data = images((10,) * 8)
    data.x[data.index["train"][5]] *= 200
    training = Training(lr=0.01, batch_size=5)
    model = nn.Linear(6, 4)
    options = {"rounds": 1, "participation": 0.5}
    history = run_each_target(WeightErosion(), model, data, training, **options)
    record = history.rounds[0]
    norms = record["relative_update_norm"]
    assert record["cohort"] == list(range(8))
    assert norms.index(max(norms)) == 5
    (run,) = records.group_runs(history.lines())
    assert list(run.outliers()) == [5]
