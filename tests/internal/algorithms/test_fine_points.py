"""Fine points of the methods that only unequal clients, a second round or a second minibatch can
show."""

import torch
from parts.fine_points import t, three

from pflcore.algorithms import Cohort, Traits
from pflcore.algorithms.clusters import fit_all
from pflcore.simulation.accept import Trained, accept


def test_models_of_an_ensemble_shuffle_apart():
    """Two that start equal go different ways."""
    s, local = three()
    delta = fit_all(s.net.w0.expand(2, -1), s.net.b0.expand(2, -1), local)[0]["delta"]
    assert not any(torch.equal(a, b) for a, b in delta)


def test_shares_are_of_the_cohort_and_sum_to_one():
    size = torch.tensor([1, 2, 5])
    assert Cohort(torch.tensor([0, 3, 7]), size, 10, 1, 5).mean().weight.tolist() == [
        [0.125, 0.25, 0.625]
    ]
    assert Cohort(torch.tensor([0, 7]), size[:2], 10, 1, 5).mean("uniform").weight.tolist() == [
        [0.5, 0.5]
    ]


def test_a_clipped_update_takes_its_control_variate_along():
    """An update of length 5 is cut to 1, one of .5 stays; so do their control variates, by the same
    factor."""
    up = {"delta": t([[3.0, 4], [0.3, 0.4]]), "control": t([[2.0, 2], [1, 1]])}
    cohort = Cohort(torch.arange(2), torch.ones(2, dtype=torch.long), 2)
    trained = Trained(cohort, {}, up, {}, {}, torch.empty(2, 0), torch.zeros(2))
    cut = accept(trained, Traits(clipped=("control",)), {}, 1.0)[0].up
    torch.testing.assert_close(cut["delta"], t([[0.6, 0.8], [0.3, 0.4]]))
    torch.testing.assert_close(cut["control"], t([[0.4, 0.4], [1, 1]]))
