"""The callable: a spec, generated, built and ready to run on a GPU or on the emulator."""

from .callable import Attention
from .compiling import compile

__all__ = ["Attention", "compile"]
