"""The same FedAvg round in Flower's simulation and in Apple's pfl: each of their own, between two aggregations, without the start.

Both are optional (the extra `bench`). Every client trains `workload.epoch` on its own made-up images.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import workload
from bench.problem import Measured, optional

TIMED = 4  # rounds after the first


@functools.lru_cache(128)
def images(client: int, count: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(client)
    return torch.randn(count, 1, 28, 28, generator=gen), torch.randint(10, (count,), generator=gen)


def flower(model: str, n: int, count: int) -> Measured:
    """`run_simulation` with one CPU for each client."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.environ.update({"FLWR_HOME": tempfile.mkdtemp(), **quiet, **os.environ})
    app, client_app, server_app, simulation = (
        optional(f"flwr.{part}", "'flwr[simulation]'") for part in ("app", "clientapp", "serverapp", "simulation")
    )
    strategy = optional("flwr.serverapp.strategy", "'flwr[simulation]'")
    optional("ray", "'flwr[simulation]'")
    client, marks = client_app.ClientApp(), [0.0]

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        net = workload.MODELS[model]()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = images(int(context.node_config["partition-id"]), count)
        workload.epoch(net, torch.optim.SGD(net.parameters(), lr=workload.LR), x, y)
        reply = {"arrays": app.ArrayRecord(net.state_dict()), "metrics": app.MetricRecord({"num-examples": len(x)})}
        return app.Message(content=app.RecordDict(reply), reply_to=message)

    class Clocked(strategy.FedAvg):  # type: ignore[misc, name-defined]
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            result = super().aggregate_train(server_round, replies)
            marks.append(time.perf_counter())
            return result

    def serve(grid: Any, context: Any) -> None:
        everybody = {"min_train_nodes": n, "min_available_nodes": n, "min_evaluate_nodes": n, "fraction_evaluate": 0.0}
        Clocked(**everybody).start(grid, app.ArrayRecord(workload.MODELS[model]().state_dict()), num_rounds=TIMED + 1)

    server = server_app.ServerApp()
    server.main()(serve)
    cpus = os.cpu_count() or 1
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cpus, "num_gpus": 0, "include_dashboard": False},
    }
    simulation.run_simulation(server, client, num_supernodes=n, backend_config=backend)
    return Measured(b - a for a, b in itertools.pairwise(marks[1:]))


def apple(model: str, n: int, count: int) -> Measured:
    """pfl's `FederatedAveraging` on its `SimulatedBackend`."""
    optional("pfl", "pfl")
    parts = (
        "aggregate.simulate",
        "algorithm.base",
        "algorithm.federated_averaging",
        "callback.base",
        "data.dataset",
        "data.federated_dataset",
    )
    simulate, base, averaging, callback, dataset, federated = (optional(f"pfl.{part}", "pfl") for part in parts)
    hyper, pytorch = optional("pfl.hyperparam.base", "pfl"), optional("pfl.model.pytorch", "pfl")
    net, marks = workload.MODELS[model](), [0.0]

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
            return F.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    class Clock(callback.TrainingProcessCallback):  # type: ignore[misc, name-defined]
        def after_central_iteration(self, *args: Any, **words: Any) -> tuple[bool, Any]:
            marks.append(time.perf_counter())
            return False, optional("pfl.metrics", "pfl").Metrics()

    module, turn = Module(), itertools.cycle(range(n))
    wrapped = pytorch.PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = federated.FederatedDataset(lambda i: dataset.Dataset(images(i, count), user_id=str(i)), lambda: next(turn))
    training = hyper.NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.LR, local_batch_size=workload.BATCH)
    evaluation = hyper.NNEvalHyperParams(local_batch_size=workload.BATCH)
    plan = base.NNAlgorithmParams(central_num_iterations=TIMED + 1, evaluation_frequency=1000, train_cohort_size=n, val_cohort_size=0)
    backend = simulate.SimulatedBackend(training_data=data, val_data=data)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()):  # it prints every round
        averaging.FederatedAveraging().run(plan, backend, wrapped, training, evaluation, callbacks=[Clock()])
    torch.set_num_threads(threads)
    return Measured(b - a for a, b in itertools.pairwise(marks[1:]))
