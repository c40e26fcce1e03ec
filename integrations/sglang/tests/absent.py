"""Stand-ins for packages that modules of SGLang import, and that neither attention nor its pools use."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

UNUSED = ("torchvision", "IPython", "sgl_kernel")
"""Images, notebooks, and kernels for CUDA, which the tests do not call."""


class _Nameless(type):
    """A class whose attributes are classes like it, for `Module.Class` in annotations and as a base class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nameless(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_absent = fullname.partition(".")[0] in self._names
        return ModuleSpec(fullname, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__version__ = "0"  # type: ignore[attr-defined]  # older than any that is asked for
        module.__getattr__ = lambda name: getattr(_Nameless("absent", (), {}), name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(*names: str) -> list[str]:
    """Lets `import name` succeed for those packages that are not installed, and returns their names."""
    absent = [name for name in names if find_spec(name) is None]
    sys.meta_path.append(_Finder(frozenset(absent)))
    return absent
