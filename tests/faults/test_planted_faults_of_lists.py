"""Mistakes planted in the kernel that lists tiles: each is caught by ThreadSanitizer.

A check that finds a fault proves something only if it finds nothing in the kernel as it is: that is tested beside it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.errors import LaunchError
from flashgen.runtime.schedule import Schedule

SPEC = fg.AttentionSpec(16, mask=fg.document("ids"))
LENGTH = 2200  # more tiles of 16 keys than the warps of a block look at in one turn
IDS = np.arange(LENGTH, dtype=np.int32) // 300
HOW: dict[str, Any] = {"target": "sm_80", "emulate": True, "plan": ForwardPlan(32, 16, 2)}
BARRIERS = {
    "before the tiles of the warps are counted": r"__syncthreads\(\);(\s+// Behind)",
    "before the next tiles take their place": r"__syncthreads\(\);(\s+\}\s+if \(threadIdx)",
}


def list_tiles(lists: str) -> None:
    """Lists the tiles of a tile of queries under ThreadSanitizer; `lists`: the text of the kernel that does it."""
    checked: dict[str, Any] = {"sanitize": "thread", "schedule": Schedule("greedy_warp")}
    attention.compile(SPEC, source={"lists": lists}, **HOW, **checked).tile_lists(32, LENGTH, ids=IDS)


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_is_caught_by_thread_sanitizer(barrier: str) -> None:
    emitted = next(iter(attention.compile(SPEC, **HOW).sources.values()))
    planted, count = re.subn(BARRIERS[barrier], r"\1", emitted)
    assert count == 1, f"the barrier stands {count} times in the kernel; the fault fits no more"
    list_tiles(emitted)
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race"):
        list_tiles(planted)
