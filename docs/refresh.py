"""Updates the parts of the documentation that commands print or that are excerpts of files.

python docs/refresh.py             # writes what is stale, and lists it
python docs/refresh.py --check     # lists it, and exits with status 1 if there is any

A fenced block with the language `console` is a transcript: below each `$ ` line stands what the command prints. A block
with a title such as `generated/NAME.cu: online_softmax` is that function of that file; `FILE: /first line/ to /last
line/` are those lines. A command of an `sh` block that writes to docs/ draws the picture that is committed there.
Tables of features, the gallery and measured tables are between two marks (features.py, gallery.py, measured_tables.py),
and the notebook keeps what its cells print (notebook.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FENCE = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?[^\n]*\n(?P<text>.*?)^```$', re.M | re.S)
TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")
PICTURE = re.compile(r"--output (docs/\S+\.svg)")
FEATURES = runpy.run_path(str(DOCS / "features.py"))
GALLERY = runpy.run_path(str(DOCS / "gallery.py"))
TABLES = runpy.run_path(str(DOCS / "measured_tables.py"))
NOTEBOOK = runpy.run_path(str(DOCS / "notebook.py"))
WIDTH = "96"  # columns of the terminal for which transcripts are printed


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its title (or "") and its text."""

    language: str
    title: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of an `sh` block without comments, or those after `$ ` of a `console` block."""
        if self.language == "console":
            return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.partition("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def pages() -> list[Path]:
    """Returns every page, including the README."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(text: str) -> list[Block]:
    found = FENCE.finditer(text)
    return [Block(match["language"], match["title"] or "", match["text"]) for match in found]


def refreshed(text: str) -> str:
    """Returns the page with current transcripts and excerpts."""

    def updated_block(match: re.Match[str]) -> str:
        before, behind = match.start("text") - match.start(), match.end("text") - match.start()
        return match[0][:before] + _content(match) + match[0][behind:]

    text = FEATURES["with_tables"](FENCE.sub(updated_block, text))
    text = TABLES["with_tables"](text)
    return str(FEATURES["between"](text, GALLERY["BEGIN"], GALLERY["END"], GALLERY["page"]))


def _content(match: re.Match[str]) -> str:
    block = Block(match["language"], match["title"] or "", match["text"])
    if block.language == "console":
        return transcript(block)
    return excerpt(block.title) if ": " in block.title else block.text


def transcript(block: Block) -> str:
    return "\n".join(f"$ {command}\n{printed(command)}" for command in block.commands)


def printed(command: str) -> str:
    """Returns what a command prints to stdout. `| head -N` keeps N lines."""
    command, _, count = command.partition(" | head -")
    lines = aligned(run(shlex.split(command)).stdout.splitlines())
    return "".join(f"{line.rstrip()}\n" for line in lines[: int(count) if count else None])


def aligned(lines: list[str]) -> list[str]:
    """Aligns the tab-separated cells of each table into columns."""
    shown: list[str] = []
    for _, table in groupby((line.split("\t") for line in lines), key=len):
        rows = list(table)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        shown += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return shown


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs `flashgen ...` or `python ...` of this checkout. Raises SystemExit if it fails."""
    programs = {"flashgen": [sys.executable, "-m", "flashgen"], "python": [sys.executable]}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": WIDTH, "CUDA_VISIBLE_DEVICES": ""}
    command = [*programs[words[0]], *words[1:]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)} ends with {done.returncode}: {done.stderr}")
    return done


def excerpt(title: str) -> str:
    """Returns the lines of a file that a title names."""
    name, _, wanted = title.partition(": ")
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines(keepends=True)
    between = re.fullmatch(r"/(.+)/ to /(.+)/", wanted)
    if between:
        first = _first(lines, between[1], 0, title)
        return "".join(lines[first : _first(lines, between[2], first, title) + 1])
    return "".join(_function(lines, wanted, name.endswith(".py"), title))


def _first(lines: list[str], words: str, start: int, title: str) -> int:
    for number in range(start, len(lines)):
        if words in lines[number]:
            return number
    raise SystemExit(f'title="{title}": no line holds {words!r}')


def _function(lines: list[str], name: str, python: bool, title: str) -> list[str]:
    """Returns the lines of a Python or C++ function, the latter with the comment before it."""
    opening = rf"def {name}\(" if python else rf"\w[^;]* {name}\((?!.*;$)"
    starts = [number for number, line in enumerate(lines) if re.match(opening, line)]
    if not starts:
        raise SystemExit(f'title="{title}": there is no function {name}')
    first = starts[0]
    if python:
        header = next(n for n in range(first, len(lines)) if re.match(r"(def .*|\)( -> .*)?):$", lines[n].rstrip()))
        behind = [n for n in range(header + 1, len(lines)) if lines[n].strip() and not lines[n].startswith(" ")]
        return _without_blank_end(lines[first : behind[0] if behind else len(lines)])
    last = next(number for number in range(first, len(lines)) if lines[number].rstrip() == "}")
    while lines[first - 1].startswith("//"):
        first -= 1
    return lines[first : last + 1]


def _without_blank_end(lines: list[str]) -> list[str]:
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines


def pictures() -> Iterator[tuple[Path, str]]:
    """Yields (picture, the command that draws it) for every page."""
    for page in pages():
        for block in blocks(page.read_text(encoding="utf-8")):
            for command in block.commands if block.language == "sh" else ():
                found = PICTURE.search(command)
                if found:
                    yield ROOT / found[1], command


def drawn(command: str) -> bytes:
    """Returns the picture that a command draws, without changing the one in docs/."""
    with tempfile.TemporaryDirectory() as folder:
        output = PICTURE.search(command)
        assert output
        path = Path(folder) / Path(output[1]).name
        run(shlex.split(command.replace(output[1], str(path))))
        return path.read_bytes()


def shown(picture: bytes, command: str) -> object:
    """Returns what is compared of a picture: its bytes, or the words and numbers of bars that matplotlib draws."""
    return sorted(TEXT.findall(picture.decode())) if " benchmarks plot " in command else picture


def is_drawn_here(command: str) -> bool:
    """Whether the library that draws a picture is installed: matplotlib draws bars."""
    return " benchmarks plot " not in command or importlib.util.find_spec("matplotlib") is not None


def stale() -> Iterator[tuple[Path, bytes]]:
    """Yields each file that differs from what its commands produce, with the content that it should have."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        now = refreshed(text)
        if now != text:
            yield page, now.encode()
    for path, command in pictures():
        if not is_drawn_here(command):
            print(f"{path.relative_to(ROOT)} is not checked because matplotlib is not installed: pip install '.[plot]'")
            continue
        content = drawn(command)
        if not path.exists() or shown(path.read_bytes(), command) != shown(content, command):
            yield path, content

    for path, text in GALLERY["files"]():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            yield path, text.encode()
    path, text = NOTEBOOK["NOTEBOOK"], NOTEBOOK["NOTEBOOK"].read_text(encoding="utf-8")
    if (now := NOTEBOOK["refreshed_notebook"](text)) != text:
        yield path, now.encode()


def main() -> None:
    found = list(stale())
    for path, content in found:
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if found and "--check" in sys.argv:
        raise SystemExit("these files are stale; run: python docs/refresh.py")


if __name__ == "__main__":
    main()
