"""Motley's protocol in a few lines: hyper-parameters chosen on some clients, results
reported on others, and who is hurt."""

import torch
from torch import nn

from pflcore import Federation, Net, Training, cross_device, tune
from pflcore.algorithms import FedAvg
from pflcore.algorithms._adaptation import FineTune
from pflcore.metrics import hurt, mean
from pflcore.simulation._evaluate import evaluate


def my_clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sixty clients with a threshold of their own."""
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(60, 2, generator=generator) for _ in range(60)]
    return [(x, (x[:, 0] > (i % 5 - 2) / 2).long()) for i, x in enumerate(points)]


protocol = cross_device(
    Federation.from_clients(my_clients()), train=40, val=10, test=10
)
net = Net(lambda: nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)))
grid = {"finetune_lr": [0.05, 0.5], "finetune_epochs": [0, 1, 5, 20]}
tuned = tune(
    protocol,
    net,
    FineTune(),
    Training(lr=0.5, batch_size=10),
    grid,
    rounds=20,
    participation=0.25,
)
print(tuned.table())

# [N]: the test clients' own evaluation halves, NaN for everybody else
after = tuned.report()["accuracy"]
setup, state = tuned.states(tuned.best.candidate, 0)
setup = setup._replace(
    algorithm=FedAvg(), context=setup.context._replace(data=protocol.data)
)
before = evaluate(setup, state, "test", protocol.report_clients)["accuracy"]
print(
    f"10 clients never seen: {mean(before):.3f} before fine-tuning, {mean(after):.3f} "
    "after; "
    f"{hurt(after, before):.0f} % are worse off"
)
