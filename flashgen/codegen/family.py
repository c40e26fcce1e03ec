"""What a family of kernels is to the rest: a record for each pass that it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class PlansBySizes:
    """Plans that calls of some sizes take in place of the one that holds for all.

    packing: a plan with so many of the query heads that share a head of K and V as rows of one tile. smaller: the plan
    of fewer queries a tile beside a spec's default one, or None. chosen: what makes a call of these sizes cheaper than
    the given plan does, by either or both; None where nothing does. every: what `chosen` may give beside a default
    plan, where so many query heads share a head of K and V. option: what `flashgen show` is told for a plan of smaller
    tiles, nothing for others.
    """

    packing: Callable[[Any, int, AttentionSpec], Plan]
    smaller: Callable[[AttentionSpec, Target], Plan | None]
    chosen: Callable[[Any, AttentionSpec, Target, Workload], Plan | None]
    every: Callable[[Any, AttentionSpec, Target, int], Sequence[Plan]]
    option: Callable[[Any, AttentionSpec, Target], str]


class DecodingPlan(Plan, Protocol):
    """The plan of a decode kernel."""

    @property
    def scheduled(self) -> bool: ...

    def part(self, spec: AttentionSpec) -> str:
        """What the kernel of a default plan is called among those that decode."""


@dataclass(frozen=True)
class Decoding:
    """How few queries over many keys are attended to, by a kernel that splits the keys over the card.

    plan: the class of its plans. splitting: the classes of all whose blocks share keys, with that of mixed batches.
    default_plans: those that calls may take, the one for the fewest rows first. chosen:
    that of calls of these sizes, or None where the forward kernel does them. of_rows: that of calls with so many rows
    for each head of k and v, whatever their sizes; the last argument says whether blocks share the keys of all
    sequences, over pages. splits: into how many parts a call's keys are split. render: as of a forward. cache_plans,
    cache_plan: of keys in pages or of 8 bits, the classes of plans, and the default one. every_plan: those that tuning
    may choose from for calls that take the last argument, the likeliest first, whether or not they fit;
    every_cache_plan: likewise of many queries, in any order. schedule: the kernel that
    says beforehand how blocks share keys, of a plan of that form; schedule_size: how many int32 it says that in.
    """

    plan: type[DecodingPlan]
    splitting: tuple[type[Plan], ...]
    default_plans: Callable[[AttentionSpec, Target], tuple[DecodingPlan, ...]]
    chosen: Callable[[AttentionSpec, Target, Workload], Plan | None]
    of_rows: Callable[[AttentionSpec, Target, int, bool], DecodingPlan]
    splits: Callable[[AttentionSpec, Any, Sizes], int]
    render: Callable[[AttentionSpec, Target, Any], tuple[RenderedKernel, ...]]
    cache_plans: Callable[[AttentionSpec], tuple[type[Plan], ...]]
    cache_plan: Callable[[AttentionSpec, Target], Plan]
    every_plan: Callable[[AttentionSpec, Target, Any], Iterator[DecodingPlan]]
    every_cache_plan: Callable[[AttentionSpec, Target], Iterator[Plan]]
    schedule: Callable[[AttentionSpec, Target, Any], RenderedKernel]
    schedule_size: Callable[[AttentionSpec, Any, Sizes], int]


@dataclass(frozen=True)
class ForwardFamily:
    """How a family does the forward pass.

    Attributes:
        plan: the class of its plans.
        default_plan: what a spec gets on a target where nobody says another.
        every_plan: those that tuning may choose from, whether or not they fit.
        render: its kernels in the order of their launches, of a plan or of the default one; that which attends has the
            role "forward". A plan that does not fit is an UnsupportedError.
        decoding: of calls of few queries over many keys; None where the forward does those, too.
        by_sizes: None where one plan holds for all calls.
    """

    plan: type[Plan]
    default_plan: Callable[[AttentionSpec, Target], Plan]
    every_plan: Callable[[AttentionSpec, Target], Iterator[Plan]]
    render: Callable[[AttentionSpec, Target, Any], tuple[RenderedKernel, ...]]
    decoding: Decoding | None = None
    by_sizes: PlansBySizes | None = None


@dataclass(frozen=True)
class HeadDivision:
    """How query heads that share a head of K and V get blocks of their own in the backward.

    of: a plan with heads apart, or None where it has no such form. chosen: that where it makes a call of these sizes
    faster, or None.
    """

    of: Callable[[Any], Any | None]
    chosen: Callable[[Any, AttentionSpec, Target, Workload], Any | None]


@dataclass(frozen=True)
class BackwardFamily:
    """How a family does the backward pass.

    plans: the classes of plans of its main kernel. every_plan: those that tuning may choose from, whether or not they
    fit. render: its kernels, in the order of their launches, of a plan or of
    the default one; the last argument says whether gradients are to be bitwise equal from run to run. dividing: None
    where query heads that share a head of K and V always share blocks.
    """

    plans: tuple[type[Any], ...]
    every_plan: Callable[[AttentionSpec, Target], Iterator[Any]]
    render: Callable[[AttentionSpec, Target, Any, bool], tuple[RenderedKernel, ...]]
    dividing: HeadDivision | None = None
