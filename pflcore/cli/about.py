"""`pflcore info`: what runs here, and what a model is made of."""

from __future__ import annotations

import importlib.util
import inspect
import os
import platform
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from pflcore.cli import experiment
from pflcore.cli.options import Group, Option, of_function, of_words, parse, peek
from pflcore.nn import factorize
from pflcore.nn.factorized import factorized_layers
from pflcore.nn.models import model_for
from pflcore.ops import __version__, backend
from pflcore.train import Net

EXTRAS = {
    "cli": ("tyro", "tqdm"),
    "data": ("torchvision", "mlxtend", "sklearn", "scipy"),
    "plot": ("matplotlib",),
}


def info(argv: Sequence[str]) -> int:
    """Says what runs here: versions, kernels, devices, optional packages; of a --model instead, the
    parameters, plain and factorized."""
    if argv:
        return _info_model(argv)
    facts: dict[str, Any] = {
        "pflcore": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    facts |= {
        "system": platform.platform(),
        "threads": f"{torch.get_num_threads()} (the machine has {os.cpu_count()} cores)",
    }
    facts["GPU"] = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch sees"
    )
    for extra, modules in EXTRAS.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        facts[f"[{extra}]"] = (
            f"without {', '.join(missing)}: pip install 'pflcore[{extra}]'"
            if missing
            else "complete"
        )
    facts["kernels"] = backend()
    for name, fact in facts.items():
        print(f"{name:<{max(map(len, facts))}}  {fact}")
    return 0


def _info_model(argv: Sequence[str]) -> int:
    """The parameters of a model, as it is and with its layers factorized."""
    name = next(iter(peek(argv, "--model")), "mlp")
    choice = experiment.model_of(name)
    if choice is None:
        raise ValueError("model: expected a model by name, got 'auto', which depends on the data.")
    shape = [
        Option("model", str, name, experiment.choices()["model"]),
        Option("shape", tuple[int, ...], (1, 28, 28), "of one input"),
        Option("classes", int, 10, "outputs"),
        Option(
            "ranks",
            tuple[int, ...],
            (),
            "factors of each layer, or one number for all; none: 3 for 5 outputs",
        ),
    ]
    groups = [
        Group("model", "", shape),
        Group(name, "", of_function(choice.function, choice.defaults)),
    ]
    got = parse("pflcore info", inspect.getdoc(info) or "", groups, argv)
    m = got["model"]
    plain = model_for(name, m["shape"], m["classes"], **of_words(got[name], choice.defaults))
    net = Net(plain)
    made = factorize(plain, m["ranks"], head=net.head_name)
    factors = sum(layer.factors for layer in factorized_layers(made).values())
    size = Net(made).size
    print(f"{name} on {prod(m['shape'])} inputs: {net.size:,} parameters")
    for n, layer in factorized_layers(made).items():
        print(
            f"  {n}: {tuple(layer.weight.shape)} as {layer.factors} factors, "
            f"{sum(p.numel() for p in layer.parameters()):,} parameters"
        )
    print(
        f"factorized: {size:,} parameters travel ({size / net.size:.3f} of the model's), "
        f"{3 * factors:,} stay with each client"
    )
    return 0
