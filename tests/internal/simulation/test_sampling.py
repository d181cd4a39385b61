"""The rules by which the clients of a round are drawn."""

import numpy as np
import pytest
import torch
from entry_points import sentence
from parts.states import same
from parts.user import simulation
from small import images

from pflcore import Simulation, run_each_target
from pflcore.algorithms import WeightErosion
from pflcore.simulation._sampling import draw_by_weight
from pflcore.simulation.round import sample_cohort

SIZES = (4, 40, 10, 10, 16)
DATA = images(SIZES)


def two_latest(round, generator, sizes):
    """Client 0, and another one that the generator draws."""
    assert sizes.tolist() == list(SIZES)
    return [0, 1 + int(torch.randint(4, (), generator=generator))]


class Rule:
    def __call__(self, round, generator, sizes):
        return np.array([round % 3])


def make(sampling="uniform", algorithm="fedavg", **options):
    settings = {"participation": 0.4, "rounds": 4, **options}
    return simulation(algorithm, DATA, sampling=sampling, **settings)


def cohorts(run, rounds):
    sampling = run.sampling
    options = (run.participation, run.eligible_clients, sampling)
    return [
        sample_cohort(run.config, round, *options).tolist()
        for round in range(1, rounds + 1)
    ]


@pytest.mark.deep("it takes a second")
def test_chances_are_those_of_the_weights():
    """Client i is drawn with the chance S w_i / sum(w), or always where that exceeds 1.

    Of weights 1, 3, 0, 2 and 10 and three clients, the last one is always there; the
    others share two places: 2 / 6, 1 and 4 / 6 would give the second one a chance of 1.
    """
    weights = torch.tensor([1.0, 3.0, 0.0, 2.0, 10.0], dtype=torch.float64)
    for count, chances in (
        (1, [1 / 16, 3 / 16, 0, 2 / 16, 10 / 16]),
        (2, [1 / 6, 1 / 2, 0, 1 / 3, 1]),
        (3, [1 / 3, 1, 0, 2 / 3, 1]),
        (5, [1, 1, 0, 1, 1]),
    ):
        taken = torch.zeros(5)
        for key in range(1000):
            ids = draw_by_weight(weights, count, "law", key)
            assert len(ids.unique()) == len(ids) == min(count, 4)
            taken[ids] += 1 / 1000
        # Five standard deviations of a frequency of 1000 draws are below 0.08.
        torch.testing.assert_close(
            taken, torch.tensor(chances).float(), rtol=0, atol=0.08
        )


def test_equal_weights_and_extreme_ones_are_drawn():
    """Neither many equal clients nor weights near the ends of float64 break a draw."""
    for values in ([1.0] * 3000, [1e308] * 7 + [5e-324]):
        weights = torch.tensor(values, dtype=torch.float64)
        n = len(weights)
        for count in (1, 7, n // 2, n - 1, n):
            ids = draw_by_weight(weights, count, "ends", count)
            assert len(ids.unique()) == count
    assert draw_by_weight(torch.ones(5).double(), 2, 0, 1).dtype == torch.int64


@pytest.mark.deep("it takes a second")
def test_rules_decide_the_cohorts_of_a_run():
    """The record has the rule and the cohorts; weights like the sizes are "size".

    Without a rule the record is what it was.
    """
    run = make("size")
    history = run.run()
    assert history.header["sampling"] == "size"
    assert [r["cohort"] for r in history.rounds] == cohorts(run, 4)
    by_weights = make([2 * size for size in SIZES])
    assert cohorts(by_weights, 12) == cohorts(run, 12)
    assert by_weights.header()["sampling"] == [2.0 * size for size in SIZES]
    assert "sampling" not in make().header()
    assert all(ids[0] == 0 and len(ids) == 2 for ids in cohorts(make(two_latest), 20))
    assert make(two_latest).header()["sampling"] == "function two_latest"
    assert cohorts(make(Rule()), 3) == [[1], [2], [0]]
    by_name = make(f"{__name__}:two_latest")
    assert by_name.sampling.__name__ == "two_latest"
    # Who may not take part, or has no weight, is never drawn.
    some = {c for ids in cohorts(make("size", clients=[0, 2, 3]), 20) for c in ids}
    assert some == {0, 2, 3}
    some = {c for ids in cohorts(make([0, 1, 0, 1, 1]), 20) for c in ids}
    assert some == {1, 3, 4}


def test_equal_weights_of_clients_drawn_by_size_are_unbiased():
    """The mean of a cohort drawn by size estimates the mean weighted by samples."""
    run = make("size", participation=0.4)
    updates = torch.arange(5.0).double() ** 2
    means = [updates[ids].mean() for ids in cohorts(run, 1000)]
    size = torch.tensor(SIZES).double()
    # Client 1 has half of all samples, so that it is in every cohort of two.
    assert size[1] * 2 == size.sum()
    want = (size / size.sum()) @ updates
    assert abs(torch.stack(means).mean() - want) < 0.3


@pytest.mark.parametrize("sampling", ["size", two_latest])
def test_a_resumed_run_draws_the_same_cohorts(sampling, tmp_path):
    whole = make(sampling, "scaffold")
    history = whole.run(lambda round, _: round == 2 and whole.save(tmp_path))
    rest = make(sampling, "scaffold").restore(tmp_path)
    again = rest.run()
    assert [r["cohort"] for r in again.rounds] == [r["cohort"] for r in history.rounds]
    assert same(whole.state, rest.state)
    with pytest.raises(ValueError, match=r"sampling is .* there and None here"):
        make("uniform", "scaffold").restore(tmp_path)


@pytest.mark.deep("it takes a second")
def test_each_target_joins_the_clients_of_a_rule():
    """Also a function that does not know the target, which comes on top."""
    target = WeightErosion(target=3)
    for sampling, sizes in (("size", {2}), (two_latest, {2, 3})):
        drawn = cohorts(make(sampling, target), 20)
        assert all(3 in ids for ids in drawn) and {len(ids) for ids in drawn} == sizes
        options = {"participation": 0.4, "rounds": 2, "sampling": sampling}
        history = run_each_target(target, make().model, DATA, **options)
        assert [len(r["cohort"]) for r in history.rounds] == [5, 5]


def test_what_is_no_rule_is_refused():
    """At the door where that is possible, and else in the round that it is met."""
    door = {
        "sizes": "got 'sizes', did you mean 'size'",
        "no.module:here": "importing 'no.module:here' failed",
        "math:pi": "expected 'uniform', 'poisson', 'size', a weight",
        (1.0, 2.0): "for each of the 5 clients, got",
        (1, 2, 3, -1, 4): "got -1 for client 3",
        (1, 2, float("inf"), 1, 4): "got inf for client 2",
        (0, 0, 0, 0, 0): "above 0 of a client that may take part, got zeros",
        ("a", 2, 3, 4, 5): "a finite weight >= 0 for each",
    }
    for sampling, words in door.items():
        with pytest.raises(ValueError, match="^sampling: .*" + words) as e:
            make(sampling)
        assert sentence(e)
    with pytest.raises(ValueError, match="zeros alone"):
        make([0, 0, 0, 0, 1], clients=[0, 1])
    later = {
        (): "expected ids of clients from 0 to 4, each once",
        (1, 1): "each once",
        (5,): "from 0 to 4",
        (0.5,): "ids of clients",
        (0, 4): r"may take part \(3\), got \[4\]",
        (0, 1, 2): "at most 1 clients, as participation says, got 3",
    }
    for ids, words in later.items():
        run = make(lambda *_, ids=ids: ids, clients=[0, 1, 2], participation=0.4)
        with pytest.raises(ValueError, match="^sampling, in round 1: .*" + words) as e:
            run.run()
        assert sentence(e)


def test_the_default_draws_as_before():
    """Cohorts of "uniform" are those of earlier versions."""
    assert cohorts(make(), 4) == cohorts(
        Simulation("fedavg", make().model, DATA, participation=0.4), 4
    )
    assert cohorts(make(), 6) == UNIFORM


UNIFORM = [[3, 4], [2, 3], [2, 4], [0, 2], [0, 2], [2, 4]]


@pytest.mark.parametrize(
    "rule, got",
    [(lambda round: [0], r"<lambda>\(round\)"), (Rule, r"Rule\(\)")],
)
def test_a_function_of_other_arguments_is_refused(rule, got):
    words = r"sampling: expected a function of \(round, generator, sizes\) that returns"
    with sentence(f"{words} ids, got {got}"):
        simulation("fedavg", DATA, sampling=rule)
