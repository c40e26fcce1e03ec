"""The callable: a spec, generated, built and ready to run on a GPU or on the emulator."""

from flashgen.attention.callable import Attention
from flashgen.attention.compiling import compile
from flashgen.attention.gradients import Gradients

__all__ = ["Attention", "Gradients", "compile"]
