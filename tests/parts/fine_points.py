"""What the tests of fine points share."""

import torch
from small import images, make_setting, tiny_model

from pflcore import Clients, Net, Training


def three(training=None):
    """Three clients of 7, 20 and 31 samples, and what a hook of the first round is given."""
    data = images()
    s = make_setting(Net(tiny_model()), data, training or Training(lr=0.1, batch_size=4), 10)
    return s, Clients(s, torch.arange(3), 1, s.net.b0.expand(3, -1))
