"""What the site has beside the documents.

It has a first page, the reference by module, and a page for each notebook.

MkDocs calls these functions when it builds the site, see mkdocs.yml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from notebook_pages import NOTEBOOK_LINK, notebook_page

ROOT = Path(__file__).parents[1]
# What docs/api.md says of a public module begins so.
OPTIONS = "    options:\n      show_root_heading: false\n"
HEADING = re.compile(r"^## `(pflcore[\w.]*)`", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md as the first page, and pages of public modules and notebooks."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = readme.replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    for module in public_modules():
        content = f"# {module}\n\n::: {module}\n{OPTIONS}"
        path = f"reference/{module}.md"
        files.append(File.generated(config, path, content=content))
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        page = notebook_page(path)
        contents = {f"{path.stem}.md": page.markdown, **page.pictures}
        for name, content in contents.items():
            file = File.generated(config, f"tutorials/{name}", content=content)
            files.append(file)
    return files


def public_modules() -> list[str]:
    """The names of the public modules."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    return HEADING.findall(text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The text of a page, with links that the site can follow.

    A link to a file outside of docs/ becomes the file's name: the site has no such
    page. In docs/api.md a module's heading becomes a link to its page. A link to a
    notebook leads to its page; the page itself links to the notebook.
    """
    if not page.file.src_path.startswith("tutorials/"):
        markdown = NOTEBOOK_LINK.sub(r"](\1.md", markdown)
    if page.file.src_path == "api.md":
        markdown = HEADING.sub(r"## [`\1`](reference/\1.md)", markdown)
    known = {file.src_path for file in files.documentation_pages()}
    folder = Path(page.file.src_path).parent

    def shown(match: re.Match[str]) -> str:
        words, target = match.groups()
        path = target.partition("#")[0]
        if not path or "//" in target:
            return match[0]
        inside = ROOT / "docs" / folder / path
        if inside.resolve().is_relative_to(ROOT / "docs") and inside.exists():
            return match[0]
        if (folder / path).as_posix() in known:
            return match[0]
        return words if "`" in words else f"{words} (`{path.removeprefix('../')}`)"

    return re.sub(r"(?<!!)\[([^\]\n]*)\]\(([^)\s]+)\)", shown, markdown)
