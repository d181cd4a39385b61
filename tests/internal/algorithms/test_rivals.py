"""Tests of the methods that FedDWA is compared with, from the inside.

Each method has golden values, and a test of the property that its known bug breaks.
"""

import pytest
import torch
from parts.rivals import GOLDEN, close
from places import tabled
from small import images, make_setting, normed_model, t, tiny_model

from pflcore import Clients, Net, Simulation, Training
from pflcore.algorithms import ClusteredFL, FedALA
from pflcore.algorithms._clusters import agglomerate
from pflcore.algorithms._mixtures import subsample_training
from pflcore.ops._directions import cosine_matrix

# Clustered FL ---------------------------------------------------------------


def halves(similar, linkage):
    """Two groups of clients, and the largest similarity between them.

    The group of client 0 comes first.
    """
    group = agglomerate(similar, 2, linkage)
    second = group != group[0]
    both = [half.nonzero()[:, 0].tolist() for half in (~second, second)]
    return both, similar[second][:, ~second].max()


# True where these options split the clients. The golden norm of the mean update is
# .03535, and that of the longest update is 1.01980. The limit of gamma is
# ((1 - alpha) / 2)^1/2.
SPLITS = """\
true | {"eps1": 0.0354, "eps2": 1.0198}
false | {"eps1": 0.0353, "eps2": 1.0198}
false | {"eps1": 0.0354, "eps2": 1.0199}
true | {"eps1": 0.04, "relative": true}
true | {"eps1": 1.0, "eps2": 0.0, "gamma": 0.988988372}
false | {"eps1": 1.0, "eps2": 0.0, "gamma": 0.988990372}
"""


def test_golden_clustered_fl():
    g1 = GOLDEN["G1_cfl"]
    g2 = GOLDEN["G2_cfl_single_vs_complete"]
    delta = t(g1["dW"])
    angle = torch.deg2rad(t(g2["angles_deg"]))
    close(cosine_matrix(delta), g1["cos"])
    # The second example has another result for each linkage.
    for linkage in ("complete", "single"):
        for g, rows, name in (
            (g1, delta, "max"),
            (g2, torch.stack([angle.cos(), angle.sin()], 1), linkage),
        ):
            both, across = halves(cosine_matrix(rows), linkage)
            assert both == g[f"bip_{linkage}"]
            close(across, g[f"alpha_cross_{name}"])
    for splits, options in tabled(SPLITS):
        assert (ClusteredFL(**options).bipartition(delta) is not None) is splits, (
            options
        )


@pytest.mark.parametrize("length", [1e-30, 1e-12, 1.0, 1e25, 1e38])
def test_an_absent_client_goes_to_its_half_at_any_length(length):
    """The second half's mean update has the larger cosine with the client's."""
    way = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    node = torch.zeros(1, dtype=torch.long)
    state = {"child": torch.tensor([1, -1, -1]), "cluster": node, "way": way}
    delta = torch.tensor([[0.5, 1.0]]) * length
    found = ClusteredFL()._descend(state, node, delta)
    assert found.tolist() == [2]


@pytest.mark.parametrize("seed", range(5))
def test_single_linkage_has_the_least_largest_similarity_across(seed):
    gen = torch.Generator().manual_seed(seed)
    s = cosine_matrix(torch.randn(7, 4, generator=gen, dtype=torch.float64))
    every = [torch.tensor([bool(k >> i & 1) for i in range(7)]) for k in range(1, 2**6)]
    close(halves(s, "single")[1], min(s[p][:, ~p].max() for p in every))


def of(setting, ids, round=1):
    net = setting.net
    clients = Clients(setting, torch.tensor(ids), round, net.b0.expand(len(ids), -1))
    return subsample_training(clients, 0.8).data.lists("train")


def test_w_is_learned_on_a_part_of_the_samples_drawn_anew_each_round():
    s = make_setting(Net(tiny_model()), images((1, 20, 31)), Training(batch_size=64), 3)
    one, two, few, whole = (
        [set(lists[i].tolist()) for i in range(3)]
        for lists in (
            of(s, [0, 1, 2]),
            of(s, [0, 1, 2], 2),
            of(s, [2, 1]),
            s.data.lists("train"),
        )
    )
    assert [len(d) for d in one] == [1, 16, 24]
    assert all(d <= w for d, w in zip(one, whole, strict=True))
    assert one[1] != two[1]
    # The other clients of a cohort do not change a client's part.
    assert few == [set(), *one[1:]]


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize(
    ("size", "batch", "drop_last"),
    [(7, 4, False), (2, 4, False), (12, 8, False), (12, 8, True)],
)
def test_no_batch_of_one_for_batch_norm(size, batch, drop_last):
    """No batch has a single sample, for which batch norm is undefined.

    4/5 of 7 samples are 5. Batches of 4 would leave one sample over, so that only 4
    samples are taken.
    """
    training = Training(lr=0.1, batch_size=batch, drop_last=drop_last)
    run = Simulation(FedALA(), normed_model, images((size, 8)), training, rounds=3)
    assert run.run().stopped is None
    count = int(of(run.config, [0, 1]).size[0])
    assert 1 < count <= size and (drop_last or count % batch != 1)
