"""Laws of lowrank: rows are an isometric image of the products, whatever the factors; mixes of rows
are mixes of products."""

import functools
from typing import Any

import pytest
import torch

from pflcore import pairwise_sqdist, personalize
from pflcore.interop import lowrank

DOUBLE = {"dtype": torch.float64}


def factors(
    n,
    o,
    i,
    ranks,
    spread,
    *,
    shared=False,
    zero=(),
    dependent=False,
    gauge=False,
):
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), **DOUBLE)
    least, a, b = min(ranks), [], []
    a0, b0 = draw(least, i), draw(o, least)
    for j in range(n):
        more = ranks[j % len(ranks)] - least
        x = torch.cat([a0 + (not shared) * spread * draw(least, i), spread * draw(more, i)])
        y = torch.cat([b0 + spread * draw(o, least), draw(o, more)], 1) * (j not in zero)
        if dependent:
            x[-1], y[:, -1] = x[0], y[:, 0]
        m = draw(len(x), len(x)) + 3 * torch.eye(len(x)) if gauge else torch.eye(len(x), **DOUBLE)
        a, b = [*a, m @ x], [*b, torch.linalg.solve(m, y, left=False)]
    return a, b, [8.0 / len(x) for x in a]


def dense(a, b, scale):
    return torch.stack([(s * y @ x).flatten() for x, y, s in zip(a, b, scale, strict=True)])


KINDS: list[dict[str, Any]] = [
    {},
    {"gauge": True},
    {"dependent": True},
    {"zero": (0, 3)},
    {"shared": True},
    {"zero": range(20)},
]


# ranks add up to 80 or 120: below both, above one, above both
@pytest.mark.parametrize("o, i", [(128, 128), (48, 128), (32, 24)])
@pytest.mark.parametrize("ranks", [[4], [2, 4, 6]])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(k) or "plain")
def test_rows_are_the_products(o, i, ranks, kind):
    if kind.get("shared"):
        ranks = ranks[:1]
    a, b, scale = factors(20, o, i, ranks, 1e-3, **kind)
    rows, basis = lowrank.project(a, b, scale)
    product = dense(a, b, scale)
    assert rows.shape[1] <= product.shape[1]
    exact = pairwise_sqdist(product)
    torch.testing.assert_close(pairwise_sqdist(rows), exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        lowrank.sqdist(a, b, scale),
        exact,
        rtol=1e-6,
        atol=1e-12 * float(product.square().sum(1).max()),
    )
    full = min(basis.left.shape[1], basis.right.shape[1])
    mean = product.mean(0).view(o, i)
    singular = torch.linalg.svdvals(mean)
    for rank in {full, min(3, full)}:
        y, x, lost = lowrank.lift(rows.mean(0), basis, rank, scale=0.5)
        assert float((0.5 * y @ x - mean).norm()) == pytest.approx(
            float(singular[rank:].norm()), abs=1e-12 * max(1.0, float(mean.norm()))
        )
        assert lost == pytest.approx(
            float(singular[rank:].square().sum() / singular.square().sum().clamp(min=1e-300)),
            abs=1e-12,
        )
        # of the clients' length, no dead direction
        torch.testing.assert_close(x @ x.T, torch.eye(rank, **DOUBLE) * basis.size**2)


def test_a_fresh_adapter_stays_one_that_can_learn():
    a, b = (
        [torch.randn(4, 16, generator=torch.Generator().manual_seed(j)) for j in range(3)],
        [torch.zeros(8, 4)] * 3,
    )
    rows, basis = lowrank.project(a, b)
    y, x, lost = lowrank.lift(rows.mean(0), basis, 4)
    assert float(y.abs().max()) == 0 == lost
    assert float(x.norm(dim=1).min()) == pytest.approx(float(torch.cat(a).norm(dim=1).mean()))


def adapter(seed, rank, dtype=torch.float32, **more):
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    tensors = {
        "m.q.lora_A.weight": draw(rank, 12),
        "m.q.lora_B.weight": draw(10, rank),
        "m.q.lora_B.bias": draw(10),
        "m.q.lora_magnitude_vector": draw(10).abs(),
        "m.conv.lora_A.weight": draw(rank, 3, 2, 2),
        "m.conv.lora_B.weight": draw(5, rank, 1, 1),
        "m.lora_embedding_A": draw(rank, 20),
        "m.lora_embedding_B": draw(8, rank),
        "m.classifier.weight": draw(3, 10),
    }
    return {k: v.to(dtype) for k, v in tensors.items()} | {"m.step": torch.tensor(seed)} | more


NAMES = ("m.q.lora_A.weight", "m.conv.lora_A.weight", "m.lora_embedding_A")


def scale_of(rank, alpha=16.0):
    return dict.fromkeys(NAMES, alpha / rank) | {"m.conv.lora_A.weight": alpha / rank**0.5}


def products(state, scale):
    """Everything that a row stands for, dense."""
    found = {
        k: scale[k]
        * state[k.replace("A", "B", 1)].double().flatten(1)
        @ state[k].double().flatten(1)
        for k in NAMES
    }
    return found | {
        k: v.double()
        for k, v in state.items()
        if v.is_floating_point() and not ("_A" in k or "_B.w" in k or k[-2:] == "_B")
    }


def test_adapters_of_different_ranks_are_packed_and_come_back():
    ranks = [2, 3, 4, 2]
    states, scale = (
        [adapter(j, r, torch.float64) for j, r in enumerate(ranks)],
        [scale_of(r) for r in ranks],
    )
    rows, layout = lowrank.pack(states, scale)
    whole = torch.stack(
        [
            torch.cat([v.flatten() for v in products(s, c).values()])
            for s, c in zip(states, scale, strict=True)
        ]
    )
    torch.testing.assert_close(pairwise_sqdist(rows), pairwise_sqdist(whole), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        lowrank.distances(states, scale), pairwise_sqdist(whole), rtol=1e-9, atol=1e-9
    )
    back, lost = lowrank.unpack(rows, layout)
    assert max(lost) < 1e-24
    for one, other, c in zip(states, back, scale, strict=True):
        assert list(one) == list(other) and all(
            other[k].shape == v.shape and other[k].dtype == v.dtype for k, v in one.items()
        )
        assert torch.equal(one["m.step"], other["m.step"])
        for k, v in products(one, c).items():
            torch.testing.assert_close(products(other, c)[k], v, rtol=1e-9, atol=1e-9)


def test_clients_by_id_keep_their_ids_and_half_precision():
    states = {"b": adapter(0, 2, torch.bfloat16), "a": adapter(1, 3, torch.bfloat16)}
    rows, layout = lowrank.pack(states, {"a": scale_of(3), "b": scale_of(2)})
    back, _ = lowrank.unpack(rows, layout)
    assert list(back) == ["b", "a"] and back["a"]["m.q.lora_A.weight"].shape == (3, 12)
    assert {v.dtype for v in back["a"].values() if v.is_floating_point()} == {torch.bfloat16}
    for k, v in products(states["a"], scale_of(3)).items():
        torch.testing.assert_close(products(back["a"], scale_of(3))[k], v, rtol=0.05, atol=0.3)


def test_mixes_of_some_are_those_of_all():
    states, scale = [adapter(j, 2, torch.float64) for j in range(5)], scale_of(2)
    index = torch.tensor([[0, 1], [1, 4], [2, 0], [3, 3], [4, 2]])
    weight = torch.tensor([[0.7, 0.3]], **DOUBLE).expand(5, -1)
    rows, layout = lowrank.pack(states, scale)
    whole, lost = lowrank.unpack(
        torch.stack([w @ rows[i] for w, i in zip(weight, index, strict=True)]), layout
    )
    few, share = lowrank.mix(states, scale, weight, index)
    assert share == pytest.approx(lost)
    for one, other in zip(whole, few, strict=True):
        for k, v in products(one, scale).items():
            torch.testing.assert_close(products(other, scale)[k], v, rtol=1e-8, atol=1e-8)


def test_directions_find_alike_clients_of_different_ranks_and_scales():
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), **DOUBLE)
    centres = [draw(10, 2) @ draw(2, 12) for _ in range(2)]
    a, b = [], []
    for j in range(8):
        u, s, vt = torch.linalg.svd(centres[j % 2] * 10 ** (j // 2) + 0.01 * draw(10, 12))
        rank = 2 + j // 2
        a, b = [*a, vt[:rank]], [*b, u[:, :rank] * s[:rank]]
    rows, _ = lowrank.project(a, b)
    means = personalize(rows, "clusters", k=2, directions=True)
    assert all(torch.equal(means[j], means[j % 2]) for j in range(8)) and not torch.equal(
        means[0], means[1]
    )
    assert not torch.equal(personalize(rows, "clusters", k=2)[0], means[0])  # lengths hide them


def test_presets():
    one, two = adapter(0, 2), adapter(1, 2)
    with pytest.raises(ValueError, match=r"client 1: its A differs"):
        lowrank.ffa_lora([one, two])
    frozen = {k: one[k] if "A" in k else v for k, v in two.items()}
    rows, form = lowrank.ffa_lora([one, frozen])
    assert list(form.columns) == [
        "m.q.lora_B.weight",
        "m.q.lora_B.bias",
        "m.conv.lora_B.weight",
        "m.lora_embedding_B",
    ]
    assert rows.shape == (2, 10 * 2 + 10 + 5 * 2 + 8 * 2)
    rows, form = lowrank.fedsa_lora({"x": one, "y": two})
    assert list(form.columns) == list(NAMES)


BAD: list[tuple[Any, Any, str]] = [
    ([], scale_of(2), "states: expected adapters"),
    ([adapter(0, 2)], [], "scale: expected that of each of 1"),
    ([adapter(0, 2)], [{}], "scale: client 0 has none for m.q.lora_A.weight"),
    (
        [adapter(0, 2), adapter(1, 2, more=torch.ones(1))],
        scale_of(2),
        "client 1: its adapter differs from client 0's in more",
    ),
    ([adapter(0, 2, **{"m.q.lora_E": torch.ones(2)})], scale_of(2), "m.q.lora_E: AdaLoRA"),
    ([{"m.q.hada_w1_a": torch.ones(2, 2)}], scale_of(2), "m.q.hada_w1_a: LoHa"),
    ([{"m.q.lokr_w1": torch.ones(2, 2)}], scale_of(2), "m.q.lokr_w1: LoKr"),
    ([{"m.q.weight": torch.ones(2, 2)}], scale_of(2), "found no lora_A"),
    ([{"m.q.lora_A.weight": torch.ones(2, 2)}], scale_of(2), "found no m.q.lora_B.weight"),
    (
        [adapter(0, 2), adapter(1, 2) | {"m.q.lora_B.weight": torch.ones(9, 2)}],
        scale_of(2),
        "m.q.lora_A.weight: a, b: expected .* client 1's",
    ),
    (
        [adapter(0, 2), adapter(1, 2) | {"m.classifier.weight": torch.ones(4, 10)}],
        scale_of(2),
        "client 1: m.classifier.weight has shape",
    ),
    (
        [adapter(0, 2), adapter(1, 2) | {"m.q.lora_B.weight": torch.full((10, 2), torch.nan)}],
        scale_of(2),
        "client 1's are not",
    ),
]


@pytest.mark.parametrize("states, scale, words", BAD)
def test_bad_adapters_are_one_sentence(states, scale, words):
    with pytest.raises(ValueError, match=words) as error:
        lowrank.pack(states, scale)
    assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")


def test_lift_refuses_what_it_cannot_do():
    rows, basis = lowrank.project([torch.ones(2, 8)], [torch.ones(8, 2)])
    for rank, scale in ((0, 1.0), (3, 1.0), (2, 0.0)):
        with pytest.raises(ValueError, match="rank, scale"):
            lowrank.lift(rows[0], basis, rank, scale)


def test_the_scales_and_states_of_peft():
    peft = pytest.importorskip("peft")
    states, scales, products = [], [], []
    for j, rslora in enumerate((False, True)):
        torch.manual_seed(j)
        base = torch.nn.ModuleDict(
            {
                "q": torch.nn.Linear(12, 10),
                "v": torch.nn.Linear(12, 8),
                "e": torch.nn.Embedding(20, 6),
            }
        )
        config = peft.LoraConfig(
            r=2 + j,
            lora_alpha=5,
            target_modules=["q", "v", "e"],
            rank_pattern={"v": 4},
            use_rslora=rslora,
        )
        model = peft.get_peft_model(base, config)
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data.normal_()
        states.append(peft.get_peft_model_state_dict(model))
        scales.append(lowrank.scales(model))
        layers = [m for m in model.modules() if hasattr(m, "get_delta_weight")]
        products.append(
            torch.cat([m.get_delta_weight("default").detach().double().flatten() for m in layers])
        )
    rows, layout = lowrank.pack(states, scales)
    torch.testing.assert_close(
        pairwise_sqdist(rows), pairwise_sqdist(torch.stack(products)), rtol=1e-5, atol=1e-5
    )
    back, _ = lowrank.unpack(rows, layout)
    peft.set_peft_model_state_dict(model, back[1])
    again = torch.cat([m.get_delta_weight("default").detach().double().flatten() for m in layers])
    torch.testing.assert_close(again, products[1], rtol=1e-4, atol=1e-4)


def test_a_rank_beyond_what_the_factors_span_comes_back():
    # a layer of 12 inputs
    states, scale = [adapter(j, 14, torch.float64) for j in range(2)], [scale_of(14)] * 2
    back, _ = lowrank.unpack(*lowrank.pack(states, scale))
    for one, other in zip(states, back, strict=True):
        assert all(other[k].shape == v.shape for k, v in one.items())
        for k, v in products(one, scale[0]).items():
            torch.testing.assert_close(products(other, scale[0])[k], v, rtol=1e-9, atol=1e-9)
    ranks = [2, 3, 1, 4]
    few, scales = (
        [adapter(j, r, torch.float64) for j, r in enumerate(ranks)],
        [scale_of(r) for r in ranks],
    )
    mixed, _ = lowrank.mix(few, scales, torch.tensor([[0.5, 0.5]] * 4), torch.tensor([[0, 2]] * 4))
    assert [len(m[NAMES[0]]) for m in mixed] == ranks


def test_columns_beside_the_factors_are_finite():
    states, scale = [adapter(j, 2, torch.float64) for j in range(2)], [scale_of(2)] * 2
    plain = next(k for k in states[0] if "lora" not in k and states[0][k].is_floating_point())
    states[1][plain].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=f"client 1: {plain} is not finite; leave this client out"):
        lowrank.pack(states, scale)
