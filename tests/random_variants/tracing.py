"""Makes masks and score functions of the language from terms, as users do: by tracing the Python of a term."""

from __future__ import annotations

from typing import Any

import flashgen as fg
from flashgen.language import Mask, Score
from random_variants.terms import Declarations, Term, is_named, named_text, text_of


def mask_of(term: Term, declared: Declarations) -> Mask:
    """The mask of a boolean term: named masks are combined by the operators of masks, the rest is traced."""
    if is_named(term):
        return _evaluated(named_text(term), declared)
    return fg.trace_mask(_evaluated(f"lambda b, h, q, k: {text_of(term)}", declared), "random")


def score_of(term: Term, declared: Declarations) -> Score:
    """The score function of a float term."""
    return fg.trace_score(_evaluated(f"lambda score, b, h, q, k: {text_of(term)}", declared), "random")


def _evaluated(text: str, declared: Declarations) -> Any:
    """The value of a Python expression that reads captures by their names."""
    names: dict[str, Any] = {"fg": fg}
    for name, each in declared.items():
        names[name] = eval(each.declaration(name), {"fg": fg})
    return eval(text, names)
