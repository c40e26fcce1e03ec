"""The process that runs cases: reads one case a line, writes its outcome. `python -m flashgen.verify.random.worker`.

`runner` sees whatever a case does to it, a trap, a hang or a leak, and nothing else ends.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
from pathlib import Path

from flashgen.attention import compiling
from flashgen.verify.random.check import check
from flashgen.verify.random.recipe import Recipe
from flashgen.verify.random.runner import OWN_CACHE, RUNTIME


def main() -> None:
    faulthandler.enable()  # stderr then says where a trap was
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing but answers goes to the real stdout
    for line in sys.stdin:
        outcome = check(Recipe.from_json(line))
        _forget()
        answers.write(outcome.to_json() + "\n")
        answers.flush()


def _forget() -> None:
    """Drops the kernels, in memory and on disk: no case meets another's, and thousands would fill the disk."""
    compiling.clear()
    folder = os.environ.get(OWN_CACHE)
    if folder is None:
        return
    kept = set(Path(folder).glob(RUNTIME))
    for entry in set(Path(folder).glob("*")) - kept:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
