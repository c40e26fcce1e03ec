"""The tables of docs/what-it-does.md: which features work with which layouts, passes, element types and targets.

A cell is computed by rendering the kernels of such a spec: that succeeds, or raises an error that states the reason.
`docs/refresh.py` writes the tables between the marks of the page, and a test compares them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np

import flashgen as fg
from flashgen.attention.tile_lists import sizes_of
from flashgen.codegen.dispatch import render_backward_kernels, render_forward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError, SpecError, UnsupportedError
from flashgen.ranks import plan_of
from flashgen.verify import Shape, random_inputs

BEGIN, END = "<!-- features -->", "<!-- end of features -->"
FRAMEWORKS_BEGIN, FRAMEWORKS_END = "<!-- frameworks -->", "<!-- end of frameworks -->"
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "varlen": {"layout": "thd"},
    "paged": {"page_size": 16},
    "varlen over pages": {"layout": "thd", "page_size": 16},
    "paged, 8 bits": {"page_size": 16, "kv_dtype": "int8"},
    "varlen over pages, 8 bits": {"layout": "thd", "page_size": 16, "kv_dtype": "int8"},
}
FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "mask with a closed form": lambda: {"mask": fg.causal()},
    "mask by tile lists": lambda: {"mask": fg.document(fg.Tensor("ids", "int32", ndim=2))},
    "score function": lambda: {"score": fg.softcap(30.0)},
    "captured array": lambda: {"score": fg.alibi(fg.Tensor("slopes"))},
    "captured array with a gradient": lambda: {"score": fg.relative_bias(fg.Tensor("table", ndim=2, grad=True), 128)},
    "dropout": lambda: {"dropout": 0.1},
    "sink": lambda: {"sink": fg.Tensor("sinks", "float32", 1, grad=True)},
    "value dim differs from head dim": lambda: {"value_dim": 64},
    "head dim 256": lambda: {"head_dim": 256},
    "head dim 512": lambda: {"head_dim": 512},
    "V as a part of K, 576 and 512": lambda: {"head_dim": 576, "value_dim": 512, "shared_kv": True},
    "records of `fp8_ds_mla`": lambda: {
        "head_dim": 576,
        "dtype": "bfloat16",
        "value_dim": 512,
        "shared_kv": True,
        "kv_dtype": "fp8_ds_mla",
    },
    "output in float32": lambda: {"out_dtype": "float32"},
    "gradients in float32": lambda: {"grad_dtype": "float32"},
}
REPRESENTATIVES = ("sm_75", "sm_80", "sm_90a")
"""A target of each family."""


@cache
def _accepts(layout: str, feature: str, dtype: str, target: str, backward: bool, deterministic: bool = False) -> bool:
    options = {"head_dim": 128, **(FEATURES[feature]() if feature else {}), **LAYOUTS[layout]}
    try:
        spec = fg.AttentionSpec(options.pop("head_dim"), options.pop("dtype", dtype), **options)
        if backward:
            render_backward_kernels(spec, TARGETS[target], deterministic=deterministic)
        else:
            render_forward_kernels(spec, TARGETS[target])
    except (SpecError, UnsupportedError):
        return False
    return True


def _cell(accepted: dict[str, bool]) -> str:
    """Returns the text of a cell, from whether each target accepts the feature."""
    if all(accepted.values()):
        return "works"
    if not any(accepted.values()):
        return "refused"
    return f"refused on {', '.join(target for target, works in accepted.items() if not works)}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _targets_cell(layout: str, feature: str, backward: bool, deterministic: bool = False) -> str:
    return _cell(
        {name: _accepts(layout, feature, "float16", name, backward, deterministic) for name in REPRESENTATIVES}
    )


def tables() -> str:
    """Returns the tables in Markdown."""
    layouts = [*LAYOUTS]
    forward = _table(
        ["forward", *layouts],
        ([feature, *(_targets_cell(layout, feature, False) for layout in layouts)] for feature in FEATURES),
    )
    with_backward = [layout for layout in layouts if _accepts(layout, "", "float16", "sm_80", backward=True)]
    backward = _table(
        ["backward", *with_backward],
        [
            *([feature, *(_targets_cell(layout, feature, True) for layout in with_backward)] for feature in FEATURES),
            ["deterministic", *(_targets_cell(layout, "", True, deterministic=True) for layout in with_backward)],
        ],
    )
    refused = ", ".join(layout for layout in layouts if layout not in with_backward)
    types = _table(
        ["target", *ELEMENTS],
        (
            [name, *(_cell({name: _accepts("dense", "", dtype, name, backward=False)}) for dtype in ELEMENTS)]
            for name in TARGETS
        ),
    )
    return f"{forward}\n\n{backward}\n\nThe backward refuses: {refused}.\n\n{types}\n\n{options_table()}"


def _is_accepted(layout: str, call: Callable[[Any], Any]) -> bool:
    """Whether a compiled attention of a layout accepts a call, on the emulator."""
    spec = fg.AttentionSpec(64, mask=fg.document(fg.Tensor("ids", "int32", ndim=2)), **LAYOUTS[layout])
    try:
        call(fg.compile(spec, target="sm_80", emulate=True))
    except (ArgumentError, SpecError, UnsupportedError):
        return False
    return True


def _decode_schedule(attention: Any) -> None:
    numbers = np.zeros((1, 4), np.int32)
    attention.decode_schedule(1, page_table=numbers, seqused_k=numbers[0, :1], heads=1, ids=numbers)


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "`num_splits`": lambda attention: attention.forward.dispatch.for_splits(sizes_of(1, 64, 1, 1, 1), 2),
    "`decode_schedule`": _decode_schedule,
    "`plan_for`": lambda attention: attention.plan_for(1, 64),
    "`tiles`, `tile_lists`": lambda attention: attention.tiles(64, 64, ids=np.zeros((1, 64), np.int32)),
    "`spec.shard()`": lambda attention: attention.spec.shard(),
}
"""Options of a call, and methods of a compiled attention."""


def options_table() -> str:
    """Returns the table of the options that calls of each layout accept."""
    rows = ([name, *(_cell({"": _is_accepted(layout, call)}) for layout in LAYOUTS)] for name, call in OPTIONS.items())
    return _table(["call", *LAYOUTS], rows)


def _inputs(spec: fg.AttentionSpec) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Returns small q, k and v, and the other arguments of a call."""
    inputs = random_inputs(spec, Shape(64, 64, 2, 2, 2))
    return [inputs.q, inputs.k, inputs.v], inputs.captures | inputs.ragged


def _call_torch(spec: fg.AttentionSpec, backward: bool) -> None:
    import torch

    from flashgen.torch import attention

    def without_data(array: Any) -> Any:
        return torch.from_numpy(array).to("meta") if isinstance(array, np.ndarray) else array

    arrays, others = _inputs(spec)
    q, k, v = map(without_data, arrays)
    out = attention(
        spec, q.requires_grad_(backward), k, v, **{name: without_data(each) for name, each in others.items()}
    )
    if backward:
        out.sum().backward()


def _call_jax(spec: fg.AttentionSpec, backward: bool) -> None:
    import jax

    from flashgen.jax import attention

    def run(q: Any, k: Any, v: Any) -> Any:
        return attention(spec, q, k, v, emulate=True, **others).sum()

    arrays, others = _inputs(spec)
    jax.eval_shape(jax.grad(run) if backward else run, *arrays)


def _call_ranks(spec: fg.AttentionSpec, backward: bool) -> None:
    plan_of(spec, 2, 64)


def _call_compiled(spec: fg.AttentionSpec, backward: bool) -> None:
    (render_backward_kernels if backward else render_forward_kernels)(spec, TARGETS["sm_80"])


FRAMEWORKS: dict[str, Callable[[fg.AttentionSpec, bool], None]] = {
    "`fg.compile`: NumPy, CuPy, DLPack": _call_compiled,
    "`flashgen.torch.attention`": _call_torch,
    "`flashgen.torch.context_parallel`": _call_ranks,
    "`flashgen.jax.attention`": _call_jax,
}
"""The functions of each framework: what a call on arrays without data, or its plan, accepts or refuses."""


def _framework_cell(layout: str, call: Callable[[fg.AttentionSpec, bool], None]) -> str:
    accepted = []
    for backward in (False, True):
        try:
            call(fg.AttentionSpec(64, mask=fg.causal(), **LAYOUTS[layout]), backward)
            accepted.append(True)
        except (ArgumentError, SpecError, UnsupportedError):
            accepted.append(False)
    return {(True, True): "works", (True, False): "forward only"}.get(tuple(accepted), "refused")


def frameworks_table() -> str:
    """Returns the table of the layouts that each framework's function accepts. Needs torch and JAX."""
    rows = ([name, *(_framework_cell(layout, call) for layout in LAYOUTS)] for name, call in FRAMEWORKS.items())
    return _table(["function", *LAYOUTS], rows)


def with_tables(text: str) -> str:
    """Returns a page with the current tables between its marks, if it has any.

    The table of frameworks stays as it is if torch or JAX is not installed.
    """
    text = between(text, BEGIN, END, tables)
    if importlib.util.find_spec("torch") and importlib.util.find_spec("jax"):
        text = between(text, FRAMEWORKS_BEGIN, FRAMEWORKS_END, frameworks_table)
    return text


def between(text: str, begin: str, end: str, table: Callable[[], str]) -> str:
    if begin not in text:
        return text
    before, _, rest = text.partition(begin)
    _, _, behind = rest.partition(end)
    return f"{before}{begin}\n\n{table()}\n\n{end}{behind}"
