"""The interfaces of a kernel family: what it offers to dispatch, tuning and rendering, for each pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec

Kernels = tuple[RenderedKernel, ...]
"""The kernels of a pass in launch order."""


class PlanKind(NamedTuple):
    """What belongs to a class of forward plans.

    Attributes:
        render: Renders the kernels of a plan; the attention kernel has the role "forward". Raises UnsupportedError for
            a plan that does not fit the spec or the target.
        num_splits: Returns the number of KV splits of a call, or the width of the grid of stream-K work units; None
            for kernels that never split the keys.
    """

    render: Callable[[AttentionSpec, Target, Any], Kernels]
    num_splits: Callable[[AttentionSpec, Any, Sizes], int] | None = None


class SizeRules(ABC):
    """Plans that replace the default plan for calls of some sizes, to fill the GPU better."""

    @abstractmethod
    def pack_heads(self, plan: Any, packed_heads: int, spec: AttentionSpec) -> Plan:
        """Returns the plan that stacks this many query heads of one KV head as rows of a tile."""

    @abstractmethod
    def smaller_tiles(self, spec: AttentionSpec, target: Target) -> Plan | None:
        """Returns the plan with fewer queries per tile than the default plan, or None if there is none."""

    @abstractmethod
    def choose(self, plan: Any, spec: AttentionSpec, target: Target, workload: Workload) -> Plan | None:
        """Returns the plan that is faster than `plan` for a call of these sizes, or None if `plan` is the fastest."""

    @abstractmethod
    def every_plan(self, plan: Any, spec: AttentionSpec, target: Target, heads_per_kv: int) -> Sequence[Plan]:
        """Returns every plan that `choose` may return in place of the default `plan`."""

    @abstractmethod
    def show_option(self, plan: Any, spec: AttentionSpec, target: Target) -> str:
        """Returns the option with which `flashgen show` selects a plan of smaller tiles; "" for other plans."""


class DecodePlan(Plan, Protocol):
    """The plan of a decode kernel."""

    @property
    def scheduled(self) -> bool:
        """Whether thread blocks share the keys of all sequences as stream-K work units."""

    def part(self, spec: AttentionSpec) -> str:
        """Returns the name of the kernel among the decode kernels of a release."""


class DecodeFamily(ABC):
    """Decode kernels: few queries over many keys, which are split over the GPU (split-KV, Flash-Decoding).

    Attributes:
        plans: The classes of its plans.
    """

    plans: tuple[type[DecodePlan], ...]

    @abstractmethod
    def default_plans(self, spec: AttentionSpec, target: Target) -> tuple[DecodePlan, ...]:
        """Returns the plans that calls may take without tuning; that of the fewest rows per tile comes first."""

    @abstractmethod
    def choose(self, spec: AttentionSpec, target: Target, workload: Workload) -> Plan | None:
        """Returns the plan for calls of these sizes, or None if the forward kernel is faster."""

    @abstractmethod
    def plan_of_rows(self, spec: AttentionSpec, target: Target, rows: int, scheduled: bool) -> DecodePlan:
        """Returns the plan for a number of query rows per KV head, independently of the batch.

        Args:
            scheduled: Whether thread blocks share the keys of all sequences as stream-K work units.
        """

    @abstractmethod
    def candidates(self, spec: AttentionSpec, target: Target, default: Any) -> Iterator[DecodePlan]:
        """Yields the plans worth timing for calls that take `default`, the most promising first; some may not fit."""

    @abstractmethod
    def render_schedule(self, spec: AttentionSpec, target: Target, plan: Any) -> RenderedKernel:
        """Renders the kernel that computes the tile schedule of a plan whose blocks share keys."""

    @abstractmethod
    def schedule_size(self, spec: AttentionSpec, plan: Any, sizes: Sizes) -> int:
        """Returns the number of int32 values of a schedule."""


class ForwardFamily(ABC):
    """How a family of kernels does the forward pass.

    Attributes:
        plan: The class of its own plans.
        plan_kinds: The classes of all plans that its targets run, with those of its decode kernels.
        decode: Its decode kernels.
        size_rules: Plans for calls of some sizes; None if one plan is used for all sizes.
    """

    plan: type[Plan]
    plan_kinds: ClassVar[Mapping[type[Plan], PlanKind]]
    decode: DecodeFamily
    size_rules: SizeRules | None = None

    @abstractmethod
    def plan_classes(self, spec: AttentionSpec) -> tuple[type[Plan], ...]:
        """Returns the plan classes whose kernels can run the spec."""

    @abstractmethod
    def default_plan(self, spec: AttentionSpec, target: Target) -> Plan:
        """Returns the plan of the spec's forward kernel when none is given."""

    @abstractmethod
    def candidates(self, spec: AttentionSpec, target: Target) -> Iterator[Plan]:
        """Yields the plans that tuning may choose from; some may not fit the spec."""


class HeadSplit(ABC):
    """Backward plans in which query heads that share a KV head have their own thread blocks."""

    @abstractmethod
    def split_plan(self, plan: Any) -> Any | None:
        """Returns the plan with one thread block per query head, or None if its kernel has no such form."""

    @abstractmethod
    def choose(self, plan: Any, spec: AttentionSpec, target: Target, workload: Workload) -> Any | None:
        """Returns the split plan if it is faster for a call of these sizes, else None."""


class BackwardFamily(ABC):
    """How a family of kernels does the backward pass.

    Attributes:
        head_split: None if query heads that share a KV head always share thread blocks.
    """

    head_split: HeadSplit | None = None

    @abstractmethod
    def plan_classes(self, spec: AttentionSpec) -> tuple[type[Any], ...]:
        """Returns the classes of plans of the main kernel that can run the spec."""

    @abstractmethod
    def candidates(self, spec: AttentionSpec, target: Target) -> Iterator[Any]:
        """Yields the plans that tuning may choose from; some may not fit the spec."""

    @abstractmethod
    def render(self, spec: AttentionSpec, target: Target, plan: Any, deterministic: bool) -> Kernels:
        """Renders the backward kernels of a plan.

        Args:
            plan: None selects the default plan.
            deterministic: Whether gradients must be bitwise equal from run to run.
        """
