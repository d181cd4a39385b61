"""What the site has beside the documents.

It has a first page, the reference by module, and a page for each notebook.

MkDocs calls these functions when it builds the site, see mkdocs.yml.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from notebook_pages import NOTEBOOK_LINK, notebook_page

from pflcore.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## `(pflcore[\w.]*)`", re.MULTILINE)
METHOD = re.compile(r"^## `(\w+)`$", re.MULTILINE)
NAME = re.compile(r"^- `(\w+)`: (.*)$", re.MULTILINE)
# A search shows the pages that explain before those that list.
REFERENCE_BOOST = 0.3
REFERENCE_HEAD = f"---\nsearch:\n  boost: {REFERENCE_BOOST}\n---\n"
OPTIONS = """
    options:
      show_root_heading: false
      show_root_toc_entry: false
      members: {members}
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md as the first page, and pages of public modules and notebooks."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = readme.replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    for place, text in reference_pages().items():
        files.append(File.generated(config, place, content=text))
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        page = notebook_page(path)
        contents = {f"{path.stem}.md": page.markdown, **page.pictures}
        for name, content in contents.items():
            file = File.generated(config, f"tutorials/{name}", content=content)
            files.append(file)
    return files


def on_config(config: Any) -> Any:
    """Puts the pages of the modules into the navigation, each by its module's name."""
    for section in config.nav:
        if "Reference" in section:
            modules = {module: f"reference/{module}.md" for module in public_names()}
            pages = [{module: path} for module, path in modules.items()]
            section["Reference"].append({"Modules": pages})
    return config


def public_names() -> dict[str, dict[str, str]]:
    """The names of each public module with their first lines, as docs/api.md has them.

    The modules are in alphabetical order.
    """
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    _, *parts = HEADING.split(text)
    names = {}
    for module, part in sorted(zip(parts[::2], parts[1::2], strict=True)):
        names[module] = dict(NAME.findall(part))
    return names


def home_of(name: str, module: str, modules: Mapping[str, Collection[str]]) -> str:
    """The one module on whose page a public object is described.

    Of the public modules that have it under this name it is the one nearest to where
    it is written; of several, the last by name.

    Args:
        name: The name of the object.
        module: A module that has it.
        modules: The names of all public modules.
    """
    thing = object_of(module, name)
    if thing is None:
        return module
    written_in = str(getattr(thing, "__module__", "")).split(".")
    homes = []
    for other, names in modules.items():
        if name in names and object_of(other, name) is thing:
            parts = other.split(".")
            shared = sum(a == b for a, b in zip(parts, written_in, strict=False))
            homes.append((shared, other))
    return max(homes)[1]


def object_of(module: str, name: str) -> Any:
    """A public object; None where its framework is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def reference_pages() -> dict[str, str]:
    """The reference's page of each public module, by its path.

    A name that has its home in another module, or on the page of a family of methods,
    is a link to it.
    """
    names = public_names()
    methods = method_pages()
    pages = {}
    for module, lines in names.items():
        own = []
        links = []
        for name, line in lines.items():
            home = home_of(name, module, names)
            if name in methods:
                links.append(f"- [`{name}`](../{methods[name]}): {line}")
            elif home == module:
                own.append(name)
            else:
                links.append(f"- [`{name}`]({home}.md#{home}.{name}): {line}")
        members = OPTIONS.format(members=own or "false")
        content = f"{REFERENCE_HEAD}# {module}\n\n::: {module}{members}"
        if links:
            content += "\n## Described elsewhere\n\n" + "\n".join(links) + "\n"
        pages[f"reference/{module}.md"] = content
    return pages


def method_pages() -> dict[str, str]:
    """The place in docs/ of each method's description, by the name of its class."""
    places = {}
    for path in sorted((ROOT / "docs" / "methods").glob("*.md")):
        for method in METHOD.findall(path.read_text(encoding="utf-8")):
            name = ALGORITHMS[method].__name__
            places[name] = f"methods/{path.name}#{method}"
    return places


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The text of a page, with links that the site can follow.

    A link to a file outside of docs/ becomes the file's name: the site has no such
    page. In docs/api.md a module's heading becomes a link to its page. A link to a
    notebook leads to its page; the page itself links to the notebook.
    """
    if not page.file.src_path.startswith("tutorials/"):
        markdown = NOTEBOOK_LINK.sub(r"](\1.md", markdown)
    if page.file.src_path == "api.md":
        page.meta["search"] = {"boost": REFERENCE_BOOST}
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
