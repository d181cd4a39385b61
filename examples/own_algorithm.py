"""An algorithm of one's own: FedPer (Arivazhagan et al. 2019), whose clients share the body of the model and keep their heads."""

from dataclasses import dataclass

from torch import nn

from pflcore import FedAvg, Simulation, Training, testing
from pflcore.data import federation_of


@dataclass(frozen=True)
class FedPer(FedAvg):
    """server: the shared columns x [K] · client: its head [P - K] · down: x [S, K] · up: delta [S, K]."""

    def init(self, net, n):  # the server's state, and one client's fresh state
        x, head = net.split(net.w0)
        return {"x": x}, {"head": head}

    def client(self, down, own, local):  # what the cohort does: its new state, and what it uploads
        x, head = local.net.split(local.fit(local.net.join(down["x"], own["head"])).w)
        return {"head": head}, {"delta": x - down["x"]}

    def personal(self, down, own, local):  # what is evaluated: each client's model [S, P]
        return {"w": local.net.join(down["x"], own["head"])}


if __name__ == "__main__":
    testing.check(FedPer)
    data = federation_of("digits", "C", n=10)
    for algorithm in ("fedavg", FedPer):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        history = Simulation(algorithm, model, data, Training(lr=0.1), rounds=10).run()
        print(history.to_pandas()[["algorithm", "round", "bytes_up", "mean_accuracy"]].tail(1).to_string(index=False))
