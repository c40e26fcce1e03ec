"""flashgen as an attention implementation of transformers.

    import flashgen.transformers

    flashgen.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation="flashgen")

The mask functions of a model are traced: windows, chunks, packed sequences and padding need no mask tensor of shape
(queries, keys). Features of a model that flashgen does not support raise an UnsupportedError that names them.
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
