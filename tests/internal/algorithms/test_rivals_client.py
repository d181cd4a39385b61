"""FedFomo: golden values of its mixing, and which models are downloaded."""

import torch
from methods import FedFomo
from parts.rivals import GOLDEN, close, cohort, fomo
from small import t

from pflcore.algorithms import Pool
from pflcore.algorithms.protocol import shares
from pflcore.simulation.accept import nbytes


def test_golden_fedfomo():
    d1, d2 = GOLDEN["D1_fedfomo"], GOLDEN["D2_fedfomo_none_better"]
    before, after = d1["loss_prev"], d1["loss_cand"]
    for norm in ("l2", "l1"):
        want = d1[norm.upper()]
        new, up = fomo(FedFomo(norm=norm), d1["theta_prev"], d1["candidates"], before, after)
        close(new["w"], [want["theta_new"]])
        close(new["old"], [want["theta_new"]])
        close(up["a"][0, :3], want["raw"][:3])
        close(shares(t([want["raw"]]).clamp(min=0))[0], want["w"])
    new, _ = fomo(FedFomo(), [0.0], [[1.0], [2.0]], d2["loss_prev"], d2["loss_cand"])
    close(new["w"], [[2.0]])  # nothing is better: its own trained model
    close(shares(t([[0.0, 0.0]])), [d2["w"]])


def test_fedfomo_downloads_the_best_models_and_explores():
    seen = torch.tensor([1, 1, 1, 1, 1, 0]).bool()
    g = {"w": torch.zeros(6, 3), "seen": seen, "p": torch.zeros(6, 6, dtype=torch.float64)}
    g["p"][0] = t([9.0, 1.0, 3.0, 2.0, -1.0, 99.0])

    def sent(alg, ids, seed=0, round=1):
        return alg.send(g, cohort(ids, 6, round)._replace(seed=seed))["w"]

    rows, index = sent(FedFomo(m=2, epsilon=0.0), [0])
    assert index.tolist() == [[2, 3]] and rows is g["w"]
    picks = [sent(FedFomo(m=2, epsilon=0.0), [1], i).index[0].tolist() for i in range(60)]
    # equals are drawn; never itself, never a client that has not come yet
    assert {i for pair in picks for i in pair} == {0, 2, 3, 4} and all(a != b for a, b in picks)
    bold = [sent(FedFomo(m=2, epsilon=1.0, decay=1.0), [0], i).index for i in range(60)]
    assert set(torch.cat(bold).flatten().tolist()) == {1, 2, 3, 4}
    assert sent(FedFomo(m=2, epsilon=1.0, decay=1.0), [0], round=2).index.tolist() == [[2, 3]]
    # more than there are: each gets all that there are for it
    index = sent(FedFomo(m=50), [0, 5]).index
    assert index.sort().values.tolist() == [[-1, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert nbytes({"w": Pool(torch.zeros(6, 1), index)}) == 9 * 4
