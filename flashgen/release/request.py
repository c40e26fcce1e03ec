"""Reads a release manifest as a person writes it (TOML or JSON): the specs and targets that it asks for.

    [[kernels]]                                   # any number of groups; each is the product of its lists
    mask = ["causal()", "causal() & sliding_window(1024)"]
    score = ["", "softcap(30)"]                   # "" is no score function
    head_dim = [64, 128]
    dtype = ["float16", "bfloat16"]
    target = ["sm_80", "sm_90a"]

    [[kernels]]
    spec = '{...}'                                # a spec's own JSON, in place of all that describes one
    target = "sm_80"
    passes = ["forward", "decode", "backward"]    # all of these; "forward" where nothing is said; "decode" is what
                                                  # calls of few queries over many keys launch
    deterministic = [false, true]                 # which kernels of the backward; false where nothing is said

Every value may be one or a list. `value_dim`, `scale`, `layout`, `dropout`, `page_size` and `kv_dtype` may be given
too, as for `AttentionSpec`.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.codegen.stages import PARTS, Part
from flashgen.codegen.targets import Target, target_named
from flashgen.errors import FlashgenError, SpecError
from flashgen.language import AttentionSpec, full, parse_mask, parse_score
from flashgen.strict_json import parse_json

_PARSERS = {
    "mask": lambda text: full() if text == "" else parse_mask(text),
    "score": lambda text: None if text == "" else parse_score(text),
}
_ARGUMENTS = ("mask", "score", "head_dim", "value_dim", "dtype", "scale", "layout", "dropout", "page_size", "kv_dtype")
_KEYS = ("spec", "target", "passes", "deterministic", *_ARGUMENTS)


@dataclass(frozen=True)
class Request:
    """A spec to be built for a target: the kernels of these passes, and whether the backward is deterministic."""

    spec: AttentionSpec
    target: Target
    passes: tuple[Part, ...] = ("forward",)
    deterministic: bool = False


def read_requests(path: Path | str) -> tuple[Request, ...]:
    """Everything that a manifest asks for, in its order, each once.

    Raises:
        SpecError: the file cannot be read, or a group is not as described; the message names the group.
    """
    path = Path(path)
    requests: dict[Request, None] = {}
    for number, group in enumerate(_groups(path), start=1):
        try:
            requests.update(dict.fromkeys(_expanded(group)))
        except (FlashgenError, TypeError) as error:
            raise SpecError(f"{path}, group {number} of `kernels`: {error}") from error
    return tuple(requests)


def _groups(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        manifest = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
    except RecursionError:
        raise SpecError(f"the release manifest {path} cannot be read: it is nested too deep") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"the release manifest {path} cannot be read: {error}") from error
    groups = manifest.get("kernels") if isinstance(manifest, dict) else None
    if not isinstance(groups, list) or not groups or list(manifest) != ["kernels"]:
        raise SpecError(f"the release manifest {path} must hold one or more groups [[kernels]] and nothing else")
    return groups


def _expanded(group: Any) -> Iterator[Request]:
    if not isinstance(group, dict):
        raise SpecError(f"a group must be a table, got {group!r}")
    unknown = sorted(set(group) - set(_KEYS))
    if unknown:
        raise SpecError(f"unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
    if "target" not in group:
        raise SpecError("`target` is missing; name one or more, such as target = ['sm_80', 'sm_90a']")
    targets = [target_named(name) for name in _listed(group, "target")]
    passes, deterministic = _passes(group)
    for spec in _specs(group):
        for target, each in itertools.product(targets, deterministic):
            yield Request(spec, target, passes, each)


def _passes(group: Mapping[str, Any]) -> tuple[tuple[Part, ...], list[bool]]:
    """The passes in the order in which they run, and which kinds of backward."""
    named = _listed(group, "passes") if "passes" in group else ["forward"]
    unknown = [name for name in named if name not in PARTS]
    if unknown:
        raise SpecError(f"`passes` names {unknown[0]!r}; choose from {', '.join(PARTS)}")
    deterministic = _listed(group, "deterministic") if "deterministic" in group else [False]
    if any(not isinstance(each, bool) for each in deterministic):
        raise SpecError(f"`deterministic` must be true, false or both, got {deterministic!r}")
    if "deterministic" in group and "backward" not in named:
        raise SpecError("`deterministic` is of the backward: add it to `passes`, or leave this out")
    return tuple(name for name in PARTS if name in named), deterministic


def _specs(group: Mapping[str, Any]) -> Iterator[AttentionSpec]:
    given = [name for name in _ARGUMENTS if name in group]
    if "spec" in group:
        if given:
            raise SpecError(f"`spec` says everything but the target; remove `{given[0]}`")
        for spec in _listed(group, "spec"):
            yield AttentionSpec.from_json(spec if isinstance(spec, str) else json.dumps(spec))
        return
    if "head_dim" not in group:
        raise SpecError("`head_dim` is missing; name one or more, such as head_dim = [64, 128]")
    for values in itertools.product(*(_listed(group, name) for name in given)):
        arguments = dict(zip(given, values, strict=True))
        yield AttentionSpec(**{name: _PARSERS.get(name, lambda value: value)(arguments[name]) for name in given})


def _listed(group: Mapping[str, Any], name: str) -> list[Any]:
    values = group[name] if isinstance(group[name], list) else [group[name]]
    if not values:
        raise SpecError(f"`{name}` is an empty list; leave it out or name a value")
    return values
