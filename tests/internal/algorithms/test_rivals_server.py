"""FedDWA's rivals that mix on the server: golden values, and for each the law that its known bug
breaks."""

import pytest
import torch
from methods import ClusteredFL, HeurFedAMP
from parts.rivals import GOLDEN, close, cohort, everybody, mixing, tree
from small import served, t

from pflcore import ops
from pflcore.algorithms import apply
from pflcore.algorithms.clusters import cosines, groups
from pflcore.algorithms.protocol import squares
from pflcore.algorithms.relations import latest_models, nearest, smoothing, with_uploads


def test_distances_are_exact_for_forty_close_models():
    """Expanding the square is off by more than 100 percent here, above 25 rows as torch.cdist does
    it."""
    gen = torch.Generator().manual_seed(0)
    centre, noise = (torch.randn(n, 5000, generator=gen, dtype=torch.float64) for n in (1, 40))
    w = (centre + 1e-4 * noise).float()
    g = {k: v.clone() for k, v in latest_models(w[0], 40).items()}
    for ids in ([*range(0, 40, 2)], [*range(1, 40, 2)]):
        g = apply(g, with_uploads(g, w[ids], cohort(ids, 40))[0])
    close(g["sqdist"], ops.pairwise_sqdist(w.double()), 1e-6)
    close(g["norm2"], (w.double() ** 2).sum(1), 1e-6)
    xi = HeurFedAMP(sigma=5.0).mixing(g["sqdist"], g["norm2"], everybody(40))
    cosine = torch.nn.functional.cosine_similarity(w.double()[:, None], w.double()[None], dim=2)
    want = (5 * cosine).masked_fill(torch.eye(40, dtype=torch.bool), -torch.inf).softmax(1)
    close(xi - xi.diagonal().diag(), want * (1 - 1 / 40), 1e-7)


def test_golden_heurfedamp():
    c4 = GOLDEN["C4_heurfedamp"]
    w = t(c4["W"])
    close(similarity(w), c4["cos"])
    xi = mixing(HeurFedAMP(sigma=5.0, xi_self=1 / 3), w)
    close(xi, c4["xi_sigma5_self1_3"])
    close(mixing(HeurFedAMP(sigma=5.0), w), c4["xi_sigma5_self1_3"])  # 1 / N is the default
    close(ops.aggregate(w, xi), c4["U"])


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
    first, second = [1, 1, 0, 0, 0], [0, 0, 1, 1, 0]
    want = [first, first, second, second, [0, 0, 0, 1, 1]]
    assert nearest(d, 1, everybody(5)).tolist() == want
    assert nearest(d, 9, everybody(5)).sum() == 25
    assert not nearest(d, 2, t([1, 1, 0, 1, 1]).bool())[:, 2].any()


# Clustered FL ---------------------------------------------------------------


def similarity(rows):
    return cosines(ops.pairwise_sqdist(rows), squares(rows))


def halves(similar, linkage):
    """Two groups, by the number of their first client, and the largest similarity across."""
    group = groups(similar, 2, linkage)
    second = group != group[0]
    both = [half.nonzero()[:, 0].tolist() for half in (~second, second)]
    return both, similar[second][:, ~second].max()


def test_golden_clustered_fl():
    g1 = GOLDEN["G1_cfl"]
    delta = t(g1["dW"])
    s = similarity(delta)
    close(s, g1["cos"])
    assert not cosines(torch.zeros(2, 2), torch.zeros(2)).any()
    for linkage in ("complete", "single"):
        both, across = halves(s, linkage)
        assert both == g1[f"bip_{linkage}"]
        close(across, g1["alpha_cross_max"])
    gamma = ((1 - g1["alpha_cross_max"]) / 2) ** 0.5
    for splits, options in (  # the golden norms of the mean, .03535, and of the longest, 1.01980
        (True, {"eps1": 0.0354, "eps2": 1.0198}),
        (False, {"eps1": 0.0353, "eps2": 1.0198}),
        (False, {"eps1": 0.0354, "eps2": 1.0199}),
        (True, {"eps1": 0.04, "relative": True}),
        (True, {"eps1": 1.0, "eps2": 0.0, "gamma": gamma - 1e-6}),
        (False, {"eps1": 1.0, "eps2": 0.0, "gamma": gamma + 1e-6}),
    ):
        assert (ClusteredFL(**options).split(delta) is not None) is splits, options


def test_golden_linkages_differ():
    g2 = GOLDEN["G2_cfl_single_vs_complete"]
    angle = torch.deg2rad(t(g2["angles_deg"]))
    s = similarity(torch.stack([angle.cos(), angle.sin()], 1))
    for linkage in ("complete", "single"):
        both, across = halves(s, linkage)
        assert both == g2[f"bip_{linkage}"]
        close(across, g2[f"alpha_cross_{linkage}"])


@pytest.mark.parametrize("seed", range(5))
def test_single_linkage_has_the_least_largest_similarity_across(seed):
    gen = torch.Generator().manual_seed(seed)
    s = similarity(torch.randn(7, 4, generator=gen, dtype=torch.float64))
    every = [torch.tensor([bool(k >> i & 1) for i in range(7)]) for k in range(1, 2**6)]
    close(halves(s, "single")[1], min(s[p][:, ~p].max() for p in every))


def test_clusters_of_two_stay_and_clusters_without_anybody_keep_their_model():
    alg, x = ClusteredFL(relative=True, first=0, eps1=1.0), t([[1.0], [2.0]])
    up, both = {"delta": t([[1.0], [-1.0]])}, cohort([0, 1], 5, 9)
    g = served(alg, tree(x, torch.tensor([0, 0, 1, 1, 1])), up, both)
    assert g["cluster"].tolist() == [0, 0, 1, 1, 1]
    close(g["x"], [[1.0], [2.0]])
