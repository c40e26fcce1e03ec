"""Random variants of the seed of this commit, or for as long as --random-minutes says; see docs/testing.md."""

from __future__ import annotations

import pytest

from random_variants.running import again, options_of, search

pytestmark = [pytest.mark.usefixtures("removed_kernels"), pytest.mark.timeout(method="thread")]


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
def test_search(search_slice: tuple[int, float], gpu: bool, request: pytest.FixtureRequest) -> None:
    config = request.config
    counts = search(*search_slice, options_of(config, gpu), again(config, gpu))
    request.node.user_properties.append(("checked random variants", counts))
    assert counts["predicates"] > 0
