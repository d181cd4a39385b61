"""The two halves of the app; what they share is in task.py."""

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
    options = task.options_of(context)
    rule = Server(
        task.algorithm(options.algorithm),
        task.model,
        options.clients,
        rounds=options.rounds,
        seed=options.seed,
    )
    strategy = PflStrategy(rule, fraction_train=options.participation)
    result = strategy.start(
        grid,
        train_config=ConfigRecord({"algorithm": options.algorithm}),
        evaluate_config=ConfigRecord({"algorithm": options.algorithm}),
    )
    for round, scores in result.evaluate_metrics_clientapp.items():
        print(
            f"{options.algorithm}, round {round:2}: mean accuracy of the clients' own "
            f"models {scores['accuracy']:.2f}"
        )


def one(context: Context) -> Client:
    options = task.options_of(context)
    return Client(
        task.algorithm(options.algorithm),
        task.model,
        task.data(options.clients).subset([task.number_of(context)]),
        task.TRAINING,
        seed=options.seed,
    )


def evaluate(model: Personalized, context: Context) -> dict[str, float]:
    """The client's own scores, on data that nobody else sees."""
    options = task.options_of(context)
    number = task.number_of(context)
    x, y = task.data(options.clients).client(number, "test")
    if options.export:
        safetensors.torch.save_file(
            model.tensors(), Path(options.export) / f"client-{number}.safetensors"
        )
    return {"size": len(y), "accuracy": (model.predict(x) == y).double().mean().item()}


client = client_app(one, evaluate=evaluate)
