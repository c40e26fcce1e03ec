"""Reads a hand-written release manifest (TOML or JSON): the specs and targets that are requested.

    [[kernels]]                                   # any number of groups; each is the product of its lists
    mask = ["causal()", "causal() & sliding_window(1024)"]
    score = ["", "softcap(30)"]                   # "" means no score function
    head_dim = [64, 128]
    dtype = ["float16", "bfloat16"]
    target = ["sm_80", "sm_90a"]

    [[kernels]]
    spec = '{...}'                                # the JSON of a spec, in place of its separate fields
    target = "sm_80"
    passes = ["forward", "decode", "backward"]    # builds all of these; default "forward"; "decode" is for calls of
                                                  # few queries over many keys
    deterministic = [false, true]                 # kinds of backward kernels; default false
    heads_per_kv = [1, 4]                         # query heads per head of k and v: adds the kernels that calls of
                                                  # some sizes launch; default: only the kernels of default plans

    [[kernels]]                                   # kernels without a spec that a server launches besides attention
    step = ["append_kv", "merge_states"]
    dtype = "bfloat16"                            # dtype of the merged outputs
    layout = "bshd"                               # layout of the merged outputs; default "bhsd"
    parts = [2, 3]                                # number of merged outputs; default 2
    target = "sm_90a"

Every value may be a single value or a list. The fields `value_dim`, `scale`, `layout`, `dropout`, `page_size`,
`kv_dtype`, `out_dtype`, `grad_dtype` and `shared_kv` of `AttentionSpec` are accepted too. `sink` is the name of a
float32 capture, which has a gradient if the backward is requested.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.codegen.append_kernel import render_append, render_append_records
from flashgen.codegen.merge_kernel import MAX_PARTIALS, MERGED_LAYOUTS, render_merge
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import PARTS, Part
from flashgen.codegen.targets import Target, target_named
from flashgen.dtypes import ELEMENTS, dtype_name
from flashgen.errors import FlashgenError, SpecError
from flashgen.files import read_text
from flashgen.language import AttentionSpec, Tensor, full, parse_mask, parse_score
from flashgen.language.kv_records import KV_RECORDS
from flashgen.strict_json import parse_json

_PARSERS: dict[str, Callable[[Any], Any]] = {
    "mask": lambda text: full() if text == "" else parse_mask(text),
    "score": lambda text: None if text == "" else parse_score(text),
}
_ARGUMENTS = (
    *("mask", "score", "head_dim", "value_dim", "dtype", "scale", "layout", "dropout", "page_size", "kv_dtype", "sink"),
    *("out_dtype", "grad_dtype", "shared_kv"),
)
_KEYS = ("spec", "target", "passes", "deterministic", "heads_per_kv", *_ARGUMENTS, "step", "parts")
_STEPS = ("append_kv", "merge_states")
_STEP_KEYS = ("step", "target", "dtype", "layout", "parts", "kv_dtype")


@dataclass(frozen=True)
class Request:
    """A spec to build for a target: its passes, and whether the backward is deterministic.

    heads_per_kv: query heads per head of k and v. It selects the additional kernels that calls of some sizes launch; 0
    for only the kernels of the default plans.

    Attributes:
        spec: the spec.
        target: the target.
        passes: "forward", "backward", "decode".
        deterministic: whether the backward is deterministic.
    """

    spec: AttentionSpec
    target: Target
    passes: tuple[Part, ...] = ("forward",)
    deterministic: bool = False
    heads_per_kv: int = 0


@dataclass(frozen=True)
class Step:
    """A kernel without a spec to build for a target: "append_kv", or "merge_states" for a dtype.

    Attributes:
        name: "append_kv" or "merge_states".
        target: the target.
        dtype: the type of the merged outputs; None for append_kv.
        layout: the layout of the outputs.
        parts: how many results are merged.
        kv_dtype: the records that append_kv writes, such as "fp8_ds_mla"; None for rows of keys and values.
    """

    name: str
    target: Target
    dtype: str = "bfloat16"
    layout: str = "bhsd"
    parts: int = 2
    kv_dtype: str | None = None

    def rendered(self) -> RenderedKernel:
        """Renders the kernel. Raises UnsupportedError if the target does not support the dtype."""
        if self.name == "append_kv":
            if self.kv_dtype:
                return render_append_records(self.target, KV_RECORDS[self.kv_dtype])
            return render_append(self.target)
        return render_merge(self.dtype, self.parts, self.layout, self.target)


AnyRequest = Request | Step


def read_requests(path: Path | str) -> tuple[AnyRequest, ...]:
    """Returns the requests of a manifest in order, without duplicates.

    Args:
        path: the file, in TOML.

    Raises:
        SpecError: the file cannot be read, or a group is invalid; the message names the group.
    """
    path = Path(path)
    requests: dict[AnyRequest, None] = {}
    for number, group in enumerate(_groups(path), start=1):
        try:
            requests.update(dict.fromkeys(_expand_group(group)))
        except (FlashgenError, TypeError) as error:
            raise SpecError(f"{path}, group {number} of `kernels`: {error}") from error
    return tuple(requests)


def _groups(path: Path) -> list[Any]:
    try:
        text = read_text(path)
        manifest = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
    except RecursionError:
        raise SpecError(f"the release manifest {path} cannot be read: it is nested too deep") from None
    except OSError as error:
        raise SpecError(f"the release manifest {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SpecError(f"the release manifest {path} cannot be read: {error}") from error
    groups = manifest.get("kernels") if isinstance(manifest, dict) else None
    if not isinstance(groups, list) or not groups or list(manifest) != ["kernels"]:
        raise SpecError(f"the release manifest {path} must hold one or more groups [[kernels]] and nothing else")
    return groups


def _expand_group(group: Any) -> Iterator[AnyRequest]:
    if not isinstance(group, dict):
        raise SpecError(f"a group must be a table, got {group!r}")
    unknown = sorted(set(group) - set(_KEYS))
    if unknown:
        raise SpecError(f"unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
    if "target" not in group:
        raise SpecError("`target` is missing; name one or more, such as target = ['sm_80', 'sm_90a']")
    targets = [target_named(name) for name in _values_of(group, "target")]
    if "step" in group:
        yield from _read_steps(group, targets)
        return
    if "parts" in group:
        raise SpecError("`parts` applies to merge_states: add step = 'merge_states', or leave it out")
    passes, deterministic = _read_passes(group)
    shared = _read_heads_per_kv(group, passes)
    for spec in _read_specs(group):
        for target, each, heads in itertools.product(targets, deterministic, shared):
            yield Request(spec, target, passes, each, heads)


def _read_steps(group: Mapping[str, Any], targets: list[Target]) -> Iterator[Step]:
    """Yields the kernels without a spec that a group requests."""
    foreign = sorted(set(group) - set(_STEP_KEYS))
    if foreign:
        raise SpecError(f"`{foreign[0]}` belongs to a spec; with `step` the keys are {', '.join(_STEP_KEYS)}")
    names = _values_of(group, "step")
    unknown = [name for name in names if name not in _STEPS]
    if unknown:
        raise SpecError(f"`step` names {unknown[0]!r}; choose from {', '.join(_STEPS)}")
    for name, target in itertools.product(names, targets):
        yield from _merge_steps(group, target) if name == "merge_states" else _append_steps(group, target)


def _append_steps(group: Mapping[str, Any], target: Target) -> Iterator[Step]:
    for name in _values_of(group, "kv_dtype") if "kv_dtype" in group else [None]:
        kv_dtype = name and dtype_name(name, tuple(KV_RECORDS), "kv_dtype")
        yield Step("append_kv", target, kv_dtype=kv_dtype)


def _merge_steps(group: Mapping[str, Any], target: Target) -> Iterator[Step]:
    if "dtype" not in group:
        raise SpecError("`dtype` is missing: give the dtype of the outputs that merge_states merges")
    layouts = _values_of(group, "layout") if "layout" in group else ["bhsd"]
    parts = _values_of(group, "parts") if "parts" in group else [2]
    for dtype, layout, count in itertools.product(_values_of(group, "dtype"), layouts, parts):
        if layout not in MERGED_LAYOUTS:
            raise SpecError(f"`layout` is {layout!r}; merge_states takes 'bhsd' and 'bshd'")
        if isinstance(count, bool) or not isinstance(count, int) or not 2 <= count <= MAX_PARTIALS:
            raise SpecError(f"`parts` is {count!r}; merge_states takes 2 to {MAX_PARTIALS}")
        yield Step("merge_states", target, dtype_name(dtype, ELEMENTS, "dtype"), layout, count)


def _read_passes(group: Mapping[str, Any]) -> tuple[tuple[Part, ...], list[bool]]:
    """Returns the passes in the order in which they run, and the values of `deterministic`."""
    requested = _values_of(group, "passes") if "passes" in group else ["forward"]
    unknown = [name for name in requested if name not in PARTS]
    if unknown:
        raise SpecError(f"`passes` names {unknown[0]!r}; choose from {', '.join(PARTS)}")
    deterministic = _values_of(group, "deterministic") if "deterministic" in group else [False]
    if any(not isinstance(each, bool) for each in deterministic):
        raise SpecError(f"`deterministic` must be true, false or both, got {deterministic!r}")
    if "deterministic" in group and "backward" not in requested:
        raise SpecError("`deterministic` applies to the backward: add it to `passes`, or leave this out")
    return tuple(name for name in PARTS if name in requested), deterministic


def _read_heads_per_kv(group: Mapping[str, Any], passes: tuple[Part, ...]) -> list[int]:
    """Returns the numbers of query heads per head of k and v; 0 if none is given."""
    if "heads_per_kv" not in group:
        return [0]
    if passes == ("decode",):
        raise SpecError("`heads_per_kv` applies to the forward and backward: add one to `passes`, or leave this out")
    heads = _values_of(group, "heads_per_kv")
    for each in heads:
        if isinstance(each, bool) or not isinstance(each, int) or each < 1:
            raise SpecError(f"`heads_per_kv` is {each!r}; give the query heads per head of k and v, 1 or more")
    return heads


def _read_specs(group: Mapping[str, Any]) -> Iterator[AttentionSpec]:
    given = [name for name in _ARGUMENTS if name in group]
    if "spec" in group:
        if given:
            raise SpecError(f"`spec` defines everything but the target; remove `{given[0]}`")
        for spec in _values_of(group, "spec"):
            yield AttentionSpec.from_json(spec if isinstance(spec, str) else json.dumps(spec))
        return
    if "head_dim" not in group:
        raise SpecError("`head_dim` is missing; name one or more, such as head_dim = [64, 128]")
    differentiated = "backward" in (_values_of(group, "passes") if "passes" in group else [])
    parsers = _PARSERS | {"sink": lambda name: None if name == "" else Tensor(name, "float32", 1, grad=differentiated)}
    for values in itertools.product(*(_values_of(group, name) for name in given)):
        arguments = dict(zip(given, values, strict=True))
        yield AttentionSpec(**{name: parsers.get(name, lambda value: value)(arguments[name]) for name in given})


def _values_of(group: Mapping[str, Any], name: str) -> list[Any]:
    values = group[name] if isinstance(group[name], list) else [group[name]]
    if not values:
        raise SpecError(f"`{name}` is an empty list; leave it out or name a value")
    return values
