"""The steps of a kernel: which functions of its text do what, by the papers' formulas, and at which line."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.report.mathml import block, call, name, number, over, power, row, sign, sub, words

_S, _P, _Q, _K, _V, _O, _D = (name(letter) for letter in "SPQKVOD")
_M, _L, _TAU = name("m"), name("ℓ"), name("τ")
_DO, _DP, _DS, _DQ, _DK, _DV = (f"<mrow><mi>d</mi><mi>{letter}</mi></mrow>" for letter in "OPSQKV")
_EQUALS, _MINUS, _PLUS, _TIMES, _INTO, _ADDS = (sign(text) for text in ("=", "−", "+", "∘", "←", "+="))
_NEW = power(_M, sign("′"))
_SHRINK = power(name("e"), row(_M, _MINUS, _NEW))


def _transposed(base: str) -> str:
    return power(base, name("T"))


_SCORES = block(_S, _EQUALS, _TAU, _Q, _transposed(_K))
_SOFTMAX = (
    block(_NEW, _EQUALS, call("max", _M, call("rowmax", _S)))
    + block(_P, _EQUALS, power(name("e"), row(_S, _MINUS, _NEW)))
    + block(_L, _INTO, _SHRINK, _L, _PLUS, call("rowsum", _P))
)
_OUTPUT = block(_O, _INTO, _SHRINK, _O, _PLUS, _P, _V)
_DIVIDE = block(_O, _INTO, over(_O, _L))
_LSE = block(name("L"), _EQUALS, _M, _PLUS, call("log", _L))
_MASKED = block(_S, _EQUALS, row(sign("−"), name("∞")), words(" where "), row(sign("¬"), name("M")))
_MODIFIED = block(_S, _INTO, call("f", _S))
_ROWSUM = block(_D, _EQUALS, call("rowsum", row(_DO, _TIMES, _O)))
_ANEW = block(_P, _EQUALS, power(name("e"), row(_S, _MINUS, name("L")))) + block(
    _DS, _EQUALS, _P, _TIMES, row(sign("("), _DP, _MINUS, _D, sign(")"))
)
_SLOPE = block(_DS, _INTO, _DS, _TIMES, call("f′", _S))
_GRADIENTS = block(_DV, _ADDS, _transposed(_P), _DO) + block(_DK, _ADDS, _TAU, _transposed(_DS), _Q)
_OF_QUERIES = block(_DQ, _ADDS, _TAU, _DS, _K)
_SUM = block(_DQ, _EQUALS, _TAU, f"<munder>{sign('∑')}{name('j')}</munder>", sub(_DS, name("j")), sub(_K, name("j")))

# Functions by what they do, in the order in which a reader would ask; the first that a text has is linked.
_FORWARD = (
    ("Which tiles of keys are visited", "", ("key_tiles_of",)),
    ("Q, K and V come in", "", ("producer", "load_tiles", "copy_tile", "load_stage")),
    ("Scores", _SCORES, ("start_scores", "multiply_by_transpose")),
    ("The score function", _MODIFIED, ("apply_score", "score_mod")),
    ("The mask", _MASKED, ("apply_mask", "apply_score_and_mask")),
    ("The online softmax", _SOFTMAX, ("online_softmax", "softmax")),
    ("Dropout", block(_P, _INTO, _P, _TIMES, over(name("Z"), row(number(1), _MINUS, name("p")))), ("drop",)),
    ("The output", _OUTPUT, ("start_output", "multiply_registers")),
    ("Divided by the sum, and stored", _DIVIDE, ("epilogue", "stage_output", "write_rows")),
    ("The log-sum-exp", _LSE, ("write_lse", "epilogue", "write_rows")),
    ("All that a warpgroup does", "", ("consumer",)),
)
_BACKWARD = (
    ("Which tiles of queries are visited", "", ("query_tiles_of",)),
    ("Which tiles of keys are visited", "", ("key_tiles_of",)),
    ("Tiles come in", "", ("load_tiles", "copy_tile", "load_stage")),
    ("D of each row", _ROWSUM, ("dot",)),
    ("Scores, computed anew", _SCORES, ("start_scores", "multiply_by_transpose", "start_product")),
    ("The score function, and its derivative", _SLOPE, ("score_mod",)),
    (
        "Weights and their gradients",
        _ANEW,
        ("differentiate_scores", "multiply_by_factors", "multiply_by_probabilities"),
    ),
    ("Gradients of K and V", _GRADIENTS, ("differentiate_keys", "start_sum", "multiply_registers")),
    ("Gradients of Q", _OF_QUERIES, ("start_query_gradients", "add_query_gradients")),
    ("Stored", "", ("write_gradients", "write_rows")),
    ("All that a warpgroup does", "", ("differentiate",)),
)
OF_ROLE = {
    "prepare": ("D of each row of O and dO, and sums of dQ begin at 0", _ROWSUM),
    "finish": ("Sums of dQ are scaled and rounded", _SUM),
    "lists": ("Lists the tiles of keys that each tile of queries visits", ""),
    "query_lists": ("Lists the tiles of queries that each tile of keys visits", ""),
    "backward_lists": ("Lists the tiles that the backward visits", ""),
    "keys": ("Gradients of K and V, a block for each tile of keys", _GRADIENTS),
    "queries": ("Gradients of Q, a block for each tile of queries", _OF_QUERIES),
    "forward": ("The output and its log-sum-exp, a block for each tile of queries", _OUTPUT),
}


@dataclass(frozen=True)
class Step:
    """What a function of a kernel does: in words, as MathML (or ""), its name and the line where it begins."""

    what: str
    formula: str
    function: str
    line: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def steps_of(role: str, source: str) -> list[Step]:
    """The steps that a kernel's text has, in the papers' order."""
    lines = definitions(source)
    found: list[Step] = []
    for what, formula, functions in _FORWARD if role == "forward" else _BACKWARD:
        function = next((each for each in functions if each in lines), None)
        if function:
            found.append(Step(what, formula, function, lines[function]))
    return found


def definitions(source: str) -> dict[str, int]:
    """The functions of a text, with the line on which each begins."""
    found: dict[str, int] = {}
    for place, line in enumerate(source.splitlines(), start=1):
        match = re.match(r"(?:extern \"C\" __global__|__device__) .*?(\w+)\(", line)
        if match and match[1] != "__launch_bounds__":
            found.setdefault(match[1], place)
    return found
