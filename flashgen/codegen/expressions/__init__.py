"""Translation of the language's expressions to CUDA text.

printer            any expression, with parentheses by operator precedence
operation_text     operations that are more than an operator or a call
precedence         precedence of C++ operators
function_text      masks and scores as device functions
derivative_text    score functions with their derivatives
row_elements       elements of arrays that the scores of a row read side by side, such as dense biases and array masks
uniform_text       the condition under which all scores of a tile read the same array elements
interval_text      predicates over a whole tile, by interval arithmetic
scale_folding      folding of the scale into the constants of a score function
"""
