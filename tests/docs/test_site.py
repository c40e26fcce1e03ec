"""The built documentation: strict, with every public name, no requests to other hosts, and nothing cut off."""

from __future__ import annotations

import functools
import html
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import flashgen as fg

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings", "latex2mathml")),
    reason="the documentation's tools are not installed: pip install '.[docs]'",
)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 390)  # pixels of a laptop, and of a telephone
# Names of __all__ that are modules with pages of their own, and names that are no Python objects.
MODULES = {"errors", "reference", "verify", "numerics"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def documented(site: Path) -> set[str]:
    """Returns the full names of all objects that the site describes."""
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" py:")[0] for line in zlib.decompress(inventory).decode().splitlines()}


def public_names() -> Iterator[tuple[str, str]]:
    """Returns (module, name) of each public name."""
    for name in ("flashgen", "flashgen.reference", "flashgen.verify", "flashgen.attention", "flashgen.release",
                 "flashgen.ranks"):  # fmt: skip
        module = importlib.import_module(name)
        yield from ((name, public) for public in module.__all__ if public not in MODULES)
    yield from (("flashgen.errors", error) for error in vars(fg.errors) if error.startswith(("Flash", "Spec", "Arg")))
    for framework in ("torch", "torch.context_parallel", "transformers", "jax"):
        source = (ROOT / "flashgen" / Path(*framework.split(".")) / "__init__.py").read_text(encoding="utf-8")
        listed = re.search(r"__all__ = \[(.*?)\]", source, flags=re.DOTALL)
        assert listed
        yield from ((f"flashgen.{framework}", public) for public in re.findall(r'"(\w+)"', listed[1]))


def test_the_api_has_every_public_name(site: Path) -> None:
    """Under its public name; functions with the names of their modules, and type aliases, where they are defined."""
    known = documented(site)
    homes = {
        "flashgen.reference": ("reference", "reference.backward"),
        "flashgen.verify": ("verify", "verify.variants", "verify.problems"),
        "flashgen.release": ("release", "release.check", "release.export"),
    }
    missing = [
        f"{module}.{name}"
        for module, name in public_names()
        if f"{module}.{name}" not in known
        and not any(f"flashgen.{home}.{name}" in known for home in homes.get(module, ()))
    ]
    assert not missing


def test_pages_request_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', text)
        assert not [target for target in loaded if re.match(r"(https?:)?//", target)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_formulas_are_mathml(site: Path) -> None:
    papers = (site / "papers.html").read_text(encoding="utf-8")
    assert papers.count("<math") > 20 and "arithmatex" not in papers


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    places = {page: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for page, text in pages.items()}
    for page, text in pages.items():
        if page.name == "404.html":
            continue
        for target in re.findall(r'<a\b[^>]*? href="([^"]+)"', text):
            path, _, anchor = target.partition("#")
            if re.match(r"\w+:", target) or path.startswith("/"):
                continue
            there = (page.parent / path).resolve() if path else page
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or there not in places or anchor in places[there], f"{page.name}: {target}"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine, and yields its address. Pages of one address can look into each other."""
    handler = functools.partial(SilentHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Prints nothing."""


def cut_off(folder: Path, pages: list[str], profile: Path) -> dict[str, list[str]]:
    """Returns what is cut off, by page and width."""
    text = (Path(__file__).parent / "widths.html").read_text(encoding="utf-8")
    text = text.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (folder / "widths.html").write_text(text, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    options += ["--virtual-time-budget=100000", "--window-size=1400,1000", "--dump-dom"]
    with served(folder) as address:
        command = [str(BROWSER), *options, f"{address}/widths.html"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (folder / "widths.html").unlink()
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert result and result[1], done.stderr
    return dict(json.loads(html.unescape(result[1])))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.rotated(8)
def test_no_code_or_table_is_cut_off(site: Path, tmp_path: Path) -> None:
    wide = "<style>article { width: 500px; overflow: hidden }</style><article><pre>" + "x" * 200 + "</pre></article>"
    (site / "wide.html").write_text(f"<!DOCTYPE html>{wide}", encoding="utf-8")
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if page.name != "404.html")
    found = cut_off(site, pages, tmp_path)
    (site / "wide.html").unlink()
    assert len(found) == len(pages) * len(WIDTHS)
    assert all(found.pop(f"wide.html at {width}") for width in WIDTHS), "what is cut off is noticed"
    assert not {page: problems for page, problems in found.items() if problems}
