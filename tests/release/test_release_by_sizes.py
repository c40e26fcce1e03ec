"""A release with `heads_per_kv` has every kernel that calls select by their sizes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import flashgen.language as fg
from flashgen.codegen.dispatch import default_plan
from flashgen.codegen.families import backward_family, forward_family
from flashgen.codegen.stages import backward_kernels, forward_kernels
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import SpecError
from flashgen.release import Request, read_requests
from flashgen.release.folder import emit

HOPPER = target_named("sm_90a")
SPECS = {
    "full": fg.AttentionSpec(128, "bfloat16"),
    "causal": fg.AttentionSpec(128, "bfloat16", mask=fg.causal()),
    "window": fg.AttentionSpec(64, mask=fg.sliding_window(1024)),
    "documents": fg.AttentionSpec(128, "bfloat16", mask=fg.document("ids") & fg.causal()),
    "pages of 16": fg.AttentionSpec(128, "bfloat16", mask=fg.causal(), page_size=16),
    "wide": fg.AttentionSpec(256, "bfloat16", mask=fg.causal()),
    "ragged": fg.AttentionSpec(128, "bfloat16", mask=fg.causal(), layout="thd"),
}


def sources(spec: fg.AttentionSpec, passes: tuple[str, ...], heads_per_kv: int) -> set[str]:
    request = Request(spec, HOPPER, passes, heads_per_kv=heads_per_kv)  # type: ignore[arg-type]
    return {kernel.rendered.source for kernel in emit([request])}


@pytest.mark.rotated(4)
@pytest.mark.parametrize("heads_per_kv", [1, 4, 6])
@pytest.mark.parametrize("name", SPECS)
def test_it_has_the_forward_kernels_of_every_size(name: str, heads_per_kv: int) -> None:
    spec, rules, taken = SPECS[name], forward_family(HOPPER).size_rules, set()
    assert rules
    built = sources(spec, ("forward",), heads_per_kv)
    for len_q, len_k, heads_kv in itertools.product((1, 16, 100, 512, 4096), (512, 8192), (1, 8, 64)):
        workload = Workload(len_q, len_k, heads_kv * heads_per_kv, 132, heads_per_kv)
        plan = rules.choose(default_plan(spec, HOPPER), spec, HOPPER, workload)
        if plan is not None:
            taken.add(forward_kernels(spec, HOPPER, plan=plan)["forward"].source)
    assert taken <= built
    assert taken or name in ("documents", "wide", "full", "window", "ragged")
    default = forward_kernels(spec, HOPPER)
    assert built - taken >= {kernel.source for kernel in default.values()}


@pytest.mark.parametrize("name", ["full", "causal", "documents", "wide", "ragged"])
def test_it_has_the_backward_kernels_of_every_size(name: str) -> None:
    spec, split = SPECS[name], backward_family(HOPPER).head_split
    assert split
    default, built = backward_kernels(spec, HOPPER), sources(spec, ("backward",), 8)
    divided = split.choose(default["dkdv"].plan, spec, HOPPER, Workload(8192, 8192, 8, 132, 8))
    assert (divided is None) == (name in ("wide", "ragged"))
    taken = backward_kernels(spec, HOPPER, plan=divided).values() if divided else ()
    assert built == {kernel.source for kernel in (*default.values(), *taken)}
    assert sources(spec, ("backward",), 1) == sources(spec, ("backward",), 0) == {k.source for k in default.values()}


def test_families_without_such_plans_have_no_more_kernels() -> None:
    for target in ("sm_80", "sm_90"):
        requests = (
            Request(SPECS["causal"], target_named(target), ("forward", "backward"), heads_per_kv=n) for n in (0, 4)
        )
        one, other = (emit([request]) for request in requests)
        assert [kernel.stem for kernel in one] == [kernel.stem for kernel in other]


def test_valid_and_invalid_requests(tmp_path: Path) -> None:
    path = tmp_path / "release.toml"
    group = '[[kernels]]\nhead_dim = 64\ntarget = "sm_90a"\n'
    path.write_text(group + "heads_per_kv = [1, 4]")
    assert [request.heads_per_kv for request in read_requests(path) if isinstance(request, Request)] == [1, 4]
    for wrong, message in (
        ("heads_per_kv = 0", "`heads_per_kv` is 0; give the query heads per head of k and v, 1 or more"),
        ("heads_per_kv = true", "`heads_per_kv` is True"),
        ('heads_per_kv = "4"', "`heads_per_kv` is '4'"),
        ("heads_per_kv = []", "`heads_per_kv` is an empty list"),
        ('heads_per_kv = 4\npasses = "decode"', "`heads_per_kv` applies to the forward and backward"),
        ('heads_per_kv = 4\nstep = "append_kv"', "`head_dim` belongs to a spec"),
    ):
        path.write_text(group + wrong)
        with pytest.raises(SpecError, match=message):
            read_requests(path)
