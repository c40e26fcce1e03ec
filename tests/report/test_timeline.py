"""Timelines: what the emulator records of a kernel, and how the model schedules it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import flashgen as fg
from flashgen.codegen.stages import backward_kernels, forward_kernels
from flashgen.codegen.targets import TARGETS, target_named
from flashgen.errors import LaunchError
from flashgen.report.replay import replayed
from flashgen.report.runs import run_once, short_shape
from flashgen.report.timeline import timeline_of, to_svg
from flashgen.runtime import timeline
from flashgen.runtime.timeline import EVENT, Did, recorder, recording

SM_80, SM_90 = TARGETS["sm_80"], TARGETS["sm_90"]
SPEC = fg.AttentionSpec(64, mask=fg.full())


def events(*steps: tuple[int, Did, dict[str, int]]) -> Any:
    """Returns a record of (warp, operation, details)."""
    made = np.zeros(len(steps), EVENT)
    for event, (warp, did, rest) in zip(made, steps, strict=True):
        event["warp"], event["did"] = warp, did
        for name, value in rest.items():
            event[name] = value
    return made


def of_kernel(target: str, role: str, spec: Any = SPEC) -> tuple[Any, Any]:
    """Returns a kernel and its events in a short run."""
    forward = role == "forward"
    named = target_named(target)
    kernel = (forward_kernels(spec, named) if forward else backward_kernels(spec, named))[role]
    shape = short_shape(kernel.plan.tile_q, kernel.plan.tile_k, along_keys=forward)
    run = run_once(spec, target, ("forward" if forward else "backward",), shape)
    assert run.verdicts and all(verdict.ok for verdict in run.verdicts.values())
    return kernel, run.events[kernel.entry]


def test_gradients_are_named_where_v_is_a_part_of_k() -> None:
    spec = fg.AttentionSpec(40, value_dim=24, shared_kv=True)
    run = run_once(spec, "sm_80", ("forward", "backward"), short_shape(64, 64, along_keys=True))
    assert {name: verdict.ok for name, verdict in run.verdicts.items()} == {"out": True, "dq": True, "dk": True}


def amount(found: Any, did: Did) -> int:
    return int(found["amount"][found["did"] == did].sum())


# ---- what is recorded


def test_products_exponentials_and_copies_of_ampere_are_recorded() -> None:
    kernel, found = of_kernel("sm_80", "forward")
    plan = kernel.plan
    shape = short_shape(plan.tile_q, plan.tile_k, along_keys=True)
    scores = plan.tile_q * shape.len_k  # of the first block, which is complete
    assert amount(found, Did.MULTIPLY) * 16 * 8 * 16 == scores * (64 + 64)
    exponentials = sum(int(found["exponentials"][found["warp"] == warp].max()) for warp in range(plan.warps))
    rescaled = exponentials * 32 - scores
    assert 0 <= rescaled <= scores / 4  # one per score, and more for rows whose maximum was updated
    copied = amount(found, Did.COPY) * 32
    assert copied == 2 * 64 * (plan.tile_q + 2 * shape.len_k)


def test_products_and_loads_of_hopper_are_recorded() -> None:
    kernel, found = of_kernel("sm_90a", "forward")
    plan = kernel.plan
    shape = short_shape(plan.tile_q, plan.tile_k, along_keys=True)
    tiles_q = -(-shape.len_q // plan.tile_q)
    mine = -(-tiles_q // 3)  # the emulator's grid has three blocks
    steps = -(-shape.len_k // plan.tile_k)
    products = amount(found[found["warp"] % 4 == 0], Did.MULTIPLY_ASYNC) * 64 * 16
    assert products == mine * plan.tile_q * steps * plan.tile_k * (64 + 64)
    loaded = amount(found, Did.LOAD)
    assert loaded == mine * 2 * 64 * (plan.tile_q + 2 * steps * plan.tile_k)


def test_lines_belong_to_the_emitted_text() -> None:
    kernel, found = of_kernel("sm_90a", "forward")
    lines = kernel.source.splitlines()
    for did, word in ((Did.LOAD, "tma_load"), (Did.MULTIPLY_ASYNC, "wgmma_"), (Did.AWAIT_PHASE, "mbarrier_wait")):
        for line in set(found["line"][found["did"] == did].tolist()):
            assert word in lines[line - 1], (did, line)


def test_nothing_is_recorded_by_default() -> None:
    assert recorder() is None
    with recording() as asked:
        assert recorder() is asked
    assert recorder() is None and asked.launches == []


def test_a_record_that_is_too_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MAX_EVENTS", 10)
    kernel = forward_kernels(SPEC, target_named("sm_80"))["forward"]
    shape = short_shape(kernel.plan.tile_q, kernel.plan.tile_k, along_keys=True)
    with pytest.raises(LaunchError, match="and 10 can be recorded: record a shorter call"):
        run_once(SPEC, "sm_80", ("forward",), shape)


# ---- the model


def test_a_product_waits_for_its_copies_and_takes_the_tensor_cores_time() -> None:
    found = replayed(
        events(
            (0, Did.COPY, {"amount": 64, "line": 5}),
            (0, Did.COMMIT_COPIES, {}),
            (0, Did.AWAIT_COPIES, {"amount": 0}),
            (0, Did.MULTIPLY, {"amount": 4, "line": 7}),
        ),
        SM_80,
    )
    own = [(span.kind, span.begin, span.end) for span in found if not span.asynchronous]
    landed = 64 * 32 / 64 + 600
    assert own == [("copy", 0, 8), ("wait", 8, landed), ("product", landed, landed + 4 * 8)]


def test_two_warps_of_one_quarter_share_its_tensor_core() -> None:
    found = replayed(events((0, Did.MULTIPLY, {"amount": 1}), (4, Did.MULTIPLY, {"amount": 1})), SM_80)
    assert [(span.warp, span.begin, span.end) for span in found] == [(0, 0, 8), (4, 8, 16)]
    apart = replayed(events((0, Did.MULTIPLY, {"amount": 1}), (1, Did.MULTIPLY, {"amount": 1})), SM_80)
    assert [(span.begin, span.end) for span in apart] == [(0, 8), (0, 8)]


def test_an_asynchronous_product_leaves_its_warp_free() -> None:
    found = replayed(
        events(
            (0, Did.MULTIPLY_ASYNC, {"amount": 128}),
            (0, Did.COMMIT_PRODUCTS, {}),
            (0, Did.AWAIT_PRODUCTS, {"amount": 0, "exponentials": 2}),
        ),
        SM_90,
    )
    assert [(span.kind, span.begin, span.end, span.asynchronous) for span in found] == [
        ("product", 0, 2, False),
        ("product", 2, 2 + 128 * 256 / 512, True),
        ("exponentials", 2, 18, False),
        ("wait", 18, 66, False),
    ]


def test_a_phase_ends_with_its_last_arrival() -> None:
    waits = (1, Did.AWAIT_PHASE, {"object": 8, "phase": 0})
    arrives = (0, Did.ARRIVE, {"object": 8, "phase": 0})
    loads = (0, Did.LOAD, {"object": 8, "phase": 0, "amount": 6400})
    (wait,) = (span for span in replayed(events(arrives, loads, waits), SM_90) if span.kind == "wait")
    assert (wait.warp, wait.begin, wait.end) == (1, 0, 700)
    before = (1, Did.AWAIT_PHASE, {"object": 8, "phase": 2**32 - 1})  # the one before the first has always ended
    assert replayed(events(before), SM_90) == []


def test_a_barrier_opens_when_the_last_warp_arrives() -> None:
    reaches = [(warp, Did.REACH, {"amount": 64}) for warp in (0, 1)]
    leaves = [(warp, Did.LEAVE, {}) for warp in (0, 1)]
    multiplies = (1, Did.MULTIPLY, {"amount": 2})
    found = replayed(events(multiplies, *reaches, *leaves, *reaches, *leaves), SM_80)
    assert [(span.warp, span.kind, span.end) for span in found] == [(1, "product", 16), (0, "wait", 16)]


def test_a_truncated_record_is_refused() -> None:
    with pytest.raises(LaunchError, match="not complete"):
        replayed(events((0, Did.REACH, {"amount": 64}), (0, Did.LEAVE, {})), SM_80)


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("role", ["forward", "dkdv"])
def test_kernels_are_scheduled_without_overlaps(target: str, role: str) -> None:
    """A warp does one thing at a time, a tensor core one product; and no unit exceeds its rate."""
    kernel, found = of_kernel(target, role)
    spans = replayed(found, kernel.target)
    for warp in {span.warp for span in spans}:
        own = sorted((span.begin, span.end) for span in spans if span.warp == warp and not span.asynchronous)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(own))
    asynchronous = target == "sm_90a"
    for quarter in range(4):
        units = [span for span in spans if span.warp % 4 == quarter and span.kind == "product"]
        busy = sorted((span.begin, span.end) for span in units if span.asynchronous is asynchronous)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(busy))
    products = amount(found, Did.MULTIPLY) * 16 * 8 * 16 + amount(found, Did.MULTIPLY_ASYNC) * 16 * 16
    assert max(span.end for span in spans) >= products / 4 / kernel.target.tensor_multiply_adds


# ---- the drawing


def test_a_drawing_has_a_row_for_each_warpgroup_and_links_to_lines() -> None:
    kernel, found = of_kernel("sm_90a", "forward")
    drawn = timeline_of(found, kernel)
    assert [row.name for row in drawn.rows] == [
        *(f"warpgroup {group}" for group in range(kernel.plan.consumers)),
        f"warp {4 * kernel.plan.consumers}, loads",
    ]
    svg = to_svg(drawn, "a & b", link="#L")
    root = ElementTree.fromstring(svg)
    words = "".join(root.itertext())
    assert "a & b" in words and "warpgroup 0" in words and "cycles of the model" in words
    links = {link.attrib["href"] for link in root.iter("{http://www.w3.org/2000/svg}a")}
    assert links and all(0 < int(link.removeprefix("#L")) <= kernel.source.count("\n") for link in links)
    assert "<a " not in to_svg(drawn, "")


def test_waits_and_products_of_a_row_add_up_to_its_time() -> None:
    kernel, found = of_kernel("sm_80", "forward")
    drawn = timeline_of(found, kernel)
    shares = [drawn.share(kind, drawn.rows[0].warp) for kind in ("copy", "product", "exponentials", "wait", "store")]
    assert all(share >= 0 for share in shares) and 0.9 < sum(shares) <= 1 + 1e-9
