"""What the tests of evaluate share."""

import torch
import torch.nn as nn
from small import make_setting

from pflcore import Federation, Net, Training

SIZES = [1, 300, 7, 125, 126]


def setting(criterion, outputs, engine="chain", relabel=False, test=None):
    gen = torch.Generator().manual_seed(0)
    sizes = [n + (test or n) for n in SIZES]
    x = torch.randn(sum(sizes), 6, generator=gen)
    labels = criterion in ("cross_entropy", "hinge")
    classes = max(2, outputs) if labels else None
    y = (
        torch.randint(classes, (len(x),), generator=gen)
        if labels
        else torch.rand(len(x), generator=gen)
    )
    index = [
        i.split([n, len(i) - n])
        for i, n in zip(torch.arange(len(x)).split(sizes), SIZES, strict=True)
    ]
    own = torch.stack([torch.randperm(classes, generator=gen) for _ in SIZES]) if relabel else None
    data = Federation(
        x, y, {"train": [a for a, _ in index], "test": [b for _, b in index]}, classes, own
    )
    net = Net(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)),
        criterion=criterion,
    )
    return make_setting(net, data, Training(batch_size=5), 3, engine=engine, workers=1)
