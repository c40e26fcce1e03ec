"""The steps of a kernel: the function and source line of each step, with its formula from the papers."""

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
_RESCALE = power(name("e"), row(_M, _MINUS, _NEW))


def _transposed(base: str) -> str:
    return power(base, name("T"))


_SCORES = block(_S, _EQUALS, _TAU, _Q, _transposed(_K))
_SOFTMAX = (
    block(_NEW, _EQUALS, call("max", _M, call("rowmax", _S)))
    + block(_P, _EQUALS, power(name("e"), row(_S, _MINUS, _NEW)))
    + block(_L, _INTO, _RESCALE, _L, _PLUS, call("rowsum", _P))
)
_OUTPUT = block(_O, _INTO, _RESCALE, _O, _PLUS, _P, _V)
_DIVIDE = block(_O, _INTO, over(_O, _L))
_LSE = block(name("L"), _EQUALS, _M, _PLUS, call("log", _L))
_MASKED = block(_S, _EQUALS, row(sign("−"), name("∞")), words(" where "), row(sign("¬"), name("M")))
_MODIFIED = block(_S, _INTO, call("f", _S))
_ROWSUM = block(_D, _EQUALS, call("rowsum", row(_DO, _TIMES, _O)))
_RECOMPUTED = block(_P, _EQUALS, power(name("e"), row(_S, _MINUS, name("L")))) + block(
    _DS, _EQUALS, _P, _TIMES, row(sign("("), _DP, _MINUS, _D, sign(")"))
)
_SLOPE = block(_DS, _INTO, _DS, _TIMES, call("f′", _S))
_GRADIENTS = block(_DV, _ADDS, _transposed(_P), _DO) + block(_DK, _ADDS, _TAU, _transposed(_DS), _Q)
_OF_QUERIES = block(_DQ, _ADDS, _TAU, _DS, _K)
_SUM = block(_DQ, _EQUALS, _TAU, f"<munder>{sign('∑')}{name('j')}</munder>", sub(_DS, name("j")), sub(_K, name("j")))

# Functions by step, in reading order. The first of a step's functions that the source defines is linked.
_FORWARD = (
    ("Which tiles of keys are visited", "", ("key_tiles_of",)),
    (
        "Q, K and V are loaded",
        "",
        ("producer", "load_columns", "load_tiles", "load_tile", "load_paged_tile", "load_stage"),
    ),
    ("Scores", _SCORES, ("issue_qk_wgmma", "multiply_by_transpose")),
    ("The score function", _MODIFIED, ("apply_score", "score_mod")),
    ("The mask", _MASKED, ("apply_mask",)),
    ("The online softmax", _SOFTMAX, ("online_softmax", "softmax")),
    ("Dropout", block(_P, _INTO, _P, _TIMES, over(name("Z"), row(number(1), _MINUS, name("p")))), ("apply_dropout",)),
    ("The output", _OUTPUT, ("issue_pv_wgmma", "multiply_registers")),
    ("The output is divided by the row sum and stored", _DIVIDE, ("epilogue",)),
    ("The log-sum-exp", _LSE, ("store_lse", "pass_output_rows", "epilogue")),
    ("All that a warpgroup does", "", ("consumer", "score_consumer")),
)
_BACKWARD = (
    ("Which tiles of queries are visited", "", ("query_tiles_of",)),
    ("Which tiles of keys are visited", "", ("key_tiles_of",)),
    ("Tiles are loaded", "", ("load_work_tile", "producer", "load_tiles", "load_tile", "load_stage")),
    ("D of each row", _ROWSUM, ("dot",)),
    ("Scores, recomputed", _SCORES, ("issue_qk_wgmma", "multiply_by_transpose", "issue_wgmma_ss")),
    ("The score function, and its derivative", _SLOPE, ("score_mod",)),
    (
        "Weights and their gradients",
        _RECOMPUTED,
        ("recompute_p_and_ds", "compute_ds_from_factors", "compute_ds"),
    ),
    ("Gradients of K and V", _GRADIENTS, ("consumer_dk", "issue_wgmma_rs", "multiply_registers")),
    ("Gradients of Q", _OF_QUERIES, ("issue_dq_wgmma", "accumulate_dq")),
    ("Gradients are stored", "", ("epilogue", "store_gradients", "store_rows")),
    ("All that a warpgroup does", "", ("consumer",)),
)
BY_ROLE = {
    "preprocess": ("Computes D of each row of O and dO, and sets the dQ accumulator to 0", _ROWSUM),
    "postprocess": ("Scales the dQ accumulator and converts it to the dtype of dQ", _SUM),
    "lists": ("Lists the key tiles that each query tile visits", ""),
    "query_lists": ("Lists the query tiles that each key tile visits", ""),
    "backward_lists": ("Lists the tiles that the backward visits", ""),
    "dkdv": ("Computes the gradients of K and V, with a block for each key tile", _GRADIENTS),
    "dq": ("Computes the gradients of Q, with a block for each query tile", _OF_QUERIES),
    "forward": ("Computes the output and its log-sum-exp, with a block for each query tile", _OUTPUT),
}


@dataclass(frozen=True)
class Step:
    """A step of a kernel: its description, its formula as MathML (or ""), its function, and that function's line."""

    what: str
    formula: str
    function: str
    line: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def steps_of(role: str, source: str) -> list[Step]:
    """Returns the steps that a kernel's source contains, in the order of the papers."""
    lines = definitions(source)
    found: list[Step] = []
    for what, formula, functions in _FORWARD if role == "forward" else _BACKWARD:
        function = next((each for each in functions if each in lines), None)
        if function:
            found.append(Step(what, formula, function, lines[function]))
    return found


def definitions(source: str) -> dict[str, int]:
    """Returns the functions that a source defines, and the line on which each one begins."""
    found: dict[str, int] = {}
    for line_number, line in enumerate(source.splitlines(), start=1):
        match = re.match(r"(?:extern \"C\" __global__|__device__) .*?(\w+)\(", line)
        if match and match[1] not in ("__launch_bounds__", "__cluster_dims__"):
            found.setdefault(match[1], line_number)
    return found
