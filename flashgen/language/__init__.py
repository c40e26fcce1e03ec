"""The language: what a user writes. Named and traced masks and scores, captures, `AttentionSpec`.

Integers are int64's, as NumPy's and torch's are, and wrap beyond them: the kernel, the oracle, `tiles()` and the lists
of tiles agree on each, for lengths up to 10**9. A kernel computes in int32 what is proven to fit there for every
length and every captured value, such as positions, their sums and distances. It computes the rest in 64 bits, such as
`q * 65536`, or `q - window` with a Scalar. Literals and integer Scalars are int32's.

Floats are float32's. Those that a mask or a condition is made of are computed without contraction, operation by
operation as NumPy's float32 does it, so that no rounding lets another key in or out; only exp, log, sin and their like
are approximations on a GPU. A division is a division. What depends on the score is rounded as a score is: its products
and sums may be contracted, and a division by a constant may become a product.
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
