"""Array libraries: where memory is taken from. CuPy is made up here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.runtime import arrays
from flashgen.runtime.arrays import CUPY, JAX, OTHER, Library


class MadeUpCuPy:
    """Tells of each array the stream that was current when its memory was taken."""

    def __init__(self) -> None:
        self.current = 0x5560
        null = self.stream(0)
        self.cuda = SimpleNamespace(
            Stream=SimpleNamespace(null=null), get_current_stream=lambda: SimpleNamespace(ptr=self.current)
        )

    @contextmanager
    def stream(self, pointer: int) -> Iterator[None]:
        before, self.current = self.current, pointer
        yield
        self.current = before

    def empty(self, shape: tuple[int, ...], dtype: Any) -> int:
        return self.current


@pytest.mark.parametrize("library", [CUPY, JAX, OTHER], ids=lambda library: library.name)
def test_memory_is_taken_on_the_stream_of_the_launch(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy gives it to others in the order of that stream: another would not wait for the launch that uses it."""
    made = MadeUpCuPy()
    monkeypatch.setattr(arrays, "_cupy", lambda: made)
    assert library.empty((3,), "float16", None) == library.stream(None)
    assert made.current == 0x5560
