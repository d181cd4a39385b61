"""The same FedAvg round in Flower's simulation and in Apple's pfl.

A round's time is the time between two of their aggregations, without the start. Both
are optional (the extra `bench`). Every client trains as `workload.train` does, on its
own samples of the workload's federation.
"""

import contextlib
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
from bench.problem import Absent, Facts, Measured
from pflcore.train._workers import single_threaded


def flower(w: workload.Workload) -> Measured:
    """Seconds of rounds of `run_simulation`, without evaluation.

    Each client has one CPU.
    """
    if w.evaluate:
        raise Absent("not measured: an evaluation is a task of Ray's for every client")
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_worker_niceness": "0",  # that of the other providers; Ray's own is 15
    }
    os.environ.update({"FLWR_HOME": tempfile.mkdtemp(), **quiet, **os.environ})
    import ray  # noqa: F401
    from flwr import app
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client = ClientApp()
    marks: list[float] = []

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        net = w.build()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        count = workload.train(net, w, int(context.node_config["partition-id"]))
        metrics = app.MetricRecord({"num-examples": count})
        reply = {"arrays": app.ArrayRecord(net.state_dict()), "metrics": metrics}
        return app.Message(content=app.RecordDict(reply), reply_to=message)

    class Clocked(FedAvg):  # type: ignore[misc]
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            result = super().aggregate_train(server_round, replies)
            marks.append(time.perf_counter())
            return result

    def serve(grid: Any, context: Any) -> None:
        strategy = Clocked(
            min_train_nodes=w.cohort,
            min_available_nodes=w.n,
            fraction_train=w.cohort / w.n,
            fraction_evaluate=0.0,
        )
        start = app.ArrayRecord(w.build().state_dict())
        strategy.start(grid, start, num_rounds=w.rounds + 1)

    server = ServerApp()
    server.main()(serve)
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {
            "num_cpus": os.cpu_count(),
            "num_gpus": 0,
            "include_dashboard": False,
        },
    }
    try:
        run_simulation(server, client, num_supernodes=w.n, backend_config=backend)
    except RuntimeError as error:
        # Ray gives up on a machine that is too busy to start it. The other providers
        # are still measured.
        raise Absent(f"its simulation failed ({error.__cause__ or error})") from None
    return Measured(b - a for a, b in itertools.pairwise(marks))


def apple(w: workload.Workload) -> Measured:
    """Seconds of rounds of pfl's `FederatedAveraging` on its `SimulatedBackend`."""
    from pfl import metrics
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    net = w.build()
    marks: list[float] = []

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
            return F.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> Facts:
            n = len(x)
            loss, accuracy = workload.scored(self.net, x, y)
            return {
                "loss": metrics.Weighted(n * loss, n),
                "accuracy": metrics.Weighted(n * accuracy, n),
            }

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *args: Any, **words: Any) -> tuple[bool, Any]:
            marks.append(time.perf_counter())
            return False, metrics.Metrics()

    module = Module()
    central_optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    wrapped = PyTorchModel(module, torch.optim.SGD, central_optimizer)

    def clients(split: str) -> Any:
        order = torch.randperm(w.n, generator=torch.Generator().manual_seed(0))
        turn = itertools.cycle(order.tolist())
        samples = workload.federation(w)
        return FederatedDataset(
            lambda i: Dataset(samples.client(i, split), user_id=str(i)),
            lambda: next(turn),
        )

    training = NNTrainHyperParams(
        local_num_epochs=w.epochs, local_learning_rate=w.lr, local_batch_size=w.batch
    )
    evaluated = w.n if w.evaluate else 0
    every = 1 if w.evaluate else 10**6
    plan = NNAlgorithmParams(
        central_num_iterations=w.rounds + 1,
        train_cohort_size=w.cohort,
        evaluation_frequency=every,
        val_cohort_size=evaluated,
    )
    backend = SimulatedBackend(training_data=clients("train"), val_data=clients("test"))
    evaluation = NNEvalHyperParams(local_batch_size=500)
    quiet = io.StringIO()
    with single_threaded(), torch.enable_grad(), contextlib.redirect_stdout(quiet):
        FederatedAveraging().run(
            plan, backend, wrapped, training, evaluation, callbacks=[Clock()]
        )
    return Measured(b - a for a, b in itertools.pairwise(marks))
