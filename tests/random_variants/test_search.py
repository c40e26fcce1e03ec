"""Random variants: fixed ones in each run, others for each commit, and a search of any duration.

docs/testing.md describes longer searches.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from random_variants.cases import Options
from random_variants.running import CHECKED, again, options_of, search

pytestmark = [pytest.mark.usefixtures("removed_kernels"), pytest.mark.timeout(method="thread")]
FIXED = range(7000, 7006)


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
def test_search(search_slice: tuple[Iterable[int], float], gpu: bool, request: pytest.FixtureRequest) -> None:
    seeds, seconds = search_slice
    counts = search(seeds, options_of(request.config, gpu), again(request.config, gpu), seconds)
    request.node.user_properties.append((CHECKED, dict(counts)))
    assert counts["predicates"] > 0


@pytest.mark.rotated(3)
def test_fixed_variants(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--random-minutes") is not None:
        pytest.skip("a search of a given length draws its own variants")
    counts = search(FIXED, Options(), again(pytestconfig, gpu=False))
    assert counts["predicates"] > 0 and counts["forward calls"] > 0 and counts["backward calls"] > 0
