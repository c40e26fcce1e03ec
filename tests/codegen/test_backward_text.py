"""The text of emitted backward kernels: tidy, short, without unused names, and reproducible."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

import flashgen.language as fg
from emitted_text import (
    LONGEST_FILE,
    LONGEST_KERNEL,
    all_called,
    all_used,
    functions,
    functions_fit,
    members_read,
    tidy,
    unconditional,
    without_comments,
)
from flashgen.codegen.dispatch import render_backward_kernels
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import backward_kernels, kernels_of
from flashgen.codegen.targets import TARGETS
from flashgen.errors import UnsupportedError
from flashgen.verify import learned, spec_of, variants

SM_80 = TARGETS["sm_80"]
# The dkdv kernel, which has everything that the dq kernel has, and also dK, dV and gradients of captures.
LONGEST_KEYS, LONGEST_KEYS_FILE = 100, 455
MODES, VARIANTS = (False, True), variants()
modes = pytest.mark.parametrize("deterministic", MODES, ids=["default", "deterministic"])


@cache
def kernels_of_variant(number: int) -> list[RenderedKernel]:
    """Returns kernels of a variant in both modes, for GPUs with and without asynchronous copies."""
    found: dict[str, RenderedKernel] = {}
    spec = spec_of(VARIANTS[number], (64, 256, 40, 128)[number % 4], "float16", ("bhsd", "bshd")[number % 2])
    for target in (("sm_80", "sm_90", "sm_86")[number % 3], "sm_75"):
        for deterministic in MODES:
            parts = kernels_of(spec, TARGETS[target], ("backward",), deterministic=deterministic)
            found |= {kernel.name: kernel for kernel in parts.values()}
    return list(found.values())


every_variant = pytest.mark.parametrize(
    "number", range(len(VARIANTS)), ids=lambda number: f"{VARIANTS[number].name}-{number}"
)


def parts(spec: fg.AttentionSpec, deterministic: bool = False, target: str = "sm_80") -> dict[str, str]:
    """Returns the texts of the backward's kernels by part, without comments."""
    found = kernels_of(spec, TARGETS[target], ("backward",), deterministic=deterministic)
    return {part: without_comments(kernel.source) for part, kernel in found.items()}


@every_variant
def test_lines_are_tidy(number: int) -> None:
    for kernel in kernels_of_variant(number):
        tidy(kernel.source)


@every_variant
def test_functions_and_kernels_are_short(number: int) -> None:
    for kernel in kernels_of_variant(number):
        longest = (LONGEST_KEYS, LONGEST_KEYS_FILE) if "bwd-dkdv" in kernel.name else (LONGEST_KERNEL, LONGEST_FILE)
        functions_fit(kernel, *longest)


@every_variant
def test_only_primitives_have_conditional_compilation(number: int) -> None:
    for kernel in kernels_of_variant(number):
        unconditional(kernel.source)


@every_variant
def test_nothing_is_unused(number: int) -> None:
    for kernel in kernels_of_variant(number):
        all_used(kernel)
        all_called(kernel)


@every_variant
def test_members_of_the_struct_are_read(number: int) -> None:
    for kernel in kernels_of_variant(number):
        members_read(kernel)


def test_entries_are_unique() -> None:
    """Within the kernels of a mode; kernels of two modes may share an entry point under two names."""
    for of_mode in (True, False):
        entries = [
            (kernel.entry, kernel.target.name)
            for number in range(len(VARIANTS))
            for kernel in kernels_of_variant(number)
            if kernel.name.startswith("deterministic") == of_mode
        ]
        assert len(set(entries)) == len(entries)


def test_a_kernel_names_its_spec_and_its_command() -> None:
    mask = fg.causal() & fg.sliding_window(128)
    spec = fg.AttentionSpec(64, mask=mask, score=fg.softcap(30), dropout=0.1)
    for deterministic in MODES:
        rendered = backward_kernels(spec, TARGETS["sm_86"], deterministic)
        for kernel in rendered.values():
            head = kernel.source.split("\n\n", 1)[0]
            told = ("causal() & sliding_window(128)", "softcap(30)", "0.1", "sm_86", spec.to_json(), "--pass backward")
            assert all(text in head for text in told), head
            assert kernel.entry in kernel.source and re.fullmatch(r"[A-Za-z_]\w*", kernel.entry)
            assert spec.name in kernel.name and "sm86" in kernel.name
        for kernel in (rendered[role] for role in ("dkdv", "dq") if role in rendered):
            plan = kernel.plan
            assert f"{plan.tile_q} queries x {plan.tile_k} keys, {plan.warps} warps" in kernel.source


@modes
def test_a_full_mask_needs_no_mask(deterministic: bool) -> None:
    for source in parts(fg.AttentionSpec(64), deterministic).values():
        for absent in ("mask_mod", "score_mod", "philox", "tiles.full", "full_begin", "find_dropped", "slope"):
            assert absent not in source, absent


@modes
def test_only_kernels_with_scores_contain_mask_score_and_dropout(deterministic: bool) -> None:
    """Kernels that only process rows or sums contain neither mask nor score nor dropout."""
    spec = fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(30), dropout=0.1)
    for part, source in parts(spec, deterministic).items():
        looks_at_scores = part in ("dkdv", "dq")
        for word in ("mask_mod", "score_mod", "philox", "mma_m16n8k16_f16"):
            assert (word in source) == looks_at_scores, (part, word)


@modes
@pytest.mark.parametrize("score", [fg.alibi(4), fg.alibi("slopes"), fg.relative_bias("table", 24)], ids=str)
def test_an_added_bias_has_no_slope(score: fg.Score, deterministic: bool) -> None:
    for source in parts(fg.AttentionSpec(64, score=score), deterministic).values():
        assert not re.search(r"\bslope\b", source)


@modes
def test_softcap_computes_one_tanh_for_score_and_slope(deterministic: bool) -> None:
    found = parts(fg.AttentionSpec(64, score=fg.softcap(30)), deterministic)
    for part in ("dkdv", "dq") if deterministic else ("dkdv",):
        body = functions(found[part])["score_mod"]
        assert body.count("tanh") == 1 and "slope = 1.0f - x0 * x0;" in body
        others = found[part].replace(body, "").replace(functions(found[part])["tanh_approx"], "")
        assert "tanh" not in others and "cosh" not in found[part]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_tiles_that_read_one_element_have_separate_scores(target: str) -> None:
    clipped, endless = fg.relative_bias("table", 24), fg.alibi("slopes")
    for score, alike in ((clipped, True), (endless, False)):
        text = keys_of(fg.AttentionSpec(64, score=score), target)
        assert ("recompute_p_and_ds<Masking::kUniform>" in text or "recompute_p<Masking::kUniform>" in text) == alike


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("width", "divides"), [(128, True), (256, True), (100, False)])
def test_quotients_of_a_tile_are_computed_once(width: int, divides: bool, target: str) -> None:
    """The | shows the compiler that upper bits are unchanged."""
    rows = fg.trace_mask(lambda b, h, q, k: abs(q // width - k // width) <= 1)
    assert ("first_query | (position.query + " in keys_of(fg.AttentionSpec(64, mask=rows), target)) == divides
    assert "first_query | (" not in keys_of(fg.AttentionSpec(64, mask=fg.causal()), target)


def keys_of(spec: fg.AttentionSpec, target: str) -> str:
    return backward_kernels(spec, TARGETS[target])["dkdv"].source


def test_only_the_default_mode_uses_atomic_additions() -> None:
    score = learned(fg.alibi("slopes"))
    spec = fg.AttentionSpec(64, mask=fg.causal(), score=score)
    default, exact = parts(spec), parts(spec, deterministic=True)
    assert "atomicAdd" in default["dkdv"] and "dq_accum" in default["dkdv"] and "add_exactly" not in default["dkdv"]
    for part, source in exact.items():
        assert "dq_accum" not in source and "reduce_add" not in source
        without = source.replace(functions(source).get("add_exactly", "\0"), "")
        assert "atomicAdd" not in without, part
    assert "add_exactly" in exact["dkdv"] and "add_exactly" not in exact["dq"]


@pytest.mark.parametrize(("target", "addition"), [("sm_80", "atomicAdd("), ("sm_90", "reduce_add_4(")])
def test_partial_dq_is_only_accessed_by_vector_reductions(target: str, addition: str) -> None:
    """Blocks add concurrently, which ThreadSanitizer does not see in the emulator; no other access is allowed."""
    source = parts(fg.AttentionSpec(64), target=target)["dkdv"]
    body = functions(source)["accumulate_dq"]
    touching = [line.strip() for line in body.splitlines() if re.search(r"\b(sums|tile)\b", line)][1:]
    begin, tile, added = touching
    assert begin.startswith("sums += warp * ") and tile.startswith("float* tile = sums + (")
    assert re.fullmatch(rf"(for \(.*\) )?{re.escape(addition)}tile \+ accum_offset\(lane, \w\), .*\);", added)
    assert source.count("dq_accum") == 2, "in the struct, and where they are added to"
    assert "dq_accum + (first_row + first_query) * kHeadDimPadded" in source


def test_gradients_of_captures_are_accumulated_in_the_dkdv_kernel() -> None:
    """Gradients of an element that all scores of a head, or several in a row, read are summed in registers."""
    of_heads = parts(fg.AttentionSpec(64, score=learned(fg.alibi("slopes"))))["dkdv"]
    whole = fg.Tensor("bias", "float32", 4, grad=True)
    of_scores = parts(fg.AttentionSpec(64, score=lambda s, b, h, q, k: s + whole[b, h, k, q]))["dkdv"]
    assert "add_capture_gradients(captured, position, arguments);" in of_heads and "warp_sum" in of_heads
    assert "add_capture_gradients(" not in of_scores and "add_to_gradient(arguments.d_bias" in of_scores
    of_distances = parts(fg.AttentionSpec(64, score=learned(fg.relative_bias("table", 8))))["dkdv"]
    assert "begin_run(captured.run0, arguments.d_table" in of_distances and "end_runs(captured.run0" in of_distances
    assert "Run" not in of_heads and "Run" not in of_scores
    plain = parts(fg.AttentionSpec(64, score=fg.alibi("slopes")))["dkdv"]
    assert "CaptureGradients" not in plain and "add_to_gradient" not in plain


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2])
@modes
def test_every_kind_of_plan_has_a_tidy_text(split: int, stages: int, deterministic: bool) -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal(), score=learned(fg.alibi("slopes")), dropout=0.1)
    plan = BackwardPlan(64, 64, 4, split, stages)
    kernel = backward_kernels(spec, SM_80, deterministic, plan=plan)["dkdv"]
    tidy(kernel.source)
    functions_fit(kernel, LONGEST_KEYS, LONGEST_KEYS_FILE)
    unconditional(kernel.source)
    all_used(kernel)
    all_called(kernel)
    members_read(kernel)
    assert f"{stages} stage(s) of Q and dO" in kernel.source and kernel.threads == 128
    assert (f"4 warps, {split} of which share rows" in kernel.source) == (split > 1)


@pytest.mark.rotated(3)
def test_rendering_is_deterministic_across_processes() -> None:
    program = (
        "import hashlib, json, sys\n"
        "from flashgen.codegen.stages import kernels_of\n"
        "from flashgen.codegen.targets import TARGETS\n"
        "from flashgen.language import AttentionSpec\n"
        "out = []\n"
        "for text in json.loads(sys.stdin.read()):\n"
        "    for deterministic in (False, True):\n"
        "        spec = AttentionSpec.from_json(text)\n"
        "        parts = kernels_of(spec, TARGETS['sm_80'], ('backward',), deterministic=deterministic)\n"
        "        out += [[k.name, k.entry, hashlib.sha256(k.source.encode()).hexdigest()] for k in parts.values()]\n"
        "print(json.dumps(out))\n"
    )
    specs = [spec_of(variant, 64, "bfloat16") for variant in VARIANTS]
    texts, answers = json.dumps([spec.to_json() for spec in specs]), []
    for seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], input=texts, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0] == answers[1]
    own = [
        [kernel.name, kernel.entry, hashlib.sha256(kernel.source.encode()).hexdigest()]
        for spec in specs
        for deterministic in MODES
        for kernel in kernels_of(spec, SM_80, ("backward",), deterministic=deterministic).values()
    ]
    assert answers[0] == own


def test_unsupported_dtypes_and_scales_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="scale="):
        render_backward_kernels(fg.AttentionSpec(64, scale=3e38), SM_80)
    with pytest.raises(UnsupportedError, match="dtype='bfloat16' is not supported on sm_75"):
        render_backward_kernels(fg.AttentionSpec(64, "bfloat16"), TARGETS["sm_75"])
    with pytest.raises(UnsupportedError, match="tile_k=40"):
        render_backward_kernels(fg.AttentionSpec(64), SM_80, replace(BackwardPlan(64, 64, 4), tile_k=40))
