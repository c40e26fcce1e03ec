"""`compile(spec, source=...)` runs edited kernels in place of the emitted ones, and refuses texts that do not fit."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention, reference
from flashgen.attention.callable import Attention
from flashgen.attention.edit_matching import Emitted, match_edits
from flashgen.attention.given_sources import texts_of
from flashgen.attention.tuning import tune
from flashgen.build import nvrtc
from flashgen.build.cache import KernelCache
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.targets import target_named
from flashgen.errors import ArgumentError, BuildError, LaunchError
from flashgen.launch.engines import Emulator
from flashgen.verify.check import judged
from flashgen.verify.problems import Shape, random_inputs

CAUSAL = fg.AttentionSpec(64, mask=fg.causal(align="top_left"))
STRICT = fg.AttentionSpec(64, mask=lambda b, h, q, k: k < q)
LISTED = fg.AttentionSpec(32, mask=fg.document("ids"))
SM_80, SM_90A = target_named("sm_80"), target_named("sm_90a")
SHAPE = Shape(70, 70, 1, 2, 2)
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC: pip install 'flashgen[cuda13]'")


def emulated(spec: fg.AttentionSpec = CAUSAL, **how: Any) -> Attention:
    return attention.compile(spec, **{"target": "sm_80", "emulate": True} | how)


def strict(source: str) -> str:
    """Returns the causal kernel with its diagonal removed by an edit."""
    edited = source.replace("return k <= q;", "return k < q;")
    assert edited != source
    return edited.replace("full_end = min(arguments.len_k, q_first + 1)", "full_end = min(arguments.len_k, q_first)")


def assert_computes(compiled: Attention, spec: fg.AttentionSpec, shape: Shape = SHAPE) -> None:
    """Returns what NumPy computes for another spec than the one that was compiled."""
    inputs = random_inputs(spec, shape)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert judged(spec, inputs.q, inputs.k, inputs.v, out, lse, {}).ok


# ---- edits that run


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_an_edited_forward_runs(target: str) -> None:
    emitted = emulated(target=target)
    edited = emulated(target=target, source=strict(emitted.source))
    assert edited.edited == ("forward",) and emitted.edited == ()
    assert edited.source == strict(emitted.source) and edited.sources == {edited.name: edited.source}
    assert re.fullmatch(rf"{emitted.name}-edited-[0-9a-f]{{8}}", edited.name)
    assert repr(edited) == f"<flashgen.Attention {edited.name} on emulator, edited: forward>"
    assert (edited.plan, edited.kernels[0].layout) == (emitted.plan, emitted.kernels[0].layout)
    assert_computes(edited, STRICT)
    assert_computes(emitted, CAUSAL)


@pytest.mark.parametrize("sanitize", [None, "address"])
def test_printf_and_assert_run_as_they_compile_for_a_gpu(sanitize: Any, capfd: Any) -> None:
    """Neither needs an include."""
    emitted, store = emulated().source, '\nextern "C" __global__'
    begin = emitted.index("{", emitted.index(store)) + 1
    looks = ' if (threadIdx.x == 0) printf("block %d of %g\\n", (int)blockIdx.x, 0.5);\n  assert(threadIdx.x < {});'
    q = np.ones((1, 1, 140, 64), np.float16)
    for most, holds in ((1024, True), (64, False)):
        edited = emitted[:begin] + looks.replace("{}", str(most)) + emitted[begin:]
        compiled = emulated(source=edited, sanitize=sanitize)
        if nvrtc.is_available() and holds:
            assert compiled.resources.spill_stores == 0
        if holds:
            compiled(q, q, q)
            ctypes.CDLL(None).fflush(None)
            printed = capfd.readouterr().out
            assert sanitize or sorted(printed.splitlines()) == ["block 0 of 0.5", "block 1 of 0.5"]
        else:
            with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: assert\(threadIdx\.x < 64\) does not hold"):
                compiled(q, q, q)


def test_an_edited_backward_kernel_runs() -> None:
    emitted = emulated()
    finish = next(text for name, text in emitted.backward_sources.items() if "bwd-postprocess" in name)
    edited = emulated(source={"postprocess": finish.replace("(low * kScale", "(2 * low * kScale")})
    assert edited.edited == ("postprocess",) and edited.name == emitted.name and "edited: postprocess" in repr(edited)
    assert [("-edited-" in name, "bwd-postprocess" in name) for name in edited.backward_sources] == [
        (False, False)
    ] * 2 + [(True, True)]
    inputs = random_inputs(CAUSAL, SHAPE)
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = emitted(q, k, v, return_lse=True)
    before, after = (each.backward(inputs.q, q, k, v, out, lse) for each in (emitted, edited))
    np.testing.assert_array_equal(after.dk, before.dk)
    np.testing.assert_array_equal(after.dq[..., 1::2], before.dq[..., 1::2])
    np.testing.assert_allclose(after.dq[..., ::2], 2 * before.dq[..., ::2].astype(np.float32), rtol=2e-3, atol=1e-6)


def test_an_edited_tile_list_kernel_runs() -> None:
    """Lists without keys: no query attends to anything."""
    emitted = emulated(LISTED)
    lists, forward = emitted.sources
    text, count = re.subn(r"(arguments\.counts\[\w+\] = )[^;]+;", r"\g<1>0;", emitted.sources[lists])
    assert count == 1
    edited = emulated(LISTED, source={lists: text})
    assert edited.edited == ("lists",) and list(edited.sources)[1] == forward
    inputs = random_inputs(LISTED, SHAPE)
    out = edited(inputs.q, inputs.k, inputs.v, **inputs.captures)
    assert not out.any() and emitted(inputs.q, inputs.k, inputs.v, **inputs.captures).any()


def test_forms_of_the_source_argument(tmp_path: Path) -> None:
    """A text, a file, a folder; keys by entry point, part, name, name in a release, edited name."""
    emitted = emulated()
    forward = strict(emitted.source)
    keys, text = next(item for item in emitted.backward_sources.items() if "bwd-dkdv" in item[0])
    other = text + "\n// read\n"
    (tmp_path / "mine.cu").write_text(forward)
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / f"{emitted.name}.cu").write_text(forward)
    (folder / f"{keys}.cu").write_text(other)
    (folder / "of-another-spec.cu").write_text("anything")
    assert emulated(source=tmp_path / "mine.cu").source == forward
    both: list[Any] = [
        folder,
        {"forward": forward, "dkdv": other},
        {"forward": tmp_path / "mine.cu", keys: folder / f"{keys}.cu"},
        {f"{emitted.name}-edited-01234567": forward, "dkdv": other},
    ]
    for source in both:
        edited = emulated(source=source)
        assert edited.source == forward and set(edited.edited) == {"forward", "dkdv"}
        assert other in edited.backward_sources.values()
    assert emulated(source=other).edited == ("dkdv",)
    with pytest.warns(DeprecationWarning, match="'keys' of the backward is 'dkdv' now"):
        assert emulated(source={"keys": other}).edited == ("dkdv",)
    assert emulated(source=emitted.source).edited == () == emulated(source=emitted.sources).edited


def test_the_deterministic_backward_has_two_tile_list_kernels(tmp_path: Path) -> None:
    emitted = Emitted(LISTED, SM_80, None, True, None)
    text = emitted.backward["backward_lists"].source + "\n// read\n"
    with pytest.raises(ArgumentError, match="may be of lists or of backward_lists"):
        match_edits(texts_of(text), emitted)
    assert list(match_edits(texts_of({"backward_lists": text}), emitted).texts) == ["backward_lists"]
    for name, part in (("", "lists"), ("deterministic-backward-", "backward_lists")):
        folder = tmp_path / part
        folder.mkdir()
        own = emitted.kernel(part).source + "\n// read\n"
        (folder / f"{name}{emitted.forward['lists'].name}.cu").write_text(own)
        assert list(match_edits(texts_of(folder), emitted).texts) == [part]


def test_each_text_has_its_own_callable() -> None:
    text = strict(emulated().source)
    edited = emulated(source=text)
    assert emulated(source=text) is edited and emulated(source=text + "\n") is not edited
    assert emulated() is not edited and emulated().source != text


@pytest.mark.parametrize("spec", [CAUSAL, LISTED, fg.AttentionSpec(64, score=fg.alibi("slopes"), dropout=0.1)])
@pytest.mark.parametrize("target", [SM_80, SM_90A], ids=lambda target: target.name)
@pytest.mark.parametrize("deterministic", [False, True])
def test_edits_outside_launch_parameters_are_accepted(spec: fg.AttentionSpec, target: Any, deterministic: bool) -> None:
    """Any kernel may be edited where its launch does not depend on the text."""
    emitted = Emitted(spec, target, None, deterministic, None)
    every = emitted.forward | emitted.backward
    edits = match_edits(texts_of({part: f"// read\n{kernel.source}" for part, kernel in every.items()}), emitted)
    assert list(edits.texts) == list(every)


# ---- plans of other kernels


def test_packed_or_tuned_kernels_do_not_replace_an_edited_one(tmp_path: Path) -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal())
    emitted = emulated(spec, target="sm_90a")
    edited = emulated(spec, target="sm_90a", source=emitted.source + "\n// read\n")
    sizes = {"len_q": 30, "len_k": 90, "batch": 2, "heads": 8, "heads_kv": 2}
    assert emitted.plan_for(**sizes) == replace(emitted.plan, packed_heads=4)
    assert edited.plan_for(**sizes) == edited.plan == emitted.plan
    assert not edited.forward.dispatch.by_sizes and edited.forward.dispatch.tuned is None
    texts = texts_of(emitted.source + "\n// read\n")
    edits = match_edits(texts, Emitted(spec, SM_90A, None, False, None))
    told_where = Attention(spec, SM_90A, Emulator(), tuned=KernelCache(tmp_path), edits=edits)
    assert told_where.forward.dispatch.tuned is None
    with pytest.raises(ArgumentError, match=r"compiled with plan=\.\.\. or source=\.\.\."):
        tune(edited.forward, (None, None, None), {}, timer=lambda *_given: [])
    keys = emitted.backward_sources
    of_backward = emulated(spec, target="sm_90a", source=next(iter(keys.values())) + "\n// read\n")
    assert of_backward.plan_for(**sizes).packed_heads == 4


def test_the_plan_of_an_edited_text_is_kept() -> None:
    plan = ForwardPlan(64, 32, 4, 2)
    text = emulated(plan=plan).source + "\n// read\n"
    assert emulated(plan=plan, source=text).plan == plan
    with pytest.raises(ArgumentError, match=r"kTileQ = 64 of the kernel forward contradicts the plan.* with 128"):
        emulated(fg.AttentionSpec(64, mask=fg.causal(align="top_left")), source=text)


# ---- refusals


def changed(old: str, new: str) -> str:
    source = emulated().source
    assert old in source
    return source.replace(old, new)


def test_texts_of_other_kernels_are_refused() -> None:
    entry = emulated().kernels[0].entry
    other = emulated(STRICT)
    refusals: list[tuple[Any, str]] = [
        (
            "edited.cu",
            "source is no kernel of .* for sm_80: it has no entry point .*give a pathlib.Path. These are: forward",
        ),
        (other.source, rf"it has the entry points {other.kernels[0].entry}\. These are: forward {entry}, preprocess "),
        (
            {"kyes": "text"},
            r"source\['kyes'\] is no kernel of .*; its kernels are forward, preprocess, dkdv",
        ),
        ({"dkdv": emulated().source}, rf"source\['dkdv'\] lacks the entry point of .*; its entry points are {entry}"),
        ({"forward": changed(entry, f"{entry}_2")}, rf"lacks the entry point.*; its entry points are {entry}_2"),
        ({"forward": changed('extern "C"', "")}, 'lacks the entry point of the kernel forward, extern "C"'),
        ({"forward": emulated().source + "\0"}, "holds a NUL"),
        ({"forward": emulated().source, emulated().name: "y"}, "are both of the kernel forward: give one"),
        (3, "source of type int: give the text of a kernel or a pathlib.Path"),
        ({"forward": b"text"}, r"source\['forward'\] of type bytes"),
        ({1: "text"}, "of several a mapping from their names"),
    ]
    for source, message in refusals:
        with pytest.raises(ArgumentError, match=message):
            emulated(source=source)


def test_texts_that_need_another_launch_are_refused() -> None:
    refusals = [
        (changed("constexpr int kTileQ = 128;", "constexpr int kTileQ = 64;"), "kTileQ = 64 .*contradicts the plan"),
        (changed("constexpr int kHeadDim = 64;", "constexpr int kHeadDim = 56;"), "kHeadDim = 56 .*with 64"),
        (changed("kThreads = kWarps * 32;", "kThreads = kWarps * 64;"), r"kThreads = \d+ .*contradicts the plan"),
        (changed("  int len_k;\n", "  long long len_k;\n"), "has `long long len_k` where its launch fills `int len_k`"),
        (changed("  int len_k;\n", ""), "has `unsigned kv_reciprocal` where its launch fills `int len_k`"),
        (changed("  int len_q;\n", "  int len_q;\n  int mine;\n"), "has `int mine` where its launch fills `int len_k`"),
    ]
    for source, message in refusals:
        with pytest.raises(ArgumentError, match=message):
            emulated(source=source)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.cu").write_bytes(b"// caf\xe9")
    (tmp_path / "none").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "theirs.cu").write_text("text")
    refusals = [
        (tmp_path / "missing.cu", "missing.cu cannot be read: No such file"),
        (tmp_path / "latin.cu", "latin.cu cannot be read: byte 6 is not UTF-8"),
        (tmp_path / "none", "the folder .*none holds no .cu file; `flashgen show --output"),
        (tmp_path / "other", r"no file is of .*; those are fwd-sm80-\S+\.cu, bwd-preprocess"),
    ]
    for source, message in refusals:
        with pytest.raises(ArgumentError, match=message):
            emulated(source=source)


def test_the_emulator_reports_errors_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    path.write_text(changed("return k <= q;", "return k <= qq;"))
    line = path.read_text()[: path.read_text().index("qq;")].count("\n") + 1
    with pytest.raises(BuildError, match=rf"kernel\.cu:{line}:\d+: error: .*'?qq'?") as refused:
        emulated(source=path)
    assert f"forward is that of {path}" in str(refused.value)


@needs_nvrtc
def test_nvrtc_reports_errors_by_file_and_line() -> None:
    text = changed("return k <= q;", "return k <= qq;")
    line = text[: text.index("qq;")].count("\n") + 1
    with pytest.raises(BuildError, match=rf"-edited-\w{{8}}\.cu\({line}\): error: .*\"qq\"") as refused:
        attention.compile(CAUSAL, target="sm_80", source=text)
    assert f">{line:5d} |   return k <= qq;" in str(refused.value)


@needs_nvrtc
def test_the_remedy_without_jit_builds_the_edited_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    text = strict(emulated().source)
    monkeypatch.setenv("FLASHGEN_JIT", "0")
    with pytest.raises(BuildError, match=r"`flashgen\.compile\(spec, target='sm_80', source=\.\.\.\)\.resources`"):
        attention.compile(CAUSAL, target="sm_80", source=text + "\n// never compiled\n")


# ---- on a GPU


@pytest.mark.gpu
def test_an_edited_kernel_on_a_gpu() -> None:
    # A backward plan of the caller keeps query heads in one CTA, as edited kernels do: the bits are then equal.
    emitted = attention.compile(CAUSAL, backward_plan=attention.compile(CAUSAL).backward_plan)
    edited = attention.compile(CAUSAL, source=strict(emitted.source))
    assert_computes(edited, STRICT, Shape(300, 300, 2, 4, 2))
    assert_computes(emitted, CAUSAL, Shape(300, 300, 2, 4, 2))
    assert edited.resources.registers > 0
    inputs = random_inputs(CAUSAL, Shape(300, 300, 2, 4, 2))
    out, lse = reference.attention(CAUSAL, inputs.q, inputs.k, inputs.v, return_lse=True)
    rest = (inputs.q, inputs.k, inputs.v, out.astype(inputs.q.dtype), lse.astype("float32"))
    sources = emitted.backward_sources
    keys = next(name for name in sources if "bwd-dkdv" in name)
    read = attention.compile(CAUSAL, source={keys: sources[keys] + "\n// read\n"})
    for ours, theirs in zip(read.backward(inputs.q, *rest)[1:], emitted.backward(inputs.q, *rest)[1:], strict=True):
        np.testing.assert_array_equal(ours, theirs)
