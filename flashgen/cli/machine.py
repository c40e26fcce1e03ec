"""The GPUs, the driver and the Python packages of this machine."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: its name, its architecture such as "sm_90", and its memory in bytes."""

    name: str
    architecture: str
    memory: int

    @property
    def compute_capability(self) -> tuple[int, int]:
        return divmod(int(self.architecture.removeprefix("sm_")), 10)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that CuPy finds; none if CuPy or the driver is missing."""
    if importlib.util.find_spec("cupy") is None:
        return ()
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return ()
    properties = [cupy.cuda.runtime.getDeviceProperties(number) for number in range(count)]
    return tuple(
        Gpu(each["name"].decode(), f"sm_{each['major']}{each['minor']}", each["totalGlobalMem"]) for each in properties
    )


def driver_version() -> str | None:
    """Returns the newest CUDA version that the driver supports, such as "13.0"; None without a driver."""
    if importlib.util.find_spec("cupy") is None:
        return None
    import cupy

    try:
        number = cupy.cuda.runtime.driverGetVersion()
    except cupy.cuda.runtime.CUDARuntimeError:
        return None
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def package_version(*names: str) -> str | None:
    """Returns the version of the first of these distributions that is installed, or None."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def engine_text(emulate: bool) -> str:
    """Describes where kernels run."""
    return "emulator: the emitted CUDA runs on this CPU" if emulate or not gpus() else gpus()[0].name
