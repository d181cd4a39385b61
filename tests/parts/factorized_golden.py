"""What the tests of factorized golden share."""

import torch

from pflcore.nn import FactorizedLinear

D = torch.float64


def t(*values):
    return torch.tensor(values, dtype=D)


def near(got, want, atol=5e-10):
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=D), torch.as_tensor(want, dtype=D), rtol=1e-7, atol=atol
    )


# -- layers ------------------------------------------------------------------


def linear(w_a, strength, w_b):
    """The layer y = x W_b^T diag(strength) W_a^T with these factors."""
    layer = FactorizedLinear(len(w_b[0]), len(w_a), len(strength), dtype=D)
    for p, values in ((layer.w_a, w_a), (layer.strength, strength), (layer.w_b, w_b)):
        p.data = torch.tensor(values, dtype=D)
    return layer
