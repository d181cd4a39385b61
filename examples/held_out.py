"""Motley's protocol in a few lines: hyper-parameters chosen on some clients, results
reported on others, and who is hurt."""

import torch
from torch import nn

from pflcore import Federation, Net, Training, cross_device, evaluate, tune
from pflcore.algorithms import FedAvg, FineTune
from pflcore.metrics import hurt


def my_clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sixty clients with a threshold of their own."""
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(60, 2, generator=generator) for _ in range(60)]
    return [(x, (x[:, 0] > (i % 5 - 2) / 2).long()) for i, x in enumerate(points)]


protocol = cross_device(
    Federation.from_clients(my_clients()), train=40, val=10, test=10
)
net = Net(lambda: nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)))
tuned = tune(
    protocol,
    net,
    FineTune(),
    Training(lr=0.5, batch_size=10),
    {"finetune_lr": [0.05, 0.5], "finetune_epochs": [0, 1, 5, 20]},
    rounds=20,
    participation=0.25,
)
print(tuned.table())

# [N]: the test clients' own evaluation halves, NaN for everybody else
after = tuned.report()["accuracy"]
config, state = tuned.states(tuned.best.candidate, 0)
config = config._replace(
    algorithm=FedAvg(), context=config.context._replace(data=protocol.data)
)
before = evaluate(config, state, "test", protocol.report_clients)["accuracy"]
print(
    f"10 clients never seen: {before.nanmean():.3f} before fine-tuning, "
    f"{after.nanmean():.3f} after; {hurt(after, before):.0f} % are worse off"
)
