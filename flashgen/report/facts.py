"""Everything that a report says, as data: what the page shows and `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from flashgen.analysis.captured_extents import captured_extent
from flashgen.analysis.expression_text import to_text
from flashgen.analysis.tile_classes import EMPTY, FULL, PARTIAL, TileMap, tile_map
from flashgen.build import nvrtc
from flashgen.build.cache import Entry, default_cache
from flashgen.codegen.dispatch import default_plan
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels, Pass, backward_kernels, forward_kernels
from flashgen.codegen.targets import ReferenceGpu, Target, target_named
from flashgen.errors import ArgumentError, BuildError
from flashgen.language.operations import BATCH, HEAD
from flashgen.language.spec import AttentionSpec
from flashgen.report import measured, roofline
from flashgen.report.machine_code import instructions_of
from flashgen.report.occupancy import occupancy
from flashgen.report.runs import Run, run_once, short_shape
from flashgen.report.sizes import CallSizes
from flashgen.report.stages import OF_ROLE, steps_of
from flashgen.report.timeline import Timeline, timeline_of
from flashgen.report.traffic import backward_traffic, flops, forward_traffic, hbm_bytes
from flashgen.verify.problems import CaptureMaker, Shape, random_captures

MOST_MAPS = 8  # tile maps of different sequences and heads that a page holds


@dataclass(frozen=True, eq=False)
class Asked:
    """What a report is asked for.

    captures: arrays of the mask by name, for the tile map; maker: what makes them for short runs; where neither is
    given, random ones stand in. run: whether the emulator runs the kernels once. measure: whether calls of these sizes
    are timed, where there is a GPU that runs the target. plan: numbers of the forward's plan that differ from the
    default one's.
    """

    spec: AttentionSpec
    target: str
    sizes: CallSizes
    passes: tuple[Pass, ...] = ("forward", "backward")
    deterministic: bool = False
    captures: Mapping[str, Any] = field(default_factory=dict)
    maker: CaptureMaker | None = None
    run: bool = True
    measure: bool = True
    plan: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Map:
    """Tiles of a pass that are visited, by sequence and head where they differ, and the arrays that the mask read."""

    of: Pass
    tiles: TileMap
    random: bool
    arrays: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        kinds = {"full": FULL, "partial": PARTIAL, "empty": EMPTY}
        counts = {name: self.tiles.count(kind) for name, kind in kinds.items()}
        batch, heads = self.tiles.classes.shape[:2]
        return {
            "pass": self.of,
            "tile": list(self.tiles.tile),
            "share": self.tiles.share,
            **counts,
            "differs_between": {"sequences": batch > 1, "heads": heads > 1},
            "captures": "random" if self.random else "given",
        }

    @property
    def places(self) -> list[tuple[int, int]]:
        """(sequence, head) of each map, as many as a page holds."""
        batch, heads = self.tiles.classes.shape[:2]
        return list(np.ndindex(batch, heads))[:MOST_MAPS]


@dataclass(frozen=True, eq=False)
class KernelFacts:
    """A kernel, what the compiler says of it (or why it says nothing), and its timeline where it was run."""

    of: Pass
    kernel: RenderedKernel
    data: dict[str, Any]
    timeline: Timeline | None


@dataclass(frozen=True, eq=False)
class Report:
    """A report's data, and what pictures are drawn of."""

    asked: Asked
    target: Target
    maps: list[Map]
    kernels: list[KernelFacts]
    card: ReferenceGpu | None
    points: list[roofline.Point]
    data: dict[str, Any]


def report_of(asked: Asked) -> Report:
    """Renders, compiles, runs and counts. Raises UnsupportedError for what the target cannot run."""
    target = target_named(asked.target)
    plan = _plan(asked, target)
    passes = _kernels(asked, target, plan)
    maps = [_map(asked, of, kernels) for of, kernels in passes.items()]
    run, refused = _run(asked, passes, plan)
    card = target.reference_gpu
    seconds = _seconds(asked, target, plan)
    kernels = [
        _facts(asked, of, kernel, map_.tiles.share, run, card, seconds.get(of))
        for (of, each), map_ in zip(passes.items(), maps, strict=True)
        for kernel in each.values()
    ]
    points = [roofline.Point(**facts.data["roofline"]) for facts in kernels if facts.data["roofline"]]
    data = {
        "spec": _spec(asked.spec),
        "target": {"name": target.name, "family": target.family, "backward_family": target.backward_family},
        "sizes": asked.sizes.to_dict(),
        "maps": [map_.to_dict() for map_ in maps],
        "traffic": _traffic(asked, target, passes, maps),
        "card": asdict(card) | {"ridge": card.ridge} if card else None,
        "kernels": [facts.data for facts in kernels],
        "seconds": seconds,
        "checked": _checked(run, refused),
    }
    return Report(asked, target, maps, kernels, card, points, data)


def _plan(asked: Asked, target: Target) -> Plan | None:
    """The forward's plan with the numbers that were asked for; None for the default one.

    Raises ArgumentError for numbers that the plan does not have, UnsupportedError for a plan that does not fit.
    """
    if not asked.plan:
        return None
    default: Any = default_plan(asked.spec, target)
    names = [each.name for each in fields(default)]
    unknown = [name for name in asked.plan if name not in names]
    if unknown:
        raise ArgumentError(f"plan: {unknown[0]!r} is no number of {default}; choose from {', '.join(names)}")
    plan: Plan = replace(default, **asked.plan)
    plan.check(asked.spec, target)
    return plan


def _kernels(asked: Asked, target: Target, plan: Plan | None) -> dict[Pass, Kernels]:
    of_passes: dict[Pass, Kernels] = {}
    if "forward" in asked.passes:
        of_passes["forward"] = forward_kernels(asked.spec, target, plan=plan)
    if "backward" in asked.passes:
        of_passes["backward"] = backward_kernels(asked.spec, target, asked.deterministic)
    return of_passes


def _spec(spec: AttentionSpec) -> dict[str, Any]:
    captures = [
        {"name": each.name, "dtype": each.dtype, "ndim": each.ndim, "gradient": each.grad} for each in spec.captures
    ]
    return {
        "name": spec.name,
        "head_dim": spec.head_dim,
        "value_dim": spec.value_dim,
        "dtype": spec.dtype,
        "scale": spec.scale,
        "layout": spec.layout,
        "dropout": spec.dropout,
        "mask": {"name": spec.mask.name, "expression": to_text(spec.mask.expression)},
        "score": {"name": spec.score.name, "expression": to_text(spec.score.expression)} if spec.score else None,
        "captures": captures,
        "json": spec.to_json(),
    }


def _map(asked: Asked, of: Pass, kernels: Kernels) -> Map:
    plan = kernels["forward" if of == "forward" else "keys"].plan
    sizes, mask = asked.sizes, asked.spec.mask
    bound = {name: array.on_host() for name, array in mask.bound.items()}
    given: dict[str, Any] = {**bound, **asked.captures}
    missing = [capture.name for capture in mask.captures if capture.name not in given]
    if missing:
        shape = Shape(sizes.len_q, sizes.len_k, sizes.batch, sizes.heads_q, sizes.heads_kv)
        random = np.random.default_rng(0)
        made = asked.maker(shape, random) if asked.maker else random_captures(asked.spec, shape, random)
        given |= {name: made[name] for name in missing}
    arrays = {capture.name: given[capture.name] for capture in mask.captures}
    batch = captured_extent(mask.expression, BATCH, arrays) or sizes.batch
    heads = captured_extent(mask.expression, HEAD, arrays) or sizes.heads_q
    tile = (plan.tile_q, plan.tile_k)
    tiles = tile_map(mask.expression, tile, sizes.len_q, sizes.len_k, batch, heads, arrays)
    return Map(of, tiles, bool(missing), arrays)


def _run(asked: Asked, passes: Mapping[Pass, Kernels], plan: Plan | None) -> tuple[Run | None, str]:
    """One short run of all passes; None, and why, where there is none."""
    if not asked.run:
        return None, "not asked for"
    forward = passes.get("forward") or forward_kernels(asked.spec, target_named(asked.target), plan=plan)
    plans = [(forward["forward"].plan, True)]
    if "backward" in passes:
        plans.append((passes["backward"]["keys"].plan, False))
    shapes = [short_shape(plan.tile_q, plan.tile_k, along_keys) for plan, along_keys in plans]
    longest = max(shapes, key=lambda shape: shape.len_q)
    try:
        return run_once(asked.spec, asked.target, asked.passes, longest, asked.maker, asked.deterministic, plan), ""
    except BuildError as error:  # there is no C++ compiler
        return None, str(error)


def _seconds(asked: Asked, target: Target, plan: Plan | None) -> dict[Pass, float]:
    """Of a call of each pass on this GPU; nothing where it runs no such kernels, or nobody asked."""
    if not asked.measure or not measured.runs_here(target):
        return {}
    sizes = asked.sizes
    shape = Shape(sizes.len_q, sizes.len_k, sizes.batch, sizes.heads_q, sizes.heads_kv)
    given = (asked.deterministic, asked.captures, asked.maker, plan)
    return measured.seconds_of_calls(asked.spec, target, asked.passes, shape, *given)


def _facts(
    asked: Asked,
    of: Pass,
    kernel: RenderedKernel,
    share: float,
    run: Run | None,
    card: ReferenceGpu | None,
    seconds: float | None,
) -> KernelFacts:
    sizes = asked.sizes
    count, moved = flops(kernel, sizes, share), hbm_bytes(kernel, sizes)
    timed = seconds if kernel.role in ("forward", "keys") else None  # a call's other kernels take little of its time
    on_roof = roofline.point(card, kernel.role, count, moved, timed) if card and count and moved else None
    what, formula = OF_ROLE.get(kernel.role, ("Adds up the gradient of a captured array", ""))
    events = run.events.get(kernel.entry) if run else None
    recorded = timeline_of(events, kernel) if events is not None else None
    timeline = recorded if recorded and recorded.spans else None  # a kernel without tiles has nothing to show
    data = {
        "pass": of,
        "role": kernel.role,
        "name": kernel.name,
        "entry": kernel.entry,
        "what": what,
        "formula": formula,
        "plan": asdict(kernel.plan) if is_dataclass(kernel.plan) and not isinstance(kernel.plan, type) else None,
        "threads": kernel.threads,
        "shared_bytes": kernel.shared_bytes,
        "shared": [region._asdict() for region in kernel.shared.regions()],
        "shared_overlays": [region._asdict() for region in kernel.shared.overlays()],
        "mbarriers": {name: at for at, name in kernel.shared.barrier_offsets().items()},
        "cost": asdict(kernel.cost) if kernel.cost else None,
        "flops": count,
        "hbm_bytes": moved,
        "roofline": on_roof.to_dict() if on_roof else None,
        **_compiled(kernel),
        "steps": [step.to_dict() for step in steps_of(kernel.role, kernel.source)],
        "timeline": timeline.to_dict() if timeline else None,
        "lines": kernel.source.count("\n"),
    }
    return KernelFacts(of, kernel, data, timeline)


def _compiled(kernel: RenderedKernel) -> dict[str, Any]:
    """Registers, occupancy and instructions; where there is no NVRTC, why there are none."""
    if not nvrtc.is_available():
        why = "NVRTC is not installed (the extras `cuda13` and `cuda12` have it), so that nothing was compiled"
        return {"resources": None, "occupancy": None, "instructions": None, "not_compiled": why}
    entry: Entry = default_cache().load_or_compile(kernel.name, kernel.source, kernel.target.architecture)
    registers = entry.resources.registers
    fits = occupancy(kernel.target, kernel.threads, registers, kernel.shared_bytes + entry.resources.static_shared)
    return {
        "resources": entry.resources.to_dict(),
        "occupancy": fits.to_dict(),
        "instructions": instructions_of(kernel, entry).to_dict(),
        "not_compiled": None,
    }


def _traffic(asked: Asked, target: Target, passes: Mapping[Pass, Kernels], maps: Sequence[Map]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for map_ in maps:
        if map_.of == "forward":
            counted = forward_traffic(asked.spec, target, map_.tiles, asked.sizes)
        else:
            counted = backward_traffic(asked.spec, target, passes["backward"], asked.sizes)
        rows[map_.of] = [row.to_dict() for row in counted]
    return rows


def _checked(run: Run | None, refused: str) -> dict[str, Any]:
    if run is None:
        return {"run": None, "why_not": refused, "verdicts": {}}
    verdicts = {
        name: {"ok": verdict.ok, "error": verdict.error, "bound": verdict.bound, "lse_error": verdict.lse_error}
        for name, verdict in run.verdicts.items()
    }
    return {"run": asdict(run.shape), "why_not": None, "verdicts": verdicts}


def check_asked(asked: Asked) -> None:
    """Raises ArgumentError for captures that the mask does not know."""
    unknown = sorted(set(asked.captures) - {capture.name for capture in asked.spec.captures})
    if unknown:
        known = ", ".join(capture.name for capture in asked.spec.captures) or "nothing"
        raise ArgumentError(f"captures {', '.join(unknown)}: {asked.spec.mask.name} captures {known}")
