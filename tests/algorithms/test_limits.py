"""Methods at the options where each is a simpler one: FedAvg, FedProx or local training."""

import pytest
import torch
from methods import (
    APFL,
    MRMTL,
    ClusteredFL,
    Ditto,
    FedALA,
    FedAMP,
    FedDWA,
    FedOpt,
    FedProx,
    FedRoD,
    FineTune,
    LocalOnly,
    Mocha,
    PerFedAvg,
    QFedAvg,
    WeightErosion,
)
from small import after, double, near, tiny

from pflcore.algorithms import FedAvg

EVEN, ALONE = FedAvg(weighting="uniform"), LocalOnly()
LIMITS = [  # a method, what it keeps that is the other's model, and the other
    (FedProx(mu=0.0), "x", FedAvg()),
    (QFedAvg(q=0.0), "x", FedAvg()),
    (FedALA(eta=0.0), "x", FedAvg()),
    (FedRoD(gamma=0.0), "x", FedAvg()),
    (FineTune(mu=1.0), "x", FedProx(mu=1.0)),
    (ClusteredFL(first=3, relative=True), "x", EVEN),
    (WeightErosion(p_d=0.0), "x", EVEN),
    (Ditto(lam=0.0), "v", ALONE),
    (MRMTL(lam=0.0), "v", ALONE),
    (FedAMP(lam=0.0), "w", ALONE),
    (FedDWA(guidance="current"), "x", ALONE),
]
for mix in ("weights", "logits"):
    LIMITS += [(APFL(alpha=0.0, adaptive=False, mix=mix), "x", EVEN)]
    LIMITS += [(APFL(alpha=1.0, adaptive=False, mix=mix), "v", ALONE)]
for relation in ("omega", "sigma"):
    LIMITS += [(Mocha(lam=0.0, relation=relation), "w", ALONE)]
for optimizer in ("heavy_ball", "nesterov", "ema"):
    none = FedOpt(optimizer=optimizer, beta1=0.0, server_lr=0.7)
    LIMITS += [(none, "x", FedAvg(server_lr=0.7))]
ball = FedOpt(optimizer="heavy_ball", beta1=0.6, server_lr=0.4)
LIMITS += [(FedOpt(optimizer="ema", beta1=0.6), "x", ball)]
WHOLE = [(Ditto(lam=0.3), "x", FedAvg())]  # without shuffles
for variant in ("fo", "hf", "exact"):
    WHOLE += [(PerFedAvg(variant=variant, alpha=0.0), "x", FedAvg())]


@pytest.mark.parametrize(("alg", "key", "other"), LIMITS + WHOLE)
def test_at_its_limit_it_is_another_method(alg, key, other):
    s = double(tiny(epochs=2, batch_size=100 if (alg, key, other) in WHOLE else 8))
    ours, theirs = (after(a, s, 3)[0] for a in (alg, other))
    want = theirs.clients["w"] if other is ALONE else theirs.server["x"]
    got = {**ours.server, **ours.clients}[key]
    near(got.view_as(want), want, 1e-9, 1e-11)
    # these take the very steps of the other
    if (other is ALONE and isinstance(alg, Ditto | FedAMP | FedDWA)) or isinstance(alg, FineTune):
        assert torch.equal(got, want)
