"""Plants each mutant of the table in a copy of the tree and runs its tests, which must fail: `python tests/mutants`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = (
    "flashgen",
    "templates",
    "tests",
    "examples",
    "generated",
    "docs",
    "pyproject.toml",
    "ARCHITECTURE.md",
    "README.md",
    "CONTRIBUTING.md",
)
_TESTS_FAILED = 1  # pytest's exit status
KILLED, SURVIVED, NOT_RUN = "killed", "survived", "no test ran"


def copied_tree(into: Path) -> Path:
    """Returns a copy of the working tree."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, into / name)
    return into


def planted(mutant: Mutant, root: Path) -> str:
    """Returns the file's text with the mutation. Raises ValueError if the table no longer fits."""
    text = (root / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.name}: {mutant.before!r} stands {text.count(mutant.before)} times in {mutant.file}")
    return text.replace(mutant.before, mutant.after)


def verdict(tree: Path, tests: tuple[str, ...]) -> tuple[str, str]:
    """Returns (the verdict about a mutant in that tree, the last lines of pytest's output)."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--all", *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    said = "\n".join(done.stdout.strip().splitlines()[-4:]) or done.stderr.strip()
    if done.returncode == _TESTS_FAILED or done.returncode < 0:  # a signal: the mutant made the process crash
        return KILLED, said
    return (SURVIVED if done.returncode == 0 and " passed" in said else NOT_RUN), said


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose name or file holds one of these")
    words = parser.parse_args().words
    chosen = [m for m in MUTANTS if not words or any(word in f"{m.name} {m.file}" for word in words)]
    with tempfile.TemporaryDirectory(prefix="flashgen-mutants-") as folder:
        os.environ.setdefault("FLASHGEN_CACHE_DIR", f"{folder}/cache")  # code that no mutant changes is compiled once
        (tree := Path(folder) / "tree").mkdir()
        copied_tree(tree)
        found = [examined(mutant, tree) for mutant in chosen]
    print(f"{found.count(KILLED)} of {len(found)} mutants killed")
    return 0 if found == [KILLED] * len(found) else 1


def examined(mutant: Mutant, tree: Path) -> str:
    """Prints and returns the verdict about a mutant; its tests must pass without it."""
    found, said = verdict(tree, mutant.tests)
    if found == SURVIVED:
        found, said = with_mistake(mutant, tree)
    else:
        found, said = NOT_RUN, f"without the mutant: {said}"
    print(f"{found:12} {mutant.name} ({mutant.file})", flush=True)
    if found != KILLED:
        print(said, flush=True)
    return found


def with_mistake(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """Returns the verdict with the mutation in the tree, which is restored afterwards."""
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8")
    try:
        file.write_text(planted(mutant, tree), encoding="utf-8")
        return verdict(tree, mutant.tests)
    except ValueError as error:
        return NOT_RUN, str(error)
    finally:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
