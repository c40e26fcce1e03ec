"""Compiles printed expressions with the host's compiler and compares them with NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import sympy

from flashgen.attention.launches import capture_values
from flashgen.build.host import compile_host
from flashgen.codegen.arguments import Field, capture_fields, member_name, ordered
from flashgen.codegen.environment import environment, primitives_for, tidy
from flashgen.codegen.expressions.printer import Printer, statements
from flashgen.codegen.targets import TARGETS
from flashgen.codegen.variant import Variant, _array
from flashgen.language.operations import (
    BATCH,
    HEAD,
    INDICES,
    KEY,
    LEN_K,
    LEN_Q,
    QUERY,
    SCORE,
    captures_of,
    kind_of,
)
from flashgen.launch.argument_writer import ArgumentWriter
from flashgen.runtime import emulator
from flashgen.runtime.arrays import view_numpy

ROWS, THREADS = 96, 32
Arrays = dict[str, Any]


def sample_values() -> dict[sympy.Basic, Any]:
    """Returns a value of each symbol per row: indices from 0 on, scores of both signs that are exact in float32."""
    random = np.random.default_rng(5)
    values: dict[sympy.Basic, Any] = {symbol: random.integers(0, 150, ROWS).astype(np.int32) for symbol in INDICES}
    values[BATCH] %= 3
    values[HEAD] %= 4
    return values | {LEN_Q: 97, LEN_K: 130, SCORE: (random.integers(-80, 80, ROWS) / 4).astype(np.float32)}


def run_expressions(nodes: Sequence[sympy.Basic], captures: Arrays) -> list[np.ndarray[Any, Any]]:
    """Returns the value of each expression at each row of `sample_values`, as computed by one kernel."""
    values, used = sample_values(), captures_of(*nodes)
    names = {BATCH: "b_at", HEAD: "h_at", QUERY: "q_at", KEY: "k_at"}
    fields = [Field("const int*", name) for name in names.values()]
    fields += [Field("const float*", "score_at"), Field("long long*", "integers"), Field("float*", "floats")]
    layout = ordered([*fields, Field("int", "len_q"), Field("int", "len_k"), *capture_fields(used)])
    arrays = [capture for capture in used if capture.ndim]
    numbers = {member_name(capture): captures[capture.name] for capture in used if not capture.ndim}
    integers = np.full((len(nodes), ROWS), -99, np.int64)
    floats = np.full((len(nodes), ROWS), np.nan, np.float32)
    pointers: Arrays = {name: values[symbol] for symbol, name in names.items()}
    pointers |= {"score_at": values[SCORE], "integers": integers, "floats": floats}
    members: dict[str, Any] = {"len_q": values[LEN_Q], "len_k": values[LEN_K]} | numbers
    pointers |= {member_name(capture): captures[capture.name] for capture in arrays}
    views = {capture.name: view_numpy(captures[capture.name], capture.name) for capture in arrays}
    members |= capture_values(layout, SimpleNamespace(captures=used), views)  # type: ignore[arg-type]
    writer = ArgumentWriter(layout, members)
    kernel = compile_host(_kernel_text(nodes, layout, arrays), "expressions")
    struct = bytes(writer.write({}, {}))
    placed = [(8 * i, pointers[name]) for i, name in enumerate(writer.pointer_names)]
    emulator.launch(kernel, (ROWS // THREADS, 1, 1), (THREADS, 1, 1), 0, struct, placed)
    return [floats[i] if kind_of(node) == "float" else integers[i] for i, node in enumerate(nodes)]


def _kernel_text(nodes: Sequence[sympy.Basic], layout: Any, arrays: Sequence[Any]) -> str:
    struct, templates = "ExpressionArguments", environment()
    types = templates.get_template("types.cuh.jinja").render(struct=struct, element=None, layout=layout)
    variant = Variant(None, None, tuple(_array(capture) for capture in arrays))
    loads = templates.get_template("variant.cuh.jinja").render(struct=struct, variant=variant, position=False)
    parameters = f"int b, int h, int q, int k, float score, const {struct}& arguments"
    functions, calls = [], []
    for number, node in enumerate(nodes):
        declarations, (text,) = statements(node)
        body = "".join(f"  {line}\n" for line in [*declarations, f"return {text};"])
        functions.append(f"__device__ {Printer().c_type(node)} value{number}({parameters}) {{\n{body}}}\n")
        into = "floats" if kind_of(node) == "float" else "integers"
        calls.append(f"  arguments.{into}[{number * ROWS} + i] = value{number}(b, h, q, k, score, arguments);\n")
    kernel = (
        f'extern "C" __global__ void expressions(const __grid_constant__ {struct} arguments) {{\n'
        f"  const int i = blockIdx.x * {THREADS} + threadIdx.x;\n"
        "  const int b = arguments.b_at[i], h = arguments.h_at[i], q = arguments.q_at[i], k = arguments.k_at[i];\n"
        f"  const float score = arguments.score_at[i];\n{''.join(calls)}}}\n"
    )
    text = "\n".join([loads, *functions, kernel])
    device, shared = primitives_for(text, TARGETS["sm_80"])
    primitives = templates.get_template("primitives.cuh.jinja").render(
        device_primitives=device, shared_primitives=shared, uses_shared_memory=False
    )
    return tidy(f"{types}\n{primitives}\n{text}")


@pytest.fixture(scope="session")
def run() -> Callable[..., list[np.ndarray[Any, Any]]]:
    return run_expressions


@pytest.fixture(scope="session")
def values() -> dict[sympy.Basic, Any]:
    return sample_values()


@pytest.fixture(scope="session")
def captures() -> Arrays:
    """Returns arrays and numbers for the captures of random expressions, by name."""
    random = np.random.default_rng(6)
    return {
        "ids": random.integers(-9, 9, 40).astype(np.int32),
        "wide": random.choice([-(2**63), -(2**32) - 1, -9, 0, 5, 2**31, 2**32 + 1, 2**63 - 1], (5, 7))[:, ::2],
        "bytes": random.integers(0, 255, 20).astype(np.uint8),
        "table": (random.integers(-40, 40, (3, 9)) / 8).astype(np.float32),
        "half": (random.integers(-40, 40, 12) / 8).astype(np.float16),
        "brain": (random.integers(-40, 40, 12) / 8).astype(ml_dtypes.bfloat16),
        "flags": random.random((4, 6)) < 0.5,
        "window": -7,
        "zero": 0,
        "cap": 2.5,
    }
