"""Motley's protocol: tunes on some clients and reports the results of others.

The validation clients choose the options of fine-tuning. The accuracy is reported for
the test clients, which took part in no training. The last number is the percentage of
them whose accuracy became worse by fine-tuning.
"""

from dataclasses import replace

import torch
from torch import nn

from pflcore import Federation, Net, Training, cross_device, evaluate, tune
from pflcore.algorithms import FedAvg, FineTune
from pflcore.metrics import hurt


def my_clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels of sixty clients.

    The threshold between the two classes is one of five values, by the client's number.
    """
    generator = torch.Generator().manual_seed(0)
    clients = []
    for i in range(60):
        x = torch.randn(60, 2, generator=generator)
        threshold = (i % 5 - 2) / 2
        clients.append((x, (x[:, 0] > threshold).long()))
    return clients


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

# The accuracy [N] after fine-tuning, on the evaluation halves of the test clients.
# It is NaN for all other clients.
after = tuned.report()["accuracy"]
# FedAvg in place of FineTune evaluates the same trained model without fine-tuning.
config, state = tuned.states(tuned.best.candidate, 0)
config = replace(config, algorithm=FedAvg(), data=protocol.data)
before = evaluate(config, state, "test", protocol.report_clients)["accuracy"]
print(
    f"10 clients never seen: {before.nanmean():.3f} before fine-tuning, "
    f"{after.nanmean():.3f} after; {hurt(after, before):.0f} % are worse off"
)
