"""Aggregates client models with the ops of pflcore.

Your own program trains the models; here there are eight of them. The ops measure the
distances between them and mix a personalized model for each client.

Symbols: N clients, P parameters of a model.
"""

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pflcore

torch.manual_seed(0)
start = torch.nn.Linear(20, 5)
# Eight clients have trained the start model. They form two groups: the first four
# moved the weights up, the last four moved them down.
models = [torch.nn.Linear(20, 5) for _ in range(8)]
for i, model in enumerate(models):
    model.load_state_dict(start.state_dict())
    step = 0.01 if i < 4 else -0.01
    with torch.no_grad():
        model.weight += step + 0.001 * torch.randn(5, 20)

with torch.no_grad():
    # The uploaded models as a matrix [N, P], with one row for each client.
    sent = torch.stack([parameters_to_vector(m.parameters()) for m in models])
    # The model [P] that the clients started from.
    before = parameters_to_vector(start.parameters())

    # Squared distances [N, N] in float64. They are accurate even where models hardly
    # differ.
    distance = pflcore.pairwise_sqdist(sent)
    # Weights [N, N] by a rule of your own: row i mixes the model of client i.
    weight = torch.softmax(-distance / distance.mean(), dim=1)
    # The personalized models [N, P]: the start model plus weighted updates.
    personal = pflcore.aggregate(sent - before, weight, base=before)

    # WAFFLE's weights [N] of the updates in the model of client 0.
    for_client_0 = pflcore.waffle_weights(distance[0].sqrt(), target=0, omega=0.5)
    # FedDWA's weights of the three nearest other clients. A client is infinitely far
    # from itself, so that it does not choose itself.
    nearest = pflcore.feddwa_weights(distance.fill_diagonal_(torch.inf), k=3)
    # The mixed models [N, P]. This reads only three rows for each client.
    mixed = pflcore.aggregate(sent, nearest.weight, nearest.index)

    # The personalized models go back into the modules.
    for model, row in zip(models, personal, strict=True):
        vector_to_parameters(row, model.parameters())

print(pflcore.backend())
print("the three nearest to each client:", nearest.index.sort().values.tolist())
print("WAFFLE's weights for client 0:", [round(w, 3) for w in for_client_0.tolist()])
