"""Which kernels a spec needs on a target, pass by pass: one answer for those who launch, release and show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from flashgen.codegen.dispatch import (
    head_split_plan,
    plan_with,
    refined_plans,
    render_backward_kernels,
    render_forward_kernels,
    required_head_split_plan,
)
from flashgen.codegen.families import forward_family
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes, size_values
from flashgen.codegen.targets import Target
from flashgen.codegen.tile_list_kernel import list_shape, render_lists
from flashgen.errors import SpecError
from flashgen.language.spec import AttentionSpec

Pass = Literal["forward", "backward"]
Part = Literal["forward", "decode", "backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)
PARTS: tuple[Part, ...] = get_args(Part)
"""Passes, and the forward's kernels for few queries over many keys apart."""

Kernels = Mapping[str, RenderedKernel]
"""The stages of a pass: kernels by the role that each plays, in the order of their launches."""


def kernels_of(
    spec: AttentionSpec,
    target: Target,
    passes: Iterable[Part] = ("forward",),
    *,
    deterministic: bool = False,
    apart: bool = False,
    packed_heads: int = 1,
    smaller_tiles: bool = False,
    heads_apart: bool = False,
) -> Kernels:
    """Every kernel that calls of these passes launch, with default plans; the forward's with so many heads packed, or
    with smaller tiles of queries, the backward's with query heads apart.

    Forward: "lists" where the mask has no closed form, then "forward". Decode: "decode_lists" likewise, then "decode"
    or, for more rows where tiles may have as many, "decode_rows32"; over pages then "decode_scheduled" for several
    sequences, and "decode_schedule", which schedules it beforehand, both of more rows likewise. Backward: "query_lists"
    and "lists" for its own tiles where they are read, "prepare", "keys", "queries" or "finish" (and, of heads apart,
    "finish_dk" and "finish_dv"), and "d_<name>" for each capture that has a gradient. With both passes the backward's
    lists are "backward_lists".

    apart: under names of which no two kernels of a spec and target are alike, in place of those that launches know.

    Raises:
        SpecError: a pass that there is not.
        UnsupportedError: the target cannot run the spec, cannot pack heads, or has no smaller tiles for it.
    """
    kernels: dict[str, RenderedKernel] = {}
    for name in passes:
        if name not in PARTS:
            raise SpecError(f"pass {name!r} is not known; choose from {', '.join(PARTS)}")
        if name == "decode":
            kernels |= decode_kernels(spec, target, apart)
            continue
        if name == "forward":
            more = forward_kernels(spec, target, packed_heads, smaller_tiles)
        else:
            plan = required_head_split_plan(spec, target) if heads_apart else None
            more = backward_kernels(spec, target, deterministic, apart, plan)
        kernels |= {f"backward_{part}" if part in kernels else part: kernel for part, kernel in more.items()}
    return kernels


def kernels_by_sizes(
    spec: AttentionSpec, target: Target, part: Part, heads_per_kv: int, deterministic: bool = False
) -> Iterator[Kernels]:
    """The kernels that calls of some sizes launch in place of a pass's default ones, plan by plan.

    heads_per_kv: how many query heads share a head of k and v in these calls. The kernels' names are their own: no two
    of a spec and target are alike.
    """
    if part == "forward":
        for plan in refined_plans(spec, target, heads_per_kv):
            yield forward_kernels(spec, target, plan=plan)
    if part != "backward" or heads_per_kv == 1 or deterministic:
        return
    divided = head_split_plan(spec, target)
    if divided and divided.problem(spec, target) is None:
        kernels = backward_kernels(spec, target, apart=True, plan=divided)
        shared = {kernel.source for kernel in backward_kernels(spec, target).values()}
        yield {
            role: kernel if kernel.source in shared else _named("heads-apart", kernel)
            for role, kernel in kernels.items()
        }


def forward_kernels(
    spec: AttentionSpec,
    target: Target,
    packed_heads: int = 1,
    smaller_tiles: bool = False,
    plan: Plan | None = None,
) -> Kernels:
    """The kernels of a forward call, of a plan, or with so many query heads of a head of K and V as rows of a tile, or
    with smaller tiles of queries."""
    plan = plan or plan_with(spec, target, packed_heads, smaller_tiles)
    return with_lists(spec, render_forward_kernels(spec, target, plan))


def decode_kernels(spec: AttentionSpec, target: Target, apart: bool = False) -> Kernels:
    """Those of few queries over many keys: a kernel for each number of rows of a tile, which are calls of their own.

    apart: as above, of lists, whose tiles are others than the forward's.
    """
    decode, kernels = forward_family(target).decode, {}
    for plan in decode.default_plans(spec, target):
        of_plan, part = forward_kernels(spec, target, plan=plan), plan.part(spec)
        if plan.scheduled:
            kernels[part.replace("scheduled", "schedule")] = decode.render_schedule(spec, target, plan)
        for role, kernel in of_plan.items():
            if role == "lists" and apart:
                kernel = _named("decode", kernel)
            kernels[part if role == "forward" else part.replace("decode", f"decode_{role}", 1)] = kernel
    return kernels


def backward_kernels(
    spec: AttentionSpec,
    target: Target,
    deterministic: bool = False,
    apart: bool = False,
    plan: Any = None,
) -> Kernels:
    """The kernels of a backward call; `apart` as above; `plan` of its main kernel."""
    kernels = with_lists(spec, render_backward_kernels(spec, target, plan, deterministic))
    return with_unique_names(kernels, deterministic) if apart else kernels


def with_lists(spec: AttentionSpec, kernels: Iterable[RenderedKernel]) -> Kernels:
    """The kernels of a pass by their roles, and before them those that list the tiles which they read."""
    stages = {kernel.role: kernel for kernel in kernels}
    readers = [kernel for kernel in stages.values() if kernel.reads]
    lists = [render_lists(spec, kernel.target, kernel.plan, kernel.reads) for kernel in readers if kernel.reads]
    return {kernel.role: kernel for kernel in lists} | stages


def struct_values(kernel: RenderedKernel, spec: AttentionSpec, sizes: Sizes) -> dict[str, Any]:
    """The members of a kernel's struct that follow from sizes: numbers, or formulas of named ones."""
    values = size_values(sizes) | dict(kernel.values(sizes))
    if kernel.reads:
        values["list_strides"] = list_shape(spec, kernel.plan, kernel.reads, sizes).strides
    return values


def with_unique_names(backward: Kernels, deterministic: bool) -> Kernels:
    """The kernels of a backward call under names of which no two kernels of a spec and target are alike."""
    apart = {part: _named("backward", kernel) if part == "lists" else kernel for part, kernel in backward.items()}
    return {part: _named("deterministic", kernel) for part, kernel in apart.items()} if deterministic else apart


def _named(prefix: str, kernel: RenderedKernel) -> RenderedKernel:
    return replace(kernel, name=f"{prefix}-{kernel.name}")
