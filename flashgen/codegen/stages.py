"""The kernels that a spec needs on a target for each pass, for launches, releases and `flashgen show`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

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
"""The passes, and "decode" for the forward kernels of few queries over many keys."""

Kernels = Mapping[str, RenderedKernel]
"""The stages of a pass: role -> kernel, in launch order."""


RENAMED_ROLES = {
    "prepare": "preprocess",
    "keys": "dkdv",
    "queries": "dq",
    "finish": "postprocess",
    "finish_dk": "postprocess_dk",
    "finish_dv": "postprocess_dv",
}
"""Roles of backward kernels that have another name now."""


def current_role(role: str) -> str:
    """Returns the present name of a role; a former name emits a DeprecationWarning."""
    if role in RENAMED_ROLES:
        message = f"the kernel {role!r} of the backward is {RENAMED_ROLES[role]!r} now; the old name will be removed"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
    return RENAMED_ROLES.get(role, role)


def kernels_of(
    spec: AttentionSpec,
    target: Target,
    passes: Iterable[Part] = ("forward",),
    *,
    deterministic: bool = False,
    unique_names: bool = False,
    packed_heads: int = 1,
    smaller_tiles: bool = False,
    heads_apart: bool = False,
) -> Kernels:
    """Returns every kernel that calls of these passes launch with default plans, by role.

    Forward: "lists" if the mask has no closed form, then "forward".

    Decode: "decode", and "decode_many", "decode_long" and "decode_rows32" if the spec has plans for other sizes.
    "decode_lists" comes first if the mask has no closed form. With paged K and V there are also "decode_scheduled" for
    several sequences, and "decode_schedule", which computes its tile schedule.

    Backward: "query_lists" and "lists" if tiles are read from lists; "preprocess"; "dkdv"; then "dq" or "postprocess"
    (with one CTA per query head also "postprocess_dk" and "postprocess_dv"); "sink" if the sinks have a gradient; and
    "d_<name>" for captures whose gradient needs a kernel. With both passes its lists are "backward_lists".

    Args:
        unique_names: Whether no two kernels of a spec and target have the same `name`, as files of a release need.
            Launches use the default names.
        packed_heads: Query heads of a KV head that are rows of a forward tile.
        smaller_tiles: Whether the forward plan has smaller tiles of queries.
        heads_apart: Whether the backward plan has one CTA per query head.

    Raises:
        SpecError: There is no such pass.
        UnsupportedError: The target cannot run the spec, cannot pack heads, or has no smaller tiles for it.
    """
    kernels: dict[str, RenderedKernel] = {}
    options = _Options(deterministic, unique_names, packed_heads, smaller_tiles, heads_apart)
    for part in passes:
        if part not in _KERNELS:
            raise SpecError(f"pass {part!r} is not known; choose from {', '.join(PARTS)}")
        own = _KERNELS[part](spec, target, options)
        kernels |= {f"{part}_{role}" if role in kernels else role: kernel for role, kernel in own.items()}
    return kernels


class _Options(NamedTuple):
    """The arguments of `kernels_of` that select kernels of a pass."""

    deterministic: bool
    unique_names: bool
    packed_heads: int
    smaller_tiles: bool
    heads_apart: bool


def _forward(spec: AttentionSpec, target: Target, options: _Options) -> Kernels:
    return forward_kernels(spec, target, options.packed_heads, options.smaller_tiles)


def _decode(spec: AttentionSpec, target: Target, options: _Options) -> Kernels:
    return decode_kernels(spec, target, options.unique_names)


def _backward(spec: AttentionSpec, target: Target, options: _Options) -> Kernels:
    plan = required_head_split_plan(spec, target) if options.heads_apart else None
    return backward_kernels(spec, target, options.deterministic, options.unique_names, plan)


_KERNELS: dict[Part, Callable[[AttentionSpec, Target, _Options], Kernels]] = {
    "forward": _forward,
    "decode": _decode,
    "backward": _backward,
}
"""A row for each pass: the function that returns its kernels by role."""


def kernels_by_sizes(
    spec: AttentionSpec, target: Target, part: Part, heads_per_kv: int, deterministic: bool = False
) -> Iterator[Kernels]:
    """Yields the kernels that calls of some sizes launch in place of the default ones, for each plan.

    `heads_per_kv` is that of the calls. The names of the kernels are unique for a spec and target.
    """
    if part == "forward":
        for plan in refined_plans(spec, target, heads_per_kv):
            yield forward_kernels(spec, target, plan=plan)
    if part != "backward" or heads_per_kv == 1 or deterministic:
        return
    split = head_split_plan(spec, target)
    if split and split.problem(spec, target) is None:
        kernels = backward_kernels(spec, target, unique_names=True, plan=split)
        shared = {kernel.source for kernel in backward_kernels(spec, target).values()}
        yield {
            role: kernel if kernel.source in shared else _with_prefix("heads-apart", kernel)
            for role, kernel in kernels.items()
        }


def forward_kernels(
    spec: AttentionSpec,
    target: Target,
    packed_heads: int = 1,
    smaller_tiles: bool = False,
    plan: Plan | None = None,
) -> Kernels:
    """Returns the kernels of a forward call, with `plan` or with the plan that the other options select."""
    plan = plan or plan_with(spec, target, packed_heads, smaller_tiles)
    return with_lists(spec, render_forward_kernels(spec, target, plan))


def decode_kernels(spec: AttentionSpec, target: Target, unique_names: bool = False) -> Kernels:
    """Returns the decode kernels of all default decode plans; a call launches those of one plan.

    With `unique_names`, list kernels are renamed, because their tiles differ from those of the forward.
    """
    decode, kernels = forward_family(target).decode, {}
    for plan in decode.default_plans(spec, target):
        plan_kernels, part = forward_kernels(spec, target, plan=plan), plan.part(spec)
        if plan.scheduled:
            kernels[part.replace("scheduled", "schedule")] = decode.render_schedule(spec, target, plan)
        for role, kernel in plan_kernels.items():
            if role == "lists" and unique_names:
                kernel = _with_prefix("decode", kernel)
            kernels[part if role == "forward" else part.replace("decode", f"decode_{role}", 1)] = kernel
    return kernels


def backward_kernels(
    spec: AttentionSpec,
    target: Target,
    deterministic: bool = False,
    unique_names: bool = False,
    plan: Any = None,
) -> Kernels:
    """Returns the kernels of a backward call; `plan` is the plan of its main kernel, None for the default."""
    kernels = with_lists(spec, render_backward_kernels(spec, target, plan, deterministic))
    return with_unique_names(kernels, deterministic) if unique_names else kernels


def with_lists(spec: AttentionSpec, kernels: Iterable[RenderedKernel]) -> Kernels:
    """Returns the kernels of a pass by role, preceded by the kernels that write the tile lists they read."""
    stages = {kernel.role: kernel for kernel in kernels}
    readers = [kernel for kernel in stages.values() if kernel.reads]
    lists = [render_lists(spec, kernel.target, kernel.plan, kernel.reads) for kernel in readers if kernel.reads]
    return {kernel.role: kernel for kernel in lists} | stages


def struct_values(kernel: RenderedKernel, spec: AttentionSpec, sizes: Sizes) -> dict[str, Any]:
    """Returns the struct members that follow from sizes: integers, or formulas if the sizes are symbolic."""
    values = size_values(sizes) | dict(kernel.values(sizes))
    if kernel.reads:
        values["list_strides"] = list_shape(spec, kernel.plan, kernel.reads, sizes).strides
    return values


def with_unique_names(backward: Kernels, deterministic: bool) -> Kernels:
    """Returns the kernels of a backward call with names that are unique for a spec and target."""
    renamed = {role: _with_prefix("backward", it) if role == "lists" else it for role, it in backward.items()}
    return {role: _with_prefix("deterministic", it) for role, it in renamed.items()} if deterministic else renamed


def _with_prefix(prefix: str, kernel: RenderedKernel) -> RenderedKernel:
    return replace(kernel, name=f"{prefix}-{kernel.name}")
