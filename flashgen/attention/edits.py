"""Edited kernels: texts that take the place of emitted ones.

All but the text stays that of the spec and its plans: which kernels are launched, their grids, threads, shared memory
and arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from flashgen.attention.given_sources import GivenText
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.errors import BuildError

Kernel = TypeVar("Kernel", bound=RenderedKernel)

FORWARD_PARTS = ("lists", "forward")
_MARK = "-edited-"
_DIGITS = 8  # of the hash of its text, which an edited kernel's name ends in


@dataclass(frozen=True)
class Edits:
    """Texts by the parts of the kernels whose place they take; parts are those of `flashgen.codegen.stages`."""

    texts: Mapping[str, GivenText] = field(default_factory=dict)

    def of(self, part: str, kernel: Kernel) -> Kernel:
        """The kernel of that part: edited, under a name that says so, or as it is."""
        if part not in self.texts:
            return kernel
        text = self.texts[part].text
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
        return replace(kernel, source=text, name=f"{kernel.name}{_MARK}{digest}")

    @property
    def of_the_forward(self) -> bool:
        """Whether a kernel that a forward call launches is edited."""
        return any(part in self.texts for part in FORWARD_PARTS)

    @property
    def of_the_backward(self) -> bool:
        """Whether a kernel that a backward call launches is edited."""
        return any(part not in FORWARD_PARTS for part in self.texts)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Adds to a compiler's complaint where the edited texts came from."""
        try:
            yield
        except BuildError as error:
            if not self.texts:
                raise
            origins = "; ".join(f"{part} is that of {text.origin}" for part, text in self.texts.items())
            raise BuildError(f"{error}\nedited kernels: {origins}") from error


NO_EDITS = Edits()


def unmarked(name: str) -> str:
    """A kernel's name before it was edited."""
    return name.partition(_MARK)[0]
