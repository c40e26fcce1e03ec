"""Times kernels on a GPU together with other implementations: `flashgen bench`."""

from flashgen.bench import summary
from flashgen.bench.beside_flex import VariantRow, variant_rows
from flashgen.bench.biases import BIAS_CASES, BIAS_PEERS, BiasRow, bias_rows
from flashgen.bench.cases import Timed
from flashgen.bench.decode import (
    LATENT_SIZES,
    PROMPT_SIZES,
    DecodeRow,
    DecodeSize,
    decode_rows,
    own_choices,
    plan_of_numbers,
)
from flashgen.bench.decode import PEERS as DECODE_PEERS
from flashgen.bench.decode import SIZES as DECODE_SIZES
from flashgen.bench.grouped import GroupedRow, grouped_rows
from flashgen.bench.latent_peers import LATENT_PEERS
from flashgen.bench.measure import Row, environment, speed_rows
from flashgen.bench.peers import PEERS
from flashgen.bench.serving import COMPARED as SERVING_COMPARED
from flashgen.bench.serving import CONTENDERS as SERVING_CONTENDERS
from flashgen.bench.serving import GROUPS as SERVING_GROUPS
from flashgen.bench.serving import ServingRow, serving_rows, serving_variants
from flashgen.bench.variants import chosen_variants
from flashgen.bench.varlen import SHAPES, VARLEN_PEERS, VarlenRow, varlen_rows

__all__ = [
    "BIAS_CASES",
    "BIAS_PEERS",
    "DECODE_PEERS",
    "DECODE_SIZES",
    "LATENT_PEERS",
    "LATENT_SIZES",
    "PEERS",
    "PROMPT_SIZES",
    "SERVING_COMPARED",
    "SERVING_CONTENDERS",
    "SERVING_GROUPS",
    "SHAPES",
    "VARLEN_PEERS",
    "BiasRow",
    "DecodeRow",
    "DecodeSize",
    "GroupedRow",
    "Row",
    "ServingRow",
    "Timed",
    "VariantRow",
    "VarlenRow",
    "bias_rows",
    "chosen_variants",
    "decode_rows",
    "environment",
    "grouped_rows",
    "own_choices",
    "plan_of_numbers",
    "serving_rows",
    "serving_variants",
    "speed_rows",
    "summary",
    "variant_rows",
    "varlen_rows",
]
