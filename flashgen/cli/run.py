"""`flashgen run`: runs one attention call on arrays in files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli import arrays
from flashgen.cli.console import fail, note, print_json
from flashgen.cli.machine import engine_text, gpus
from flashgen.cli.options import Emulate, Json, Seed, Spec, SpecOptions, Target, with_spec_options_of
from flashgen.cli.specs import is_complete, load_spec
from flashgen.cli.writing import Force, check_output
from flashgen.errors import ArgumentError, LaunchError

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

EXAMPLES = """[bold]Examples[/]

flashgen run "causal()" --input qkv.npz --output out.npz --check

flashgen run "document()" --dropout 0.1 --seed 7 --lse --input qkv.safetensors --output out.safetensors --emulate
"""

INPUTS = ("q", "k", "v")
_PAGES, _SCALES = ("page_table", "seqused_k"), ("k_scale", "v_scale")


@with_spec_options_of(dtype="that of q", head_dim="that of q", value_dim="that of v")
def run(
    spec: Spec,
    input: Annotated[
        Path, typer.Option("--input", "-i", help="The .npz or .safetensors file with q, k, v and the captures.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .npz or .safetensors file to write.")],
    options: SpecOptions,
    target: Target = None,
    emulate: Emulate = False,
    seed: Seed = 0,
    lse: Annotated[bool, typer.Option("--lse", help="Also write the log-sum-exp of each row.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with NumPy; exit with status 1 if the error is too large.")
    ] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Run an attention variant on q, k and v from a file, and write the output to another file.

    Head dim, value dim and dtype are those of the arrays, unless SPEC is a complete spec or an option sets them. With
    [cyan]--shared-kv[/] the file has no v, and [cyan]--value-dim[/] says how many columns of k are the value. The file
    has the captures of the variant as arrays of the same names (a number is an array without dimensions), and the
    other arguments of a call, such as cu_seqlens_q, page_table, seqused_k and k_scale. Further arrays are ignored. The
    .npz format does not support bfloat16: with [cyan]--dtype bfloat16[/], q, k, v and out are 16-bit words of dtype
    uint16. The .safetensors format supports it. The output file has the array out, and with --lse the array lse.
    """
    check_paths(output, input, force)
    if not emulate and not gpus():
        raise LaunchError("this machine has no GPU; --emulate runs the same CUDA on this CPU")
    given = arrays.load_arrays(input)
    declared = spec_for(spec, options, given, input)
    query, key, value = (in_dtype(given.get(name), declared.dtype) for name in INPUTS)
    captures = captures_of(declared, given, input)

    from flashgen import attention as engine

    attention = engine.compile(declared, target=target, emulate=emulate)
    dropout: dict[str, Any] = {"seed": seed} if declared.dropout else {}
    begin = time.perf_counter()
    out, log_sum_exp = attention(query, key, value, **captures, **dropout, return_lse=True)
    seconds = time.perf_counter() - begin

    arrays.save_arrays(output, {"out": out, "lse": log_sum_exp} if lse else {"out": out})
    report: dict[str, Any] = {
        "spec": declared.name,
        "engine": engine_text(emulate),
        "output": str(output),
        "out": list(out.shape),
        "seconds": seconds,
    }
    verdict = None
    if check:
        from flashgen.verify import judged

        verdict = judged(declared, query, key, value, out, log_sum_exp, captures, **dropout)
        report["check"] = {
            "ok": verdict.ok,
            "error": verdict.error,
            "bound": verdict.bound,
            "lse_error": verdict.lse_error,
        }
    if json:
        print_json(report)
    else:
        note(f"{declared.name} on the {engine_text(emulate)}: out {out.shape} in {seconds:.3f} s -> {output}")
    if verdict is not None and not json:
        (note if verdict.ok else fail)(f"compared with NumPy in float64: {verdict}")
    if verdict is not None and not verdict.ok:
        raise typer.Exit(1)


def check_paths(output: Path, input: Path, force: bool) -> None:
    """Raises ArgumentError, before anything is computed, if the output would replace the input or an edited file."""
    arrays.check_kind(output, "--output")
    if output.exists() and input.exists() and output.samefile(input):
        raise ArgumentError(
            f"--output {output} is the file of --input, and would replace q, k and v; give another file"
        )
    check_output(output, force)


def captures_of(spec: AttentionSpec, given: arrays.Arrays, path: Path) -> dict[str, Any]:
    """Returns the arguments of a call other than q, k and v that the file has, by name.

    These are the captures of the spec, where the number of a Scalar is an array without dimensions, and the arguments
    that locate sequences or pages. Raises ArgumentError for captures that the file lacks.
    """
    missing = [capture.name for capture in spec.captures if capture.name not in {*given, *spec.bound}]
    if missing:
        raise ArgumentError(
            f"--input {path} lacks the captures {', '.join(missing)}; it holds {', '.join(sorted(given))}"
        )
    own = (*spec.batch_layout.sequence_arrays, *_PAGES * bool(spec.page_size), *_SCALES * spec.scales_kv)
    found: dict[str, Any] = {name: given[name] for name in own if name in given}
    for capture in (capture for capture in spec.captures if capture.name in given):
        array = given[capture.name]
        found[capture.name] = array.item() if capture.ndim == array.ndim == 0 else narrowed(array, capture.dtype)
    return found


def narrowed(array: Any, dtype: str) -> Any:
    """Converts float64 to float32, and int64 to int32 if the values fit; returns other arrays unchanged.

    NumPy creates 64-bit arrays by default, so files often have them.
    """
    if (array.dtype.name, dtype) == ("float64", "float32"):
        return array.astype(dtype)
    if (array.dtype.name, dtype) == ("int64", "int32") and (array == array.astype(dtype)).all():
        return array.astype(dtype)
    return array


def spec_for(text: str, options: SpecOptions, given: arrays.Arrays, path: Path) -> AttentionSpec:
    """Returns the spec of SPEC and the options, with the head dim, value dim and dtype of the arrays as defaults."""
    complete = load_spec(text, options) if is_complete(text) else None
    shared = options.shared_kv if complete is None else complete.shared_kv
    inputs = INPUTS[:2] if shared else INPUTS
    missing = [name for name in inputs if name not in given]
    if missing:
        raise ArgumentError(
            f"--input {path} lacks {', '.join(missing)}; it holds {', '.join(sorted(given)) or 'nothing'}"
        )
    if complete is not None:
        return complete
    for name in inputs:
        if given[name].ndim == 0:
            raise ArgumentError(
                f"--input {path}: {name} is an array without dimensions; give one of shape (batch, heads, length, dim)"
            )
    defaults: dict[str, Any] = {"head_dim": int(given["q"].shape[-1])}
    if not shared:
        defaults["value_dim"] = int(given["v"].shape[-1])
    dtype = given["q"].dtype
    if dtype == arrays.BFLOAT16 or dtype.name == "float16":
        defaults["dtype"] = dtype.name
    elif options.dtype is None:
        raise ArgumentError(
            f"--input {path}: q has the dtype {dtype}; give float16, or 16-bit words with --dtype bfloat16"
        )
    return load_spec(text, options.with_defaults(**defaults))


def in_dtype(array: Any, dtype: str) -> Any:
    return arrays.as_bfloat16(array) if dtype == "bfloat16" and array is not None else array
