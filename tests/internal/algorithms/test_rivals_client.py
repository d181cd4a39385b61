"""FedDWA's rivals that work on the clients: golden values, and for each the law that its known bug
breaks."""

import torch
from methods import FedFomo
from parts.rivals import GOLDEN, close, cohort, fomo
from small import t

from pflcore.algorithms import Pool
from pflcore.algorithms.mixtures import mixing_weights
from pflcore.simulation.accept import nbytes


def test_golden_fedfomo():
    d1 = GOLDEN["D1_fedfomo"]
    for norm in ("l2", "l1"):
        want = d1[norm.upper()]
        new, up = fomo(
            FedFomo(norm=norm), d1["theta_prev"], d1["candidates"], d1["loss_prev"], d1["loss_cand"]
        )
        close(new["w"], [want["theta_new"]])
        close(new["old"], [want["theta_new"]])
        close(up["a"][0, :3], want["raw"][:3])
        close(mixing_weights(t([want["raw"]]))[0], want["w"])


def test_golden_fedfomo_when_nothing_is_better():
    d2 = GOLDEN["D2_fedfomo_none_better"]
    for none_positive, want in (("keep", [2.0]), ("discard", [0.0])):
        new, _ = fomo(
            FedFomo(none_positive=none_positive),
            [0.0],
            [[1.0], [2.0]],
            d2["loss_prev"],
            d2["loss_cand"],
        )
        close(new["w"], [want])
    close(mixing_weights(t([[0.0, -0.2]])), [d2["w"]])


def test_fedfomo_downloads_the_best_models_and_explores():
    alg = FedFomo(m=2, epsilon=0.0)
    g = {
        "w": torch.zeros(6, 3),
        "seen": torch.tensor([1, 1, 1, 1, 1, 0]).bool(),
        "p": torch.zeros(6, 6, dtype=torch.float64),
    }
    g["p"][0] = t([9.0, 1.0, 3.0, 2.0, -1.0, 99.0])
    for _ in range(5):
        rows, index = alg.send(g, cohort([0], 6))["w"]
        assert index.tolist() == [[2, 3]] and rows is g["w"]
    picks = torch.cat([alg.send(g, cohort([1], 6)._replace(seed=i))["w"].index for i in range(60)])
    # equals are drawn; never itself, never who has not come yet
    assert set(picks.flatten().tolist()) == {0, 2, 3, 4}
    assert all(a != b for a, b in picks.tolist())
    bold = torch.cat(
        [
            FedFomo(m=2, epsilon=1.0, decay=0.0).send(g, cohort([0], 6)._replace(seed=i))["w"].index
            for i in range(60)
        ]
    )
    assert set(bold.flatten().tolist()) == {1, 2, 3, 4}
    # more than there are: each gets all that there are for it
    index = FedFomo(m=50).send(g, cohort([0, 5], 6))["w"].index
    assert (
        index.sort().values.tolist() == [[-1, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
        and nbytes({"w": Pool(torch.zeros(6, 1), index)}) == 9 * 4
    )
    late = FedFomo(m=2, epsilon=1.0, decay=0.5).send(g, cohort([0], 6, round=3))["w"].index
    assert late.tolist() == [[2, 3]]
