"""The data of a report, which the page shows and `--json` prints."""

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
from flashgen.report.stages import BY_ROLE, steps_of
from flashgen.report.timeline import Timeline, timeline_of
from flashgen.report.traffic import backward_traffic, flops, forward_traffic, hbm_bytes
from flashgen.verify.problems import CaptureMaker, Shape, random_captures

MAX_MAPS = 8  # tile maps of different sequences and heads on a page


@dataclass(frozen=True, eq=False)
class ReportRequest:
    """The parameters of a report.

    captures: the arrays that the mask captures, by name, for the tile map. maker: creates the captures of the short
    run; random captures are used where neither is given. run: whether the emulator runs the kernels once. measure:
    whether calls of these sizes are timed, if a GPU that runs the target is present. plan: parameters of the forward
    plan that override those of the default plan.
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
    """The tile map of a pass, for each sequence and head where they differ, and the arrays that the mask reads.

    random: whether some of the arrays are random because they were not given.
    """

    pass_: Pass
    tiles: TileMap
    random: bool
    arrays: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        kinds = {"full": FULL, "partial": PARTIAL, "empty": EMPTY}
        counts = {name: self.tiles.count(kind) for name, kind in kinds.items()}
        batch, heads = self.tiles.classes.shape[:2]
        return {
            "pass": self.pass_,
            "tile": list(self.tiles.tile),
            "share": self.tiles.share,
            **counts,
            "differs_between": {"sequences": batch > 1, "heads": heads > 1},
            "captures": "random" if self.random else "given",
        }

    @property
    def positions(self) -> list[tuple[int, int]]:
        """The (sequence, head) of each map that the page shows, at most MAX_MAPS."""
        batch, heads = self.tiles.classes.shape[:2]
        return list(np.ndindex(batch, heads))[:MAX_MAPS]


@dataclass(frozen=True, eq=False)
class KernelFacts:
    """A kernel, its data in the report, and its timeline if it was run."""

    pass_: Pass
    kernel: RenderedKernel
    data: dict[str, Any]
    timeline: Timeline | None


@dataclass(frozen=True, eq=False)
class Report:
    """The data of a report, and the objects from which its pictures are drawn."""

    request: ReportRequest
    target: Target
    maps: list[Map]
    kernels: list[KernelFacts]
    card: ReferenceGpu | None
    points: list[roofline.Point]
    data: dict[str, Any]


def report_of(request: ReportRequest) -> Report:
    """Renders, compiles and runs the kernels, and returns the report.

    Raises UnsupportedError if the target cannot run the spec.
    """
    target = target_named(request.target)
    plan = _plan(request, target)
    passes = _kernels(request, target, plan)
    maps = [_map(request, pass_, kernels) for pass_, kernels in passes.items()]
    run, refused = _run(request, passes, plan)
    card = target.reference_gpu
    seconds = _seconds(request, target, plan)
    kernels = [
        _facts(request, pass_, kernel, map_.tiles.share, run, card, seconds.get(pass_))
        for (pass_, each), map_ in zip(passes.items(), maps, strict=True)
        for kernel in each.values()
    ]
    points = [roofline.Point(**facts.data["roofline"]) for facts in kernels if facts.data["roofline"]]
    data = {
        "spec": _spec(request.spec),
        "target": {"name": target.name, "family": target.family, "backward_family": target.backward_family},
        "sizes": request.sizes.to_dict(),
        "maps": [map_.to_dict() for map_ in maps],
        "traffic": _traffic(request, target, passes, maps),
        "card": asdict(card) | {"ridge": card.ridge} if card else None,
        "kernels": [facts.data for facts in kernels],
        "seconds": seconds,
        "checked": _checked(run, refused),
    }
    return Report(request, target, maps, kernels, card, points, data)


def _plan(request: ReportRequest, target: Target) -> Plan | None:
    """Returns the forward plan with the requested parameters, or None for the default plan.

    Raises ArgumentError for parameters that the plan does not have, UnsupportedError for a plan that does not fit.
    """
    if not request.plan:
        return None
    default: Any = default_plan(request.spec, target)
    names = [each.name for each in fields(default)]
    unknown = [name for name in request.plan if name not in names]
    if unknown:
        raise ArgumentError(f"plan: {unknown[0]!r} is no parameter of {default}; choose from {', '.join(names)}")
    plan: Plan = replace(default, **request.plan)
    plan.check(request.spec, target)
    return plan


def _kernels(request: ReportRequest, target: Target, plan: Plan | None) -> dict[Pass, Kernels]:
    kernels_by_pass: dict[Pass, Kernels] = {}
    if "forward" in request.passes:
        kernels_by_pass["forward"] = forward_kernels(request.spec, target, plan=plan)
    if "backward" in request.passes:
        kernels_by_pass["backward"] = backward_kernels(request.spec, target, request.deterministic)
    return kernels_by_pass


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


def _map(request: ReportRequest, pass_: Pass, kernels: Kernels) -> Map:
    plan = kernels["forward" if pass_ == "forward" else "dkdv"].plan
    sizes, mask = request.sizes, request.spec.mask
    bound = {name: array.on_host() for name, array in mask.bound.items()}
    given: dict[str, Any] = {**bound, **request.captures}
    missing = [capture.name for capture in mask.captures if capture.name not in given]
    if missing:
        shape = Shape(sizes.len_q, sizes.len_k, sizes.batch, sizes.heads_q, sizes.heads_kv)
        random = np.random.default_rng(0)
        generated = request.maker(shape, random) if request.maker else random_captures(request.spec, shape, random)
        given |= {name: generated[name] for name in missing}
    arrays = {capture.name: given[capture.name] for capture in mask.captures}
    batch = captured_extent(mask.expression, BATCH, arrays) or sizes.batch
    heads = captured_extent(mask.expression, HEAD, arrays) or sizes.heads_q
    tile = (plan.tile_q, plan.tile_k)
    tiles = tile_map(mask.expression, tile, sizes.len_q, sizes.len_k, batch, heads, arrays)
    return Map(pass_, tiles, bool(missing), arrays)


def _run(request: ReportRequest, passes: Mapping[Pass, Kernels], plan: Plan | None) -> tuple[Run | None, str]:
    """Runs all passes once at a short length. Returns None and the reason if the kernels were not run."""
    if not request.run:
        return None, "not requested"
    forward = passes.get("forward") or forward_kernels(request.spec, target_named(request.target), plan=plan)
    plans = [(forward["forward"].plan, True)]
    if "backward" in passes:
        plans.append((passes["backward"]["dkdv"].plan, False))
    shapes = [short_shape(plan.tile_q, plan.tile_k, along_keys) for plan, along_keys in plans]
    longest = max(shapes, key=lambda shape: shape.len_q)
    try:
        # The plan is given, because a call of this length would choose smaller tiles.
        options = {"deterministic": request.deterministic, "plan": forward["forward"].plan}
        return run_once(request.spec, request.target, request.passes, longest, request.maker, **options), ""
    except BuildError as error:  # there is no C++ compiler
        return None, str(error)


def _seconds(request: ReportRequest, target: Target, plan: Plan | None) -> dict[Pass, float]:
    """Returns the seconds of a call of each pass; empty if not requested, or if this GPU does not run the target."""
    if not request.measure or not measured.runs_here(target):
        return {}
    sizes = request.sizes
    shape = Shape(sizes.len_q, sizes.len_k, sizes.batch, sizes.heads_q, sizes.heads_kv)
    given = (request.deterministic, request.captures, request.maker, plan)
    return measured.seconds_of_calls(request.spec, target, request.passes, shape, *given)


def _facts(
    request: ReportRequest,
    pass_: Pass,
    kernel: RenderedKernel,
    share: float,
    run: Run | None,
    card: ReferenceGpu | None,
    seconds: float | None,
) -> KernelFacts:
    sizes = request.sizes
    count, moved = flops(kernel, sizes, share), hbm_bytes(kernel, sizes)
    timed = seconds if kernel.role in ("forward", "dkdv") else None  # the other kernels of a call take little time
    on_roof = roofline.point(card, kernel.role, count, moved, timed) if card and count and moved else None
    what, formula = BY_ROLE.get(kernel.role, ("Adds up the gradient of a captured array", ""))
    events = run.events.get(kernel.entry) if run else None
    recorded = timeline_of(events, kernel) if events is not None else None
    timeline = recorded if recorded and recorded.spans else None  # a kernel without tiles has nothing to show
    data = {
        "pass": pass_,
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
        "cost": {"flops": kernel.cost.flops_text, "hbm": kernel.cost.hbm_text} if kernel.cost else None,
        "flops": count,
        "hbm_bytes": moved,
        "roofline": on_roof.to_dict() if on_roof else None,
        **_compiled(kernel),
        "steps": [step.to_dict() for step in steps_of(kernel.role, kernel.source)],
        "timeline": timeline.to_dict() if timeline else None,
        "lines": kernel.source.count("\n"),
    }
    return KernelFacts(pass_, kernel, data, timeline)


def _compiled(kernel: RenderedKernel) -> dict[str, Any]:
    """Returns registers, occupancy and instruction counts, or the reason for their absence if NVRTC is missing."""
    if not nvrtc.is_available():
        why = "NVRTC is not installed (the extras `cuda13` and `cuda12` install it), so nothing was compiled"
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


def _traffic(
    request: ReportRequest, target: Target, passes: Mapping[Pass, Kernels], maps: Sequence[Map]
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for map_ in maps:
        if map_.pass_ == "forward":
            counted = forward_traffic(request.spec, target, map_.tiles, request.sizes)
        else:
            counted = backward_traffic(request.spec, target, passes["backward"], request.sizes)
        rows[map_.pass_] = [row.to_dict() for row in counted]
    return rows


def _checked(run: Run | None, refused: str) -> dict[str, Any]:
    if run is None:
        return {"run": None, "why_not": refused, "verdicts": {}}
    verdicts = {
        name: {"ok": verdict.ok, "error": verdict.error, "bound": verdict.bound, "lse_error": verdict.lse_error}
        for name, verdict in run.verdicts.items()
    }
    return {"run": asdict(run.shape), "why_not": None, "verdicts": verdicts}


def check_request(request: ReportRequest) -> None:
    """Raises ArgumentError for captures that the spec does not have."""
    unknown = sorted(set(request.captures) - {capture.name for capture in request.spec.captures})
    if unknown:
        known = ", ".join(capture.name for capture in request.spec.captures) or "nothing"
        raise ArgumentError(f"captures {', '.join(unknown)}: {request.spec.mask.name} captures {known}")
