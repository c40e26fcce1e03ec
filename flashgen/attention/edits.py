"""Edited kernels: texts that replace emitted ones.

Only the text changes. The kernels to launch, their grids, threads, shared memory and arguments are those of the spec
and its plans.
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
_DIGITS = 8  # of the hash of the text, at the end of an edited kernel's name


@dataclass(frozen=True)
class Edits:
    """Edited texts by the parts of the kernels that they replace; parts are those of `flashgen.codegen.stages`."""

    texts: Mapping[str, GivenText] = field(default_factory=dict)

    def apply(self, part: str, kernel: Kernel) -> Kernel:
        """Returns the kernel of a part with its edited text and a name that shows the edit; unchanged without one."""
        if part not in self.texts:
            return kernel
        text = self.texts[part].text
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
        return replace(kernel, source=text, name=f"{kernel.name}{_MARK}{digest}")

    @property
    def touches_forward(self) -> bool:
        """Whether a kernel that a forward call launches is edited."""
        return any(part in self.texts for part in FORWARD_PARTS)

    @property
    def touches_backward(self) -> bool:
        """Whether a kernel that a backward call launches is edited."""
        return any(part not in FORWARD_PARTS for part in self.texts)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Adds the origins of the edited texts to a BuildError that is raised inside."""
        try:
            yield
        except BuildError as error:
            if not self.texts:
                raise
            origins = "; ".join(f"{part} is that of {text.origin}" for part, text in self.texts.items())
            raise BuildError(f"{error}\nedited kernels: {origins}") from error


NO_EDITS = Edits()


def unmarked(name: str) -> str:
    """Returns the name that a kernel had before it was edited."""
    return name.partition(_MARK)[0]
