"""Windows of tokens, and turned images, by the functions inside."""

import numpy as np
import pytest
import torch
from entry_points import IGNORED

from pflcore.data._feature_shift import SHIFTS
from pflcore.data._text import next_tokens


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_every_token_is_predicted_once(length):
    texts = [np.arange(1, 6), np.arange(7, 9)]

    x, y = next_tokens(texts, length, whole=True)

    seen = y != IGNORED
    assert x[seen].tolist() == [1, 2, 3, 4, 7] and y[seen].tolist() == [2, 3, 4, 5, 8]
    assert (x[~seen] == 0).all() and x.shape == y.shape and x.shape[1] == length
    x, y = next_tokens(texts, length, whole=False)
    assert x.shape[0] == 2 and y[0, 0] == 2


def test_a_quarter_turn_is_exact():
    x = torch.randn(3, 2, 6, 6)
    got = SHIFTS["rotation"].apply(x, 90.0, None)
    torch.testing.assert_close(got, torch.rot90(x, 1, (2, 3)), rtol=0, atol=1e-5)
    # Images that are not square keep their middle.
    flat = torch.randn(2, 1, 3, 5)
    got = SHIFTS["rotation"].apply(flat, 90.0, None)
    want = torch.rot90(flat[..., 1:4], 1, (2, 3))
    torch.testing.assert_close(got[..., 1:4], want, rtol=0, atol=1e-5)
