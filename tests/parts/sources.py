"""What the tests of sources share."""

import numpy as np
import pytest


def cells(path, clients):
    io = pytest.importorskip("scipy.io")
    x, y = (np.empty((1, len(clients)), dtype=object) for _ in range(2))
    for i, (a, b) in enumerate(clients):
        x[0, i], y[0, i] = np.asarray(a), np.asarray(b)[:, None]
    path.parent.mkdir(exist_ok=True, parents=True)
    io.savemat(path, {"X": x, "Y": y})


# -- bad input ---------------------------------------------------------------


def sentence(error, call, *parts):
    with pytest.raises(error) as e:
        call()
    assert all(p in str(e.value) for p in parts), str(e.value)
    assert "\n" not in str(e.value)
