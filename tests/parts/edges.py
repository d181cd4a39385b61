"""Shared settings of the tests of edge cases."""

from small import images, layers, make_setting, wide

from pflcore import Net, Training


def normed():
    return layers("Linear 6 5, BatchNorm1d 5, Tanh, Linear 5 4").double()


def normal(sizes=(8, 20, 32, 12), engine="loop", **training):
    """Clients and a model with batch norm, in float64."""
    settings = Training(**{"lr": 0.1, "batch_size": 8, **training})
    return make_setting(Net(normed, seed=1), wide(images(sizes)), settings, 10, engine)
