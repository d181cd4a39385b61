"""`pflcore attack`: what an adversary learns from what travels, in a table with intervals, and the
reconstructions beside the originals."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from bench.papers import privacy
from pflcore.check import refuse
from pflcore.cli.experiment import algorithm
from pflcore.data import SOURCES, Federation, Source, load
from pflcore.nn.models import MODELS, model_for
from pflcore.train import Net, Training


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("pflcore attack", description=__doc__)
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=["fedavg", "factorized_waffle"],
        help="whose uploads are attacked",
    )
    parser.add_argument(
        "--data",
        default="fashion_mnist",
        choices=sorted(SOURCES),
        help="images, cut at random among clients",
    )
    parser.add_argument("--model", default="mlp", choices=sorted(MODELS))
    parser.add_argument(
        "--activation", choices=("tanh", "relu"), help="of lenet5, as --pool and --no-bias are"
    )
    parser.add_argument("--pool", choices=("avg", "max"))
    parser.add_argument("--no-bias", dest="bias", action="store_false", default=None)
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        default=[],
        help="factors of factorized layers; default: 3 for 5 outputs",
    )
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1000, help="training samples of a client")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--shadows", type=int, default=3, help="shadow federations on other data")
    parser.add_argument("--ratios", type=int, default=16, help="federations for LiRA; 0: without")
    parser.add_argument(
        "--views",
        nargs="+",
        default=list(privacy.VIEWS),
        choices=privacy.VIEWS,
        help="of a factorized upload",
    )
    parser.add_argument("--steps", type=int, default=5000, help="of model inversion; 0: without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/attack"),
        help="folder of attack.json, table.md and the pictures",
    )
    parser.add_argument("--quiet", action="store_true")
    got = parser.parse_args(argv)
    least = {"clients": 1, "samples": 1, "rounds": 1, "shadows": 0, "ratios": 0, "steps": 0}
    for option, at_least in least.items():
        if getattr(got, option) < at_least:
            refuse(option, f"a whole number, at least {at_least}", getattr(got, option))
    if not (got.shadows or got.ratios):
        raise ValueError(
            "shadows, ratios: expected at least one federation for one of them, got none."
        )
    hypers = {
        n: {"ranks": tuple(got.ranks)} if n == "factorized_waffle" else {} for n in got.algorithms
    }
    attacked = {n: algorithm(n, h) for n, h in hypers.items()}
    training = Training(lr=got.lr, batch_size=got.batch_size, epochs=got.epochs)
    source = load(got.data)
    pool = source.x_train, source.y_train
    say = (lambda text: None) if got.quiet else lambda text: print(text, flush=True)
    options: dict[str, Any] = {
        k: getattr(got, k)
        for k in ("clients", "samples", "rounds", "shadows", "ratios", "seed", "workers")
    }
    try:
        got.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(
            f"out: expected a folder that can be written, got {got.out} ({e.strerror})."
        ) from None
    shape = {
        k: getattr(got, k) for k in ("activation", "pool", "bias") if getattr(got, k) is not None
    }

    def make() -> nn.Module:
        return model_for(got.model, tuple(source.x_train.shape[1:]), source.classes, **shape)

    oracle: Callable[[Tensor], Tensor] | None = None
    results: dict[str, Any] = {}
    for name, alg in attacked.items():
        done = got.out / f"{name}.json"
        settings = {
            k: str(v)
            for k, v in vars(got).items()
            if k not in ("algorithms", "workers", "out", "quiet")
        }
        # an interrupted command goes on here
        if done.exists() and json.loads(done.read_text())["asked"] == settings:
            results[name] = json.loads(done.read_text())
            continue
        result = privacy.membership(
            alg, make, pool, source.classes, training, names=got.views, say=say, **options
        )
        results[name] = {"asked": settings, "membership": [v._asdict() for v in result.verdicts]}
        if got.steps:
            oracle = oracle or judge(source, make, training, got.seed, got.workers)
            upload, mine = result.upload, result.game.candidates[0][result.game.member[0]]
            rows = {
                view: r[0]
                for view, r in privacy.views(alg, upload, result.known, got.seed, got.views).items()
            }
            x, y = pool[0][mine], pool[1][mine]
            results[name]["inversion"] = inversion(
                upload.net, rows, x, y, source, oracle, got.steps, got.out / f"{name}.png"
            )
        done.write_text(json.dumps(results[name]) + "\n", encoding="utf-8")
        (got.out / "table.md").write_text(table(results), encoding="utf-8")
    print(table(results))
    return 0


def judge(
    source: Source,
    make: Callable[[], nn.Module],
    training: Training,
    seed: int,
    workers: int | None,
) -> Callable[[Tensor], Tensor]:
    """A model of the adversary's own, trained on data of nobody here: it says what a reconstruction
    looks like to a stranger."""
    n = len(source.y_test)
    data = Federation(source.x_test, source.y_test, {"train": [torch.arange(n)]}, source.classes)
    net = Net(make, seed=seed + 99)
    upload = privacy.intercept(algorithm("fedavg"), net, data, training, 1, seed + 99, workers)
    return lambda x: net(upload.row[0], x)


def inversion(
    net: Net,
    rows: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    source: Source,
    oracle: Callable[[Tensor], Tensor],
    steps: int,
    path: Path,
) -> dict[str, dict[str, float]]:
    """Every class reconstructed from each view of one client's upload, against the mean of its
    images; draws them into `path`."""
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (source.mean, source.std))
    low, high = -mean / std, (1 - mean) / std
    classes = [c for c in range(source.classes) if bool((y == c).any())]
    real = torch.stack([x[y == c].mean(0) for c in classes])
    targets = torch.tensor(classes)
    out, pictures = {}, {"class mean": real}
    for view, row in rows.items():
        start = low.expand_as(real).clone()
        made, sure = privacy.invert(
            partial(net, row), start, targets, steps=steps, low=low, high=high
        )
        with torch.no_grad():
            p = oracle(made).softmax(1)
        out[view] = {
            **privacy.likeness(made * std + mean, real * std + mean, 1.0),
            "confidence": float(sure.mean()),
            "oracle": float((p.argmax(1) == targets).double().mean()),
        }
        pictures[view] = made
    try:
        from pflcore.results.pictures import grid

        grid({k: (v * std + mean).clamp(0, 1) for k, v in pictures.items()}, path)
    except ImportError as e:
        print(e)
    return out


def table(results: Mapping[str, Any]) -> str:
    """Markdown: membership inference with 95 % intervals, then model inversion."""
    lines = [
        "| upload of | seen as | attack | accuracy | F1 | AUC | TPR at 1 % FPR | right on members "
        "| on others |",
        "|:---|:---|:---|" + "---:|" * 6,
    ]
    for name, result in results.items():
        for v in result["membership"]:
            cells = [
                f"{100 * v['value'][k]:.1f} ({100 * v['interval'][k][0]:.1f} to "
                f"{100 * v['interval'][k][1]:.1f})"
                for k in ("accuracy", "f1", "auc", "tpr")
            ]
            lines.append(
                f"| {name} | {v['view']} | {v['attack']} | {' | '.join(cells)} | "
                f"{100 * v['train']:.1f} | {100 * v['test']:.1f} |"
            )
    if any("inversion" in r for r in results.values()):
        keys = ("confidence", "oracle", "correlation", "ssim", "mse")
        lines += [
            "",
            "| upload of | seen as | own confidence | a stranger sees the class | correlation | "
            "SSIM | MSE |",
            "|:---|:---|" + "---:|" * 5,
        ]
        for name, result in results.items():
            for view, v in result.get("inversion", {}).items():
                lines.append(
                    f"| {name} | {view} | " + " | ".join(f"{v[k]:.3f}" for k in keys) + " |"
                )
    return (
        "\n".join(lines)
        + "\n\nIn percent, with 95 % intervals over samples; images against the client's mean "
        "of each class.\n"
    )
