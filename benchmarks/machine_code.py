"""Compares the machine code of sampled kernels between two versions of flashgen. Needs NVRTC, no GPU.

A change that renames or rearranges emitted text should leave the machine code as it is. Save the samples before the
change and compare after it:

    python benchmarks/machine_code.py save before.json
    python benchmarks/machine_code.py compare before.json

`PYTHONPATH=CHECKOUT python -P benchmarks/machine_code.py save before.json` samples the kernels of another checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashgen.language as fg
from flashgen.build import elf, nvrtc
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import near_or_global, spec_of

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

Sample = dict[str, str]


def specs() -> Iterator[tuple[str, AttentionSpec, str, dict[str, Any]]]:
    """Yields labelled specs, a target each, and the options of `kernels_of`."""
    window = fg.trace_mask(near_or_global)
    base: list[tuple[str, dict[str, Any]]] = [
        ("full", {}),
        ("causal", {"mask": fg.causal()}),
        ("lists", {"mask": window}),
        ("score", {"mask": fg.causal(), "score": fg.softcap(20)(fg.alibi(8))}),
        ("dropout", {"mask": fg.causal(), "dropout": 0.1}),
        ("sink", {"mask": fg.causal(), "sink": fg.Tensor("sinks", "float32", 1, grad=True)}),
    ]
    cache: dict[str, Any] = {"page_size": 16, "mask": fg.causal()}
    for target in ("sm_80", "sm_90a"):
        for name, options in base:
            for dim in (64, 128, 192, 256) if name in ("full", "causal") else (64, 128):
                for layout in ("bhsd", "thd"):
                    if layout == "thd" and dim in (64, 192):
                        continue
                    spec = AttentionSpec(dim, "bfloat16", layout=layout, **options)
                    yield f"{name} {dim} {layout}", spec, target, {"passes": ("forward", "backward")}
        overrides: tuple[tuple[str, dict[str, Any]], ...] = (
            ("pages", {}),
            ("8-bit", {"kv_dtype": "float8_e4m3fn"}),
            ("list pages", {"mask": window}),
        )
        for name, more in overrides:
            for layout in ("bhsd", "thd"):
                spec = AttentionSpec(128, "bfloat16", layout=layout, **cache | more)
                yield f"{name} {layout}", spec, target, {"passes": ("forward",)}
                yield f"{name} {layout} decode", spec, target, {"passes": ("decode",)}
        yield "decode", AttentionSpec(128, mask=fg.causal()), target, {"passes": ("decode",)}
        for dim in (64, 128):
            backward = {"passes": ("backward",), "deterministic": True}
            yield f"deterministic {dim}", AttentionSpec(dim, mask=fg.causal()), target, backward
            yield f"deterministic lists {dim}", AttentionSpec(dim, mask=window), target, backward
            yield f"head split {dim}", AttentionSpec(dim), target, {"passes": ("backward",), "heads_apart": True}
        packed = {"passes": ("forward",), "packed_heads": 8}
        yield "packed heads", AttentionSpec(128, mask=fg.causal()), target, packed
    yield "turing", AttentionSpec(64, mask=fg.causal()), "sm_75", {"passes": ("forward", "backward", "decode")}
    for number, variant in enumerate(variants()[::4]):
        dim, target = (64, 128, 96, 192)[number % 4], ("sm_90a", "sm_80", "sm_90a")[number % 3]
        spec = spec_of(variant, dim, "bfloat16", ("bhsd", "thd")[number % 2])
        yield f"variant {variant.name}", spec, target, {"passes": ("forward", "backward")}


def kernels() -> Iterator[tuple[str, RenderedKernel]]:
    """Yields the sampled kernels, labelled by spec, target and position in the launch order."""
    for label, spec, target, options in specs():
        try:
            rendered = kernels_of(spec, TARGETS[target], **options)
        except UnsupportedError:  # not every target has head splits or packed heads
            continue
        for position, kernel in enumerate(rendered.values()):
            yield f"{target} {label} #{position}", kernel


def tokens(kernel: RenderedKernel) -> str:
    """Returns the hash of the target and of the text without comments and spacing."""
    return _sha((kernel.target.name + " ".join(_COMMENT.sub(" ", kernel.source).split())).encode())


def machine_code(kernel: RenderedKernel, known: dict[str, str]) -> str:
    """Returns the hash of the machine code. known: hashes by `tokens`, to which it is added."""
    text = tokens(kernel)
    if text not in known:
        cubin = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name).cubin
        known[text] = _sha(b"".join(elf.machine_code(cubin)))
    return known[text]


def save() -> dict[str, Sample]:
    """Returns the samples of this version: hashes of the text and of the machine code of each kernel."""
    known: dict[str, str] = {}
    return {label: {"tokens": tokens(kernel), "code": machine_code(kernel, known)} for label, kernel in kernels()}


def compare(before: dict[str, Sample]) -> dict[str, list[str]]:
    """Returns the labels of the kernels whose text or code is the same as before, differs, or has no counterpart.

    A kernel is compiled only if its text differs by more than comments and spacing.
    """
    result: dict[str, list[str]] = {name: [] for name in ("same text", "same code", "different", "new", "missing")}
    known: dict[str, str] = {}
    left = dict(before)
    for label, kernel in kernels():
        old = left.pop(label, None)
        if old is None:
            result["new"].append(label)
        elif tokens(kernel) == old["tokens"]:
            result["same text"].append(label)
        else:
            result["same code" if machine_code(kernel, known) == old["code"] else "different"].append(label)
    result["missing"] = list(left)
    return result


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("save", "compare"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "save":
        samples = save()
        arguments.file.write_text(json.dumps(samples, indent=1), "utf-8")
        print(f"{len(samples)} kernels")
        return
    result = compare(json.loads(arguments.file.read_text("utf-8")))
    for name in ("different", "new", "missing"):
        for label in result[name]:
            print(f"{name}: {label}")
    print(", ".join(f"{name}: {len(labels)}" for name, labels in result.items()))


if __name__ == "__main__":
    main()
