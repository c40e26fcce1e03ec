"""The attention variants of this package (specs.json): which tensors each takes, and the launches of a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import driver
from .launches import Captured, Prepared, Rows, prepare

_AXES = {
    "bhsd": ("batch", "heads", "length", "dim"),
    "bshd": ("batch", "length", "heads", "dim"),
    "thd": ("tokens", "heads", "dim"),
}
_ROW_BYTES = 16  # every row begins at a multiple of them
_LONGEST, _MAX_HEADS, _MAX_HEADS_PER_KV = 10**9, 65535, 8192


class Capture(NamedTuple):
    """An array or a number that each call of a spec supplies by name.

    Attributes:
        name: its name.
        member: its name in argument structs.
        dtype: its type, as in torch.
        ndim: the number of axes; 0 for a number.
        grad: whether the backward computes its gradient.
        sink: whether it is an extra score of each query head.
        indexed: (axis, index, block) of each axis that is read at b, h, q or k, or at blocks of them.
        distances: (axis, farthest) of each axis that is read at a distance of at most a number, or a captured number.
    """

    name: str
    member: str
    dtype: str
    ndim: int
    grad: bool
    sink: bool
    indexed: Sequence[Any]
    distances: Sequence[Any]

    @property
    def is_integer(self) -> bool:
        return "float" not in self.dtype

    def check(self, array: torch.Tensor, q: torch.Tensor, extents: Mapping[str, int]) -> None:
        """Raises ValueError if an array does not fit. extents: the numbers of sequences, query heads, and rows."""
        if array.dtype != getattr(torch, self.dtype) or array.dim() != self.ndim or array.device != q.device:
            given = f"{array.dtype} {tuple(array.shape)} on {array.device}"
            raise ValueError(f"capture {self.name!r} is {given}: give {self.dtype} of {self.ndim} axes on {q.device}")
        if not all(array.shape):
            raise ValueError(f"capture {self.name!r} has shape {tuple(array.shape)}: it needs at least one element")
        if self.sink and array.shape[0] != extents["h"]:
            raise ValueError(
                f"capture {self.name!r} has {array.shape[0]} elements: give one for each of {extents['h']} heads"
            )
        for axis, index, block in self.indexed:
            needed = -(-extents[index] // block)
            if array.shape[axis] != 1 and array.shape[axis] < needed:
                raise ValueError(
                    f"capture {self.name!r} has shape {tuple(array.shape)}: axis {axis} needs {needed} elements, or 1"
                )


class Spec:
    """A variant of attention, with kernels for one or more targets.

    Attributes:
        name: its name, by which `attention` selects it.
        mask, score: what it computes, in words of flashgen.
        arrays, numbers: what each call captures besides q, k and v.
        layout: the order of the axes of q, k, v and the output: "bhsd", "bshd", or "thd" for packed sequences.
        targets: the names of the GPU architectures that have kernels, such as "sm_90a".
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.name: str = facts["name"]
        self.mask: str = facts["mask"]
        self.score: str | None = facts["score"]
        self.dropout: float = facts["dropout"]
        self.head_dim: int = facts["head_dim"]
        self.value_dim: int = facts["value_dim"]
        self.dtype, self.out_dtype, self.grad_dtype = (
            getattr(torch, facts[name]) for name in ("dtype", "out_dtype", "grad_dtype")
        )
        self.layout: str = facts["layout"]
        self.axes = _AXES[self.layout]
        captures = [Capture(**each) for each in facts["captures"]]
        self.arrays = [each for each in captures if each.ndim]
        self.numbers = [each for each in captures if not each.ndim]
        self.is_varlen = self.layout == "thd"
        self._rows_axis = next(axis for axis in ("length", "tokens") if axis in self.axes)
        self._kernels: Mapping[str, Mapping[str, Sequence[str]]] = facts["kernels"]
        self.targets = tuple(self._kernels)

    def __repr__(self) -> str:
        score = f", score {self.score}" if self.score else ""
        return f"<{self.name}: mask {self.mask}{score}, q {self.dtype} ({', '.join(self.axes)}), for {self.targets}>"

    @property
    def has_backward(self) -> bool:
        """Whether gradients can be computed."""
        return all("backward" in passes for passes in self._kernels.values())

    def lse_shape(self, q: torch.Tensor) -> tuple[int, ...]:
        """Returns the shape of the logarithms of the sums of each row, (batch, heads, length) or (heads, tokens)."""
        sizes = dict(zip(self.axes, q.shape))
        return tuple(sizes[axis] for axis in ("batch", "heads", self._rows_axis) if axis in sizes)

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raises ValueError if shapes, dtypes, strides or devices do not fit. Works for tensors without data."""
        dims = {"q": self.head_dim, "k": self.head_dim, "v": self.value_dim}
        for (name, dim), tensor in zip(dims.items(), (q, k, v)):
            self._check_tensor(name, tensor, dim, q.device)
        (rows_q, heads_q), (rows_k, heads_kv) = map(self._rows_and_heads, (q, k))
        if k.shape[:-1] != v.shape[:-1]:
            raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: every key needs one value")
        batch, batch_k = (dict(zip(self.axes, tensor.shape)).get("batch", 0) for tensor in (q, k))
        if batch != batch_k:
            raise ValueError(f"q has batch {batch} and k {batch_k}: give tensors of one batch size")
        if heads_q and (not heads_kv or heads_q % heads_kv):
            raise ValueError(f"q has {heads_q} heads, no multiple of the {heads_kv} heads of k and v ({self.axes})")
        if max(batch, heads_q) > _MAX_HEADS or heads_q > _MAX_HEADS_PER_KV * max(heads_kv, 1):
            most = f"{_MAX_HEADS}, and {_MAX_HEADS_PER_KV} heads of q for each of k and v"
            raise ValueError(f"q has batch {batch} and {heads_q} heads: give at most {most}")
        if max(rows_q, rows_k) > _LONGEST:
            raise ValueError(f"q has {rows_q} rows and k {rows_k}: they must be at most {_LONGEST}")

    def _check_tensor(self, name: str, tensor: torch.Tensor, dim: int, device: torch.device) -> None:
        if tensor.dtype != self.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, and {self.name} takes {self.dtype}: convert it")
        if tensor.dim() != len(self.axes) or tensor.shape[-1] != dim:
            shape = f"({', '.join(self.axes[:-1])}, {dim})"
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, and {self.name} takes {shape}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and q on {device}: move it there")
        if not has_aligned_rows(tensor):
            raise ValueError(
                f"{name} has strides {tensor.stride()} (elements): its rows must be contiguous and begin at multiples "
                f"of {_ROW_BYTES} bytes: give {name}.contiguous()"
            )

    def _rows_and_heads(self, tensor: torch.Tensor) -> tuple[int, int]:
        return tensor.shape[self.axes.index(self._rows_axis)], tensor.shape[self.axes.index("heads")]

    def rows(self, tensor: torch.Tensor) -> Rows:
        """Returns the geometry of a tensor of rows."""
        rows, heads = self._rows_and_heads(tensor)
        strides = dict(zip(self.axes, tensor.stride()))
        return Rows(rows, heads, (strides.get("batch", 0), strides["heads"], strides[self._rows_axis]))

    def split(self, captures: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[float]]:
        """Returns the captured arrays and numbers of a call in order. Raises ValueError for wrong names."""
        if not captures and not self.arrays and not self.numbers:
            return [], []
        names = [each.name for each in (*self.arrays, *self.numbers)]
        if set(names) != set(captures):
            raise ValueError(f"captures are {sorted(captures)}, and {self.name} takes {sorted(names)}")
        return [captures[each.name] for each in self.arrays], [captures[each.name] for each in self.numbers]

    def sizes(
        self, q: torch.Tensor, k: torch.Tensor, batch: int | None, longest: tuple[int | None, int | None]
    ) -> dict[str, int]:
        """Returns the sizes of a call, by their names in formulas.

        batch, longest: the number of packed sequences, and bounds of their numbers of queries and keys; None in other
        layouts, and for unknown bounds.
        """
        (rows_q, heads_q), (rows_k, heads_kv) = self._rows_and_heads(q), self._rows_and_heads(k)
        len_q, len_k = (rows if bound is None else min(bound, rows) for rows, bound in zip((rows_q, rows_k), longest))
        return {
            "batch": q.shape[0] if batch is None else batch,
            "heads_q": heads_q,
            "heads_kv": heads_kv,
            "len_q": len_q,
            "len_k": len_k,
            "total_q": rows_q,
            "total_k": rows_k,
        }

    def check_arrays(self, q: torch.Tensor, sizes: Mapping[str, int], arrays: Sequence[torch.Tensor]) -> None:
        """Raises ValueError if captured arrays do not fit the sizes of a call."""
        extents = dict(zip("bhqk", (sizes[name] for name in ("batch", "heads_q", "len_q", "len_k"))))
        for capture, array in zip(self.arrays, arrays):
            capture.check(array, q, extents)

    def check_numbers(self, arrays: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        """Raises ValueError if captured numbers do not fit their declarations, or the sizes of captured arrays."""
        for capture, number in zip(self.numbers, numbers):
            if capture.is_integer and not (float(number).is_integer() and -(2**31) <= number < 2**31):
                raise ValueError(f"capture {capture.name!r} is {number}: give an integer of 32 bits")
        by_name = {capture.name: number for capture, number in zip(self.numbers, numbers)}
        for capture, array in zip(self.arrays, arrays):
            for axis, farthest in capture.distances:
                wanted = 2 * int(by_name[farthest] if isinstance(farthest, str) else farthest) + 1
                if array.shape[axis] not in (1, wanted):
                    raise ValueError(
                        f"capture {capture.name!r} has shape {tuple(array.shape)}: axis {axis} is of distances, it "
                        f"needs {wanted} elements, or 1"
                    )

    def prepare(
        self,
        part: str,
        sizes: Mapping[str, int],
        arrays: Mapping[str, torch.Tensor],
        captured: Sequence[torch.Tensor],
        order: Sequence[str],
    ) -> Prepared:
        """Returns the launches of a pass ("forward" or "backward") on the device of q.

        arrays: the tensors of rows, by name. captured: the captured arrays. order: as `launches.prepare` takes it.
        """
        device = arrays["q"].device
        sizes = {**sizes, "multiprocessors": driver.multiprocessors(device)}
        geometry = {name: self.rows(tensor) for name, tensor in arrays.items()}
        captures = {}
        for capture, tensor in zip(self.arrays, captured):
            strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
            captures[capture.member] = Captured(tuple(tensor.shape), strides)
        return prepare(self._kernels_on(device, part), sizes, geometry, captures, device, order)

    def _kernels_on(self, device: torch.device, part: str) -> tuple[str, ...]:
        """Returns the kernels of a pass for a GPU: those compiled for the most specific target that it runs."""
        major, minor = driver.capability(device)
        fitting = [target for target in self.targets if _runs_on(target, major, minor)]
        if not fitting:
            raise RuntimeError(
                f"{device} has compute capability {major}.{minor}, and {self.name} has kernels for "
                f"{', '.join(self.targets)}: export it for this GPU, by `flashgen export --target sm_{major}{minor}`"
            )
        passes = self._kernels[max(fitting, key=_specificity)]
        if part not in passes:
            raise RuntimeError(f"{self.name} was exported without its {part}: export it with --pass both")
        return tuple(passes[part])


def has_aligned_rows(tensor: torch.Tensor) -> bool:
    """Whether the rows of a tensor are contiguous and begin at multiples of 16 bytes from its first element."""
    multiple = _ROW_BYTES // tensor.element_size()
    *strides, last = tensor.stride()
    return last == 1 and not any(stride % multiple for stride, size in zip(strides, tensor.shape) if size > 1)


def _specificity(target: str) -> tuple[int, bool]:
    return int(target[len("sm_") :].rstrip("a")), target.endswith("a")


def _runs_on(target: str, major: int, minor: int) -> bool:
    """Whether a GPU runs code of a target: one with the suffix `a` runs on its own compute capability only."""
    (number, exact) = _specificity(target)
    own_major, own_minor = divmod(number, 10)
    return own_major == major and (own_minor == minor if exact else own_minor <= minor)


SPECS = {facts["name"]: Spec(facts) for facts in json.loads((Path(__file__).parent / "specs.json").read_text("utf-8"))}


_SPECS_BY_ROWS: dict[tuple[torch.dtype, int, int, int], list[Spec]] = {}
for _spec in SPECS.values():
    _SPECS_BY_ROWS.setdefault((_spec.dtype, len(_spec.axes), _spec.head_dim, _spec.value_dim), []).append(_spec)


def spec_of(name: str | None, q: torch.Tensor, v: torch.Tensor) -> Spec:
    """Returns the spec of this name, or the only one that takes such tensors if there is no name."""
    if name is not None:
        if name not in SPECS:
            raise ValueError(f"spec={name!r} is not in this package; it has {', '.join(SPECS)}")
        return SPECS[name]
    fitting = _SPECS_BY_ROWS.get((q.dtype, q.dim(), q.shape[-1], v.shape[-1]), [])
    if len(fitting) != 1:
        which = "none" if not fitting else ", ".join(spec.name for spec in fitting)
        raise ValueError(
            f"q is {q.dtype} {tuple(q.shape)} and v has {v.shape[-1]} columns; the specs that take them: {which}; give "
            f"spec=NAME of {', '.join(SPECS)}"
        )
    return fitting[0]
