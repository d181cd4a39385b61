"""Methods that pull a model towards another: FedProx, Ditto, MR-MTL, pFedMe."""

import torch
import torch.nn as nn
from methods import MRMTL, Ditto, FedProx, PFedMe
from parts.rivals import GOLDEN, close
from small import after, alike, at_work, lines, near, points, regression, t, tiny

from pflcore.simulation.round import begin


def test_fedprox_by_hand():
    for epochs, golden in ((1, 1.4), (2, 1.7), (3, 1.925)):
        s = points([3.0], 0.1, 1.0, loss=nn.functional.mse_loss, epochs=epochs)
        near(after(FedProx(mu=0.5), s)[0].server["x"], [golden])


def test_one_round_of_ditto_by_hand():
    s = regression([([[1, 2], [-1, 0.5], [0.3, -0.7]], [1, 0, 0.5])], w0=(0.2, -0.1))
    alg = Ditto(lam=0.5)
    state = begin(alg, s.net, 1)
    state.clients["v"] = t([[0.5, 0.4]])
    state.seen[0] = True
    near(at_work(s).grad(state.clients["v"]), [[0.137, 0.297]])
    state, _ = after(alg, s, 1, state)
    near(state.clients["v"], [[0.4713, 0.3453]], 1e-7, 5e-10)
    near(state.server["x"], [0.2287, -0.0378], 1e-7, 5e-10)


def test_the_shared_model_of_mrmtl_is_the_mean():
    s = tiny()
    state = after(MRMTL(lam=0.3), s, 4)[0]
    share = s.data.size() / s.data.size().sum()
    alike(state.server["x"], share @ state.clients["v"])


# pFedMe --------------------------------------------------------------------------------------


def test_golden_pfedme():
    i1 = GOLDEN["I1_pfedme"]
    options = {"lam": i1["lam"], "personal_lr": i1["personal_lr"]}
    s = points([2.0], i1["eta"], i1["w0"])
    for inner, theta in enumerate(i1["theta_traj"], 1):
        own = {"theta": t([[i1["theta0"]]])}
        alg = PFedMe(inner=inner, **options)
        new, up, _ = alg.train({"x": s.net.w0[None]}, own, at_work(s))
        close(new["theta"], [[theta]])
    close(up["delta"], [[i1["w_after"]]])
    for beta, want in ((1.0, i1["server_beta1"][0]), (0.5, i1["server_beta05_prev0_mean"])):
        close(after(PFedMe(server_lr=beta, **options), s)[0].server["x"], [want])
    far = PFedMe(lam=1.0, inner=400, personal_lr=0.1)
    state, _ = after(far, points([2.0], 0.0))
    close(state.clients["theta"], [[i1["theta_exact_prox"]]])


def test_pfedme_evaluates_theta_and_goes_on_from_it():
    """An alias in the authors' code makes its "personalized" accuracy that of w."""
    s = lines()
    alg = PFedMe(lam=1.0, personal_lr=0.05)
    found = []
    for moved in (0.0, 7.0):
        state, _ = after(alg, s)
        assert torch.equal(alg.model({}, state.clients, None)["w"], state.clients["theta"])
        assert not torch.allclose(state.clients["theta"], state.server["x"].expand(6, -1))
        state.clients["theta"] += moved
        found.append(after(alg, s, 1, state)[0].clients["theta"])
    assert not torch.allclose(*found)


def test_pfedme_without_a_pull_never_moves_the_shared_model():
    s = tiny()
    state, _ = after(PFedMe(lam=0.0), s, 2)
    assert torch.equal(state.server["x"], s.net.w0)
    assert not torch.equal(state.clients["theta"][0], s.net.w0)
