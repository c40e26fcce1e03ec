"""`flashgen tune`: times the plans of a spec's kernels on this machine's GPU, and saves the best one of each pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.arrays import load_arrays
from flashgen.cli.bench import numbers, require_gpu
from flashgen.cli.console import note, print_json, print_table, progress
from flashgen.cli.options import Deterministic, Json, Passes, Seed, Spec, SpecOptions, Target, with_spec_options
from flashgen.cli.specs import load_spec, load_variant
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.attention.trials import Tuning
    from flashgen.codegen.stages import Pass
    from flashgen.language import AttentionSpec
    from flashgen.verify import Inputs, Shape

EXAMPLES = """[bold]Examples[/]

flashgen tune "causal()" --head-dim 128 --dtype bfloat16

flashgen tune "causal() & sliding_window(1024)" --lengths 8192,32768 --batch 1 --heads 32 --heads-kv 8

flashgen tune "document('ids')" --captures packed.npz --lengths 16384 --json

flashgen tune "causal()" --lengths 1 --len-k 8192 --batch 8 --heads 32 --heads-kv 8 --page-size 16

flashgen tune "causal()" --pass backward --head-dim 64 --heads-kv 4
"""

TOKENS, WIDTH = 16384, 2048  # default batch x length and heads x head dim of a call, as in `flashgen bench`


@with_spec_options
def tune(
    spec: Spec,
    options: SpecOptions,
    lengths: Annotated[
        str, typer.Option("--lengths", help="Numbers of queries to tune for, comma-separated.")
    ] = "1024,4096,16384",
    len_k: Annotated[
        int | None, typer.Option("--len-k", min=1, help="Number of keys. Default: that of queries.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Number of sequences. Default: 16384 tokens in total.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", min=1, help="Number of query heads. Default: 2048 / head dim.")
    ] = None,
    heads_kv: Annotated[
        int | None, typer.Option("--heads-kv", min=1, help="Number of key heads. Default: that of query heads.")
    ] = None,
    passes: Annotated[Passes, typer.Option("--pass", help="The pass to tune.")] = Passes.forward,
    deterministic: Deterministic = False,
    captures: Annotated[
        Path | None,
        typer.Option("--captures", "--input", "-i", help="A file with captures by name. Default: random captures."),
    ] = None,
    target: Target = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Time the plans of a spec's kernels on this machine's GPU, and save the best plan for calls of these lengths.

    A plan is a choice of tile sizes, stages and warps. Each spec has a default plan. For each length up to 12 plans are
    compiled, compared with the output of the default plan, and timed alternately, with the L2 cache flushed before each
    run. The best plan is saved in the cache ([cyan]flashgen cache list[/]). Later calls of the spec on the same kind of
    GPU, with lengths that have the same nearest powers of 2, use it. The default plan stays if no plan is at least 1%
    faster. For few queries over many keys, also in pages or of 8 bits, the plans of the decode kernel are timed, and
    the table shows TB/s of the k and v that they read. For the backward all plans that fit of its main kernel, which
    computes dK and dV, are timed. Inputs are random, and all sequences have equal lengths. Do not use the GPU for other
    work meanwhile.
    """
    require_gpu()
    if deterministic and passes == Passes.forward:
        raise ArgumentError("--deterministic applies to the backward: add --pass backward or --pass both")
    declared = load_spec(spec, options)
    sizes = [
        shape_of(declared, length, len_k or length, batch, heads, heads_kv) for length in numbers(lengths, "--lengths")
    ]
    given = load_arrays(captures, "--captures") if captures else {}
    found = []
    for shape in sizes:
        inputs = inputs_of(spec, declared, shape, seed, given)
        for which in passes.chosen:
            result = tune_pass(declared, shape, inputs, target, seed, which, deterministic)
            found.append(described(result, declared, shape, which))
            if not json:
                print_table(*table(result, declared, shape, which), title=f"{declared.name}, {shape}, {which}")
                note(f"{result}\nsaved to {result.kept}")
    if json:
        print_json(found)


def shape_of(
    spec: AttentionSpec, len_q: int, len_k: int, batch: int | None, heads: int | None, heads_kv: int | None
) -> Shape:
    """Returns the sizes of a call. Raises ArgumentError if heads_kv does not divide heads."""
    from flashgen.verify import Shape

    heads = heads or max(WIDTH // spec.head_dim, 1)
    heads_kv = heads_kv or heads
    if heads % heads_kv:
        raise ArgumentError(f"--heads-kv {heads_kv} does not divide --heads {heads}")
    return Shape(len_q, len_k, batch or max(TOKENS // max(len_q, len_k), 1), heads, heads_kv)


def inputs_of(text: str, spec: AttentionSpec, shape: Shape, seed: int, given: dict[str, Any]) -> Inputs:
    """Returns random inputs, with the captures that the file has; its numbers are arrays without dimensions."""
    from flashgen.verify import random_inputs

    variant = load_variant(text)
    inputs = random_inputs(spec, shape, seed, variant.captures if variant else None, equal_lengths=True)
    own = {name: given[name] if given[name].ndim else given[name].item() for name in inputs.captures if name in given}
    return dataclasses.replace(inputs, captures=inputs.captures | own)


def tune_pass(
    spec: AttentionSpec,
    shape: Shape,
    inputs: Inputs,
    target: str | None,
    seed: int,
    which: Pass = "forward",
    deterministic: bool = False,
) -> Tuning:
    """Tunes a pass for one call, with a progress bar."""
    from flashgen import attention
    from flashgen.attention.backward_tuning import tune_backward
    from flashgen.attention.problem import CACHE
    from flashgen.attention.tuning import tune

    with progress(f"tuning {shape}", None) as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.update(bar.task_ids[0], description=f"{shape}: {what}", completed=done, total=total)

        compiled = attention.compile(spec, target=target, deterministic=deterministic)
        captures = {name: value for name, value in inputs.captures.items() if name not in CACHE}
        given = inputs.rows, captures, seed if spec.dropout else None
        if which == "forward":
            return tune(compiled.forward, *given, cache=inputs.captures, progress=show)
        return tune_backward(compiled.backward_pass, compiled.forward, *given, progress=show)


def table(
    result: Tuning, spec: AttentionSpec, shape: Shape, which: Pass = "forward"
) -> tuple[tuple[str, ...], list[list[str]]]:
    """Returns the heading and the rows: the plans by time, then those that were left out, with the reason.

    Plans of decode kernels are shown with TB/s instead of TFLOP/s.
    """
    unit, work = ("TB/s", bytes_moved(spec, shape)) if is_decode(result) else ("TFLOP/s", flops(spec, shape, which))
    heading = ("plan", "ms", unit, "registers", "times the default's speed", "")
    rows = sorted(result.timings, key=lambda row: (row.milliseconds is None, row.milliseconds))
    default = result.milliseconds[result.default]
    cells = []
    for row in rows:
        marks = [name for name, plan in (("winner", result.winner), ("default", result.default)) if plan == row.plan]
        registers = "-" if row.registers is None else str(row.registers)
        if row.milliseconds is None:
            cells.append([plan_text(row.plan), "-", "-", registers, "-", row.left_out])
            continue
        speed = f"{work / row.milliseconds / 1e9:.{2 if is_decode(result) else 0}f}"
        ratio = f"{default / row.milliseconds:.3f}"
        cells.append([plan_text(row.plan), f"{row.milliseconds:.4f}", speed, registers, ratio, ", ".join(marks)])
    return heading, cells


def described(result: Tuning, spec: AttentionSpec, shape: Shape, which: Pass = "forward") -> dict[str, Any]:
    """Returns a result for JSON."""
    speed, work = (
        ("terabytes", bytes_moved(spec, shape)) if is_decode(result) else ("tflops", flops(spec, shape, which))
    )
    timings = [
        timing | {speed: row.milliseconds and work / row.milliseconds / 1e9}
        for timing, row in zip(result.to_dict()["timings"], result.timings, strict=True)
    ]
    facts = {"spec": spec.name, "pass": which, "shape": dataclasses.asdict(shape), "timings": timings}
    return result.to_dict() | facts


def flops(spec: AttentionSpec, shape: Shape, which: Pass = "forward") -> float:
    """Returns the FLOPs of the matrix products of a pass, counted as in `flashgen bench`.

    A causal mask halves them if the lengths are equal.
    """
    from flashgen.bench.cases import counted_share
    from flashgen.codegen.costs import WorkSizes, product_flops

    share = counted_share(spec)
    if share < 1:
        shorter, longer = sorted((shape.len_q, shape.len_k))
        share = shorter / (2 * longer) if shorter == shape.len_k else 1 - shorter / (2 * longer)
    sizes = (shape.batch, shape.heads_q, shape.heads_kv, shape.len_q, shape.len_k)
    return product_flops(spec, which, WorkSizes(*sizes, pairs=shape.batch * shape.len_q * shape.len_k, visited=share))


def bytes_moved(spec: AttentionSpec, shape: Shape) -> int:
    """Returns the bytes of k and v that a call needs."""
    from flashgen.bench.decode import DecodeSize, bytes_needed

    return bytes_needed(spec, DecodeSize(shape.batch, shape.heads_q, shape.heads_kv, shape.len_k, shape.len_q))


def is_decode(result: Tuning) -> bool:
    """Returns whether the plans are those of a decode kernel."""
    from flashgen.codegen.dispatch import is_decode_plan
    from flashgen.codegen.targets import TARGETS

    return any(is_decode_plan(result.default, target) for target in TARGETS.values())


_UNSAID = (("packed_heads", 1), ("split", 1))


def plan_text(plan: Any) -> str:
    """Formats a plan: "192 x 128, consumers 3, stages 2, takes_turns"."""
    words = []
    for name, value in dataclasses.asdict(plan).items():
        if name not in ("tile_q", "tile_k") and value is not False and (name, value) not in _UNSAID:
            words.append(name if value is True else f"{name} {value}")
    return ", ".join([f"{plan.tile_q} x {plan.tile_k}", *words])
