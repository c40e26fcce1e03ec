"""The device function that tests whether all scores of a tile read the same elements of captured arrays."""

from __future__ import annotations

from flashgen.analysis.closed_forms.uniform_tiles import uniform_condition
from flashgen.codegen.expressions.function_text import FunctionText, indices_in
from flashgen.codegen.expressions.printer import statements
from flashgen.language.spec import AttentionSpec


def uniform_text(spec: AttentionSpec) -> FunctionText | None:
    """Returns the function, which also takes a tile's first and last query and key; None if no condition is known."""
    condition = uniform_condition(spec.score.expression) if spec.score else None
    if condition is None:
        return None
    declarations, (text,) = statements(condition)
    return FunctionText("reads_uniform", tuple(declarations), text, indices_in(condition))
