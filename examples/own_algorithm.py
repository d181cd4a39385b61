"""Defines an algorithm of your own, FedPer, and compares it with FedAvg.

In FedPer (Arivazhagan et al. 2019) the clients share the body of the model. Each client
keeps its own head.

Symbols: S clients of a cohort, P parameters of a model, K of them in the body.
"""

from dataclasses import dataclass

from torch import nn

from pflcore import Clients, FedAvg, Net, Simulation, Training, testing
from pflcore.algorithms import Payload, Tensors, TrainResult
from pflcore.lab.data import federation_of


@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedPer (Arivazhagan et al. 2019): clients share all columns but the head.

    server: x [K] · client: head [P - K] · down: x [S, K] · up: delta [S, K]
    """

    # Returns what the server starts from.
    def server_init_args(self, net: Net) -> Tensors:
        return {"x0": net.split(net.w0)[0]}

    def init_client(self, down: Payload, net: Net, n: int) -> Tensors:
        return {"head": net.split(net.w0[None])[1]}

    # Returns what the clients keep, what they upload, and the result of training.
    def train(
        self, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        fit = clients.fit(clients.net.join(down["x"], client_state["head"]))
        x, head = clients.net.split(fit.w)
        return {"head": head}, {"delta": x - down["x"]}, fit

    # Returns the model of each client, [S, P], for evaluation.
    def model(self, down: Payload, client_state: Tensors, clients: Clients) -> Tensors:
        return {"w": clients.net.join(down["x"], client_state["head"])}


if __name__ == "__main__":
    # Checks that the class keeps the rules for algorithms.
    testing.check(FedPer)
    data = federation_of("digits", "C", n=10)
    for algorithm in (FedAvg, FedPer):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
        )
        history = Simulation(algorithm, model, data, Training(lr=0.1), rounds=10).run()
        table = history.to_pandas()[["algorithm", "round", "bytes_up", "mean_accuracy"]]
        print(table.tail(1).to_string(index=False))
