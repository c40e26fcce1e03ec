"""Reports agree with `show`, tile maps, the compiler and the reference."""

from __future__ import annotations

import base64
import json
import re
import shlex
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import flashgen as fg
from flashgen.analysis.tile_classes import PARTIAL, tile_map
from flashgen.build import nvrtc
from flashgen.build.tools import find_tool
from flashgen.cli.app import app
from flashgen.codegen.shared_memory import Region
from flashgen.codegen.stages import backward_kernels, forward_kernels
from flashgen.codegen.targets import TARGETS, ReferenceGpu, target_named
from flashgen.report import machine_code, measured
from flashgen.report.elements import mixed_elements
from flashgen.report.mathml import block, expression
from flashgen.report.occupancy import occupancy
from flashgen.report.page import formulas, si, thousands
from flashgen.report.roofline import point
from flashgen.report.stages import definitions, steps_of

needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC: pip install '.[cuda13]'")
ROOT = Path(__file__).parents[2]
LARGEST = 3_000_000  # bytes of a page

# Kinds of variants, in a user's words.
KINDS = (
    '"causal()" --target sm_80',
    '"causal() & sliding_window(600)" --target sm_86',
    "\"causal() & document('ids')\" --target sm_80",
    '"causal()" --score "alibi(\'slopes\')" --target sm_89 --pass forward',
    '"causal()" --score "softcap(30)" --target sm_90a --dtype bfloat16',
    "\"block_sparse('layout', 64, 64)\" --target sm_80 --len-q 1024",
    '"full()" --dropout 0.1 --target sm_80',
    '"causal()" --head-dim 192 --value-dim 128 --dtype bfloat16 --target sm_90a --pass forward',
    '"causal()" --head-dim 128 --pass backward --target sm_80',
    '"full()" --head-dim 128 --pass backward --target sm_90a',
    '"causal()" --layout thd --target sm_80',
    '"causal()" --layout thd --head-dim 128 --target sm_90a',
)


def invoke(command: str, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return result


@needs_nvrtc
@pytest.mark.rotated(12)
@pytest.mark.parametrize("words", KINDS)
def test_reports_agree_with_other_commands(words: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    invoke(f"report {words} --output {path}")
    text = path.read_text(encoding="utf-8")
    data = data_of(text)
    assert data["checked"]["verdicts"] and all(each["ok"] for each in data["checked"]["verdicts"].values())
    shown = re.sub(r" --pass \w+| --len-q \d+", "", words)
    of_passes = {kernel["pass"] for kernel in data["kernels"]}
    for of in of_passes:
        resources = json.loads(invoke(f"show {shown} --pass {of} --what resources --json").stdout)
        by_name = {each["kernel"]: each for each in (resources if isinstance(resources, list) else [resources])}
        for kernel in data["kernels"]:
            if kernel["pass"] == of and kernel["name"] in by_name:
                known = by_name[kernel["name"]]
                assert kernel["resources"]["registers"] == known["registers"]
                assert (kernel["threads"], kernel["shared_bytes"]) == (known["threads"], known["dynamic_shared"])
    if not data["spec"]["captures"]:
        lengths = f"--len-q {data['sizes']['len_q']}"
        for known in data["maps"]:
            tiles = json.loads(invoke(f"show {shown} --pass {known['pass']} --what tiles {lengths} --json").stdout)
            assert tiles["tile"] == known["tile"] and tiles["share"] == pytest.approx(known["share"])
            assert np.bincount(np.ravel(tiles["classes"]), minlength=3).tolist() == [
                known[kind] for kind in ("empty", "partial", "full")
            ]
    assert_page(text, data)


@needs_nvrtc
def test_json_equals_the_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    words = 'report "causal()" --pass forward --target sm_80'
    invoke(f"{words} --output {path}")
    assert json.loads(invoke(f"{words} --json").stdout) == data_of(path.read_text(encoding="utf-8"))


def data_of(page: str) -> Any:
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert embedded
    return json.loads(embedded[1])


class Page(HTMLParser):
    """Collects ids, links, and what a page would load. Raises an error if an element is not closed."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if known.get("id"):
            self.ids.append(str(known["id"]))
        if tag == "a":
            self.links.append(known.get("href") or "")
        elif "src" in known or (tag == "link" and known.get("rel") != "icon"):
            self.loads.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID and tag != "path" and tag != "rect":
            while self.open and self.open[-1] in ("path", "rect", "circle", "p") and self.open[-1] != tag:
                self.open.pop()
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def assert_page(text: str, data: Any) -> None:
    assert len(text.encode()) < LARGEST
    page = Page()
    page.feed(text)
    assert len(page.ids) == len(set(page.ids))
    assert not page.loads and "@import" not in text and not re.search(r"url\((?!data:)", text)
    assert page.links and all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    for kernel in data["kernels"]:
        assert kernel["name"] in text


@needs_nvrtc
def test_two_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "both.html"
    invoke(f'report --compare "causal()" "full()" --pass forward --target sm_80 --output {path}')
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert len(page.ids) == len(set(page.ids)) and all(link[1:] in page.ids for link in page.links)
    table = text[text.index("What differs") : text.index("The variant")]
    assert "forward: share of tiles visited" in table and "forward: plan" not in table
    invoke(
        'report --compare "causal()" "causal()" --pass forward --no-run --target sm_80 '
        f"--other-target sm_90a --output {path}"
    )
    assert ">target<" in path.read_text(encoding="utf-8")


@needs_nvrtc
@pytest.mark.parametrize(
    ("second", "compared"),
    [
        ('"causal() & sliding_window(64)"', True),
        ('"causal()" --other-target sm_86', False),
        ('"causal()" --other-plan tile_k=32', False),  # its run is shorter
    ],
)
def test_cycles_are_not_presented_as_time_across_targets(tmp_path: Path, second: str, compared: bool) -> None:
    path = tmp_path / "both.html"
    words = f'report --compare "causal()" {second} --pass forward --target sm_80 --no-measure'
    invoke(f"{words} --output {path}")
    text = path.read_text(encoding="utf-8")
    table = text[text.index("What differs") : text.index("The variant")]
    assert (">forward: cycles of the model<" in table) is compared
    assert ("Cycles of the timelines are not compared" in table) is not compared


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ('report "causal()"', "give --output FILE.html"),
        ('report "causal()" --output x.txt', "must end in .html"),
        ('report "causal()" "full()" --json', "give one"),
        ('report --compare "causal()" --json', "--compare takes two"),
        ('report "causal()" --other-target sm_80 --json', "only --compare takes this"),
        ('report "causal()" --other-plan tile_k=64 --json', "only --compare takes this"),
        ('report "causal()" --plan tile_k --json', "the plan parameter 'tile_k' must be NAME=NUMBER"),
        ('report "causal()" --plan tile=64 --target sm_80 --json', "'tile' is no parameter of ForwardPlan"),
        ('report "causal()" --plan stages=40 --target sm_80 --json', "stages=40 must be 1 or 2"),
        ('report "causal()" --heads 3 --heads-kv 2 --json', "heads_q=3 must be a multiple of heads_kv=2"),
        ('report "causal()" --target sm_12 --json', "not supported"),
        ('show "causal()" --what timeline --output x.png --target sm_80', "pictures are written as SVG"),
    ],
)
def test_refusals(words: str, said: str) -> None:
    assert said in " ".join(invoke(words, expect=2).stderr.split())


@pytest.mark.parametrize("of", ['"causal()" --pass backward --kernel finish', "\"document('ids')\" --kernel lists"])
def test_kernels_without_a_timeline_are_refused(of: str) -> None:
    words = f"show {of} --what timeline --target sm_80"
    assert "has no timeline" in invoke(words, expect=2).stderr


# ---- shared memory


@needs_nvrtc
@pytest.mark.rotated(3)
def test_a_page_draws_the_layout_of_shared_memory(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    invoke(f'report "causal()" --head-dim 128 --target sm_90a --output {path}')
    text = path.read_text(encoding="utf-8")
    kernels = {kernel["role"]: kernel for kernel in data_of(text)["kernels"]}
    spec, target = fg.AttentionSpec(128, mask=fg.causal()), target_named("sm_90a")
    for role, kernel in {**forward_kernels(spec, target), **backward_kernels(spec, target)}.items():
        found = kernels[role]
        assert [Region(**region) for region in found["shared"]] == kernel.shared.regions()
        assert sum(region["bytes"] for region in found["shared"]) == found["shared_bytes"] == kernel.shared_bytes
    assert [region["name"] for region in kernels["dkdv"]["shared_overlays"]] == ["dK", "dV"]
    assert "Later dK overlays bytes" in text
    offsets = kernels["forward"]["mbarriers"]
    (barriers,) = (region for region in kernels["forward"]["shared"] if region["name"] == "mbarriers")
    assert offsets["queries_full"] == barriers["offset"] and len(offsets) * 8 == barriers["bytes"]
    waits = {span["text"] for span in kernels["forward"]["timeline"]["spans"] if span["kind"] == "wait"}
    assert "waits for queries_full" in waits and not any("mbarrier at byte" in text for text in waits)


# ---- occupancy, roofline, instructions, formulas, steps


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "blocks", "limit"),
    [
        ("sm_80", 128, 255, 0, 2, "registers"),
        ("sm_80", 128, 32, 80 * 1024, 2, "shared memory"),
        ("sm_80", 256, 16, 0, 8, "threads"),
        ("sm_80", 32, 16, 0, 32, "blocks"),
        ("sm_75", 256, 64, 32 * 1024, 2, "shared memory"),
        ("sm_90a", 512, 128, 180312, 1, "registers"),
    ],
)
def test_occupancy(target: str, threads: int, registers: int, shared: int, blocks: int, limit: str) -> None:
    found = occupancy(target_named(target), threads, registers, shared)
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.warps == blocks * threads // 32


def test_every_target_has_limits() -> None:
    for target in TARGETS.values():
        assert occupancy(target, 128, 128, 1024).blocks > 0


def test_a_point_below_the_roof() -> None:
    gpu = ReferenceGpu("c", tflops=100, gb_per_second=1000)
    slow, fast = point(gpu, "a", 10**9, 10**9), point(gpu, "b", 10**12, 10**9, seconds=0.1)
    assert (slow.bound, slow.limit, slow.measured) == (1.0, "memory", None)
    assert (fast.bound, fast.limit, fast.measured) == (100, "products", 10.0)


def test_no_line_ends_within_a_number() -> None:
    assert [thousands(n) for n in (7, 4096, 35433480192)] == ["7", "4\xa0096", "35\xa0433\xa0480\xa0192"]


def test_counting_instructions_of_sass_and_of_ptx() -> None:
    sass = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/                   MUFU.EX2 R3, R3 ;
        /*0030*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0040*/              @UP0 BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/                   NOP ;
    """
    counted = machine_code._counted("SASS", "", machine_code._SASS.findall(sass), {})
    assert counted.total == 5
    assert {kind: count for kind, count in counted.kinds.items() if count} == {
        "products": 1,
        "exponentials and their like": 1,
        "shared memory": 1,
        "barriers": 1,
        "integers, addresses, moves": 1,
    }


@needs_nvrtc
def test_ptx_is_counted_where_there_is_no_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "find_tool", lambda name: None)
    data = json.loads(invoke('report "causal()" --pass forward --target sm_80 --no-run --json').stdout)
    (kernel,) = data["kernels"]
    counted = kernel["instructions"]
    assert counted["language"] == "PTX" and "nvdisasm is not installed" in counted["why"]
    assert counted["kinds"]["products"] > 0 and counted["kinds"]["float arithmetic"] > 0
    assert data["checked"]["why_not"] == "not requested"


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="needs nvdisasm: pip install '.[inspect]'")
@needs_nvrtc
def test_sass_has_the_products_that_the_text_unrolls() -> None:
    (kernel,) = json.loads(invoke('report "causal()" --pass forward --target sm_80 --no-run --json').stdout)["kernels"]
    assert kernel["instructions"]["language"] == "SASS"
    plan = kernel["plan"]
    rows = plan["tile_q"] // plan["warps"] // 16
    assert kernel["instructions"]["kinds"]["products"] == rows * (plan["tile_k"] // 8) * (64 // 16) * 2


def test_formulas_of_masks_and_scores_are_well_formed() -> None:
    slopes = fg.Tensor("slopes", "float32", 1)
    spec = fg.AttentionSpec(
        64,
        mask=fg.causal() & (lambda b, h, q, k: ~((abs(q - k) // 3 % 5 == 0) | (fg.minimum(q, k) < -2))),
        score=lambda s, b, h, q, k: fg.where(q > k, fg.tanh(s / 3.5) * fg.exp(-s), fg.sqrt(s)) + slopes[h] * (k - q),
    )
    assert spec.score
    for node in (spec.mask.expression, spec.score.expression):
        root = ElementTree.fromstring(block(expression(node)))
        assert root.tag == "math" and "".join(root.itertext())
    text = "".join(ElementTree.fromstring(block(expression(fg.causal().expression))).itertext())
    assert text == "k≤q+(Nk−Nq)"


def test_formulas_keep_their_parentheses() -> None:
    near = fg.causal() & (lambda b, h, q, k: (abs(q - k) <= 128) | (k < 4))
    assert shown_mask(near) == ["M(b,h,q,k)=k≤q+(Nk−Nq)", "∧(|q−k|≤128∨k<4)"]
    first = fg.full() & (lambda b, h, q, k: (k < 4) | (q < k)) & (lambda b, h, q, k: (k > 1) & (q != 0))
    assert shown_mask(first) == ["M(b,h,q,k)=(k<4∨q<k)", "∧k>1", "∧q≠0"]
    assert shown_mask(lambda b, h, q, k: (k < 4) | (q < k)) == ["M(b,h,q,k)=k<4∨q<k"]


def shown_mask(mask: Any) -> list[str]:
    """Returns the lines of a mask's formula as text."""
    texts = ["".join(ElementTree.fromstring(line).itertext()) for line in formulas(fg.AttentionSpec(64, mask=mask))]
    return texts[1:-2]


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("modified", [False, True])
def test_steps_link_to_their_functions(target: str, dim: int, modified: bool) -> None:
    more = {"score": fg.softcap(20), "dropout": 0.1} if modified else {}
    spec = fg.AttentionSpec(dim, mask=fg.causal(), **more)
    named = target_named(target)
    wanted = {
        "forward": {"Scores", "The mask", "The online softmax", "The output"},
        "dkdv": {"Weights and their gradients", "Scores, recomputed", "Gradients of K and V"},
    }
    for kernel in (*forward_kernels(spec, named).values(), *backward_kernels(spec, named).values()):
        steps = steps_of(kernel.role, kernel.source)
        lines = kernel.source.splitlines()
        for step in steps:
            assert f"{step.function}(" in lines[step.line - 1]
            assert not step.formula or ElementTree.fromstring(f"<p>{step.formula}</p>") is not None
        found = {step.what for step in steps}
        assert wanted.get(kernel.role, set()) <= found, kernel.name
        if kernel.role in wanted:
            assert modified is any("score function" in what for what in found)
        assert len(definitions(kernel.source)) > 1


@pytest.mark.parametrize(("value", "shown"), [(0, "0"), (999, "999"), (70_866_960_384, "70.9 G"), (2e15, "2e+03 T")])
def test_numbers_with_prefixes(value: float, shown: str) -> None:
    assert si(value) == shown


@pytest.mark.gpu
@pytest.mark.parametrize("words", ['"causal()" --head-dim 128 --dtype bfloat16', '"full()" --dropout 0.1'])
def test_calls_are_measured_on_a_gpu(words: str) -> None:
    data = json.loads(invoke(f"report {words} --no-run --len-q 4096 --json").stdout)
    assert set(data["seconds"]) == {"forward", "backward"} and all(each > 0 for each in data["seconds"].values())
    points = {kernel["role"]: kernel["roofline"] for kernel in data["kernels"] if kernel["roofline"]}
    for role, of in (("forward", "forward"), ("dkdv", "backward")):
        kernel = next(each for each in data["kernels"] if each["role"] == role)
        assert points[role]["measured"] == pytest.approx(kernel["flops"] / data["seconds"][of] / 1e12)
        assert 0 < points[role]["measured"] < 1.1 * data["card"]["tflops"]
    unmeasured = json.loads(invoke(f"report {words} --no-run --no-measure --json").stdout)
    assert unmeasured["seconds"] == {}


def test_measured_calls_have_the_requested_sizes_and_are_below_the_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the emulator in place of the GPU, and a clock that always measures 2 ms."""
    seen: list[Any] = []
    monkeypatch.setattr(measured, "runs_here", lambda target: target.name == "sm_80")
    monkeypatch.setattr(measured, "_to_gpu", lambda value: value)
    monkeypatch.setattr(measured.engine, "compile", partial(measured.engine.compile, emulate=True))
    monkeypatch.setattr(measured, "median_ms", lambda run: seen.append(run()) or 2.0)
    words = 'report "causal()" --len-q 100 --len-k 130 --heads 4 --heads-kv 2 --no-run --json'
    data = json.loads(invoke(f"{words} --target sm_80").stdout)
    out, (dq, dk, _) = seen
    assert out.shape == dq.shape == (1, 4, 100, 64) and dk.shape == (1, 2, 130, 64)
    assert data["seconds"] == {"forward": 0.002, "backward": 0.002}
    points = {kernel["role"]: kernel["roofline"] for kernel in data["kernels"]}
    flops = next(kernel["flops"] for kernel in data["kernels"] if kernel["role"] == "dkdv")
    assert (
        points["dkdv"]["measured"] == pytest.approx(flops / 0.002 / 1e12) and points["preprocess"]["measured"] is None
    )
    assert json.loads(invoke(f"{words} --target sm_86").stdout)["seconds"] == {}


@needs_nvrtc
def test_plans_side_by_side() -> None:
    words = '"causal()" "causal()" --pass forward --target sm_80 --other-plan tile_k=32,stages=1'
    left, right = json.loads(invoke(f"report --compare {words} --json").stdout)
    assert (left["kernels"][0]["plan"]["tile_k"], left["kernels"][0]["plan"]["stages"]) == (64, 2)
    assert (right["kernels"][0]["plan"]["tile_k"], right["kernels"][0]["plan"]["stages"]) == (32, 1)
    assert right["maps"][0]["tile"] == [128, 32] and right["checked"]["verdicts"]["out"]["ok"]
    assert right["kernels"][0]["timeline"] != left["kernels"][0]["timeline"]


def test_elements_of_partial_tiles_equal_the_mask() -> None:
    mask = (fg.causal() & fg.sliding_window(37)).expression
    tiles = tile_map(mask, (24, 16), 100, 90)
    found = mixed_elements(mask, tiles, 0, 0, {})
    assert len(found.tiles) == tiles.count(PARTIAL) and len(found.patterns) < len(found.tiles)
    for name, number in found.tiles.items():
        row, column = map(int, name.split(","))
        bits = np.unpackbits(np.frombuffer(base64.b64decode(found.patterns[number]), np.uint8)).reshape(24, 16)
        q, k = row * 24 + np.arange(24)[:, None], column * 16 + np.arange(16)
        distance = q + 90 - 100 - k
        assert np.array_equal(bits, (distance >= 0) & (distance <= 37) & (q < 100) & (k < 90))
