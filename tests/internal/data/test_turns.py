"""Turned images, by the functions inside."""

import torch

from pflcore.data._feature_shift import SHIFTS


def test_a_quarter_turn_is_exact():
    x = torch.randn(3, 2, 6, 6)
    got = SHIFTS["rotation"].apply(x, 90.0, None)
    torch.testing.assert_close(got, torch.rot90(x, 1, (2, 3)), rtol=0, atol=1e-5)
    # Images that are not square keep their middle.
    flat = torch.randn(2, 1, 3, 5)
    got = SHIFTS["rotation"].apply(flat, 90.0, None)
    want = torch.rot90(flat[..., 1:4], 1, (2, 3))
    torch.testing.assert_close(got[..., 1:4], want, rtol=0, atol=1e-5)
