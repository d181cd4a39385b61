"""Rows of low-rank factors keep the distances of the products.

This holds for all factors: the map from products to rows is an isometry. A mix of rows
is the mix of the products.

Symbols: a, b factors of a layer, whose product is b @ a; o outputs and i inputs of the
layer.
"""

import functools

import pytest
import torch
from entry_points import sentence
from places import tabled
from torch import nn

from pflcore import pairwise_sqdist
from pflcore.interop import lowrank

F64 = torch.float64
near = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def normal(seed, dtype=F64):
    gen = torch.Generator().manual_seed(seed)
    return functools.partial(torch.randn, generator=gen, dtype=dtype)


def factors(o, i, ranks, shared=False, zero=(), dependent=False, gauge=False):
    draw = normal(0)
    spread = 1e-3
    least = min(ranks)
    a = []
    b = []
    a0 = draw(least, i)
    b0 = draw(o, least)
    for j in range(20):
        more = ranks[j % len(ranks)] - least
        x = torch.cat(
            [a0 + (not shared) * spread * draw(least, i), spread * draw(more, i)]
        )
        y = torch.cat([b0 + spread * draw(o, least), draw(o, more)], 1) * (
            j not in zero
        )
        if dependent:
            x[-1] = x[0]
            y[:, -1] = y[:, 0]
        m = torch.eye(len(x), dtype=F64)
        m = draw(len(x), len(x)) + 3 * m if gauge else m
        a.append(m @ x)
        b.append(torch.linalg.solve(m, y, left=False))
    return a, b, [8.0 / len(x) for x in a]


KINDS = [
    {},
    {"gauge": True},
    {"dependent": True},
    {"zero": (0, 3)},
    {"shared": True},
    {"zero": range(20)},
]


# The ranks of the 20 clients add up to about 80: less than o and i, more than one of
# them, or more than both.
@pytest.mark.parametrize("o, i", [(128, 128), (48, 128), (32, 24)])
@pytest.mark.parametrize("ranks", [[4], [2, 4, 6]])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_products(o, i, ranks, kind):
    a, b, scale = factors(o, i, ranks[:1] if kind.get("shared") else ranks, **kind)
    rows, basis = lowrank.project(a, b, scale)
    product = torch.stack(
        [(s * y @ x).flatten() for x, y, s in zip(a, b, scale, strict=True)]
    )
    assert rows.shape[1] <= product.shape[1]
    assert basis.size == pytest.approx(torch.cat(a).norm(dim=1).mean().item())
    exact = pairwise_sqdist(product)
    size = float(product.square().sum(1).max())
    near(pairwise_sqdist(rows), exact, atol=1e-12)
    layers = [{"lora_A": x, "lora_B": y} for x, y in zip(a, b, strict=True)]
    got = lowrank.sqdist(layers, [{"lora_A": s} for s in scale])
    near(got, exact, rtol=1e-6, atol=1e-12 * size)
    full = min(basis.left.shape[1], basis.right.shape[1])
    mean = product.mean(0).view(o, i)
    singular = torch.linalg.svdvals(mean)
    for rank in {full, min(3, full)}:
        y, x, lost = lowrank.lift(rows.mean(0), basis, rank, scale=0.5)
        error = (0.5 * y @ x - mean).norm()
        atol = 1e-12 * max(1.0, float(mean.norm()))
        near(error, singular[rank:].norm(), rtol=0, atol=atol)
        total = singular.square().sum().clamp(min=1e-300)
        share = singular[rank:].square().sum() / total
        assert lost == pytest.approx(float(share), abs=1e-12)
        # The rows of x are orthogonal, and as long as the clients' rows on average.
        torch.testing.assert_close(x @ x.T, torch.eye(rank, dtype=F64) * basis.size**2)


def adapter(seed, rank, **more):
    draw = normal(seed, torch.float32)
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
    return (
        {k: v.double() for k, v in tensors.items()}
        | {"m.step": torch.tensor(seed)}
        | more
    )


NAMES = ("m.q.lora_A.weight", "m.conv.lora_A.weight", "m.lora_embedding_A")
PLAIN = ("m.q.lora_B.bias", "m.q.lora_magnitude_vector", "m.classifier.weight")


def scale_of(rank, alpha=16.0):
    return dict.fromkeys(NAMES, alpha / rank) | {
        "m.conv.lora_A.weight": alpha / rank**0.5
    }


def adapters(*ranks):
    """Adapters of clients with these ranks, and their scales."""
    states = [adapter(j, rank) for j, rank in enumerate(ranks)]
    return states, [scale_of(rank) for rank in ranks]


def dense(state, scale):
    """A vector of an adapter's products and of its other tensors."""
    products = []
    for k in NAMES:
        a = state[k].flatten(1)
        b = state[k.replace("A", "B", 1)].flatten(1)
        products.append(scale[k] * b.double() @ a.double())
    others = [state[k] for k in PLAIN]
    return torch.cat([v.double().flatten() for v in (*products, *others)])


def form(state):
    return [(k, v.shape, v.dtype) for k, v in state.items()]


def assert_same_adapters(got, want, scale):
    """Checks that two lists of adapters have the same products and form."""
    for one, other, c in zip(want, got, scale, strict=True):
        assert form(one) == form(other)
        assert torch.equal(one["m.step"], other["m.step"])
        near(dense(other, c), dense(one, c))


def halved(state):
    return {k: v.bfloat16() if v.is_floating_point() else v for k, v in state.items()}


# Rank 14 is greater than 12, the inputs of a layer.
@pytest.mark.parametrize("ranks", [(2, 3, 4, 2), (14, 14)])
def test_adapters_of_different_ranks_are_packed_and_come_back(ranks):
    states, scale = adapters(*ranks)
    rows, layout = lowrank.pack(states, scale)
    exact = pairwise_sqdist(
        torch.stack([dense(*pair) for pair in zip(states, scale, strict=True)])
    )
    near(pairwise_sqdist(rows), exact)
    near(lowrank.sqdist(states, scale), exact)
    back, lost = lowrank.unpack(rows, layout)
    assert max(lost) < 1e-24
    assert_same_adapters(back, states, scale)
    # The same by client id and in half precision.
    named = {"b": halved(states[0]), "a": halved(states[1])}
    scales = {"b": scale[0], "a": scale[1]}
    back, _ = lowrank.unpack(*lowrank.pack(named, scales))
    assert list(back) == ["b", "a"]
    for c, state in named.items():
        assert all(v.dtype == state[k].dtype for k, v in back[c].items())
        near(dense(back[c], scales[c]), dense(state, scales[c]), rtol=0.05, atol=0.3)


def test_mixes_of_some_are_those_of_all():
    states, scale = adapters(2, 2, 2, 2)
    index = torch.tensor([[0, 1], [1, 3], [2, 0], [3, 3]])
    weight = torch.tensor([[0.7, 0.3]], dtype=F64).expand(4, -1)
    rows, layout = lowrank.pack(states, scale_of(2))
    mixed = torch.stack([w @ rows[i] for w, i in zip(weight, index, strict=True)])
    whole, lost = lowrank.unpack(mixed, layout)
    mixes, share = lowrank.mix(states, scale, weight, index)
    assert share == pytest.approx(lost)
    assert_same_adapters(mixes, whole, scale)
    ranks = [2, 3, 1, 4]
    mixes, _ = lowrank.mix(*adapters(*ranks), weight, torch.tensor([[0, 2]] * 4))
    assert [len(m[NAMES[0]]) for m in mixes] == ranks


GOOD = adapter(0, 2)
NONE = "states: expected LoRA's lora_A and lora_B"
BAD = [
    ([GOOD], [], "scale: expected one for all clients, or one for each of .0."),
    (
        [GOOD],
        [{}],
        f"scale: expected one for {NAMES[0]} of every client, got 'none of .0.'",
    ),
    ([GOOD | {"m.q.lora_E": torch.ones(2)}], scale_of(2), NONE),  # AdaLoRA
    ([{"m.q.hada_w1_a": torch.ones(2, 2)}], scale_of(2), NONE),  # LoHa
    ([{"m.q.lora_A.weight": torch.ones(2, 2)}], scale_of(2), NONE),
]


@pytest.mark.parametrize("states, scale, words", BAD)
def test_bad_adapters_are_one_sentence(states, scale, words):
    with sentence(words):
        lowrank.pack(states, scale)


# Each line: a tensor of client 1, its shape, the value of all its entries, the error.
OTHER = """\
more | [10] | 1 | client 1: expected an adapter of
m.q.lora_B.weight | [9, 2] | 1 | m.q.lora_A.weight: .*, got .client 1's
m.q.lora_B.weight | [10, 2] | Infinity | m.q.lora_A.weight: expected finite
m.classifier.weight | [4, 10] | 1 | client 1: m.classifier.weight: expected finite .* .3, 10.
m.classifier.weight | [3, 10] | Infinity | client 1: m.classifier.weight: expected finite
"""  # noqa: E501


@pytest.mark.parametrize("name, shape, value, words", tabled(OTHER))
def test_an_adapter_unlike_the_first_is_named(name, shape, value, words):
    odd = adapter(1, 2, **{name: torch.full(shape, value)})
    with sentence(words):
        lowrank.pack([GOOD, odd], scale_of(2))


def test_what_cannot_be_lifted_mixed_or_unpacked():
    a = torch.ones(2, 8)
    b = torch.ones(8, 2)
    weight = torch.ones(1, 2)
    rows, basis = lowrank.project([a], [b])
    for rank, scale in ((0, 1.0), (3, 1.0), (2, 0.0)):
        with sentence("rank, scale"):
            lowrank.lift(rows[0], basis, rank, scale)
    with sentence("row: expected 4 numbers"):
        lowrank.lift(rows[0, :3], basis, 1)
    with sentence("a, b, scale: expected one of each"):
        lowrank.project([a, a], [b])
    for index in (torch.tensor([[0]]), torch.tensor([[0, 1]])):
        with sentence("weight, index: expected .1, K. each, of adapters 0"):
            lowrank.mix([GOOD], scale_of(2), weight, index)
    rows, layout = lowrank.pack([GOOD], scale_of(2))
    with sentence("rows: expected .1, "):
        lowrank.unpack(rows[:, 1:], layout)
    with sentence("model: expected one with a LoRA adapter 'default'"):
        lowrank.scales(nn.Linear(2, 2))


def test_the_scales_and_states_of_peft():
    peft = pytest.importorskip("peft")
    states = []
    scales = []
    products = []

    def deltas(model):
        layers = [m for m in model.modules() if hasattr(m, "get_delta_weight")]
        weights = [m.get_delta_weight("default").detach() for m in layers]
        return torch.cat([weight.double().flatten() for weight in weights])

    for j, rslora in enumerate((False, True)):
        torch.manual_seed(j)
        layers = {
            "q": nn.Linear(12, 10),
            "v": nn.Linear(12, 8),
            "e": nn.Embedding(20, 6),
        }
        options = {"lora_alpha": 5, "rank_pattern": {"v": 4}, "use_rslora": rslora}
        config = peft.LoraConfig(r=2 + j, target_modules=list(layers), **options)
        model = peft.get_peft_model(nn.ModuleDict(layers), config)
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data.normal_()
        states.append(peft.get_peft_model_state_dict(model))
        scales.append(lowrank.scales(model))
        products.append(deltas(model))
    rows, layout = lowrank.pack(states, scales)
    near(
        pairwise_sqdist(rows),
        pairwise_sqdist(torch.stack(products)),
        rtol=1e-5,
        atol=1e-5,
    )
    back, _ = lowrank.unpack(rows, layout)
    peft.set_peft_model_state_dict(model, back[1])
    near(deltas(model), products[1], rtol=1e-4, atol=1e-4)
