"""flashgen in transformers' models.

    import flashgen.transformers

    flashgen.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation="flashgen")

Masks are the functions that a model makes them of: windows, chunks, packed sequences and padding are traced, and no
mask of (queries, keys) is ever held. What a model asks for that flashgen cannot do is refused by name.
"""

from flashgen.remedies import missing

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("transformers", error) from None

from flashgen.transformers.context import context_parallel
from flashgen.transformers.registration import register

__all__ = ["context_parallel", "register"]
