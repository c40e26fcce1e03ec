"""`Attention`: a compiled spec, ready to run on a GPU or on the emulator."""

from flashgen.attention.appending import append_kv
from flashgen.attention.callable import Attention
from flashgen.attention.compiling import compile
from flashgen.attention.decode_schedule import DecodeSchedule
from flashgen.attention.gradients import Gradients
from flashgen.attention.merging import merge_states
from flashgen.codegen.hopper.plans import MAX_DECODE_QUERIES

__all__ = ["MAX_DECODE_QUERIES", "Attention", "DecodeSchedule", "Gradients", "append_kv", "compile", "merge_states"]
