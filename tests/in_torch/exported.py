"""An exported package in this process, on a driver that records launches, and can run them on the emulator."""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from struct import unpack
from types import ModuleType
from typing import Any

import pytest

import flashgen as fg
from flashgen.build.host import compile_host
from flashgen.release.export import VARIANT, export
from flashgen.runtime import emulator
from flashgen.runtime.emulated_maps import encode_map

DENSE = fg.AttentionSpec(64, "float16", mask=fg.causal())
PACKED = fg.AttentionSpec(64, "bfloat16", layout="thd", dropout=0.25, mask=fg.sliding_window(70, 10))
LEARNED = fg.AttentionSpec(
    32,
    "float16",
    layout="bshd",
    mask=fg.causal() & fg.document(fg.Tensor("ids", "int32", 2)),
    score=fg.relative_bias(fg.Tensor("table", "float16", 2, grad=True), fg.Scalar("reach", "int32")),
    sink=fg.Tensor("sinks", "float32", 1, grad=True),
)
TARGETS = ("sm_80", "sm_90a")
MULTIPROCESSORS = 3
FOREIGN = ("flashgen", "cupy", "sympy", "jinja2", "numpy", "ml_dtypes")
"""What a package may not import. torch may: it uses some of them itself, when it compiles."""
_MAP_DTYPES = {6: "float16", 9: "bfloat16"}
_SWIZZLES = {1: 32, 2: 64, 3: 128}


def export_package(folder: Path, *specs: fg.AttentionSpec, name: str, targets: tuple[str, ...] = TARGETS) -> Path:
    """Exports specs and returns the folder from which the package is imported."""
    export(specs, folder, targets=targets, name=name)
    return folder / VARIANT


def import_package(variant: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(variant))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(variant))


@dataclass
class Launched:
    """A launch: the kernel, its grid, block and shared memory, the bytes of its argument struct, and the stream."""

    kernel: dict[str, Any]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    struct: bytes
    stream: int


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


@dataclass
class Driver:
    """The functions of libcuda that a package calls. Launches are recorded, and run if `emulate`.

    Tensor maps have the format of the emulator, with the address of the array in the first bytes.
    """

    folder: Path
    emulate: bool = False
    launches: list[Launched] = field(default_factory=list)
    shared_limits: dict[int, int] = field(default_factory=dict)
    capture_mode: int = 0
    _memory: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        manifest = json.loads((self.folder / "manifest.json").read_text())
        self._kernels = manifest["kernels"]
        self._by_cubin = {
            (self.folder / kernel["files"]["cubin"]["path"]).read_bytes(): number
            for number, kernel in enumerate(self._kernels)
        }

    def cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> int:
        context._obj.value = 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0 if context.value == 1 else 201

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        module._obj.value = self._by_cubin[cubin] + 1
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        assert self._kernels[module.value - 1]["entry"] == name.decode()
        function._obj.value = module.value
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        assert attribute == 8
        self.shared_limits[function.value] = value
        return 0

    def cuStreamGetId(self, stream: Any, number: Any) -> int:
        number._obj.value = stream.value
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.capture_mode, mode._obj.value = mode._obj.value, self.capture_mode
        return 0

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        assert self.capture_mode == 2, "an allocation could end another thread's capture"
        self._memory.append(ctypes.create_string_buffer(b"\xff" * size.value, size.value))
        address._obj.value = ctypes.addressof(self._memory[-1])
        return 0

    def cuMemsetD32Async(self, address: Any, value: int, count: Any, stream: Any) -> int:
        ctypes.memset(address.value, value, 4 * count.value)
        return 0

    def cuTensorMapEncodeTiled(
        self,
        out: Any,
        dtype: int,
        rank: int,
        address: Any,
        sizes: Any,
        strides: Any,
        box: Any,
        steps: Any,
        *options: int,
    ) -> int:
        interleave, swizzle, promotion, fill = options
        assert (interleave, promotion, fill, set(steps)) == (0, 3, 0, {1}) and rank == len(sizes)
        shape = (_numbers(sizes), _numbers(strides), _numbers(box))
        encoded = bytearray(encode_map(_MAP_DTYPES[dtype], *shape, _SWIZZLES[swizzle], 0))
        encoded[:8] = address.value.to_bytes(8, "little")
        ctypes.memmove(out.value, bytes(encoded), len(encoded))
        return 0

    def cuLaunchKernelEx(self, configuration: int, function: Any, pointers: int, extra: Any) -> int:
        *sizes, shared_bytes, stream, _attributes, count = unpack("7I4xQQI", ctypes.string_at(configuration, 52))
        assert extra is None and count == 0
        kernel = self._kernels[function - 1]
        assert shared_bytes <= self.shared_limits.get(function, 48 * 1024)
        (address,) = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))[:1]
        struct = ctypes.string_at(address, kernel["argument_bytes"])
        grid, block = tuple(sizes[:3]), tuple(sizes[3:])
        self.launches.append(Launched(kernel, grid, block, shared_bytes, struct, stream))
        if self.emulate:
            source = (self.folder / kernel["files"]["source"]["path"]).read_text()
            emulator.launch(compile_host(source, kernel["entry"]), grid, block, shared_bytes, struct, [])
        return 0


def install(package: ModuleType, driver: Driver, capability: tuple[int, int], patch: pytest.MonkeyPatch) -> None:
    """Makes a package run CPU tensors on a driver, as on a GPU of this compute capability, on stream 7."""
    module = package.operators.driver
    package.operators._calls.clear()  # they are those of another GPU
    patch.setattr(module, "library", lambda: driver)
    patch.setattr(module, "check_device", lambda tensor: None)
    patch.setattr(module, "on", lambda device: nullcontext())
    patch.setattr(module, "current_stream", lambda device: 7)
    patch.setattr(module, "is_capturing", lambda: False)
    patch.setattr(module, "capability", lambda device: capability)
    patch.setattr(module, "multiprocessors", lambda device: MULTIPROCESSORS)
