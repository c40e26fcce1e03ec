"""A rendered kernel: its text, and what is needed to launch it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from flashgen.codegen.arguments import ArgumentLayout
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True, repr=False)
class RenderedKernel:
    """A kernel's text and launch facts. `name` is for folders and reports, `entry` that of the extern "C" function.

    plan: whose tiles the kernel is for, a dataclass; None where it knows of no tiles.

    Prints as one line without its text; print `source` for that.
    """

    name: str
    entry: str
    source: str
    target: Target
    layout: ArgumentLayout
    threads: int
    shared_bytes: int
    plan: Any = field(kw_only=True)

    def __repr__(self) -> str:
        facts = (
            f"{self.threads} threads, {self.shared_bytes} bytes of shared memory, {self.source.count(chr(10))} lines"
        )
        return f"<{type(self).__name__} {self.name}: {self.target.name}, {facts}>"


def kernel_name(kind: str, target: Target, spec: AttentionSpec) -> str:
    """A readable name such as fwd-sm90-bf16-d128-causal-1a2b3c4d."""
    return f"{kind}-{target.name.replace('_', '')}-{spec.name}"


def entry_name(prefix: str, spec: AttentionSpec) -> str:
    """The name of a kernel's function: a C identifier."""
    return re.sub(r"\W+", "_", f"{prefix}_{spec.name}")
