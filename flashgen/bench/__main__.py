"""`python -m flashgen.bench`: times the candidate plans of plain and causal specs on this GPU.

python -m flashgen.bench [backward | deterministic] [HEAD_DIM ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from flashgen.bench.plans import PlanRow, backward_candidates, backward_plan_rows, candidates, plan_rows
from flashgen.language import AttentionSpec, causal, full

LENGTHS = (1024, 4096, 16384)


def main(what: str, head_dims: list[int]) -> None:
    for head_dim in head_dims:
        for mask in (full(), causal()):
            spec = AttentionSpec(head_dim, "bfloat16", mask=mask)
            for row in sorted(rows(what, spec), key=lambda row: -sum(row.tflops.values())):
                speeds = "  ".join(f"{length}: {row.tflops[length]:5.0f}" for length in LENGTHS)
                numbers = ", ".join(f"{name} {value}" for name, value in vars(row.plan).items())
                print(
                    f"{row.spec:28} registers {row.registers:3} spills {row.spills:4}  {speeds}  {numbers}", flush=True
                )


def rows(what: str, spec: AttentionSpec) -> Iterator[PlanRow]:
    if what == "forward":
        return plan_rows(spec, candidates(), LENGTHS)
    return backward_plan_rows(spec, backward_candidates(), LENGTHS, deterministic=what == "deterministic")


if __name__ == "__main__":
    words = [argument for argument in sys.argv[1:] if not argument.isdigit()]
    dims = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    main(words[0] if words else "forward", dims or [64, 128, 256])
