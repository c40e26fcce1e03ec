"""The documentation's pages: blocks run; transcripts, excerpts and images are current; links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from benchmarks.commands import app as benchmarks_app
from flashgen.cli import bench
from flashgen.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFRESH: dict[str, Any] = runpy.run_path(str(DOCS / "refresh.py"))
PAGES = [page for page in REFRESH["pages"]() if page.parent != DOCS / "api"]
OF_PYTHON = [page for page in PAGES if page.name != "README.md"]  # tests/test_readme.py runs the README's
WITH_COMMANDS = [*PAGES, ROOT / "benchmarks" / "README.md"]
PROGRAMS = ("flashgen", "pip", "python", "pytest")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[Any]:
    return [block for block in REFRESH["blocks"](text_of(page)) if block.language in languages]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.rotated(9)
@pytest.mark.parametrize("page", OF_PYTHON, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """The blocks of a page run one after another, as a reader would type them; excerpts are not run."""
    program = "\n".join(block.text for block in blocks(page, "python") if not block.title)
    if not program:
        pytest.skip("this page has no block of Python")
    needed = re.search(r"<!-- needs (.+) -->", text_of(page))
    missing = [name for name in (needed[1].split(", ") if needed else ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"this page needs {', '.join(missing)}, which is not installed")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_is_in_fenced_blocks(page: Path) -> None:
    """Code outside fenced blocks would not be run; indented blocks of the README are commands and outlines."""
    outside = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (?![-*]|\d+\. )\S.*$", outside, flags=re.MULTILINE)
    if page.name != "README.md":
        assert not indented


@pytest.mark.parametrize("page", PAGES, ids=name)
@pytest.mark.rotated(3)
def test_transcripts_and_excerpts_are_current(page: Path) -> None:
    text = text_of(page)
    assert REFRESH["refreshed"](text) == text, "make it anew: python docs/refresh.py"


@pytest.mark.rotated(9)
@pytest.mark.parametrize(("picture", "command"), sorted(set(REFRESH["pictures"]())), ids=lambda value: Path(value).name)
def test_pictures_are_current(picture: Path, command: str) -> None:
    if not REFRESH["is_drawn_here"](command):
        pytest.skip("bars are drawn by matplotlib, which is not installed: pip install '.[plot]'")
    shown = [REFRESH["shown"](content, command) for content in (REFRESH["drawn"](command), picture.read_bytes())]
    assert shown[0] and shown[0] == shown[1], "draw it anew: python docs/refresh.py"


@pytest.mark.rotated(3)
def test_a_stale_page_is_noticed() -> None:
    """A transcript and an excerpt of one page, both at once, because printing takes long."""
    page = DOCS / "papers.md"
    text = stale = text_of(page)
    for line in ("__device__ __forceinline__ void online_softmax(", "standard attention            136.3"):
        assert line in text
        stale = stale.replace(line, line.upper())
    assert REFRESH["refreshed"](stale) == text


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands_and_their_options_exist(page: Path) -> None:
    """Commands are parsed, not run; transcripts are run above."""
    for block in blocks(page, "sh"):
        for command in block.commands:
            for part in re.split(r" && | > \S+$", command):
                words = [word for word in shlex.split(part) if not re.fullmatch(r"[A-Z_]+=.*", word)]
                if not words:
                    continue
                assert words[0] in PROGRAMS, command
                if words[0] == "flashgen":
                    parse(words[1:])
                elif words[:3] == ["python", "-m", "benchmarks"]:
                    parse(words[3:], benchmarks_app)
                elif words[0] == "python":
                    assert (ROOT / next(word for word in words[1:] if not word.startswith("-"))).exists(), command


def parse(words: list[str], application: Any = app) -> None:
    """Raises an error for an unknown or hidden command, an unknown option, or a wrong value of an option."""
    command: Any = get_command(application)
    context: Any = None
    while hasattr(command, "commands"):
        if bench.DEFAULT in command.commands and not {*words[:1]} & command.commands.keys():
            words = [bench.DEFAULT, *words]
        assert words and words[0] in command.commands, f"there is no command {words[:1]}"
        context = command.context_class(command, parent=context, info_name=words[0])
        command, words = command.commands[words[0]], words[1:]
        assert not command.hidden, f"{context.info_name} is hidden: a page names its successor"
    command.make_context("flashgen", list(words), parent=context)


@pytest.mark.parametrize(
    "words", ["shwo causal()", "show causal() --whta tiles", "show causal() --what tails", "show", "bench host"]
)
def test_a_missing_command_is_noticed(words: str) -> None:
    with pytest.raises(BaseException, match=r"there is no command|No such option|is not one of|Missing|is hidden"):
        parse(words.split())


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Links of the API, which are created when the site is built, are checked there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name(page)}: {target}"
        if anchor and there.suffix == ".md":
            assert anchor in headings(there), f"{name(page)}: {target}"


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_common_questions_are_one_click_from_the_first_page() -> None:
    """Questions of a reader of the FlashAttention papers."""
    first = text_of(DOCS / "index.md")
    for target in (
        "papers.md#the-online-softmax",
        "papers.md#how-many-bytes-a-variant-moves",
        "variant.md",
        "variant.md#in-torch",
    ):
        assert f"]({target})" in first


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        assert re.search(rf"- (\w+: )?{re.escape(str(page.relative_to(DOCS)))}$", navigation, re.MULTILINE), page
