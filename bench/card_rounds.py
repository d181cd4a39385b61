"""Rounds of FedAvg on a GPU, with pflcore and in plain torch.

pflcore's rounds run with and without CUDA graphs. The loop trains one client after
another, eagerly or with its step captured as a CUDA graph.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.problem import Call, Calls, Problem, Size
from pflcore import Evaluation, Federation, Hardware, Simulation, Training
from pflcore.nn.models import model_for

LR = 0.05
BATCH = 50
FULL_WIDTH = 64  # channels of ResNet-18's first convolution


class Residual(nn.Module):
    """Two 3 x 3 convolutions with group norm and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, width)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or before != width:
            self.around = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(self.around(x) + y)


def resnet18(width: int) -> nn.Module:
    """ResNet-18 for images of 32 x 32, with group norm.

    It has 11.2 million weights at full width.
    """
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False)]
    layers += [nn.GroupNorm(4, width), nn.ReLU()]
    for stage, (before, after) in enumerate(itertools.pairwise(widths)):
        stride = 1 if stage == 0 else 2
        layers.append(Residual(before, after, stride))
        layers.append(Residual(after, after, 1))
    head = nn.Linear(8 * width, 10)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def build(model: str) -> nn.Module:
    """The model of this name in the table."""
    if model == "ResNet-18":
        return resnet18(FULL_WIDTH)
    if model == "ResNet-18, quarter width":
        return resnet18(FULL_WIDTH // 4)
    return model_for(model, image_shape(model), 10)


def image_shape(model: str) -> tuple[int, int, int]:
    """The shape of the images on which the model is trained."""
    return (1, 28, 28) if model == "mlp" else (3, 32, 32)


# Model, clients, and training images of each, which are whole batches.
SIZES: list[tuple[str, int, int]] = [
    ("mlp", 20, 500),
    ("mlp", 100, 500),
    ("lenet5", 20, 500),
    ("lenet5", 100, 500),
    ("cifar_cnn", 20, 500),
    ("cifar_cnn", 100, 500),
    ("ResNet-18, quarter width", 20, 500),
    ("ResNet-18, quarter width", 100, 500),
    ("ResNet-18", 20, 150),
]
QUICK_MODELS = ("mlp", "lenet5")
QUICK_CLIENTS = 20


def sizes(quick: bool) -> list[Size]:
    """Models, N clients, the images of each, and batches of B.

    With `quick` there are the two smallest models and 20 clients.
    """
    chosen = []
    for model, n, images in SIZES:
        is_quick = model in QUICK_MODELS and n == QUICK_CLIENTS
        if is_quick or not quick:
            batch = min(BATCH, images)
            chosen.append({"model": model, "N": n, "images": images, "B": batch})
    return chosen


def problem(size: Size, device: str) -> Problem:
    """The problem of a round; every client trains for one epoch."""
    data = federation(size["model"], size["N"], size["images"]).to(device)
    make = functools.partial(build, size["model"])
    training = Training(LR, size["B"], 1)

    def rounds(**hardware: Any) -> Call:
        where = Hardware(device=device, **hardware)
        how = {"rounds": 10**6, "evaluation": Evaluation(every=0), "hardware": where}
        played = Simulation("fedavg", make, data, training, **how).iterate()  # type: ignore
        return lambda: next(played)

    def loop(captured: bool) -> Call:
        return PlainLoop(make().to(device), data, size["B"], captured)

    calls: Calls = {
        "pflcore": rounds(),
        "pflcore, eager": rounds(graphs=False),
        "plain loop": loop(captured=False),
        "plain loop, captured": loop(captured=True),
    }
    return Problem("round on a card", {**size, "backward": 1}, calls)


def federation(model: str, n: int, images: int) -> Federation:
    """Clients with equal numbers of images, around a mean of each class."""
    generator = torch.Generator().manual_seed(0)
    shape = image_shape(model)
    y = torch.randint(10, (n * images,), generator=generator)
    means = torch.randn(10, *shape, generator=generator) * 0.3
    x = torch.randn(n * images, *shape, generator=generator) + means[y]
    return Federation(x, y, {"train": list(torch.arange(n * images).split(images))}, 10)


class PlainLoop:
    """FedAvg as a loop over clients; a call plays a round.

    All clients train in the same module.
    """

    def __init__(
        self, model: nn.Module, data: Federation, batch: int, captured: bool
    ) -> None:
        self.model = model
        self.data = data
        self.batch = batch
        self.parameters: list[Tensor] = list(model.parameters())
        self.state = {k: v.clone() for k, v in model.state_dict().items()}
        self.places = torch.arange(batch, device=data.device)
        self.step: Call = self.take_step
        if captured:
            self.step = captured_call(self.take_step, data.device)

    def take_step(self) -> None:
        """Takes a step of SGD on the samples at `places`."""
        x = self.data.x.index_select(0, self.places)
        y = self.data.y.index_select(0, self.places)
        with torch.enable_grad():
            loss = F.cross_entropy(self.model(x), y)
            gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-LR)

    def __call__(self) -> None:
        total = {k: torch.zeros_like(v) for k, v in self.state.items()}
        lists = self.data.lists("train")
        for client in range(self.data.n):
            self.model.load_state_dict(self.state)
            places = lists[client]
            order = places[torch.randperm(len(places)).to(places.device)]
            for part in order.split(self.batch):
                self.places.copy_(part)
                self.step()
            for k, v in self.model.state_dict().items():
                if v.is_floating_point():
                    total[k] += v / self.data.n
                else:
                    total[k] += v // self.data.n
        self.state = total


def captured_call(body: Callable[[], None], device: torch.device) -> Call:
    """`body` as a CUDA graph; on a CPU `body` itself.

    Before the capture, some calls on a stream of their own warm it up.
    """
    if device.type != "cuda":
        return body
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    replay: Call = graph.replay
    return replay
