"""Heads of more than 256 columns, whose output columns are split over warps."""

from collections.abc import Mapping
from typing import Any

import pytest

import flashgen as fg
from flashgen.verify import Case, verify
from flashgen.verify.problems import Shape

SPECS: Mapping[str, dict[str, Any]] = {
    "512": {"head_dim": 512, "dtype": "bfloat16", "mask": fg.causal()},
    "264": {"head_dim": 264, "mask": fg.sliding_window(40)},
    "320 and 512": {"head_dim": 320, "value_dim": 512, "score": fg.alibi("slopes")},
    "384 and 64": {"head_dim": 384, "value_dim": 64, "score": fg.softcap(20.0), "mask": fg.causal()},
    "steep scores": {"head_dim": 512, "scale": 1.0},
    "sink": {"head_dim": 512, "sink": fg.Tensor("sinks", "float32", 1), "layout": "bshd"},
    "varlen": {"head_dim": 512, "layout": "thd", "mask": fg.causal(), "dtype": "bfloat16"},
    "documents": {"head_dim": 512, "mask": fg.document("ids"), "out_dtype": "float32"},
    "pages": {"head_dim": 512, "page_size": 16, "mask": fg.causal()},
    "dropout": {"head_dim": 512, "dropout": 0.25},
}
TARGETS = ("sm_80", "sm_86", "sm_90")


@pytest.mark.rotated(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str, target: str) -> None:
    if (name, target) == ("dropout", "sm_86"):
        pytest.skip("too little shared memory")
    shape = Shape(70, 70, 2, 4, 2) if name == "documents" else Shape(70, 150, 2, 4, 2)
    for result in verify([Case(fg.AttentionSpec(**SPECS[name]), shape)], target=target, emulate=True):
        assert result.ok, (result.problem, result.verdicts)
