"""Writes what the pages docs/methods/*.md say of each method, below an introduction.

It is a table of what a round costs, counted while one is played, and for each method
the docstring of its class, with its formulas, a link to its paper and a table of its
options. `PYTHONPATH=. python docs/make_methods.py [PAGE ...]` writes the pages, by
default all, and tests compare them with the code.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from bench.papers.costs import Call, Cost, cost
from pflcore import Net
from pflcore.algorithms import ALGORITHMS, Algorithm
from pflcore.lab.cli._options import field_comments

FOLDER = Path(__file__).with_name("methods")
ARXIV = "https://arxiv.org/abs/"
DOI = "https://doi.org/"
FEDAS = (
    "https://openaccess.thecvf.com/content/CVPR2024/html/Yang_FedAS_Bridging_"
    "Inconsistency_in_Personalized_Federated_Learning_CVPR_2024_paper.html"
)


MARK = "<!-- The rest of this page is made by docs/make_methods.py. -->\n"
COSTS_HEADING = "## What a round costs\n"
# Costs are counted in a cohort of each of these numbers of clients, to see which grow
# with it. No other length of a tensor is the first of them.
COHORTS = (7, 11)
INPUTS = 128
CLASSES = 10
# A part of a model below this counts as nothing: a few numbers beside the models.
LEAST_MODELS = 0.02
ABOUT_COSTS = (
    "Letters, units and how it is counted: "
    "[What a round costs](../algorithms.md#what-a-round-costs)."
)
NAMES = {cls: name for name, cls in ALGORITHMS.items()}
OTHER_OPTIONS = "The other options are those of"
# For each page the addresses of its methods' papers.
FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "one_model": {
        "fedavg": (ARXIV + "1602.05629",),
        "fedavgm": (ARXIV + "1909.06335",),
        "fedadam": (ARXIV + "2003.00295",),
        "fedyogi": (ARXIV + "2003.00295",),
        "fedadagrad": (ARXIV + "2003.00295",),
        "fedopt": (ARXIV + "2003.00295",),
        "qfedavg": (ARXIV + "1905.10497",),
        "fednova": (ARXIV + "2007.07481",),
        "fedprox": (ARXIV + "1812.06127",),
        "feddyn": (ARXIV + "2111.04263",),
        "moon": (ARXIV + "2103.16257",),
        "fedntd": (ARXIV + "2106.03097",),
        "scaffold": (ARXIV + "1910.06378",),
    },
    "one_target": {
        "waffle": (ARXIV + "2110.06978",),
        "weight_erosion": (DOI + "10.1007/978-3-030-60548-3_16",),
    },
    "mixed_models": {
        "feddwa": (ARXIV + "2305.06124",),
        "feddwa_qp": (ARXIV + "2305.06124",),
        "fedamp": (ARXIV + "2007.03797",),
        "heurfedamp": (ARXIV + "2007.03797",),
        "pfedgraph": ("https://proceedings.mlr.press/v202/ye23b.html",),
        "sfl": (ARXIV + "2203.00829",),
        "fedcac": (ARXIV + "2309.11103",),
        "fedfomo": (ARXIV + "2012.08565",),
        "l2c": (DOI + "10.1109/CVPR52688.2022.00954",),
        "fedala": (ARXIV + "2212.01197",),
        "pfedhn": (ARXIV + "2103.04628",),
    },
    "clusters": {
        "hypcluster": (ARXIV + "2002.10619", ARXIV + "2006.04088"),
        "ensemble": (ARXIV + "2206.09262",),
        "clustered_fl": (ARXIV + "1910.01991",),
    },
    "pulled_models": {
        "ditto": (ARXIV + "2012.04221",),
        "pfedme": (ARXIV + "2006.08848",),
        "mrmtl": (ARXIV + "2206.07902",),
        "mocha": (ARXIV + "1705.10467",),
        "apfl": (ARXIV + "2003.13461",),
    },
    "split_models": {
        "fedper": (ARXIV + "1912.00818",),
        "lg_fedavg": (ARXIV + "2001.01523",),
        "fedrep": (ARXIV + "2102.07078",),
        "fedbabu": (ARXIV + "2106.06042",),
        "fedbn": (ARXIV + "2102.07623",),
        "fedrod": (ARXIV + "2107.00778",),
        "gpfl": (ARXIV + "2308.10279",),
        "factorized_waffle": (ARXIV + "2008.05687",),
    },
    "shared_features": {
        "fedproto": (ARXIV + "2105.00243",),
        "fedpac": (ARXIV + "2306.11867",),
        "fedas": (FEDAS,),
        "feddbe": (ARXIV + "2311.14975",),
    },
    "adapted_models": {
        "finetune": (ARXIV + "1910.10252", ARXIV + "2002.04758"),
        "knnper": (ARXIV + "2111.09360",),
        "per_fedavg": (ARXIV + "2002.07948",),
        "local": (),
    },
}


def family_page(
    page: str, methods: dict[str, tuple[str, ...]], costs: str | None = None
) -> str:
    """The text of a family's page, whose part about the methods is made anew.

    Args:
        costs: The table of costs; None for the one of `page`.
    """
    introduction = page.partition(MARK)[0] + MARK
    if costs is None:
        costs = page.partition(COSTS_HEADING)[2].partition("\n## ")[0].strip()
    parts = [f"{COSTS_HEADING}\n{costs}"]
    for name, addresses in methods.items():
        parts += method_parts(name, addresses)
    return introduction + "\n" + "\n\n".join(parts) + "\n"


def costs_table(methods: Iterable[str]) -> str:
    """What a round of each method costs, counted while one is played."""
    head = (
        "method | models down | models up | server keeps | client keeps | training | "
        "needs"
    )
    lines = ["| " + head + " |", "|:--|" + "--:|" * 5 + ":--|"]
    methods_of_calls: dict[str, list[str]] = {}
    base = _counted(ALGORITHMS["fedavg"]())
    for name in methods:
        algorithm = ALGORITHMS[name]()
        costs = _counted(algorithm)
        ratios = [c.client / b.client for c, b in zip(costs, base, strict=True)]
        cells = [
            f"`{name}`",
            _linear_text([c.models_down for c in costs], "S"),
            _linear_text([c.models_up for c in costs], "S"),
            _linear_text([c.server_models for c in costs], "N"),
            _linear_text([c.client_models for c in costs], "N"),
            _linear_text(ratios, "S"),
            _needs_text(algorithm),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        methods_of_calls.setdefault(_calls_text(costs[0]), []).append(f"`{name}`")
    calls = [
        f"- {', '.join(names)}: {text}"
        for text, names in methods_of_calls.items()
        if text
    ]
    return "\n".join([ABOUT_COSTS, "", *lines, "", "Ops of the server:", "", *calls])


def _counted(algorithm: Algorithm) -> list[Cost]:
    """The costs of a round in a cohort of each number of clients."""
    torch.manual_seed(0)
    layers = nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    net = algorithm.prepare(Net(nn.Sequential(*layers)))
    sizes = {"samples": 8, "batch_size": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about results, which nobody reads here
        return [cost(algorithm, net, (INPUTS,), CLASSES, n=n, **sizes) for n in COHORTS]


def _linear_text(values: list[float], letter: str) -> str:
    """Values in cohorts of two sizes as a + b S, with two decimals."""
    few, many = COHORTS
    slope = (values[1] - values[0]) / (many - few)
    if abs(slope) < LEAST_MODELS:
        return f"{sum(values) / 2:.2f}".rstrip("0").rstrip(".")
    constant = values[0] - slope * few
    factor = f"{slope:.2f}".rstrip("0").rstrip(".")
    text = letter if factor == "1" else f"{factor} {letter}"
    if abs(constant) < LEAST_MODELS:
        return text
    return f"{constant:.2f}".rstrip("0").rstrip(".") + f" + {text}"


def _needs_text(algorithm: Algorithm) -> str:
    """What the traits of an algorithm ask of a run."""
    traits = algorithm.traits
    needs = []
    if traits.required_clients:
        needs.append("its target in every round")
    if traits.needs_val:
        needs.append("validation samples")
    if "local_optimizer" in traits.fixed_training:
        needs.append("SGD")
    return ", ".join(needs)


def _calls_text(costs: Cost) -> str:
    """The server's calls of ops, in the order of the first ones."""
    calls = Counter[str]()
    for (name, shapes), count in costs.calls.items():
        if all(0 not in shape for shape in shapes):  # Nothing is mixed there.
            calls[_call_text((name, shapes), costs)] += count
    texts = [f"{n} times {text}" if n > 1 else text for text, n in calls.items()]
    return ", ".join(texts)


def _call_text(call: Call, costs: Cost) -> str:
    """A call such as `aggregate([S, P], [1, S])`."""
    name, shapes = call
    letters = {COHORTS[0]: "S", COHORTS[0] + 1: "S + 1", costs.parameters: "P"}
    words = []
    for shape in shapes:
        lengths = []
        for length in shape:
            letter = letters.get(length, str(length))
            if length > 1000 and letter != "P":
                multiple = length / costs.parameters
                letter = f"{multiple:.0f} P" if multiple % 1 == 0 else "Q"
            lengths.append(letter)
        words.append(f"[{', '.join(lengths)}]")
    return f"`{name}({', '.join(words)})`"


def method_parts(name: str, addresses: tuple[str, ...]) -> list[str]:
    """The paragraphs about one method."""
    cls = ALGORITHMS[name]
    text, _, _ = inspect.getdoc(cls).partition("\n\nArgs:\n")  # type: ignore[union-attr]
    text = _with_links(_as_markdown(text))
    parts = [f"## `{name}`", text]
    if addresses:
        links = ", ".join(
            f"[{address.partition('//')[2]}]({address})" for address in addresses
        )
        parts.append(f"Paper: {links}")
    rows, bases = option_rows(cls)
    if rows:
        parts.append("\n".join(["Options:", "", *rows]))
    if bases and OTHER_OPTIONS not in text:
        parts.append(f"{OTHER_OPTIONS} {' and '.join(map(_link, bases))}.")
    return parts


def option_rows(cls: type) -> tuple[list[str], list[str]]:
    """A line of a list for each option that a class does not have from another method.

    Also the names of the methods that bring the others.
    """
    comments = field_comments(cls)
    rows = []
    bases = []
    for name, field in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        if name == "traits":
            continue
        meaning = " ".join(comments.get(name, "").split())
        base = _described_at(cls, name, field.default, meaning)
        if base:
            bases.append(base)
            continue
        default = repr(field.default).replace("'", '"')
        rows.append(f"- `{name}={default}`: {meaning}")
    # A method's page names those that bring its own options in turn.
    nearest = [name for name in dict.fromkeys(bases) if not _is_base(name, bases)]
    return rows, nearest


def _is_base(name: str, others: Iterable[str]) -> bool:
    """True where one of the other methods is derived from a method."""
    cls = ALGORITHMS[name]
    others = {*others} - {name}
    return any(issubclass(ALGORITHMS[other], cls) for other in others)


def _described_at(cls: type, name: str, default: object, meaning: str) -> str | None:
    """The method whose page describes an option that a class has in common with it.

    It is a base class, a class that the docstring names for its other options, or the
    first one that has it from the same base class.
    """
    text = " ".join((inspect.getdoc(cls) or "").split())
    named = [c for c in NAMES if f"{OTHER_OPTIONS} `{c.__name__}`" in text]
    owner = next(c for c in cls.__mro__ if name in inspect.get_annotations(c))
    heirs = [c for c in NAMES if owner not in NAMES and issubclass(c, owner)]
    heirs = heirs[: heirs.index(cls)] if cls in heirs else []
    heirs = [c for c in heirs if not issubclass(c, cls)]
    for base in [*reversed(cls.__mro__[1:]), *named, *heirs]:
        field = getattr(base, "__dataclass_fields__", {}).get(name)
        if base not in NAMES or field is None or field.default != default:
            continue
        if " ".join(field_comments(base).get(name, "").split()) == meaning:
            return NAMES[base]
    return None


def _link(name: str) -> str:
    """A link to the part of a page that describes a method."""
    (page,) = (page for page, methods in FAMILIES.items() if name in methods)
    return f"[`{name}`]({page}.md#{name})"


def _with_links(text: str) -> str:
    """A text in which the methods that bring other options are links."""
    for cls, name in NAMES.items():
        sentence = OTHER_OPTIONS.replace(" ", r"\s") + rf"\s`{cls.__name__}`"
        text = re.sub(sentence, f"{OTHER_OPTIONS} {_link(name)}", text)
    return text


def _as_markdown(text: str) -> str:
    """A docstring as Markdown.

    The paragraph "server: ... · client: ..." becomes a list. Numbers in brackets are no
    links.
    """
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("server: "):
            lines = " ".join(paragraph.split()).split(" · ")
            paragraph = "\n".join(re.sub(r"^([\w ]+):", r"- **\1**:", x) for x in lines)
        pieces = re.split(r"(`[^`]*`)", paragraph)
        pieces[::2] = [re.sub(r"([\[\]])", r"\\\1", piece) for piece in pieces[::2]]
        paragraphs.append("".join(pieces))
    return "\n\n".join(paragraphs)


def pages(slugs: Iterable[str]) -> dict[Path, str]:
    """The text of some pages, by their paths."""
    texts = {}
    for slug in slugs:
        path = FOLDER / f"{slug}.md"
        page = path.read_text(encoding="utf-8")
        methods = FAMILIES[slug]
        texts[path] = family_page(page, methods, costs_table(methods))
    return texts


if __name__ == "__main__":
    for path, text in pages(sys.argv[1:] or FAMILIES).items():
        path.write_text(text, encoding="utf-8")
