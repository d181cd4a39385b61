"""Writes what the pages docs/methods/*.md say of each method, below an introduction.

It is the docstring of the method's class, with its formulas, a link to its paper and a
table of its options. `python docs/make_methods.py` writes all pages, and a test
compares them with the code.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from pflcore.algorithms import ALGORITHMS
from pflcore.cli._options import field_comments

FOLDER = Path(__file__).with_name("methods")
ARXIV = "https://arxiv.org/abs/"
DOI = "https://doi.org/"
FEDAS = (
    "https://openaccess.thecvf.com/content/CVPR2024/html/Yang_FedAS_Bridging_"
    "Inconsistency_in_Personalized_Federated_Learning_CVPR_2024_paper.html"
)


MARK = "<!-- The rest of this page is made by docs/make_methods.py. -->\n"
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
        "fedprox": (ARXIV + "1812.06127",),
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
        "sfl": (ARXIV + "2203.00829",),
        "fedfomo": (ARXIV + "2012.08565",),
        "l2c": (DOI + "10.1109/CVPR52688.2022.00954",),
        "fedala": (ARXIV + "2212.01197",),
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


def family_page(page: str, methods: dict[str, tuple[str, ...]]) -> str:
    """The text of a family's page, whose part about the methods is made anew."""
    introduction = page.partition(MARK)[0] + MARK
    parts = []
    for name, addresses in methods.items():
        parts += method_parts(name, addresses)
    return introduction + "\n" + "\n\n".join(parts) + "\n"


def method_parts(name: str, addresses: tuple[str, ...]) -> list[str]:
    """The paragraphs about one method."""
    cls = ALGORITHMS[name]
    text, _, _ = inspect.getdoc(cls).partition("\n\nArgs:\n")  # type: ignore[union-attr]
    parts = [f"## `{name}`", _as_markdown(text)]
    if addresses:
        links = ", ".join(
            f"[{address.partition('//')[2]}]({address})" for address in addresses
        )
        parts.append(f"Paper: {links}")
    rows = option_rows(cls)
    if rows:
        head = ["| option | default | meaning |", "|:--|:--|:--|"]
        parts.append("\n".join([*head, *rows]))
    return parts


def option_rows(cls: type) -> list[str]:
    """A row of a table for each option of a class."""
    comments = field_comments(cls)
    rows = []
    for name, field in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        if name == "traits":
            continue
        meaning = " ".join(comments.get(name, "").split()).replace("|", "\\|")
        default = repr(field.default).replace("'", '"')
        rows.append(f"| `{name}` | `{default}` | {meaning} |")
    return rows


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


def pages() -> dict[Path, str]:
    """The text of each page, by its path."""
    texts = {}
    for slug, methods in FAMILIES.items():
        path = FOLDER / f"{slug}.md"
        texts[path] = family_page(path.read_text(encoding="utf-8"), methods)
    return texts


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
