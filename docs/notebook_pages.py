"""The pages of the site that are made from notebooks.

A notebook is the JSON of a file docs/tutorials/*.ipynb, with its outputs. Its page has
the same cells in the same order.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

NOTEBOOK_LINK = re.compile(r"\]\(([\w/]+)\.ipynb")
STYLE = re.compile(r"<style.*?</style>\s*", re.DOTALL)
# The site's own style applies to tables without attributes.
TABLE = re.compile(r"<table [^>]*>")


class Page(NamedTuple):
    """A page of the site.

    Attributes:
        markdown: The text of the page.
        pictures: The PNG files that the text shows, by name. They belong beside it.
    """

    markdown: str
    pictures: dict[str, bytes]


def notebook_page(path: Path) -> Page:
    """The page of a notebook, which ends with a link to the notebook itself."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(NOTEBOOK_LINK.sub(r"](\1.md", source))
            continue
        parts.append(code_block(source, "python"))
        for output in cell["outputs"]:
            picture = output.get("data", {}).get("image/png")
            if picture is None:
                parts.append(text_output(output))
                continue
            name = f"{path.stem}_{len(pictures) + 1}.png"
            pictures[name] = base64.b64decode("".join(picture))
            parts.append(f"![Picture of the code above]({name})")
    parts.append(f"[This page as a notebook]({path.name})")
    return Page("\n\n".join(parts) + "\n", pictures)


def text_output(output: dict[str, Any]) -> str:
    """What a cell printed or returned, as Markdown.

    A table of HTML stays one, in the style of the site.
    """
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    if "text/html" in data:
        html = STYLE.sub("", "".join(data["text/html"]))
        return TABLE.sub("<table>", html)
    return code_block("".join(data["text/plain"]).rstrip("\n"), "text")


def code_block(text: str, language: str) -> str:
    """A fenced block; its fence is longer than each fence in the text."""
    longest = max([2, *map(len, re.findall("`{3,}", text))])
    fence = "`" * (longest + 1)
    return f"{fence} {language}\n{text}\n{fence}"
