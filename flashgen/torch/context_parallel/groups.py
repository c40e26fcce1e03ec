"""The ranks of a call: a process group, a device mesh, or two groups, for the ring and for the exchange of heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashgen.errors import ArgumentError


class Ranks(NamedTuple):
    """The groups of a call. Ranks are numbered so that those of a heads group are consecutive.

    Attributes:
        ring: the group that sends keys and values around or gathers them; None in the scheme "ulysses".
        heads: the group that exchanges heads, or None.
        world: the group of all ranks; None if only the two groups are known.
    """

    ring: Any
    heads: Any
    world: Any

    @property
    def ring_size(self) -> int:
        return 1 if self.ring is None else dist.get_world_size(self.ring)

    @property
    def heads_size(self) -> int:
        return 1 if self.heads is None else dist.get_world_size(self.heads)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ring_size * self.heads_size

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring is None else dist.get_rank(self.ring)

    @property
    def heads_rank(self) -> int:
        return 0 if self.heads is None else dist.get_rank(self.heads)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.ring_rank * self.heads_size + self.heads_rank

    @property
    def groups(self) -> list[Any]:
        """The groups of the call. A reduction over all ranks is one over each of them in turn."""
        return [group for group in (self.ring, self.heads) if group is not None]


def ranks_of(group: Any, scheme: str) -> Ranks:
    """Returns the ranks of a call from its argument `group`; None is the default group.

    Raises ArgumentError if it is not a group, or if the scheme takes another number of dimensions.
    """
    if not dist.is_initialized():
        raise ArgumentError("group: there is none; call torch.distributed.init_process_group first")
    if scheme == "ulysses_ring":
        world, (ring, heads) = _two_groups(group)
        return Ranks(ring, heads, world)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            named = f"mesh[{group.mesh_dim_names[0]!r}]" if group.mesh_dim_names else "one of its dimensions"
            raise ArgumentError(
                f"group is a device mesh of {group.ndim} dimensions; scheme={scheme!r} takes a mesh of one: give "
                f"{named}, or scheme='ulysses_ring'"
            )
        group = group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f"group={group!r}: give a ProcessGroup or a DeviceMesh, or None for the default group")
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ArgumentError("group: this process is not in it")
    return Ranks(None, group, group) if scheme == "ulysses" else Ranks(group, None, group)


def _two_groups(group: Any) -> tuple[Any, tuple[Any, Any]]:
    """Returns (group of all ranks or None, (ring, heads)) of a two-dimensional mesh or a pair of groups."""
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        all_ranks = sorted(group.mesh.flatten().tolist())
        world = dist.group.WORLD if all_ranks == list(range(dist.get_world_size())) else None
        return world, (group.get_group(0), group.get_group(1))
    if isinstance(group, (tuple, list)) and len(group) == 2:
        return None, (group[0], group[1])
    raise ArgumentError(
        "group: scheme='ulysses_ring' takes a device mesh of two dimensions, or a pair of groups: that of the ring, "
        "then that which exchanges heads"
    )
