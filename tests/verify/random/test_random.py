"""Some seconds of random variants, of which a part is new with each commit: no finding.

FLASHGEN_RANDOM_SECONDS=600 pytest tests/verify/random/test_random.py looks longer;
`flashgen verify --random` for hours.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flashgen.verify.random import Options, Summary, finding_text, run, targets_of_gpu

SECONDS = float(os.environ.get("FLASHGEN_RANDOM_SECONDS", "24"))
FIXED = 7_000_000


def seed_of_this_commit() -> int:
    """A first seed that follows from the commit; without git, another fixed one."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return int(done.stdout.strip() or "8", 16) % 2**31 if done.returncode == 0 else FIXED + 1_000_000


@pytest.mark.parametrize("which", ["fixed", "of the commit"])
def test_random_variants(which: str) -> None:
    nothing_is_found(FIXED if which == "fixed" else seed_of_this_commit(), Options())


@pytest.mark.gpu
def test_random_variants_on_a_gpu() -> None:
    from flashgen.runtime.gpu import compute_capability

    nothing_is_found(seed_of_this_commit(), Options(targets_of_gpu(*compute_capability()), emulate=False))


def nothing_is_found(seed: int, options: Options) -> None:
    summary = Summary(options)
    for result in run(seed, options, seconds=SECONDS / 2, own_cache=False, shrink_seconds=SECONDS):
        summary.add(result)
    assert summary.ok, "\n\n".join(finding_text(result, options) for result in summary.findings)
    assert summary.checked["predicates"] > 0
