"""The ops in one's own federated-learning code: personalized aggregation of the client
models that one has anyway."""

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pflcore

torch.manual_seed(0)
start = torch.nn.Linear(20, 5)
# what eight clients sent back: two groups that went two ways
models = [torch.nn.Linear(20, 5) for _ in range(8)]
for i, model in enumerate(models):
    model.load_state_dict(start.state_dict())
    with torch.no_grad():
        model.weight += (0.01 if i < 4 else -0.01) + 0.001 * torch.randn(5, 20)

with torch.no_grad():
    # [N, P], one row per client
    sent = torch.stack([parameters_to_vector(m.parameters()) for m in models])
    before = parameters_to_vector(start.parameters())  # [P], what they were sent

    # [N, N] float64, exact for models that differ by little, too
    distance = pflcore.pairwise_sqdist(sent)
    # [N, N], one's own rule: who learns from whom
    weight = torch.softmax(-distance / distance.mean(), dim=1)
    # [N, P], a model for each client in one pass
    personal = pflcore.aggregate(sent - before, weight, base=before)
    # [N], or a rule of a paper: WAFFLE's
    for_client_0 = pflcore.waffle_weights(distance[0].sqrt(), target=0, omega=0.5)
    # or FedDWA's: the three nearest others
    nearest = pflcore.feddwa_weights(distance.fill_diagonal_(torch.inf), k=3)
    # [N, P]; reads three rows per client only
    mixed = pflcore.aggregate(sent, nearest.weight, nearest.index)

    for model, row in zip(models, personal, strict=True):
        vector_to_parameters(row, model.parameters())  # back into the modules

print(pflcore.backend())
print("the three nearest to each client:", nearest.index.sort().values.tolist())
print("WAFFLE's weights for client 0:", [round(w, 3) for w in for_client_0.tolist()])
