"""The language in which users declare attention variants: masks, scores, captures and `AttentionSpec`.

Integers are int64 and wrap on overflow, as in NumPy and torch. The kernel, the NumPy reference, `tiles()` and the tile
lists agree on every integer, for lengths up to 10**9. A kernel computes in int32 if the value is proven to fit for
every length and every captured value; positions, their sums and their differences do. Other values are computed in 64
bits, for example `q * 65536`, or `q - window` with a Scalar. Literals and integer Scalars are int32.

Floats are float32. Floats that a mask or a condition depends on are computed one operation at a time, without
contraction, exactly as NumPy computes them in float32, so that rounding never changes which keys are kept. The
exceptions are exp, log, sin and similar functions, which are approximations on a GPU. Floats that depend on the score
are rounded like a score: a product and a sum may be contracted to an FMA, and a division by a constant may become a
multiplication.
"""

from flashgen.language import functions, masks, scores
from flashgen.language.captures import Scalar, Tensor
from flashgen.language.functions import *  # noqa: F403
from flashgen.language.layouts import BlockLayout
from flashgen.language.masks import *  # noqa: F403
from flashgen.language.modifiers import Mask, Score, trace_mask, trace_score
from flashgen.language.parse import parse_mask, parse_score
from flashgen.language.protocols import answer_libraries
from flashgen.language.scores import *  # noqa: F403
from flashgen.language.spec import AttentionSpec
from flashgen.language.trees import tree_bits

__all__ = ["AttentionSpec", "BlockLayout", "Mask", "Scalar", "Score", "Tensor"]
__all__ += ["parse_mask", "parse_score", "trace_mask", "trace_score", "tree_bits"]
__all__ += functions.__all__
__all__ += masks.__all__
__all__ += scores.__all__

answer_libraries()
