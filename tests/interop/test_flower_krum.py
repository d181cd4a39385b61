"""Flower's MultiKrum with exact distances: where its own picks a wrong client, this one does not;
and Flower's records as rows."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Bulyan, MultiKrum
from flwr.serverapp.strategy.multikrum import select_multikrum as flowers
from nodes import Nodes

from pflcore import pack, unpack
from pflcore.interop.flower import ExactMultiKrum, select_multikrum

N, F, P = 10, 2, 100_000
del Nodes  # it sets who this process is


def contents(spread, seed=0, far=1.5, p=P):
    """Models that differ by `spread`, relatively; the first F of them are `far` times as far from
    the middle as the others."""
    draw = np.random.default_rng(seed)
    base = draw.normal(size=p) * 0.05
    models = [
        base + spread * 0.05 * (far if i < F else 1.0) * draw.normal(size=p) for i in range(N)
    ]
    records = [
        ArrayRecord({"w": Array(m.astype(np.float32)), "steps": Array(np.asarray(i))})
        for i, m in enumerate(models)
    ]
    return [
        RecordDict({"arrays": r, "metrics": MetricRecord({"num-examples": 1})}) for r in records
    ], set(range(F))


def who(chosen, among):
    return [next(i for i, c in enumerate(among) if c is one) for one in chosen]


def test_flowers_own_picks_a_wrong_client_at_a_thousandth_and_this_one_does_not():
    wrong = right = 0
    for seed in range(5):
        given, far = contents(1e-3, seed)
        wrong += len(far & set(who(flowers(given, F, N - F), given)))
        right += len(far & set(who(select_multikrum(given, F, N - F), given)))
    assert right == 0 and wrong > 0


def test_where_models_differ_much_both_pick_the_same():
    given, far = contents(0.5)
    assert (
        set(who(select_multikrum(given, F, N - F), given))
        == set(who(flowers(given, F, N - F), given))
        == set(range(N)) - far
    )


def test_exact_distances_are_those_of_float64():
    given, _ = contents(1e-5, far=1.0)
    rows = np.stack([c["arrays"]["w"].numpy().astype(np.float64) for c in given])
    score = np.sort(((rows[:, None] - rows[None]) ** 2).sum(-1), 1)[:, 1 : N - F - 1].sum(1)
    assert who(select_multikrum(given, F, N - F), given) == score.argsort()[: N - F].tolist()


def messages(given):
    return [
        Message(c, reply_to=Message(RecordDict(), 100 + i, "train")) for i, c in enumerate(given)
    ]


def test_the_strategy_is_flowers_own_but_for_the_distances():
    given, _ = contents(1e-3)
    words: dict[str, Any] = {"num_malicious_nodes": F, "num_nodes_to_select": N - F}
    arrays, metrics = ExactMultiKrum(**words).aggregate_train(1, messages(given))
    chosen = who(select_multikrum(given, F, N - F), given)
    assert arrays is not None and metrics is not None
    mean = np.mean([given[i]["arrays"]["w"].numpy() for i in chosen], 0)
    np.testing.assert_allclose(arrays["w"].numpy(), mean, rtol=1e-5, atol=1e-8)
    assert set(chosen).isdisjoint(range(F))
    much, _ = contents(0.5)
    one, other = (
        cls(**words).aggregate_train(1, messages(much))[0] for cls in (ExactMultiKrum, MultiKrum)
    )
    np.testing.assert_allclose(one["w"].numpy(), other["w"].numpy(), rtol=1e-5, atol=1e-7)
    few, _ = contents(1e-3, p=1000)  # it takes a second for each 20,000 parameters
    assert (
        Bulyan(num_malicious_nodes=1, selection_rule=select_multikrum).aggregate_train(
            1, messages(few)
        )[0]
        is not None
    )


def test_too_few_replies_skip_a_round_and_a_model_that_is_not_finite_is_not_chosen():
    given, _ = contents(1e-3)
    strategy = ExactMultiKrum(num_malicious_nodes=4, num_nodes_to_select=2)
    assert (
        strategy.aggregate_train(1, messages(given))
        == (None, None)
        == strategy.aggregate_train(1, [])
    )
    bad = np.full(P, np.nan, np.float32)
    given[5] = RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(bad), "steps": Array(np.asarray(0))}),
            "metrics": given[5]["metrics"],
        }
    )
    assert 5 not in who(select_multikrum(given, F, N - F), given)
    with pytest.raises(ValueError, match=r"f, m: expected 0 <= f with 2 f \+ 2 < 10 clients"):
        select_multikrum(given, 4, 1)
    given[3] = RecordDict({"arrays": ArrayRecord({"v": Array(bad)})})
    with pytest.raises(
        ValueError,
        match="client 3: expected the tensors of client 0, got a model without 'w' and with 'v'",
    ):
        select_multikrum(given, F, N - F)


def test_flowers_bytes_are_written_into_the_matrix_once():
    n, p = 4, 500_000
    records = {
        f"node {i}": ArrayRecord({"w": Array(np.full((2, p // 2), i, np.float32))})
        for i in range(n)
    }
    torch.empty(1)
    tracemalloc.start()
    rows, form = pack(records)
    peak = tracemalloc.get_traced_memory()[1]  # of Python and numpy; the matrix itself is torch's
    tracemalloc.stop()
    # less than a tenth of one model
    assert peak < 4 * p / 10 and torch.equal(rows, torch.arange(4.0)[:, None].expand(4, p))
    back = unpack(rows, form)
    assert back == records and all(
        type(r) is ArrayRecord and type(r["w"]) is Array for r in back.values()
    )


def test_bytes_of_bfloat16_are_one_sentence():
    with pytest.raises(
        ValueError,
        match=r"client 0: 'w': numpy carries no .* to torch; send bfloat16 as float32 "
        r"or as a torch tensor",
    ):
        pack([ArrayRecord({"w": Array(np.zeros(4, "V2"))})])
