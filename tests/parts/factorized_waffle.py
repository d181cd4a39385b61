"""Shared settings of the tests of factorized WAFFLE."""

from small import images, layers, make_setting, wide

from pflcore import Net, Training
from pflcore.nn import factorize


def model():
    return layers("Linear 6 8, ReLU, Linear 8 5, Tanh, Linear 5 3").double()


def federation(sizes=(9, 20, 31)):
    return wide(images(sizes, classes=3))


def setting(engine="vmap", **training):
    settings = Training(**{"lr": 0.1, "batch_size": 8, "epochs": 2, **training})
    net = Net(lambda: factorize(model(), (4, 3)), seed=1)
    return make_setting(net, federation(), settings, 6, engine, workers=1)
