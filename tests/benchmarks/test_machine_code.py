"""The comparison of sampled kernels with those of an earlier version."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flashgen.language as fg
from benchmarks import machine_code
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.targets import TARGETS


def test_samples_are_compared_by_text_then_by_code(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = render_forward(fg.AttentionSpec(64), TARGETS["sm_80"])
    variants = {
        "commented": replace(kernel, source=f"// More.\n\n{kernel.source}"),
        "renamed": replace(kernel, source=kernel.source.replace("compute_work_tile", "compute_tile")),
        "changed": replace(kernel, source=kernel.source + "int another;"),
        "new": kernel,
    }
    codes = {machine_code.tokens(each): "A" for each in variants.values()}
    codes[machine_code.tokens(variants["changed"])] = "B"
    monkeypatch.setattr(machine_code, "machine_code", lambda kernel, known: codes[machine_code.tokens(kernel)])
    monkeypatch.setattr(machine_code, "kernels", lambda: iter([(name, kernel) for name in (*variants, "missing")]))
    before = machine_code.save()
    del before["new"]
    monkeypatch.setattr(machine_code, "kernels", lambda: iter(variants.items()))
    assert machine_code.compare(before) == {
        "same text": ["commented"],
        "same code": ["renamed"],
        "different": ["changed"],
        "new": ["new"],
        "missing": ["missing"],
    }


def test_every_family_and_pass_is_sampled() -> None:
    sampled = {(kernel.target.name, kernel.role) for _, kernel in machine_code.kernels()}
    for target, passes in (("sm_75", 1), ("sm_80", 2), ("sm_90a", 2)):
        roles = {role for name, role in sampled if name == target}
        assert {"forward", "preprocess", "dkdv"} <= roles and (passes == 1 or {"dq", "schedule", "lists"} <= roles)
