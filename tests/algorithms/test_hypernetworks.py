"""pFedHN: what its server must do beside the golden rounds.

Symbols: N clients; v are the embeddings [N, D], x the models that clients receive.
"""

import torch
from small import after, double, joined, near, some, tiny

from pflcore.algorithms import PFedHN, apply

SMALL = PFedHN(embedding_size=3, hidden_size=12, hidden_layers=2, server_lr=0.3)


def played(rounds, alg=SMALL):
    """The task, and the state after some rounds of all clients."""
    s = double(tiny())
    return s, after(alg, s, rounds)[0]


def test_all_clients_begin_with_the_initial_model_and_then_part():
    s, state = played(2)
    n = s.data.n
    first = SMALL.send(joined(SMALL, s).server, some(n))["x"]
    near(first, s.net.w0.expand_as(first), 1e-12, 1e-14)
    x = SMALL.send(state.server, some(n))["x"]
    assert (x[0] - x[1:]).abs().amax(1).min() > 1e-6


def test_without_hidden_outputs_the_bias_follows_one_client_after_another():
    s = double(tiny())
    n = s.data.n
    state = joined(SMALL, s)
    state.server["phi"] = torch.zeros_like(state.server["phi"])
    delta = torch.linspace(-1, 1, n * s.net.size, dtype=s.net.dtype).view(n, -1)

    changes = SMALL.update(state.server, {"delta": delta}, some(n, round=1))[0]

    bias = s.net.w0
    order = torch.randperm(n, generator=some(n).generator).tolist()
    for i in order:
        bias = bias + 0.3 * (s.net.w0 + delta[i] - bias)
    near(changes["output"][-1], bias, 1e-12, 1e-14)
    assert not changes["output"][:-1].any()


def test_a_step_moves_the_model_by_its_part_at_any_scale():
    """To the first order; the models of larger steps bend."""
    s, state = played(2)
    cohort = some(s.data.n, ids=[1])
    for scale in (1e-3, 1e-6):
        x = SMALL.send(state.server, cohort)["x"]
        delta = scale * torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[None]
        changes = SMALL.update(state.server, {"delta": delta}, cohort)[0]
        moved = SMALL.send(apply(state.server, changes), cohort)["x"] - x
        part = (moved * delta).sum() / delta.square().sum()
        near(part, torch.full_like(part, 0.3), scale, 1e-8)


def test_without_steps_everything_stays():
    alg = PFedHN(embedding_size=3, hidden_size=5, server_lr=0)
    s, state = played(2, alg)
    first = joined(alg, s)
    for name, tensor in first.server.items():
        assert torch.equal(state.server[name], tensor), name


def test_other_clients_change_no_bit_of_a_model():
    s, state = played(2)
    n = s.data.n
    x = SMALL.send(state.server, some(n))["x"]
    for ids in ([1], [0, n - 1]):
        assert torch.equal(SMALL.send(state.server, some(n, ids=ids))["x"], x[ids])


def test_a_newcomer_moves_its_embedding_alone_and_uphill():
    """The step of an embedding goes to where the model moves along the update."""
    s, state = played(2)
    cohort = some(s.data.n, ids=[1])
    x = SMALL.send(state.server, cohort)["x"]
    delta = 1e-3 * torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[None]
    changes = SMALL.assign_new_client(state.server, {"delta": delta}, cohort)
    assert changes.keys() == {"v"} and changes["v"].ids.tolist() == [1]
    moved = SMALL.send(apply(state.server, changes), cohort)["x"]
    assert ((moved - x) * delta).sum() > 0
