"""FedDWA's rivals that mix on the server: golden values, and for each the law that its known bug
breaks."""

import pytest
import torch
import torch.nn as nn
from methods import ClusteredFL, HeurFedAMP
from parts.rivals import GOLDEN, close, cohort, everybody, mixing, tree
from small import served, t

from pflcore import Net, ops
from pflcore.algorithms import Cohort, apply
from pflcore.algorithms.clusters import across, bipartition, cosines
from pflcore.algorithms.relations import latest_models, nearest, smoothing, with_uploads


def test_gallery_is_exact_for_forty_close_models():
    """Expanding the square is off by more than 100 percent here, above 25 rows as torch.cdist does
    it."""
    gen = torch.Generator().manual_seed(0)
    w = (
        torch.randn(5000, generator=gen, dtype=torch.float64)
        + 1e-4 * torch.randn(40, 5000, generator=gen, dtype=torch.float64)
    ).float()
    net = Net(nn.Linear(4999, 1))
    g = {k: v.clone() for k, v in latest_models(net.w0, 40).items()}
    for ids in ([*range(0, 40, 2)], [*range(1, 40, 2)]):
        g = apply(g, with_uploads(g, w[ids], cohort(ids, 40))[0])
    close(g["sqdist"], ops.pairwise_sqdist(w.double()), 1e-6)
    close(g["norm2"], (w.double() ** 2).sum(1), 1e-6)
    xi = HeurFedAMP(sigma=5.0).mixing(g["sqdist"], g["norm2"], everybody(40))
    cosine = torch.nn.functional.cosine_similarity(w.double()[:, None], w.double()[None], dim=2)
    want = (5 * cosine).masked_fill(torch.eye(40, dtype=torch.bool), -torch.inf).softmax(1) * (
        1 - 1 / 40
    )
    close(xi - xi.diagonal().diag(), want, 1e-7)


def test_golden_heurfedamp():
    c4 = GOLDEN["C4_heurfedamp"]
    w = t(c4["W"])
    close(cosines(ops.pairwise_sqdist(w), w.norm(dim=1)), c4["cos"])
    xi = mixing(HeurFedAMP(sigma=5.0, xi_self=1 / 3), w)
    close(xi, c4["xi_sigma5_self1_3"])
    close(mixing(HeurFedAMP(sigma=5.0), w), c4["xi_sigma5_self1_3"])  # 1 / N is the default
    close(ops.aggregate(w, xi), c4["U"])


# SFL ------------------------------------------------------------------------


def test_golden_sfl():
    f1 = GOLDEN["F1_sfl"]
    a, x = t(f1["A"]), t(f1["X"])
    close(smoothing(a, everybody(3), 1, 1.0), f1["A_norm"])
    close(smoothing(a, everybody(3), 1, 1.0) @ x, f1["one_layer"])
    three = smoothing(a, everybody(3), 3, 1.0)
    close(three @ x, f1["three_layers"])
    close(three.mean(0) @ x, [f1["readout_global"]])
    close(smoothing(a, everybody(3), 3, 0.5) @ x, f1["alpha_mix_05"])


def test_sfl_neighbours_are_the_nearest():
    d = ops.pairwise_sqdist(t([[0.0], [1.0], [5.0], [5.5], [100.0]]))
    assert nearest(d, 1, everybody(5)).tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert nearest(d, 9, everybody(5)).sum() == 25
    usable = t([1, 1, 0, 1, 1]).bool()
    assert not nearest(d, 2, usable)[:, 2].any()


# Clustered FL ---------------------------------------------------------------


def similarity(rows):
    return cosines(ops.pairwise_sqdist(rows), rows.norm(dim=1))


def halves(second):
    return [(~second).nonzero()[:, 0].tolist(), second.nonzero()[:, 0].tolist()]


def test_golden_clustered_fl():
    g1 = GOLDEN["G1_cfl"]
    delta = t(g1["dW"])
    s = similarity(delta)
    close(s, g1["cos"])
    for linkage in ("complete", "single"):
        assert halves(bipartition(s, linkage)) == g1[f"bip_{linkage}"]
    close(across(s, bipartition(s)), g1["alpha_cross_max"])
    close(delta.norm(dim=1).max(), g1["max_norm"])
    close(delta.mean(0).norm(), g1["mean_norm"])
    assert ClusteredFL(eps1=0.0354, eps2=1.0198).split(delta) is not None
    assert ClusteredFL(eps1=0.0353, eps2=1.0198).split(delta) is None
    assert ClusteredFL(eps1=0.0354, eps2=1.0199).split(delta) is None
    assert ClusteredFL(eps1=0.04, relative=True).split(delta) is not None
    gamma = ((1 - g1["alpha_cross_max"]) / 2) ** 0.5
    assert ClusteredFL(eps1=1.0, eps2=0.0, gamma=gamma - 1e-6).split(delta) is not None
    assert ClusteredFL(eps1=1.0, eps2=0.0, gamma=gamma + 1e-6).split(delta) is None


def test_golden_linkages_differ():
    g2 = GOLDEN["G2_cfl_single_vs_complete"]
    angle = torch.deg2rad(t(g2["angles_deg"]))
    s = similarity(torch.stack([angle.cos(), angle.sin()], 1))
    for linkage in ("complete", "single"):
        second = bipartition(s, linkage)
        assert halves(second) == g2[f"bip_{linkage}"]
        close(across(s, second), g2[f"alpha_cross_{linkage}"])


@pytest.mark.parametrize("seed", range(10))
def test_single_linkage_has_the_least_largest_similarity_across(seed):
    gen = torch.Generator().manual_seed(seed)
    s = similarity(torch.randn(7, 4, generator=gen, dtype=torch.float64))
    every = [torch.tensor([bool(k >> i & 1) for i in range(7)]) for k in range(1, 2**6)]
    close(across(s, bipartition(s, "single")), min(across(s, p) for p in every))


def test_clusters_of_two_stay_and_clusters_without_anybody_keep_their_model():
    alg = ClusteredFL(relative=True, first=0, eps1=1.0)
    x = t([[1.0], [2.0]])
    g = served(
        alg,
        tree(x, torch.tensor([0, 0, 1, 1, 1])),
        {"delta": t([[1.0], [-1.0]])},
        cohort([0, 1], 5, 9),
    )
    assert g["cluster"].tolist() == [0, 0, 1, 1, 1]
    close(g["x"], [[1.0], [2.0]])
    zero = cosines(torch.zeros(2, 2), torch.zeros(2))
    assert not zero.any()


def test_shares_are_of_the_cohort_and_sum_to_one():
    size = torch.tensor([1, 2, 5])
    assert Cohort(torch.tensor([0, 3, 7]), size, 10, 1, 5).mean().weight.tolist() == [
        [0.125, 0.25, 0.625]
    ]
    assert Cohort(torch.tensor([0, 7]), size[:2], 10, 1, 5).mean("uniform").weight.tolist() == [
        [0.5, 0.5]
    ]
