"""Measures kernels on a GPU beside their peers, in one run: `flashgen bench`."""

from flashgen.bench import summary
from flashgen.bench.beside_flex import VariantRow, variant_rows
from flashgen.bench.cases import Timed
from flashgen.bench.context import CONTENDERS as CONTEXT_CONTENDERS
from flashgen.bench.context import ContextRow, context_rows, context_summary, gpus_here
from flashgen.bench.context import Shape as ContextShape
from flashgen.bench.decode import PEERS as DECODE_PEERS
from flashgen.bench.decode import SIZES as DECODE_SIZES
from flashgen.bench.decode import DecodeRow, DecodeSize, decode_rows, own_choices
from flashgen.bench.grouped import GroupedRow, grouped_rows
from flashgen.bench.host import LIBRARIES, PARTS, PASSES, REST, HostRow, host_cases, host_rows, installed_libraries
from flashgen.bench.host_functions import function_names, function_rows
from flashgen.bench.host_torch import operator_names, operator_rows, operator_summary
from flashgen.bench.measure import Row, environment, speed_rows
from flashgen.bench.paper import PaperRow, paper_rows
from flashgen.bench.peers import PEERS
from flashgen.bench.ragged import RAGGED_PEERS, SHAPES, RaggedRow, ragged_rows
from flashgen.bench.serving import COMPARED as SERVING_COMPARED
from flashgen.bench.serving import CONTENDERS as SERVING_CONTENDERS
from flashgen.bench.serving import GROUPS as SERVING_GROUPS
from flashgen.bench.serving import ServingRow, serving_rows, serving_variants
from flashgen.bench.start import STARTS, start_rows
from flashgen.bench.train import ATTENTIONS, MODES, TrainRow, train_rows, train_summary, trainings
from flashgen.bench.variants import chosen_variants

__all__ = [
    "ATTENTIONS",
    "CONTEXT_CONTENDERS",
    "DECODE_PEERS",
    "DECODE_SIZES",
    "LIBRARIES",
    "MODES",
    "PARTS",
    "PASSES",
    "PEERS",
    "RAGGED_PEERS",
    "REST",
    "SERVING_COMPARED",
    "SERVING_CONTENDERS",
    "SERVING_GROUPS",
    "SHAPES",
    "STARTS",
    "ContextRow",
    "ContextShape",
    "DecodeRow",
    "DecodeSize",
    "GroupedRow",
    "HostRow",
    "PaperRow",
    "RaggedRow",
    "Row",
    "ServingRow",
    "Timed",
    "TrainRow",
    "VariantRow",
    "chosen_variants",
    "context_rows",
    "context_summary",
    "decode_rows",
    "environment",
    "function_names",
    "function_rows",
    "gpus_here",
    "grouped_rows",
    "host_cases",
    "host_rows",
    "installed_libraries",
    "operator_names",
    "operator_rows",
    "operator_summary",
    "own_choices",
    "paper_rows",
    "ragged_rows",
    "serving_rows",
    "serving_variants",
    "speed_rows",
    "start_rows",
    "summary",
    "train_rows",
    "train_summary",
    "trainings",
    "variant_rows",
]
