"""`python -m flashgen.bench`: times the candidate plans of plain and causal specs on this GPU."""

from __future__ import annotations

import sys

from flashgen.bench.plans import candidates, plan_rows
from flashgen.language import AttentionSpec, causal, full

LENGTHS = (1024, 4096, 16384)


def main(head_dims: list[int]) -> None:
    for head_dim in head_dims:
        for mask in (full(), causal()):
            spec = AttentionSpec(head_dim, "bfloat16", mask=mask)
            rows = sorted(plan_rows(spec, candidates(), LENGTHS), key=lambda row: -sum(row.tflops.values()))
            for row in rows:
                speeds = "  ".join(f"{length}: {row.tflops[length]:5.0f}" for length in LENGTHS)
                plan = row.plan
                shape = f"{plan.tile_q}x{plan.tile_k} warps {plan.warps} stages {plan.stages} blocks {plan.blocks}"
                print(
                    f"{row.spec:28} {shape:40} registers {row.registers:3} spills {row.spills:4}  {speeds}", flush=True
                )


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [64, 128, 256])
