"""Feature shift: what a client gets depends on the seed and its number alone."""

import pytest
import torch
from entry_points import sentence
from hypothesis import given
from hypothesis import strategies as st
from small import equals

from pflcore import Federation
from pflcore.lab.data import federation_of

SHIFTS = ("rotation", "noise", "brightness")


def images(n, height=6, width=6):
    """Clients with four training and two test images."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(n):
        x = torch.randn(6, 2, height, width, generator=generator)
        y = torch.arange(6) % 2
        clients.append({"train": (x[:4], y[:4]), "test": (x[4:], y[4:])})
    return Federation.from_clients(clients)


@given(st.sampled_from(SHIFTS), st.integers(1, 6), st.integers(0, 3), st.floats(0, 90))
def test_amounts_are_the_clients_own(name, n, seed, strength):
    data = images(6)

    every = data.shift_features(name, strength, seed)
    few = data.subset(range(n)).shift_features(name, strength, seed)

    amounts = every.truth["shift"]
    low = 0.0 if name == "noise" else -strength
    assert ((amounts >= low) & (amounts <= strength)).all()
    equals(few.truth["shift"], amounts[:n])
    for split in data.splits:
        for i in range(n):
            equals(few.x[few.index[split][i]], every.x[every.index[split][i]])
    equals(every.y, data.y)
    if strength == 0:
        equals(every.x, data.x)


@pytest.mark.parametrize("name, low", [("brightness", -2.0), ("noise", 0.0)])
def test_amounts_fill_their_interval(name, low):
    data = Federation.from_clients([(torch.zeros(1, 1), [0])] * 200)

    amounts = data.shift_features(name, 2.0).truth["shift"]

    eighths = amounts.histc(8, low, 2.0)
    assert eighths.sum() == 200 and (eighths >= 10).all()  # 25 are expected


@pytest.mark.parametrize("name", SHIFTS)
def test_no_strength_changes_no_bit(name):
    data = images(3)
    equals(data.shift_features(name, 0.0).x, data.x)
    assert not torch.equal(data.shift_features(name).x, data.x)


def test_noise_and_brightness_have_the_clients_amount():
    x = torch.zeros(4, 5000)
    data = Federation.from_clients([(x, [0, 1, 0, 1])] * 3)

    noisy = data.shift_features("noise", 2.0, seed=1)
    brighter = data.shift_features("brightness", 2.0, seed=1)

    for i in range(3):
        rows = data.index["train"][i]
        got = noisy.x[rows].std().double()
        torch.testing.assert_close(got, noisy.truth["shift"][i], rtol=0.03, atol=0)
        want = brighter.truth["shift"][i].float().expand(4, 5000)
        equals(brighter.x[rows], want)


def test_a_function_sees_client_samples_and_generator():
    data = images(3)

    def add(client, x, generator):
        return x + client + torch.rand(1, generator=generator)

    once, again = (data.shift_features(add, seed=2) for _ in range(2))

    equals(once.x, again.x)
    for i in range(3):
        rows = torch.cat([data.index[split][i] for split in data.splits])
        change = once.x[rows] - data.x[rows]
        assert i <= float(change.mean()) < i + 1
        torch.testing.assert_close(change, change.mean().expand_as(change))


@pytest.mark.parametrize(
    "shift, options, words",
    [
        ("turn", {}, "shift: expected "),
        (lambda i, x, g: x[:1], {}, r"shift of client 0: expected samples of shape"),
        (lambda i, x, g: x / 0, {}, "shift of client 0: expected finite numbers"),
        (lambda i, x, g: x, {"strength": 1.0}, "strength: expected None, as the func"),
    ],
)
def test_other_shifts_are_one_sentence(shift, options, words):
    with sentence(words):
        images(2).shift_features(shift, **options)


def test_data_that_cannot_be_shifted_are_named():
    tokens = federation_of("synthetic_text", n=2)
    with sentence("x: expected floats in one tensor, to be shifted"):
        tokens.shift_features("noise")
    vectors = federation_of("synthetic_clusters", n=2)
    with sentence("shift: expected images"):
        vectors.shift_features("rotation")
    with sentence("feature_shift_strength: expected None without a feature_shift"):
        federation_of("synthetic_clusters", feature_shift_strength=1.0)


def test_a_name_says_the_shift():
    data = federation_of(
        "synthetic_clusters", n=2, feature_shift="noise", feature_shift_strength=0.3
    )
    assert data.name == "synthetic_clusters noise=0.3"
    want = federation_of("synthetic_clusters", n=2).shift_features("noise", 0.3)
    equals(data.x, want.x)
