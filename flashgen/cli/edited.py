"""`flashgen verify --source`: checks and compiles edited kernels before any case runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.cli.console import note
from flashgen.cli.specs import load_spec
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.cli.options import SpecOptions


def check_source(
    source: Path, specs: Sequence[str] | None, options: SpecOptions, passes: Sequence[str], **engine: Any
) -> None:
    """Compiles the source, and prints the names of the kernels of SPEC that it edits.

    Raises:
        ArgumentError: the number of specs is not one, an edited kernel belongs to a pass that is not run, or
            `flashgen.compile` refuses the source.
        BuildError: the source does not compile.
    """
    from flashgen.attention import compile
    from flashgen.attention.edits import FORWARD_PARTS, unmarked

    if specs is None or len(specs) != 1:
        raise ArgumentError(f"--source {source} holds kernels of one SPEC: name it")
    compiled = compile(load_spec(specs[0], options), source=source, **engine)
    if not compiled.edited:
        note(f"{source} equals the generated source: nothing in it is edited")
        return
    for part in compiled.edited:
        pass_ = "forward" if part in FORWARD_PARTS else "backward"
        if pass_ not in passes:
            raise ArgumentError(f"--source {source} edits {part}, a kernel of the {pass_} pass: add --pass {pass_}")
    names = list(compiled.sources)
    if "backward" in passes:
        compiled.build_backward()
        names += compiled.backward_sources
    note(f"edited: {', '.join(name for name in names if unmarked(name) != name)}")
