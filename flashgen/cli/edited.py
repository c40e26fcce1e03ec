"""`flashgen verify --source`: looks at edited kernels and compiles them before anything runs."""

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
    """Compiles the source, and says which kernels of the one SPEC are edited in it.

    Raises:
        ArgumentError: there is not one SPEC, an edited kernel is for a pass that is not to run, or `flashgen.compile`
            refuses the source.
        BuildError: it does not compile.
    """
    from flashgen.attention import compile
    from flashgen.attention.edits import FORWARD_PARTS, unmarked

    if specs is None or len(specs) != 1:
        raise ArgumentError(f"--source {source} holds kernels of one SPEC: name it")
    compiled = compile(load_spec(specs[0], options), source=source, **engine)
    if not compiled.edited:
        note(f"{source} is what is emitted: nothing in it is edited")
        return
    for part in compiled.edited:
        of = "forward" if part in FORWARD_PARTS else "backward"
        if of not in passes:
            raise ArgumentError(f"--source {source} edits {part}, which is of the {of} pass: add --pass {of}")
    names = list(compiled.sources)
    if "backward" in passes:
        compiled.build_backward()
        names += compiled.backward_sources
    note(f"edited: {', '.join(name for name in names if unmarked(name) != name)}")
