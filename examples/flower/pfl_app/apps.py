"""The server app and the client app.

Both take the task from task.py.
"""

from pathlib import Path

import safetensors.torch
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from pfl_app import task
from pflcore import Client, Personalized, Server
from pflcore.interop.flower import PflStrategy, client_app

server = ServerApp()


@server.main()
def play(grid: Grid, context: Context) -> None:
    """Runs all rounds on the server and prints their accuracy."""
    options = task.options_of(context)
    rule = Server(
        task.algorithm(options.algorithm),
        task.model,
        options.clients,
        rounds=options.rounds,
        seed=options.seed,
    )
    folder = task.checkpoint_of(context, "server")
    strategy = PflStrategy(rule, folder, fraction_train=options.participation)
    result = strategy.start(
        grid,
        train_config=ConfigRecord({"algorithm": options.algorithm}),
        evaluate_config=ConfigRecord({"algorithm": options.algorithm}),
    )
    for round, scores in result.evaluate_metrics_clientapp.items():
        print(
            f"{options.algorithm}, round {round:2}: mean accuracy of the clients' own "
            f"models {scores['accuracy']:.2f}",
            flush=True,
        )


def one(context: Context) -> Client:
    """The client of this node, with its own data."""
    options = task.options_of(context)
    return Client(
        task.algorithm(options.algorithm),
        task.model,
        task.data(options.clients).subset([task.number_of(context)]),
        task.TRAINING,
        seed=options.seed,
    )


def evaluate(model: Personalized, context: Context) -> dict[str, float]:
    """Scores of the client's personalized model on its own test samples.

    With the option `export`, the model is also saved in that folder.
    """
    options = task.options_of(context)
    number = task.number_of(context)
    x, y = task.data(options.clients).client(number, "test")
    if options.export:
        path = Path(options.export) / f"client-{number}.safetensors"
        safetensors.torch.save_file(model.tensors(), path)
    correct = model.predict(x) == y
    return {"size": len(y), "accuracy": correct.double().mean().item()}


def folder(context: Context) -> Path | None:
    """The folder for the states of this node's client."""
    return task.checkpoint_of(context, "clients")


client = client_app(one, evaluate=evaluate, checkpoint=folder)
