"""MkDocs hooks: version and repository, formulas in MathML, and files from outside of docs/ or rendered for the site.

No script has to draw formulas, and a built site loads nothing from other hosts.
"""

from __future__ import annotations

import re
import runpy
import tomllib
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_LINES = re.compile(r'^(```\w+ title="[^":]+): /.*"$', re.MULTILINE)
_KERNEL = re.compile(r"\]\(\.\./(generated/[^)/]+\.cu)\)")
_PAGES = {"../CHANGELOG.md": "changelog.md", "../examples/first_kernel.ipynb": "notebook.md"}
_GALLERY_KERNEL = re.compile(r"Kernel: `([^`]+\.cu)`")
_CELL = re.compile(r"<t([dh])[ >].*?</t\1>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_config(config: Any) -> Any:
    """Gives each page the version in its header, and a link to the repository, as pyproject.toml states them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version = re.search(
        r'^__version__ = "(.+)"$', (ROOT / declared["tool"]["hatch"]["version"]["path"]).read_text(), re.M
    )
    assert version
    config["site_name"] = f"{config['site_name']} {version[1]}"
    config["repo_url"] = declared["project"]["urls"]["Repository"]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the kernels of generated/ and of the gallery, the changelog (its links start in docs/), and the notebook."""
    for kernel in sorted((ROOT / "generated").glob("*.cu")):
        files.append(File.generated(config, f"generated/{kernel.name}", abs_src_path=str(kernel)))
    for name, source in _gallery_kernels().items():
        files.append(File.generated(config, f"gallery/{name}", content=source))
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!docs/|https:)", "](../", text).replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    notebook = runpy.run_path(str(ROOT / "docs" / "notebook.py"))
    page = notebook["as_markdown"](notebook["NOTEBOOK"].read_text(encoding="utf-8"))
    files.append(File.generated(config, "notebook.md", content=page))
    return files


@cache
def _gallery_kernels() -> dict[str, str]:
    kernels: dict[str, str] = runpy.run_path(str(ROOT / "docs" / "gallery.py"))["kernels"]()
    return kernels


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces links that lead out of docs/ by links to what `on_files` added, or else by the paths of their files.

    The names of the gallery's kernels become links.

    The title of an excerpt that docs/refresh.py finds by its first and last line is reduced to the name of the file.
    """
    markdown = _GALLERY_KERNEL.sub(r"Kernel: [\1](gallery/\1)", _KERNEL.sub(r"](\1)", markdown))
    for outside, page in _PAGES.items():
        markdown = markdown.replace(f"]({outside})", f"]({page})")
    return _LINES.sub(r'\1"', _OUTSIDE.sub(r"`\2`", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Converts each formula that pymdownx.arithmatex marked to MathML, and lets code in tables break within names."""
    return _CELL.sub(lambda cell: _CODE.sub(_breakable, cell[0]), _FORMULA.sub(_mathml, html))


def _breakable(code: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)([._(=]|,(?! ))(?=\w|&)", r"\1<wbr>", code[0])


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    return convert(unescape(match[3]).strip(), display=display)
