"""Which kernels a spec needs on a target, pass by pass: one answer for those who launch, release and show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, get_args

from flashgen.codegen.families import AnyForwardPlan, plan_packing, render_forward
from flashgen.codegen.mma_sync.backward import render_backward
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import Target
from flashgen.codegen.tile_list_kernel import render_lists
from flashgen.errors import SpecError
from flashgen.language.spec import AttentionSpec

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)

Kernels = Mapping[str, RenderedKernel]
"""Kernels by the part that each plays, in the order of their launches."""


def kernels_of(
    spec: AttentionSpec,
    target: Target,
    passes: Iterable[Pass] = ("forward",),
    *,
    deterministic: bool = False,
    apart: bool = False,
    packed_heads: int = 1,
) -> Kernels:
    """Every kernel that calls of these passes launch, with default plans; the forward's with so many heads packed.

    Forward: "lists" where the mask has no closed form, then "forward". Backward: "query_lists" and "lists" for its own
    tiles where they are read, "prepare", "keys", "queries" or "finish", and "d_<name>" for each capture that has a
    gradient. With both passes the backward's lists are "backward_lists".

    apart: under names of which no two kernels of a spec and target are alike, in place of those that launches know.

    Raises:
        SpecError: a pass that there is not.
        UnsupportedError: the target cannot run the spec, or cannot pack heads.
    """
    kernels: dict[str, RenderedKernel] = {}
    for name in passes:
        if name not in PASSES:
            raise SpecError(f"pass {name!r} is not known; choose from {', '.join(PASSES)}")
        more = (
            forward_kernels(spec, target, packed_heads)
            if name == "forward"
            else backward_kernels(spec, target, deterministic, apart)
        )
        kernels |= {f"backward_{part}" if part in kernels else part: kernel for part, kernel in more.items()}
    return kernels


def forward_kernels(
    spec: AttentionSpec, target: Target, packed_heads: int = 1, plan: AnyForwardPlan | None = None
) -> Kernels:
    """The kernels of a forward call, of a plan, or with so many query heads of a head of K and V as rows of a tile."""
    forward = render_forward(spec, target, plan or plan_packing(spec, target, packed_heads))
    lists = {"lists": render_lists(spec, target, forward.plan)} if forward.uses_lists else {}
    return {**lists, "forward": forward}


def backward_kernels(
    spec: AttentionSpec,
    target: Target,
    deterministic: bool = False,
    apart: bool = False,
    plan: BackwardPlan | None = None,
) -> Kernels:
    """The kernels of a backward call; `apart` as above; `plan` of the kernel of keys."""
    backward = render_backward(spec, target, plan, deterministic)
    kernels: dict[str, RenderedKernel | None] = {}
    if backward.uses_lists:
        kernels["query_lists"] = render_lists(spec, target, backward.plan, "queries")
    if backward.uses_key_lists:
        assert backward.queries_plan is not None, "the kernel of queries has a plan"
        kernels["lists"] = render_lists(spec, target, backward.queries_plan)
    kernels |= {"prepare": backward.prepare, "keys": backward.keys}
    kernels |= {"queries": backward.queries, "finish": backward.finish}
    kernels |= {f"d_{name}": kernel for name, kernel in backward.captures.items()}
    present = {part: kernel for part, kernel in kernels.items() if kernel is not None}
    return set_apart(present, deterministic) if apart else present


def set_apart(backward: Kernels, deterministic: bool) -> Kernels:
    """The kernels of a backward call under names of which no two kernels of a spec and target are alike."""
    apart = {part: _named("backward", kernel) if part == "lists" else kernel for part, kernel in backward.items()}
    return {part: _named("deterministic", kernel) for part, kernel in apart.items()} if deterministic else apart


def _named(prefix: str, kernel: RenderedKernel) -> RenderedKernel:
    return replace(kernel, name=f"{prefix}-{kernel.name}")
