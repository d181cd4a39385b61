"""One call is one step of the algorithm's server; Krum and clusters by their definitions."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from methods import Ensemble, FedAMP
from parts.personalize import N, P, rows
from small import with_test
from torch import nn

from pflcore import Federation, Net, Simulation, Training, pairwise_sqdist, personalize
from pflcore.algorithms import ALGORITHMS, Cohort, apply
from pflcore.interop import Clusters, Krum


def test_feddwa_keeps_the_model_of_a_client_without_a_previous_one():
    uploads = {f"c{i}": row for i, row in enumerate(rows())}
    mixed = personalize(
        uploads, "feddwa", previous={f"c{i}": row for i, row in enumerate(rows(1)) if i != 4}
    )
    assert torch.equal(mixed["c4"], uploads["c4"]) and not torch.equal(mixed["c3"], uploads["c3"])


def test_guidance_belongs_to_a_client_by_its_name_and_not_by_its_place():
    names, guide = [f"c{i}" for i in range(N)], rows() + 0.1 * rows(1)
    turned = {names[i]: guide[i] for i in [3, 0, 6, 1, 5, 2, 4]}
    mixed = personalize(dict(zip(names, rows(), strict=True)), "feddwa", guidance=turned, k=3)
    assert torch.equal(
        torch.stack([mixed[name] for name in names]),
        personalize(rows(), "feddwa", guidance=guide, k=3),
    )


def test_clusters_of_updates_are_clustered_fls_split():
    base, delta = rows(2)[0], rows() * torch.tensor([1, -1, 1, -1, -1, 1, 1])[:, None]
    alg, net = (
        ALGORITHMS["clustered_fl"](first=0, eps1=1e9, eps2=0.0),
        Net(nn.Linear(4, 3).double()),
    )
    state = alg.init(net.w0, N) | {"x": base[None]}
    changes, _ = alg.update(
        state, {"delta": delta}, Cohort(torch.arange(N), torch.ones(N, dtype=torch.long), N)
    )
    state = apply(state, changes)
    assert len(state["x"]) == 3
    torch.testing.assert_close(
        personalize(base + delta, "clusters", base=base),
        state["x"][state["cluster"]],
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_clusters_are_the_groups_that_there_are(linkage):
    centre = 10 * torch.eye(3, P).double()
    models = centre[[0, 1, 2, 1, 0, 2, 2]] + 0.01 * rows()
    mixed = personalize(models, Clusters(3, linkage))
    for group in ([0, 4], [1, 3], [2, 5, 6]):
        torch.testing.assert_close(
            mixed[group], models[group].mean(0).expand(len(group), -1), rtol=1e-12, atol=1e-12
        )
    assert torch.equal(personalize(models, "clusters", k=N), models)


@pytest.mark.parametrize("f", [0, 1, 2])
def test_krum_is_its_definition(f):
    models = rows(3, 1.0)
    d = pairwise_sqdist(models)
    score = [sum(sorted(float(d[i, j]) for j in range(N) if j != i)[: N - f - 2]) for i in range(N)]
    order = sorted(range(N), key=lambda i: score[i])
    assert Krum(f).chosen(d).tolist() == order[:1]
    assert torch.equal(personalize(models, "krum", f=f), models[order[0]].expand(N, -1))
    torch.testing.assert_close(
        personalize(models, "multikrum", f=f, m=3),
        models[order[:3]].mean(0).expand(N, -1),
        rtol=1e-12,
        atol=1e-12,
    )


def test_krum_never_takes_the_hostile_where_a_gram_matrix_does():
    torch.manual_seed(0)
    fooled = 0
    for _ in range(10):
        honest = torch.randn(1, 20000) + 3e-5 * torch.randn(10, 20000)
        # farther from everybody, each other included
        hostile = honest.mean(0) + 1e-4 * torch.randn(4, 20000)
        models = torch.cat([hostile, honest])
        assert min(Krum(4, 5).chosen(pairwise_sqdist(models)).tolist()) >= 4
        square = models.square().sum(1)
        fooled += (
            min(Krum(4, 5).chosen(square[:, None] + square - 2 * models @ models.T).tolist()) < 4
        )
    assert fooled >= 3


def test_every_method_returns_the_form_it_was_given_and_is_blind_to_the_order():
    models = {f"client {i}": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for i in range(5)}
    for method, extra in itertools.product(
        ("fedamp", "heurfedamp", "sfl", "krum", "multikrum", "clusters"), ({}, {"exclude": "1.*"})
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = personalize(models, method, **extra)
            other = personalize(dict(reversed(models.items())), method, **extra)
        assert list(one) == list(models) and list(other) == list(models)[::-1]
        for k in models:
            assert isinstance(one[k], nn.Sequential) and one[k] is not models[k]
            torch.testing.assert_close(dict(one[k].state_dict()), dict(other[k].state_dict()))
            if extra:
                assert torch.equal(one[k][1].weight, models[k][1].weight)


def test_statistics_go_with_the_models_where_the_method_mixes_them():
    models = [nn.BatchNorm1d(2) for _ in range(5)]
    for i, m in enumerate(models):
        m.weight.data.fill_(float(i // 3))
        m.running_mean.fill_(float(i))
    mixed = personalize(models, "clusters")
    assert [float(m.running_mean[0]) for m in mixed] == [1, 1, 1, 3.5, 3.5]
    assert [float(m.running_mean[0]) for m in personalize(models, "clusters", buffers="local")] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert [float(m.running_mean[0]) for m in personalize(models, "heurfedamp")] == [0, 1, 2, 3, 4]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"method": "feddwa"}, "own distance is 0"),
    ({"method": "feddwa", "guidance": rows(), "previous": rows()}, "needs one of them"),
    (
        {"method": "feddwa", "guidance": rows()[:3]},
        "guidance: expected 7 models of 15 float64 parameters",
    ),
    ({"method": "feddwa", "previous": rows() * torch.nan}, "previous: expected finite"),
    ({"method": "fedamp", "previous": rows()}, "they are FedDWA's, FedAMP does not look"),
    ({"method": "fedamp", "base": rows()[0]}, "base: only clusters"),
    ({"method": "scaffold"}, "Scaffold needs more of a client than its model"),
    ({"method": "krums"}, "method: expected one of fedamp, heurfedamp, sfl"),
    (
        {
            "method": "feddwa",
            "uploads": dict(enumerate(rows())),
            "previous": {str(i): r for i, r in enumerate(rows())},
        },
        "use the same ids",
    ),
    ({"method": "krum", "f": 3}, r"expected 0 <= f with 2 f \+ 2 < 7"),
    ({"method": "multikrum", "m": 7}, "f, m"),
    ({"method": "clusters", "k": 8}, "k: expected at most 7"),
    ({"method": "clusters", "linkage": "ward"}, "linkage: expected"),
    (
        {"method": "fedamp", "uploads": torch.cat([rows()[:3], rows()[3:] * torch.inf])},
        "client 3's model is not finite",
    ),
]


@pytest.mark.parametrize("given, words", BAD)
def test_mistakes_are_one_sentence(given, words):
    with pytest.raises(ValueError, match=words) as error:
        personalize(**{"uploads": rows(), **given})
    assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")


def test_unknown_options_are_one_sentence():
    for method in ("krum", "clusters", "fedamp"):
        with pytest.raises(TypeError, match="temperature"):
            personalize(rows(), method, temperature=3)


@pytest.mark.parametrize(
    "given",
    [
        {"method": Krum(), "m": 3},
        {"method": FedAMP(sigma=5.0), "alpha": 2.0},
        {"method": Krum(), "exclud": "head"},
    ],
)
def test_an_instance_has_its_options(given):
    with pytest.raises(TypeError, match=r"^options: \w+ has its own"):
        personalize(rows(), **given)


def test_a_base_is_a_row_where_the_uploads_are_rows():
    with pytest.raises(TypeError, match=r"^base: expected one row of 15 parameters"):
        personalize(rows(), "clusters", base=[0.0] * 15)


GEN = torch.Generator().manual_seed(0)


PARTS = [
    (torch.randn(8, 3, generator=GEN), torch.randint(0, 2, (8,), generator=GEN)) for _ in range(4)
]


def at_zero():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_an_ensemble_starts_where_fedavg_does():
    """A model that starts at zero does so in each of the k runs."""
    data = Federation.from_clients(with_test(PARTS, PARTS), classes=2)
    assert (
        not Simulation(Ensemble(k=3), at_zero, data, Training(), rounds=1).state.server["x"].any()
    )


@pytest.mark.parametrize("method", ["fedamp", "heurfedamp"])
def test_personalize_leaves_a_client_at_least_half_of_its_own(method):
    models = torch.randn(5, 40, generator=GEN)
    others = [
        personalize(torch.cat([models[:1] + 1, models[1:]]), method)[0],
        personalize(models, method)[0],
    ]
    assert float((others[0] - others[1]).mean()) >= 0.5
