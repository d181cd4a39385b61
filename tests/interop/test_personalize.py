"""A call of `personalize` is one step of the algorithm's server.

Krum and the clusters follow their definitions.

Symbols: N clients; P parameters of a model.
"""

import itertools
import warnings

import pytest
import torch
from entry_points import sentence
from places import tabled
from small import Line, layers, near, some
from torch import nn
from ugly import randn

from pflcore import Net, pairwise_sqdist, personalize
from pflcore.algorithms import ALGORITHMS, Ensemble, apply
from pflcore.robust import Krum, MultiKrum

N, P = 7, 15


def rows(seed=0, spread=0.3):
    return randn(seed, 1, P) + spread * randn(seed + 10, N, P)


GUIDE = rows() + 0.1 * rows(1)


ROWS = {  # models by the names that the tables below use
    "rows": rows(),
    "others": rows(1),
    "guide": GUIDE,
    "products": rows() @ rows().T,
    "three": rows()[:3],
    "float32": rows().float(),
    "nan": rows() * torch.nan,
    "named": dict(enumerate(rows())),
    "by other names": {str(i): row for i, row in enumerate(rows())},
    "first": rows()[0],
    "short": rows()[0, :3],
    "zeros": torch.zeros(P, dtype=torch.float64),
    "infinite": rows() * torch.tensor([1, 1, 1, torch.inf, 1, 1, 1])[:, None],
}


def known(options):
    """Options in which each name of ROWS is replaced by its models."""
    return {k: ROWS.get(v, v) for k, v in options.items()}


# Each line: the method, its options, and the guidance or the previous models.
STEPS = """\
fedamp | {"sigma": 3.0, "alpha": 0.5} | {}
fedamp | {"alpha": 5.0} | {}
heurfedamp | {"sigma": 2.0, "xi_self": 0.3} | {}
pfedgraph | {"alpha": 0.3} | {"base": "zeros"}
sfl | {"k": 2, "layers": 2, "s": 0.7} | {}
sfl | {"adjacency": "products"} | {}
feddwa | {"k": 3} | {"guidance": "guide"}
feddwa_qp | {"k": 3} | {"guidance": "guide"}
feddwa | {"k": 3} | {"previous": "others"}
feddwa_qp | {"k": 3} | {"previous": "others"}
"""


@pytest.mark.parametrize("name, options, given", tabled(STEPS))
@pytest.mark.filterwarnings("ignore:FedAMP")
def test_it_is_the_step_of_the_methods_server(name, options, given):
    """A call equals a step of the server after all uploads.

    With previous models, the server has seen the uploads of two rounds.
    """
    options = known(options)
    given = known(given)
    before = [*given.values()] if "previous" in given else []
    alg = ALGORITHMS[name](**options, **({"guidance": "previous"} if before else {}))
    state = alg.init(torch.zeros(P, dtype=torch.float64), N)
    for r, w in enumerate([*before, rows()], 1):
        up = {"w": w, "g": GUIDE} if "guidance" in given else {"w": w}
        seen = torch.full((N,), r > 1)
        cohort = some(N, r)._replace(new=~seen, participated=seen)
        state = apply(state, alg.update(state, up, cohort)[0])
    seen = torch.ones(N, dtype=torch.bool)
    sent = alg.send(state, some(N, r)._replace(new=~seen, participated=seen))
    want = sent["u" if "u" in sent else "x"]
    assert torch.equal(personalize(rows(), name, **options, **given), want)


def test_guidance_belongs_to_a_client_by_its_name_and_one_without_keeps_its_model():
    uploads = {f"c{i}": row for i, row in enumerate(rows())}
    shuffled = {f"c{i}": GUIDE[i] for i in [3, 0, 6, 1, 5, 2, 4]}
    mixed = personalize(uploads, "feddwa", guidance=shuffled, k=3)
    by_place = personalize(rows(), "feddwa", guidance=GUIDE, k=3)
    assert torch.equal(torch.stack([mixed[name] for name in uploads]), by_place)
    del shuffled["c4"]
    mixed = personalize(uploads, "feddwa", previous=shuffled)
    assert torch.equal(mixed["c4"], uploads["c4"])
    assert not torch.equal(mixed["c3"], uploads["c3"])


def test_clusters_of_updates_are_clustered_fls_split():
    base = rows(2)[0]
    delta = rows() * torch.tensor([1, -1, 1, -1, -1, 1, 1])[:, None]
    alg = ALGORITHMS["clustered_fl"](first=0, eps1=1e9, eps2=0.0)
    state = alg.init(Net(nn.Linear(4, 3).double()).w0, N) | {"x": base[None]}
    state = apply(state, alg.update(state, {"delta": delta}, some(N))[0])
    assert len(state["x"]) == 3
    near(personalize(base + delta, "clusters", base=base), state["x"][state["cluster"]])


@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_clusters_are_the_groups_that_there_are(linkage):
    centre = 10 * torch.eye(3, P).double()
    models = centre[[0, 1, 2, 1, 0, 2, 2]] + 0.01 * rows()
    mixed = personalize(models, "clusters", k=3, linkage=linkage)
    for group in ([0, 4], [1, 3], [2, 5, 6]):
        near(mixed[group], models[group].mean(0).expand(len(group), -1))
    assert torch.equal(personalize(models, "clusters", k=N), models)


def test_directions_are_blind_to_lengths():
    models = rows(4, 1.0)[[0, 1] * 4] + 0.01 * rows(5)[:1]
    models = models * 10.0 ** (torch.arange(8) // 2)[:, None]
    means = personalize(models, "clusters", k=2, directions=True)
    assert torch.equal(means, means[[0, 1] * 4]) and not torch.equal(means[0], means[1])
    assert not torch.equal(personalize(models, "clusters", k=2)[0], means[0])


@pytest.mark.parametrize("scale", [1e-200, 1e-20, 1e20, 1e200])
def test_directions_have_no_least_or_largest_length(scale):
    models = rows(4, 1.0)[[0, 1] * 4] + 0.01 * rows(5)[:1]
    want = personalize(models, "clusters", k=2, directions=True)
    got = personalize(models * scale, "clusters", k=2, directions=True)
    torch.testing.assert_close(got / scale, want)


def test_a_long_model_changes_no_cosine_of_heurfedamp():
    """The softmax of the others knows no lengths, so their weights stay."""
    models = rows(4, 1.0)
    longer = models.clone()
    longer[3] *= 1e17
    _, want = personalize(models, "heurfedamp", return_weights=True)
    _, got = personalize(longer, "heurfedamp", return_weights=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name, options, given", tabled(STEPS))
@pytest.mark.filterwarnings("ignore:FedAMP")
def test_returned_weights_are_those_of_the_models(name, options, given):
    options = known(options) | known(given)
    models, weights = personalize(rows(), name, return_weights=True, **options)
    near(models, weights @ rows())
    near(weights.sum(1), torch.ones(N))


@pytest.mark.parametrize("name, options", [("krum", {}), ("clusters", {"k": 3})])
def test_returned_weights_are_of_uploads_in_their_order(name, options):
    uploads = {f"c{i}": row for i, row in enumerate(rows())}
    models, weights = personalize(uploads, name, return_weights=True, **options)
    mixed = weights @ torch.stack([*uploads.values()])
    near(torch.stack([models[client] for client in uploads]), mixed)


def distant_models(scale):
    base = randn(0, 1, 1218)
    return base + scale * randn(1, 6, 1218)


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if w.category is RuntimeWarning]


def test_models_too_far_for_sigma_are_a_warning():
    models = distant_models(0.3)
    upper = pairwise_sqdist(models)[~torch.eye(6, dtype=torch.bool)]
    (text,) = warnings_of(lambda: personalize(models, "fedamp"))
    words = f"{float(upper.median()):.3g} in the median: give sigma near that, got 1"
    assert words in text and text.endswith(".") and "alpha near sigma / 6" in text


@pytest.mark.parametrize(
    "method, options, scale",
    [
        ("fedamp", {}, 0.001),
        ("fedamp", {"sigma": 220.0}, 0.3),
        ("fedamp", {"sigma": 220.0, "alpha": 220.0 / 6}, 0.3),
        ("heurfedamp", {}, 0.3),
        ("heurfedamp", {"xi_self": 0.999}, 0.3),
        ("clusters", {"k": 6}, 0.3),
        ("sfl", {"s": 0.0}, 0.3),
    ],
)
def test_weights_by_choice_or_of_near_models_are_no_warning(method, options, scale):
    models = distant_models(scale)
    assert warnings_of(lambda: personalize(models, method, **options)) == []


def test_one_model_alone_is_no_warning():
    assert warnings_of(lambda: personalize(distant_models(0.3)[:1], "fedamp")) == []


@pytest.mark.parametrize("f", [0, 1, 2])
def test_krum_is_its_definition(f):
    models = rows(3, 1.0)
    d = pairwise_sqdist(models)
    # The first distance of each row is 0, that of a client to itself.
    order = d.sort(1).values[:, 1 : N - f - 1].sum(1).argsort().tolist()
    assert torch.equal(
        personalize(models, "krum", num_byzantine=f), models[order[0]].expand(N, -1)
    )
    for m, more in ((2, {}), (3, {"num_selected": 3})):
        mean = models[order[:m]].mean(0).expand(N, -1)
        near(personalize(models, "multikrum", num_byzantine=f, **more), mean)


def test_every_method_returns_the_form_it_was_given_and_is_blind_to_the_order():
    models = {f"client {i}": layers("Linear 3 2, BatchNorm1d 2") for i in range(5)}
    names = ("fedamp", "heurfedamp", "sfl", "krum", "multikrum", "clusters")
    for method, extra in itertools.product(names, ({}, {"exclude": "1.*"})):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = personalize(models, method, **extra)
            other = personalize(dict(reversed(models.items())), method, **extra)
        assert list(one) == list(models) and list(other) == list(models)[::-1]
        for k in models:
            assert isinstance(one[k], nn.Sequential) and one[k] is not models[k]
            torch.testing.assert_close(
                dict(one[k].state_dict()), dict(other[k].state_dict())
            )
            assert not extra or torch.equal(one[k][1].weight, models[k][1].weight)


def test_statistics_go_with_the_models_where_the_method_mixes_them():
    models = [nn.BatchNorm1d(2) for _ in range(5)]
    for i, m in enumerate(models):
        m.weight.data.fill_(float(i // 3))
        m.running_mean.fill_(float(i))
    alone = [0, 1, 2, 3, 4]
    for method, options, want in (
        ("clusters", {}, [1, 1, 1, 3.5, 3.5]),
        ("clusters", {"batch_norm": "local"}, alone),
        ("heurfedamp", {}, alone),
    ):
        mixed = personalize(models, method, **options)
        assert [float(m.running_mean[0]) for m in mixed] == want


@pytest.mark.parametrize("method", ["fedamp", "heurfedamp"])
def test_by_name_a_client_keeps_at_least_half_of_its_own(method):
    # The models are close: with FedAMP's own default, a client's model would have
    # weight 0 in its own mix.
    models = 0.01 * torch.randn(5, 40)
    shifted = torch.cat([models[:1] + 0.01, models[1:]])
    change = personalize(shifted, method)[0] - personalize(models, method)[0]
    assert float(change.mean()) >= 0.5 * 0.01


@pytest.mark.parametrize(
    "name, value", tabled("var | NaN\nmean | Infinity\nvar | -1e30")
)
def test_statistics_that_are_none_are_refused(name, value):
    models = [layers("Linear 4 5, BatchNorm1d 5").state_dict() for _ in range(6)]
    mixed = personalize(models, "krum", batch_norm="average")
    assert all(v.isfinite().all() for m in mixed for v in m.values())
    models[5][f"1.running_{name}"] = torch.full((5,), value)
    with sentence(
        "uploads: client 5's model is not finite, or has a negative variance"
    ):
        personalize(models, "krum", batch_norm="average")


# Each line: the arguments, and the error, in which ONE and LIKE stand for the texts
# below the table.
BAD = """\
{"method": "feddwa"} | guidance, previous: personalize by feddwa needs guidance= or previous=: w
{"method": "feddwa", "guidance": "rows", "previous": "rows"} | ONE of them, got 'both'
{"method": "fedamp", "previous": "rows"} | guidance, previous: expected none, .* got 'one'
{"method": "feddwa", "guidance": "three"} | LIKE
{"method": "feddwa", "guidance": "float32"} | LIKE
{"method": "feddwa", "previous": "nan"} | LIKE
{"method": "feddwa", "uploads": "named", "previous": "by other names"} | LIKE
{"method": "fedamp", "base": "first"} | base: expected None where .* not 'clusters'
{"method": "pfedgraph"} | base: expected the model that the clients started from, with 'pf
{"method": "clusters", "base": "short"} | base: expected 1 finite models
{"method": "scaffold"} | method: scaffold needs more of its clients than a model; use pflcore.S
{"method": "ditto", "lam": 1.0} | method: ditto needs more of its clients than a model; use pfl
{"method": "Krumm"} | method: got 'Krumm', did you mean 'krum'.* Expected one of fedamp, pfedgraph, s
{"method": "nobody"} | method: expected one of fedamp, pfedgraph, s.* got 'nobody'
{"method": "krum", "num_byzantine": 3} | num_byzantine, num_selected: expected 0 <= f with 2
{"method": "multikrum", "num_selected": 7} | num_byzantine, num_selected: expected
{"method": "clusters", "k": 8} | k: expected at most 7
{"uploads": "infinite"} | .*client 3's
"""  # noqa: E501
ONE = "guidance, previous: expected one"
LIKE = "guidance, previous: expected 7 finite models as the uploads are, 15 numbers"


@pytest.mark.parametrize("given, words", tabled(BAD))
def test_mistakes_are_one_sentence(given, words):
    with sentence(words.replace("ONE", ONE).replace("LIKE", LIKE)):
        personalize(**{"uploads": rows(), **known(given)})


def test_pairs_are_refused_and_the_dict_that_is_named_is_right():
    """A list of pairs is refused; a dict is read by names.

    Without the refusal, a pair would be a model of two tensors, and guidance would
    belong to a client by its position.
    """
    models = {name: row for name, row in zip("abcdefg", rows(), strict=True)}
    guides = {name: row + 0.01 * i for i, (name, row) in enumerate(models.items())}
    pairs = list(models.items())
    guide_pairs = list(guides.items())[::-1]
    for uploads, guidance in (
        (pairs, guide_pairs),
        (models.items(), guides),
        (models, guide_pairs),
    ):
        with sentence(
            "client 0, element 0: expected a tensor or an array; models by client id "
            "com"
        ):
            personalize(uploads, "feddwa", guidance=guidance)
    with sentence(
        "guidance, previous: expected 7 finite models as the uploads are, .* by the "
        "same"
    ):
        personalize(list(models.values()), "feddwa", guidance=guides)
    want = personalize(models, "feddwa", guidance=guides)
    got = personalize(dict(pairs), "feddwa", guidance=dict(guide_pairs))
    assert all(torch.equal(got[name], want[name]) for name in models)


def test_classes_and_instances_of_algorithms():
    with sentence("method: ditto needs more of its clients than a model"):
        personalize(rows(), ALGORITHMS["ditto"])
    with sentence("options: expected none beside an instance"):
        personalize(rows(), ALGORITHMS["fedamp"](), m=3)


@pytest.mark.parametrize("method", ["krum", "clusters", "fedamp"])
def test_unknown_options_are_named(method):
    with sentence(r".*: expected options among .*, got \['temperature'\]"):
        personalize(rows(), method, temperature=3)


def test_an_ensemble_starts_where_fedavg_does():
    """All k models of an ensemble start where FedAvg starts."""
    assert not Ensemble(k=3).initial_models(Net(Line)).any()


@pytest.mark.parametrize(
    ("rule", "name", "options"),
    [
        (Krum(1), "krum", {"num_byzantine": 1}),
        (MultiKrum(1, 3), "multikrum", {"num_byzantine": 1, "num_selected": 3}),
        (Krum, Krum(), {}),
        (MultiKrum, MultiKrum(), {}),
    ],
)
def test_a_rule_is_an_instance_or_a_class(rule, name, options):
    rows = torch.randn(6, 5)
    assert torch.equal(personalize(rows, rule), personalize(rows, name, **options))


def test_a_list_has_no_names():
    """Its places are none, also where the clients' names are numbers."""
    rows = [torch.randn(5) for _ in range(3)]
    uploads = dict(zip([1, 2, 3], rows, strict=True))
    with sentence("guidance, previous: expected 3 finite models .* by the same ids"):
        personalize(uploads, "feddwa", previous=rows, k=1)
