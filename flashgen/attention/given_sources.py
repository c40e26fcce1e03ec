"""Reads the `source` argument of `compile`: the texts of kernels, and the kernel that each is meant to replace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.codegen.stages import current_role
from flashgen.errors import ArgumentError
from flashgen.files import read_text

Source = str | Path | Mapping[str, str | Path]


@dataclass(frozen=True)
class GivenText:
    """A text that replaces the emitted text of a kernel.

    kernel: the part or the name of the kernel; "" to identify it by its entry point. origin: for messages. of_folder:
    the text is a file of a folder, which may also hold kernels of other specs.
    """

    kernel: str
    text: str
    origin: str
    of_folder: bool = False


def texts_of(source: Source | None) -> tuple[GivenText, ...]:
    """Returns the texts, and reads files. Raises ArgumentError if `source` has another type or cannot be read."""
    if source is None:
        return ()
    if not isinstance(source, Mapping):
        return _texts("", source, "source")
    return tuple(
        text for kernel, given in source.items() for text in _texts(current_role(kernel), given, f"source[{kernel!r}]")
    )


def _texts(kernel: Any, given: Any, argument: str) -> tuple[GivenText, ...]:
    if not isinstance(kernel, str) or not isinstance(given, (str, Path)):
        raise ArgumentError(
            f"{argument} of type {type(given).__name__}: give the text of a kernel or a pathlib.Path of it; of several "
            "a mapping from their names, those of attention.sources and attention.backward_sources, to texts or paths"
        )
    if isinstance(given, str):
        return (GivenText(kernel, given, argument),)
    if kernel or not given.is_dir():
        return (GivenText(kernel, _read(given, argument), str(given)),)
    files = sorted(given.glob("*.cu"))
    if not files:
        raise ArgumentError(
            f"{argument}: the folder {given} holds no .cu file; `flashgen show --output DIR/` writes some"
        )
    return tuple(GivenText(path.stem, _read(path, argument), str(path), of_folder=True) for path in files)


def _read(path: Path, argument: str) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise ArgumentError(f"{argument}: {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{argument}: {path} cannot be read: byte {error.start} is not UTF-8") from error
