"""The language's expressions as CUDA text.

printer            any expression: ordered, precedence-aware
operation_text     operations that are more than an operator or a call
precedence         how strongly C++ operators bind
function_text      masks and scores as device functions
derivative_text    score functions with their derivatives
uniform_text         when all scores of a tile read the same elements
interval_text      what is certain of a predicate over a tile
scale_folding      the scale folded into the products of a score function
"""
