"""A manifest describes launches as calls make them: grids, arguments and tensor maps, in JSON and as C++."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import release
from flashgen.attention.callable import Attention
from flashgen.attention.launches import Launch
from flashgen.build import nvrtc
from flashgen.build.host import find_compiler
from flashgen.build.resources import Resources
from flashgen.codegen.hopper.plans import HopperPlan, panel_columns
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import target_named
from flashgen.launch.engines import Emulator, EmulatorRunner
from flashgen.launch.tensor_map_writer import TensorMapWriter
from flashgen.release.launch_facts import FORMULAS, launch_facts
from flashgen.release.launch_header import struct_name
from flashgen.verify.problems import Inputs, Shape, random_inputs

SHAPE = Shape(300, 170, 2, 4, 2)
SLOPES = fg.Tensor("slopes", "bfloat16", 1, grad=True)
BY_PLACE = fg.trace_mask(lambda b, h, q, k: fg.Tensor("keep", "uint8", 2)[h, k] > fg.Tensor("least", "int32", 1)[b])
SPECS = (
    fg.AttentionSpec(64, mask=fg.causal()),
    fg.AttentionSpec(40, "bfloat16", value_dim=72, score=fg.alibi(SLOPES), dropout=0.1, layout="bshd"),
    fg.AttentionSpec(64, mask=fg.document("ids") & fg.causal(), score=fg.softcap(fg.Scalar("cap", "float32"))),
    fg.AttentionSpec(256, mask=BY_PLACE, score=fg.alibi(fg.Tensor("slopes", "float32", 1, grad=True))),
    fg.AttentionSpec(64, mask=fg.causal(), sink=fg.Tensor("sinks", "float32", 1, grad=True)),
    fg.AttentionSpec(64, mask=fg.causal(), layout="thd", sink=fg.Tensor("sinks", "float32", 1, grad=True)),
    fg.AttentionSpec(128, "bfloat16", mask=fg.document("ids") & fg.causal(), layout="thd", dropout=0.1),
)
CALLERS = {"q", "k", "v", "o", "lse", "d_o", "d_lse", "dq", "dk", "dv", "next_tile", "seed_low", "seed_high", "offset"}


@dataclass(frozen=True)
class Launched:
    """A launch of a call: kernel, part, grid and the bytes of its arguments."""

    part: str
    kernel: RenderedKernel
    launch: Launch
    arguments: bytes


def part_of(kernel: RenderedKernel, backward: bool) -> str:
    kind = kernel.name.removeprefix("bwd-").split("-")[0]
    if kind in ("fwd", "capture"):
        return "forward" if kind == "fwd" else f"d_{kernel.name.split('-')[2]}"
    if kind == "postprocess":
        return kernel.role  # with split heads there are three
    return {"lists": "backward_lists" if backward else "lists", "query": "query_lists"}.get(kind, kind)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RenderedKernel, Launch, bytes]]:
    """Records launches without making them."""
    seen: list[tuple[RenderedKernel, Launch, bytes]] = []

    def launch(self: EmulatorRunner, launch: Launch, arrays: Any, numbers: Any, place: Any) -> None:
        seen.append((self._kernel, launch, bytes(launch.writer.write_emulated(numbers))))

    monkeypatch.setattr(EmulatorRunner, "__init__", lambda self, kernel, *how: setattr(self, "_kernel", kernel))
    monkeypatch.setattr(EmulatorRunner, "launch", launch)
    return seen


def launches(
    spec: fg.AttentionSpec,
    target: str,
    deterministic: bool,
    recorded: list[Any],
    plan: Any = None,
    shape: Shape = SHAPE,
) -> Iterator[Launched]:
    """Returns the launches of a forward and a backward call."""
    attention = Attention(spec, target_named(target), Emulator(), plan, deterministic)
    inputs: Inputs = random_inputs(spec, shape)
    rest = inputs.ragged | inputs.captures | ({"seed": 5} if spec.dropout else {})
    out, lse = attention(inputs.q, inputs.k, inputs.v, return_lse=True, **rest)
    forward = len(recorded)
    attention.backward(out, inputs.q, inputs.k, inputs.v, out, np.zeros_like(lse), **rest)
    for number, (kernel, launch, arguments) in enumerate(recorded):
        yield Launched(part_of(kernel, number >= forward), kernel, launch, arguments)


def value(formula: str, sizes: Mapping[str, int]) -> int:
    """For nonnegative sizes C++'s integer division equals Python's."""
    names = {"ceil_div": lambda a, b: -(-a // b), "min": min, "max": max, **sizes}
    return int(eval(formula.replace("/", "//"), {"__builtins__": {}}, names))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_formulas_equal_the_launches_of_calls(
    spec: fg.AttentionSpec, target: str, deterministic: bool, recorded: list[Any]
) -> None:
    made = list(launches(spec, target, deterministic, recorded))
    check(made, spec)
    parts = {launched.part for launched in made}
    listed = spec.mask.name not in ("causal()", "full()")
    own = target == "sm_90a"
    in_turns = own and not listed and not spec.is_varlen
    apart = (deterministic and not in_turns) or (own and spec.head_dim > 128)  # a kernel of its own makes dQ
    finishes = own and not apart and not spec.is_varlen  # the main kernel itself
    assert {"forward", "preprocess", "dkdv", *(["dq"] if apart else [] if finishes else ["postprocess"])} <= parts
    lists = {"lists", "query_lists", *(["backward_lists"] if apart else [])} if listed else set()
    assert {part for part in parts if part.endswith("lists")} == lists


@pytest.mark.parametrize("packed", [2, 4])
def test_formulas_of_packed_heads(packed: int, recorded: list[Any]) -> None:
    plan = HopperPlan(2, 64, takes_turns=True, packed_heads=packed)
    shape = replace(SHAPE, heads_q=8)
    check([next(launches(SPECS[0], "sm_90a", False, recorded, plan, shape))], SPECS[0], shape)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_formulas_over_pages(layout: Any, recorded: list[Any]) -> None:
    spec = fg.AttentionSpec(96, "bfloat16", value_dim=64, mask=fg.causal(), layout=layout, page_size=32)
    inputs = random_inputs(spec, SHAPE)
    Attention(spec, target_named("sm_90a"), Emulator())(inputs.q, inputs.k, inputs.v, **inputs.captures)
    ((kernel, launch, arguments),) = recorded
    table = inputs.captures["page_table"].shape[1]
    check([Launched("forward", kernel, launch, arguments)], spec, replace(SHAPE, len_k=32 * table), len(inputs.k))


@pytest.mark.parametrize("deterministic", [False, True])
def test_formulas_where_v_is_a_part_of_k(deterministic: bool, recorded: list[Any]) -> None:
    """No member of a struct belongs to v, and the text of k says where the values are."""
    spec = fg.AttentionSpec(96, "bfloat16", value_dim=64, mask=fg.causal(), shared_kv=True)
    made = list(launches(spec, "sm_80", deterministic, recorded))
    check(made, spec)
    for part, facts in launch_facts({launched.part: launched.kernel for launched in made}, spec).items():
        meanings = {member["name"]: member["meaning"] for member in facts["arguments"]}
        assert not {"v", "dv", "v_strides", "dv_strides"} & set(meanings), part
        if "k" in meanings:
            assert meanings["k"].endswith("; the first 64 columns are the values")


def sizes_of(spec: fg.AttentionSpec, shape: Shape) -> dict[str, int]:
    """Those of a call with `random_inputs`."""
    if not spec.is_varlen:
        return asdict(shape)
    inputs = random_inputs(spec, shape)
    batch = len(inputs.ragged["cu_seqlens_q"]) - 1
    return asdict(shape) | {"batch": batch, "total_q": len(inputs.q), "total_k": len(inputs.k)}


def check(made: list[Launched], spec: fg.AttentionSpec, shape: Shape = SHAPE, pages: int = 0) -> None:
    described = launch_facts({launched.part: launched.kernel for launched in made}, spec)
    sizes = sizes_of(spec, shape) | {"count": shape.heads_q, "multiprocessors": Emulator().multiprocessors(0)}
    sizes["pages"] = pages
    sizes |= {f"{name}_head_panels": width // panel_columns(width, spec.element) for name, width in _widths(spec)}
    for launched in made:
        facts = described[launched.part]
        assert tuple(value(facts["grid"][axis], sizes) for axis in "xyz") == launched.launch.grid, launched.part
        assert facts["argument_bytes"] == len(launched.arguments)
        assert ("plan" in facts) == (not launched.part.startswith(("d_", "sink")))
        check_members(facts["arguments"], launched, sizes)
        if isinstance(launched.launch.writer, TensorMapWriter):
            check_maps(facts["maps"], launched.launch.writer, sizes, spec, shape)


def _widths(spec: fg.AttentionSpec) -> list[tuple[str, int]]:
    return [("k", spec.head_dim), ("v", spec.value_dim)]


def check_members(members: list[dict[str, Any]], launched: Launched, sizes: Mapping[str, int]) -> None:
    layout = launched.kernel.layout
    assert [(member["name"], member["type"]) for member in members] == [(f.name, f.type) for f in layout.fields]
    for member, field in zip(members, layout.fields, strict=True):
        assert member["offset"] == layout.offset(field.name) and member.get("count", 0) == field.count
        assert member["meaning"], f"{launched.part} {field.name}: say what it is"
        formulas = member.get("value")
        if formulas is None:
            assert is_the_callers(field.name, field.type), f"{launched.part} {field.name}: give a formula"
            continue
        written = struct.unpack_from(f"<{field.format[0]}", launched.arguments, member["offset"])
        expected = [value(each, sizes) for each in ([formulas] if isinstance(formulas, str) else formulas)]
        assert list(written) == expected, f"{launched.part} {field.name}"


def is_the_callers(name: str, type: str) -> bool:
    """Whether a member holds the caller's arrays or numbers, rather than values that follow from sizes."""
    return (
        type.endswith(("*", "TensorMap"))
        or name in CALLERS
        or name in ("cap", "pages", "table_pitch")
        or name.endswith(("_strides", "_stride", "_size", "_head_panels"))
    )


def check_maps(
    maps: list[dict[str, Any]], writer: TensorMapWriter, sizes: Mapping[str, int], spec: fg.AttentionSpec, shape: Shape
) -> None:
    assert [described["array"] for described in maps] == list(writer.shapes)
    for described in maps:
        map_shape = writer.shapes[described["array"]]
        assert tuple(value(size, sizes) for size in described["sizes"]) == map_shape.sizes
        assert tuple(described["box"]) == map_shape.full_box
        assert described["swizzle_bytes"] == map_shape.swizzle_bytes
        assert described["l2_promotion_bytes"] == map_shape.l2_promotion
        assert described["dtype"] == map_shape.dtype and described["member"] == f"{described['array']}_map"
        assert described.get("rows_before", 0) == map_shape.rows_before
        bytes_of = bytes_from(described["array"], spec, shape)
        assert tuple(bytes_of[name] for name in described["strides"]) == map_shape.strides


def bytes_from(array: str, spec: fg.AttentionSpec, shape: Shape) -> dict[str, int]:
    """Returns the strides of a contiguous array in bytes."""
    row = 2 * (spec.value_dim if array in ("v", "o", "d_o", "dv") else spec.head_dim)
    of_queries = array in ("q", "o", "d_o", "dq")
    length, heads = (shape.len_q, shape.heads_q) if of_queries else (shape.len_k, shape.heads_kv)
    if spec.page_size and not of_queries:
        of_panels = {"panel": 2 * panel_columns(row // 2, spec.element), "group": 8 * heads * row}
        return of_panels | {"row": heads * row, "head": row, "page": spec.page_size * heads * row}
    by_layout = {"row": row, "head": length * row} if spec.layout == "bhsd" else {"row": heads * row, "head": row}
    return by_layout | {"batch": length * heads * row}


# ---- in a release


def built(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release with cubins of a mock compiler, which derives bytes from names."""

    def compiled(source: str, architecture: str, name: str) -> nvrtc.Compiled:
        return nvrtc.Compiled(name.encode(), "", Resources(96), (13, 0))

    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile", compiled)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "release.toml").write_text(text)
    release.build(tmp_path / "release.toml", tmp_path / "out")
    return tmp_path / "out"


EVERY_KIND = """
[[kernels]]
mask = ["causal()", "document('ids') & causal()"]
score = "alibi(Tensor('slopes', 'float16', 1, grad=True))"
head_dim = 64
target = ["sm_80", "sm_90a"]
passes = ["forward", "backward"]
deterministic = [false, true]
heads_per_kv = 2

[[kernels]]
mask = ["causal()", "document('ids') & causal()"]
head_dim = 64
layout = "thd"
target = ["sm_80", "sm_90a"]
passes = ["forward", "backward"]

[[kernels]]
mask = "causal()"
head_dim = 64
page_size = 64
layout = ["bhsd", "thd"]
target = ["sm_80", "sm_90a"]

[[kernels]]
mask = "causal()"
head_dim = 96
value_dim = 64
shared_kv = true
page_size = 16
target = "sm_80"
passes = ["forward", "decode"]

[[kernels]]
mask = "causal()"
head_dim = 96
value_dim = 64
shared_kv = true
target = "sm_80"
passes = ["forward", "backward"]

[[kernels]]
step = ["append_kv", "merge_states"]
dtype = ["float16", "bfloat16"]
layout = ["bhsd", "bshd"]
parts = [2, 5]
target = ["sm_80", "sm_90a"]
"""


def test_a_manifest_describes_each_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = built(tmp_path, EVERY_KIND, monkeypatch)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == 2 and manifest["formulas"] == FORMULAS
    for kernel in manifest["kernels"]:
        assert kernel["threads"] > 0 and kernel["shared_bytes"] >= 0 and set(kernel["grid"]) == set("xyz")
        assert kernel["entry"] in (folder / kernel["files"]["source"]["path"]).read_text()
        by_maps = "-sm90a-" in kernel["name"] and kernel["part"] in ("forward", "dkdv", "dq")
        assert ("maps" in kernel) == by_maps
        if kernel["part"] in ("append", "merge"):
            assert kernel["spec"] is None and all(member["meaning"] for member in kernel["arguments"])
    assert sum(kernel["part"] == "backward_lists" for kernel in manifest["kernels"]) == 2
    assert [sum(k["part"] == part for k in manifest["kernels"]) for part in ("append", "merge")] == [2, 16]
    assert release.check(folder) == []


def test_headers_compile_and_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles every header of a release in one program and compares grids and structs with the formulas."""
    folder = built(tmp_path, EVERY_KIND, monkeypatch)
    kernels = json.loads((folder / "manifest.json").read_text())["kernels"]
    sizes = asdict(SHAPE) | {"count": 4, "multiprocessors": 132, "total_q": 777, "total_k": 555, "splits": 6}
    lines = [f'#include "{kernel["files"]["header"]["path"]}"' for kernel in kernels]
    lines += ["#include <cstdio>", "#include <cstring>", "using namespace flashgen;", "int main() {"]
    for kernel in kernels:
        lines += ["  {", f"    using K = {struct_name(kernel['name'])};", "    K::Sizes s = {};"]
        header = (folder / kernel["files"]["header"]["path"]).read_text()
        taken = re.search(r"struct Sizes \{\n    long long (.*);", header)
        assert taken is not None
        lines += [f"    s.{name} = {sizes[name]};" for name in taken[1].split(", ")]
        lines += ["    K::Arguments a = {};", "    K::set_sizes(a, s);", "    const K::Grid g = K::grid_of(s);"]
        lines += ['    std::printf("%s %s %u %u %u", K::kEntry, K::kCubin, g.x, g.y, g.z);']
        for member in kernel["arguments"]:
            if "value" in member:
                words = 3 if member["type"] == "Strides" else 1
                number = "long long" if words == 3 or member["type"] == "long long" else member["type"]
                lines += [f"    {{ {number} v[{words}]; std::memcpy(v, &a.{member['name']}, sizeof v);"]
                lines += ['      for (auto each : v) std::printf(" %lld", static_cast<long long>(each)); }']
        lines += ['    std::printf("\\n");', "  }"]
    (tmp_path / "all.cpp").write_text("\n".join([*lines, "}"]))
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{folder}", "all.cpp", "-o", "all"]
    subprocess.run([*find_compiler().command, *options], cwd=tmp_path, check=True)
    printed = subprocess.run([str(tmp_path / "all")], check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == [expected_line(kernel, sizes) for kernel in kernels]


def expected_line(kernel: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    formulas = [kernel["grid"][axis] for axis in "xyz"]
    for member in kernel["arguments"]:
        formulas += [member["value"]] if isinstance(member.get("value"), str) else member.get("value", [])
    numbers = " ".join(str(value(formula, sizes)) for formula in formulas)
    return f"{kernel['entry']} {kernel['files']['cubin']['path']} {numbers}"
