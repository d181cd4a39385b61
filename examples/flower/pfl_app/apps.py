"""The two halves of the app; what they share is in task.py."""

from pathlib import Path

import safetensors.torch
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from pfl_app import task
from pflcore import Client, Server
from pflcore.interop.flower import PflStrategy, client_app
from pflcore.simulation._models import Personalized

server = ServerApp()


@server.main()
def play(grid: Grid, context: Context) -> None:
    c = context.run_config
    alg, options = (
        task.algorithm(c["algorithm"]),
        {"rounds": c["rounds"], "seed": c["seed"]},
    )
    rule = Server(alg, task.model, c["clients"], **options)
    strategy = PflStrategy(rule, fraction_train=c["participation"])
    told = {"algorithm": c["algorithm"]}
    result = strategy.start(
        grid, train_config=ConfigRecord(told), evaluate_config=ConfigRecord(told)
    )
    for round, scores in result.evaluate_metrics_clientapp.items():
        print(
            f"{c['algorithm']}, round {round:2}: mean accuracy of the clients' own "
            "models "
            f"{scores['accuracy']:.2f}"
        )


def one(context: Context) -> Client:
    c, number = context.run_config, context.node_config["partition-id"]
    return Client(
        task.algorithm(c["algorithm"]),
        task.model,
        task.data(c["clients"]).subset([number]),
        task.TRAINING,
        seed=c["seed"],
    )


def evaluate(model: Personalized, context: Context) -> dict[str, float]:
    """The client's own scores, on data that nobody else sees."""
    c, number = context.run_config, context.node_config["partition-id"]
    x, y = task.data(c["clients"]).client(number, "test")
    if c["export"]:
        safetensors.torch.save_file(
            model.tensors(), Path(c["export"]) / f"client-{number}.safetensors"
        )
    return {"size": len(y), "accuracy": (model.predict(x) == y).double().mean().item()}


client = client_app(one, evaluate=evaluate)
