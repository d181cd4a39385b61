"""pFedHN: what its server must do beside the golden rounds.

Symbols: N clients; v are the embeddings [N, D], x the models that clients receive.
"""

import torch
from small import after, double, joined, near, some, tiny

from pflcore.algorithms import FedAvg, PFedHN, apply

SMALL = PFedHN(embedding_size=3, hidden_size=5, server_lr=0.3)


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


def test_without_hidden_outputs_it_is_fedavg():
    s = double(tiny())
    state = joined(SMALL, s)
    output = torch.zeros_like(state.server["output"])
    output[-1] = s.net.w0
    state.server["phi"] = torch.zeros_like(state.server["phi"])
    state.server["output"] = output
    ours, _ = after(SMALL, s, 3, state)
    theirs, _ = after(FedAvg(server_lr=0.3), s, 3)
    near(ours.server["output"][-1], theirs.server["x"], 1e-9, 1e-11)
    assert not ours.server["output"][:-1].any() and not ours.server["v"].any()


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
