"""`pflcore attack`: attacks on uploads, and a table of their success.

The table has intervals. Pictures show the reconstructions and the originals.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from bench.papers import privacy
from bench.papers.figures import grid
from bench.problem import Facts, parsed
from bench.table import markdown
from pflcore import Algorithm, Federation, Training
from pflcore.check import NonNegativeInt, PositiveInt, require
from pflcore.lab.cli._experiment import make_algorithm
from pflcore.lab.data import load
from pflcore.lab.data._sources import Source
from pflcore.nn.models import model_for
from pflcore.simulation._files import lock_folder, write_text

ASIDE = ("algorithms", "workers", "out", "quiet")  # options that change no result


@dataclass(frozen=True)
class Options(privacy.Played):
    """Options of membership inference and model inversion against uploads.

    Args:
        algorithms: the algorithms whose uploads are attacked
        data: images, cut at random among clients
        model: the model's name
        activation: of lenet5, as pool and bias are
        pool: of lenet5
        bias: of lenet5 and other models: layers have biases
        ranks: factors of factorized layers; default: 3 for 5 outputs
        epochs: epochs of local training
        batch_size: samples of a minibatch
        lr: step size of local training
        steps: steps of model inversion; 0: without
        out: folder of the results, table.md and the pictures
        quiet: prints no progress
    """

    algorithms: tuple[str, ...] = ("fedavg", "factorized_waffle")
    data: str = "fashion_mnist"
    model: str = "mlp"
    activation: Literal["tanh", "relu"] | None = None
    pool: Literal["max", "avg"] | None = None
    bias: bool = True
    ranks: tuple[int, ...] = ()
    epochs: PositiveInt = 5
    batch_size: PositiveInt = 20
    lr: float = 0.1
    steps: NonNegativeInt = 5000
    out: Path = Path("runs/attack")
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 0."""
    got = parsed(Options, "pflcore attack", __doc__, argv)
    expected = "at least one federation for one of them"
    require(got.shadows or got.ratios, "shadows, ratios", expected, 0)
    ranks = {"factorized_waffle": {"ranks": got.ranks}}
    attacked = {n: make_algorithm(n, ranks.get(n)) for n in got.algorithms}
    training = Training(lr=got.lr, batch_size=got.batch_size, epochs=got.epochs)
    source = load(got.data)
    with lock_folder(got.out):  # The lock makes the folder.
        pass
    own = {"activation": got.activation, "pool": got.pool, "bias": got.bias}
    shape = {k: v for k, v in own.items() if v not in (None, True)}
    image = tuple(source.x_train.shape[1:])
    make = partial(model_for, got.model, image, source.classes, **shape)
    asked = {k: str(v) for k, v in vars(got).items() if k not in ASIDE}
    say = (lambda text: None) if got.quiet else partial(print, flush=True)

    @cache
    def judge() -> privacy.Scores:
        """The scores of a model of the adversary's own.

        It is trained on the test set, which no client has. It shows how a
        stranger's model classifies a reconstruction.
        """
        clients = [(source.x_test, source.y_test)]
        data = Federation.from_clients(clients, classes=source.classes)
        alg = make_algorithm("fedavg")
        seed = got.seed + 99
        upload = privacy.intercept(alg, make, data, training, 1, seed, got.workers)
        return partial(upload.net, upload.row[0])

    results: Facts = {}
    for name, alg in attacked.items():
        done = got.out / f"{name}.json"
        # An interrupted command goes on here.
        results[name] = json.loads(done.read_text()) if done.exists() else {}
        if results[name].get("asked") == asked:
            continue
        pool = source.x_train, source.y_train
        found = privacy.membership(alg, make, pool, source.classes, training, got, say)
        results[name] = {
            "asked": asked,
            "membership": [v._asdict() for v in found.verdicts],
        }
        if got.steps:
            path = got.out / f"{name}.png"
            images = inversion(alg, found, source, judge(), got, path)
            results[name]["inversion"] = images
        write_text(done, json.dumps(results[name]) + "\n")
        write_text(got.out / "table.md", table(results))
    print(table(results))
    return 0


def inversion(
    attacked: Algorithm,
    found: privacy.Attacked,
    source: Source,
    oracle: privacy.Scores,
    asked: Options,
    path: Path,
) -> dict[str, dict[str, float]]:
    """Likeness of each view's reconstructions to the means of a client's classes.

    Every class is reconstructed from each view of the first client's upload. The images
    are drawn into `path`.

    Args:
        oracle: a stranger's model, which names the class of an image
    """
    mean = torch.tensor(source.mean).view(1, -1, 1, 1)
    std = torch.tensor(source.std).view(1, -1, 1, 1)
    low = -mean / std
    high = (1 - mean) / std
    mine = found.game.candidates[0][found.game.member[0]]
    x = source.x_train[mine]
    y = source.y_train[mine]
    targets = y.unique()
    real = torch.stack([x[y == c].mean(0) for c in targets]) * std + mean
    out = {}
    pictures = {"class mean": real}
    seen = privacy.views(attacked, found.upload, found.known, asked.seed, asked.views)
    for view, rows in seen.items():
        model = partial(found.upload.net, rows[0])
        start = low.expand_as(real)
        made, sure = privacy.invert(
            model, start, targets, asked.steps, low=low, high=high
        )
        with torch.no_grad():
            said = oracle(made).argmax(1)
        pictures[view] = made * std + mean
        out[view] = {
            **privacy.likeness(pictures[view], real, 1.0),
            "confidence": float(sure.mean()),
            "oracle": float((said == targets).double().mean()),
        }
    try:
        grid({k: v.clamp(0, 1) for k, v in pictures.items()}, path)
    except ImportError as e:
        print(e)
    return out


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown: membership inference, then model inversion.

    Membership inference has 95 % intervals.
    """
    rows = [
        "upload of | seen as | attack | accuracy | F1 | AUC | TPR at 1 % FPR | right "
        "on members | on others"
    ]
    images = [
        "upload of | seen as | own confidence | a stranger sees the class | "
        "correlation | SSIM | MSE"
    ]
    for name, result in results.items():
        for v in result["membership"]:
            cells = []
            for measure, value in v["value"].items():
                low, high = v["interval"][measure]
                cells.append(f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})")
            rows.append(
                f"{name} | {v['view']} | {v['attack']} | {' | '.join(cells)} | "
                f"{100 * v['train']:.1f} | {100 * v['test']:.1f}"
            )
        for view, v in result.get("inversion", {}).items():
            images.append(
                f"{name} | {view} | {v['confidence']:.3f} | {v['oracle']:.3f} | "
                f"{v['correlation']:.3f} | {v['ssim']:.3f} | {v['mse']:.3f}"
            )
    lines = [*markdown(rows), ""]
    if len(images) > 1:
        lines += [*markdown(images), ""]
    note = (
        "In percent, with 95 % intervals over samples; images against the client's "
        "mean of each class."
    )
    return "\n".join([*lines, note, ""])
