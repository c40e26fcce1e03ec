"""Small kernels with Hopper's instructions: one text for the emulator and for a GPU, with their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flashgen.codegen.environment import environment, primitives_for, tidy
from flashgen.codegen.targets import target_named

FOLDER = Path(__file__).parent / "kernels"
DTYPES: dict[str, Any] = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
MAP = "struct alignas(64) TensorMap { unsigned long long words[16]; };"


@dataclass(frozen=True)
class TensorMap:
    """An array as TMA sees it: dimensions and box in the order of its coordinates, the contiguous one first."""

    array: np.ndarray[Any, Any]
    box: tuple[int, int, int, int]
    swizzle: int

    @property
    def dtype(self) -> str:
        return self.array.dtype.name

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.array.shape[::-1]

    @property
    def byte_strides(self) -> tuple[int, ...]:
        return self.array.strides[-2::-1]


def kernel_source(file: str, constants: dict[str, int], sizes: dict[str, Any] | None = None, **texts: str) -> str:
    """Returns a kernel file with its constants and texts inserted, and the primitives that it calls."""
    body = (FOLDER / file).read_text()
    for name, text in texts.items():
        body = body.replace(name, text)
    device, shared = primitives_for(body, target_named("sm_90a"), sizes or {})
    template = environment().get_template("primitives.cuh.jinja")
    primitives = template.render(device_primitives=device, shared_primitives=shared, uses_shared_memory=True)
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    return tidy("\n".join([MAP, *lines, primitives, body]))


@dataclass(frozen=True)
class ProductCase:
    """One form of a wgmma: shape, location and layout of its operands."""

    columns: int
    depth: int
    swizzle: int
    transposed: bool = False
    from_registers: bool = False
    dtype: str = "f16"

    def __str__(self) -> str:
        operands = ("registers" if self.from_registers else "shared", "transposed" if self.transposed else "straight")
        return f"n{self.columns}k{self.depth}-{operands[0]}-{operands[1]}-swizzle{self.swizzle}-{self.dtype}"

    @property
    def source(self) -> str:
        flag = str(self.transposed).lower()
        kind = "registers" if self.from_registers else "shared"
        operand = "fragments[depth / 16]" if self.from_registers else "along_depth(a, 64, depth)"
        call = f"wgmma_{kind}_{self.dtype}<kColumns, kTransposed>(d, {operand}, b_tile, accumulate);"
        constants = {"kColumns": self.columns, "kDepth": self.depth, "kSwizzle": self.swizzle}
        kind = kind.removesuffix("s")
        sizes = {f"{kind}_forms": [(self.columns, flag)]}
        return kernel_source("product.cu", constants | {"kTransposed": int(self.transposed)}, sizes, MULTIPLY=call)

    @property
    def panel(self) -> int:
        return self.swizzle // 2 if self.swizzle else 8

    @property
    def shared_bytes(self) -> int:
        rows, columns = (self.depth, self.columns) if self.transposed else (self.columns, self.depth)
        a, b = (-(-n // self.panel) * r * self.panel * 2 for n, r in ((self.depth, 64), (columns, rows)))
        return -(-a // 1024) * 1024 + b + 8

    def inputs(self, seed: int = 0) -> tuple[np.ndarray[Any, Any], ...]:
        """a (64, depth); b (columns, depth), or transposed; d (64, columns): integers, whose sums are exact."""
        random = np.random.default_rng(seed)
        a = random.integers(-8, 9, (64, self.depth)).astype(DTYPES[self.dtype])
        b = random.integers(-8, 9, (self.columns, self.depth)).astype(DTYPES[self.dtype])
        d = random.integers(-8, 9, (64, self.columns)).astype(np.float32)
        return a, np.ascontiguousarray(b.T) if self.transposed else b, d

    def maps(self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[TensorMap, TensorMap]:
        return tuple(TensorMap(x[None, None], (self.panel, x.shape[0], 1, 1), self.swizzle) for x in (a, b))  # type: ignore[return-value]

    def expected(self, a: Any, b: Any, d: Any, accumulate: bool) -> np.ndarray[Any, Any]:
        a, b = a.astype(np.float64), b.astype(np.float64)
        return (d if accumulate else 0) + a @ (b if self.transposed else b.T)


PRODUCTS = [
    *(
        ProductCase(columns, 64, swizzle, transposed, from_registers)
        for columns in (8, 80, 128)
        for swizzle in (0, 32, 64, 128)
        for transposed in (False, True)
        for from_registers in (False, True)
    ),
    *(ProductCase(256, 128, 128, t, r, "bf16") for t in (False, True) for r in (False, True)),
    ProductCase(48, 96, 64, dtype="bf16"),
    ProductCase(16, 16, 32, True, True, "bf16"),
]


@dataclass(frozen=True)
class Box:
    """One TMA copy between shared memory and a tensor of shape (batch, heads, rows, columns)."""

    shape: tuple[int, int, int, int]
    box: tuple[int, int, int, int]  # columns, rows, heads, batch, in the order of coordinates
    start: tuple[int, int, int, int]
    swizzle: int
    dtype: Any = DTYPES["f16"]

    def __str__(self) -> str:
        box, start = "x".join(map(str, self.box)), ".".join(map(str, self.start))
        return f"{self.dtype.name}-{box}-at{start}-swizzle{self.swizzle}"

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.dtype.itemsize

    @property
    def kernels(self) -> tuple[str, ...]:
        """The operations that this box allows: stores may not begin before the tensor."""
        return ("load_box",) if min(self.start) < 0 else ("load_box", "store_box", "add_box")

    def tensor(self, seed: int = 0) -> np.ndarray[Any, Any]:
        return np.random.default_rng(seed).integers(-50, 50, self.shape).astype(self.dtype)

    def map(self, tensor: np.ndarray[Any, Any]) -> TensorMap:
        return TensorMap(tensor, self.box, self.swizzle)

    def _slices(self) -> tuple[list[slice], list[slice]]:
        """Returns where the part inside the tensor lies in the tensor, and in the box."""
        inside, within = [], []
        for size, length, start in zip(self.shape, self.box[::-1], self.start[::-1], strict=True):
            first, past = max(start, 0), max(min(start + length, size), max(start, 0))
            inside.append(slice(first, past))
            within.append(slice(first - start, past - start))
        return inside, within

    def in_shared_memory(self, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the box as TMA writes it: consecutive rows with swizzled 16-byte chunks, zeros outside."""
        box = np.zeros(self.box[::-1], self.dtype)
        inside, within = self._slices()
        box[tuple(within)] = tensor[tuple(inside)]
        chunks = box.reshape(-1).view(np.uint8).reshape(-1, 16)
        places = np.arange(len(chunks))
        lines = self.swizzle // 16 - 1 if self.swizzle else 0
        swizzled = np.empty_like(chunks)
        swizzled[places ^ (places >> 3 & lines)] = chunks
        return swizzled.reshape(-1)

    def stored(self, tensor: np.ndarray[Any, Any], data: np.ndarray[Any, Any], add: bool) -> np.ndarray[Any, Any]:
        """Returns `tensor` after the box of `data` has been stored or added."""
        result, (inside, _) = tensor.copy(), self._slices()
        part = data[tuple(inside)]
        result[tuple(inside)] = result[tuple(inside)] + part if add else part
        return result


BOXES = [
    Box((2, 3, 40, 64), (64, 32, 1, 1), (0, 4, 1, 1), 128),
    Box((2, 3, 40, 96), (32, 16, 2, 2), (32, 30, 1, 0), 64),  # beyond the last row
    Box((2, 3, 40, 40), (16, 64, 1, 1), (32, -5, 2, 1), 32),  # before the first row, and half a row too many
    Box((1, 2, 20, 48), (24, 8, 2, 1), (-8, 16, 0, 0), 0),
    Box((1, 1, 9, 16), (64, 16, 1, 1), (0, 0, 0, 0), 128, DTYPES["bf16"]),
    Box((1, 2, 9, 16), (16, 8, 1, 1), (8, 8, 1, 0), 32, DTYPES["bf16"]),
    Box((1, 1, 16, 64), (64, 8, 1, 1), (64, 0, 0, 0), 128),  # entirely outside
    Box((1, 2, 20, 32), (32, 8, 1, 1), (8, 1, 1, 0), 128, np.dtype(np.float32)),
    Box((2, 3, 40, 40), (16, 64, 1, 1), (32, 3, 2, 1), 32),  # more rows than the tensor has, and half a row too many
    Box((1, 2, 20, 48), (24, 8, 2, 1), (40, 16, 1, 0), 0),  # past all but batch
]


COPIES_OF_BOXES = [(box, kernel) for box in BOXES for kernel in box.kernels]


@dataclass(frozen=True)
class Pipeline:
    """kernels/pipeline.cu: c = a @ b.T in float16 by tiles of 128 rows and steps of 32."""

    tiles: int = 3
    steps: int = 3
    stages: int = 2
    name = "pipeline"
    block = (384, 1, 1)

    @property
    def source(self) -> str:
        return kernel_source("pipeline.cu", {"kStages": self.stages}, {"shared_forms": [(64, "false")]})

    @property
    def shared_bytes(self) -> int:
        return self.stages * (192 * 64 + 16) + 128 * 128

    def arguments(self) -> tuple[tuple[Any, ...], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Returns (the kernel's arguments, c as it will be written, c as expected)."""
        random = np.random.default_rng(0)
        a = random.standard_normal((self.tiles * 128, self.steps * 32)).astype(np.float16)
        b = random.standard_normal((64, self.steps * 32)).astype(np.float16)
        c = np.full((self.tiles * 128, 64), np.nan, np.float16)
        maps = (
            TensorMap(a[None, None], (32, 128, 1, 1), 64),
            TensorMap(b[None, None], (32, 64, 1, 1), 64),
            TensorMap(c[None, None], (64, 16, 1, 1), 128),
        )
        return (*maps, self.tiles, self.steps), c, a.astype(np.float64) @ b.T.astype(np.float64)


@dataclass(frozen=True)
class WrittenOperands:
    """kernels/written_operands.cu: d (64, 32) = a (64, 16) @ b (32, 16).T in float16."""

    name = "written_operands"
    block = (128, 1, 1)
    shared_bytes = 2048 + 1024

    @property
    def source(self) -> str:
        return kernel_source("written_operands.cu", {}, {"shared_forms": [(32, "false")]})

    def arguments(self) -> tuple[tuple[Any, ...], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Returns (the kernel's arguments, d as it will be written, d as expected)."""
        random = np.random.default_rng(0)
        a, b = (random.standard_normal((rows, 16)).astype(np.float16) for rows in (64, 32))
        # (warp, half of rows, row, half of columns, pair) -> (warp, row, pair, half of columns, half of rows)
        fragments = a.view(np.uint32).reshape(4, 2, 8, 2, 4).transpose(0, 2, 4, 3, 1)
        d = np.full((64, 32), np.nan, np.float32)
        return (np.ascontiguousarray(fragments), b, d), d, a.astype(np.float64) @ b.T.astype(np.float64)
