"""Methods at options with which each is a simpler one.

The simpler ones are FedAvg, FedProx and local training.
"""

import json

import pytest
import torch
from small import after, double, near, tiny

from pflcore.algorithms import ALGORITHMS

# A method, the tensor that is the other's model, and the other method. "same" says that
# the bits are the same, "whole" that batches are whole, so that there are no shuffles.
LIMITS = """\
fedprox {"mu": 0} | x | fedavg {}
qfedavg {"q": 0} | x | fedavg {}
moon {"mu": 0} | x | fedavg {} | same
fedntd {"beta": 0} | x | fedavg {} | same
fednova {} | x | fedavg {} | whole | same
feddyn {"alpha": 1e-13} | x | fedopt {"optimizer": "nesterov", "beta1": 0.9999999999999, "weighting": "uniform"}
fedala {"eta": 0} | x | fedavg {}
fedrod {"gamma": 0} | x | fedavg {}
finetune {"mu": 1} | x | fedprox {"mu": 1} | same
clustered_fl {"first": 3, "relative": true} | x | fedavg {"weighting": "uniform"}
weight_erosion {"p_d": 0} | x | fedavg {"weighting": "uniform"}
apfl {"alpha": 0, "adaptive": false, "mix": "weights"} | x | fedavg {"weighting": "uniform"}
apfl {"alpha": 0, "adaptive": false, "mix": "logits"} | x | fedavg {"weighting": "uniform"}
apfl {"alpha": 1, "adaptive": false, "mix": "weights"} | v | local {}
apfl {"alpha": 1, "adaptive": false, "mix": "logits"} | v | local {}
ditto {"lam": 0} | v | local {} | same
mrmtl {"lam": 0} | v | local {}
mocha {"lam": 0, "relation": "omega"} | w | local {}
mocha {"lam": 0, "relation": "sigma"} | w | local {}
fedamp {"lam": 0} | w | local {} | same
pfedgraph {"alpha": 1e-12, "lam": 0} | x | local {}
fedcac {"tau": 0} | x | fedavg {}
feddwa {"guidance": "current"} | x | local {} | same
fedopt {"optimizer": "heavy_ball", "beta1": 0, "server_lr": 0.7} | x | fedavg {"server_lr": 0.7}
fedopt {"optimizer": "nesterov", "beta1": 0, "server_lr": 0.7} | x | fedavg {"server_lr": 0.7}
fedopt {"optimizer": "ema", "beta1": 0, "server_lr": 0.7} | x | fedavg {"server_lr": 0.7}
fedavgm {"optimizer": "ema", "beta1": 0.6} | x | fedavgm {"beta1": 0.6, "server_lr": 0.4}
ditto {"lam": 0.3} | x | fedavg {} | whole
per_fedavg {"variant": "fo", "alpha": 0} | x | fedavg {} | whole
per_fedavg {"variant": "hf", "alpha": 0} | x | fedavg {} | whole
per_fedavg {"variant": "exact", "alpha": 0} | x | fedavg {} | whole
"""  # noqa: E501


def method(words):
    """The algorithm of a name and its options in JSON."""
    name, options = words.split(" ", 1)
    return ALGORITHMS[name](**json.loads(options))


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("line", LIMITS.splitlines())
def test_at_its_limit_it_is_another_method(line):
    one, key, other, *how = line.split(" | ")
    batch_size = 100 if "whole" in how else 8
    s = double(tiny(epochs=2, batch_size=batch_size))
    ours, _ = after(method(one), s, 3)
    theirs, _ = after(method(other), s, 3)
    want = theirs.clients["w"] if other == "local {}" else theirs.server["x"]
    got = {**ours.server, **ours.clients}[key]
    near(got.view_as(want), want, 1e-9, 1e-11)
    assert "same" not in how or torch.equal(got, want)
