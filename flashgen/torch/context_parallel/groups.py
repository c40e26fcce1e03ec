"""The ranks of a call: a process group, a device mesh, or two groups, of a ring and of those who exchange heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashgen.errors import ArgumentError


class Ranks(NamedTuple):
    """Who takes part in a call.

    ring: the group among which keys travel. heads: the group that exchanges heads, or None. whole: the group of all,
    None where only its two parts are known. Ranks are numbered so that those of a heads group stand side by side.
    """

    ring: Any
    heads: Any
    whole: Any

    @property
    def ring_size(self) -> int:
        return 1 if self.ring is None else dist.get_world_size(self.ring)

    @property
    def heads_size(self) -> int:
        return 1 if self.heads is None else dist.get_world_size(self.heads)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.ring_size * self.heads_size

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring is None else dist.get_rank(self.ring)

    @property
    def heads_rank(self) -> int:
        return 0 if self.heads is None else dist.get_rank(self.heads)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.ring_rank * self.heads_size + self.heads_rank

    @property
    def groups(self) -> list[Any]:
        """The groups that make up the whole: a sum over each in turn is one over all."""
        return [group for group in (self.ring, self.heads) if group is not None]


def ranks_of(group: Any, scheme: str) -> Ranks:
    """The ranks of a call, by its argument `group`: None is the default group.

    ArgumentError where it is no group, or not of as many dimensions as the scheme takes.
    """
    if not dist.is_initialized():
        raise ArgumentError("group: there is none; call torch.distributed.init_process_group first")
    if scheme == "ulysses_ring":
        whole, (ring, heads) = _two(group)
        return Ranks(ring, heads, whole)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            named = f"mesh[{group.mesh_dim_names[0]!r}]" if group.mesh_dim_names else "one of its dimensions"
            raise ArgumentError(
                f"group is a device mesh of {group.ndim} dimensions; scheme={scheme!r} takes one of one: give {named}, "
                "or scheme='ulysses_ring'"
            )
        group = group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f"group={group!r}: give a ProcessGroup or a DeviceMesh, or None for the default group")
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ArgumentError("group: this process is not in it")
    return Ranks(None, group, group) if scheme == "ulysses" else Ranks(group, None, group)


def _two(group: Any) -> tuple[Any, tuple[Any, Any]]:
    """(all of them, (ring, heads)) of a mesh of two dimensions, or of a pair of groups."""
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        everyone = sorted(group.mesh.flatten().tolist())
        world = dist.group.WORLD if everyone == list(range(dist.get_world_size())) else None
        return world, (group.get_group(0), group.get_group(1))
    if isinstance(group, (tuple, list)) and len(group) == 2:
        return None, (group[0], group[1])
    raise ArgumentError(
        "group: scheme='ulysses_ring' takes a device mesh of two dimensions, or a pair of groups: first the ring, then "
        "those who exchange heads"
    )
