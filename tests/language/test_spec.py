"""AttentionSpec: validation, equality, names."""

import dataclasses
import math
import re

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import FlashgenError, SpecError

slopes = fg.Tensor("slopes", dtype="float32", ndim=1)


def near_or_global(b, h, q, k):
    return (abs(q - k) <= 128) | (k < 4)


def test_the_first_spec():
    spec = fg.AttentionSpec(
        head_dim=64,
        dtype="float16",
        mask=fg.causal() & near_or_global,
        score=lambda s, b, h, q, k: s + slopes[h] * (k - q),
        dropout=0.1,
    )
    assert (spec.value_dim, spec.scale, spec.layout, spec.keep_threshold) == (64, 0.125, "bhsd", 230)
    assert spec.mask.name == "causal() & near_or_global"
    assert [capture.name for capture in spec.captures] == ["slopes"]
    assert re.fullmatch(r"fp16-d64-causal-and-near_or_global-score-dropout0.1-[0-9a-f]{8}", spec.name)
    assert "near_or_global" in repr(spec)


def test_defaults():
    spec = fg.AttentionSpec(128)
    assert spec.dtype == "float16" and spec.mask == fg.full() and spec.score is None and spec.captures == ()
    assert spec.scale == 1 / math.sqrt(128)
    assert spec.name == f"fp16-d128-full-{spec.digest}"


@pytest.mark.parametrize(("arguments", "start"), [
    ({"dtype": "bf16", "mask": fg.causal(), "score": fg.softcap(30)}, "bf16-d128-causal-softcap30-"),
    ({"value_dim": 64}, "fp16-d128v64-full-"), ({"layout": "bshd"}, "fp16-d128-full-bshd-"),
    ({"mask": ~fg.causal() | fg.sliding_window(1024, 2)}, "fp16-d128-not-causal-or-sliding_window1024-2-"),
    ({"mask": fg.causal("top_left")}, "fp16-d128-causal-top_left-"),
    ({"mask": fg.document("ids")}, "fp16-d128-document-ids-"),
    ({"score": fg.softcap(0.5)(fg.alibi(8))}, "fp16-d128-full-softcap0.5-alibi8-"),
    ({"dropout": 0.17}, "fp16-d128-full-dropout0.17-"),
])  # fmt: skip
def test_names_are_readable(arguments, start):
    spec = fg.AttentionSpec(128, **arguments)
    assert spec.name == start + spec.digest
    assert re.fullmatch("[a-z0-9._-]+", spec.name)


def test_long_names_are_truncated():
    mask = fg.full()
    for i in range(8):
        mask = mask & fg.sliding_window(1000 + i)
    spec = fg.AttentionSpec(64, mask=mask)
    assert len(spec.name) <= 105 and spec.name.endswith(spec.digest)


def test_dtypes_by_all_their_names():
    for given, dtype in [
        ("fp16", "float16"), ("half", "float16"), (np.float16, "float16"), (np.dtype("float16"), "float16"),
        ("bf16", "bfloat16"), ("torch.bfloat16", "bfloat16"), (ml_dtypes.bfloat16, "bfloat16"),
        ("BFloat16", "bfloat16"),
    ]:  # fmt: skip
        assert fg.AttentionSpec(64, given).dtype == dtype


@pytest.mark.parametrize(("arguments", "message"), [
    ({"head_dim": 60}, "head_dim=60 must be a multiple of 8"), ({"head_dim": 0}, "head_dim"),
    ({"head_dim": 60}, r"pad q and k with zeros to 64, and give scale=60\*\*-0.5"),
    ({"value_dim": 20}, "pad v with zeros to 24, and slice the output"),
    ({"head_dim": 584}, "head_dim=584 must be from 8 to 576"),
    ({"head_dim": 576}, "value_dim=576 must be from 8 to 512"),
    ({"head_dim": 64, "value_dim": 128, "shared_kv": True}, "value_dim=128 must be at most head_dim=64"),
    ({"head_dim": 64, "shared_kv": 1}, "shared_kv=1 must be True or False"),
    ({"head_dim": 64, "shared_kv": True, "kv_dtype": "int8"}, "shared_kv=True is not supported with kv_dtype='int8'"),
    ({"head_dim": -8}, "head_dim=-8 must be from 8"),
    ({"value_dim": "64"}, "value_dim='64' must be an integer"),
    ({"head_dim": 64.0}, "head_dim=64.0"), ({"head_dim": True}, "head_dim"),
    ({"head_dim": "64"}, "head_dim='64' must be an integer"),
    ({"value_dim": 12}, "value_dim=12"),
    ({"dtype": "float32"}, "dtype='float32' is not supported: .*float16, bfloat16"),
    ({"dtype": None}, "dtype=None"), ({"scale": math.nan}, "scale=nan"), ({"scale": -math.inf}, "scale"),
    ({"scale": -1e-50}, "scale"), ({"scale": math.inf}, "scale"), ({"scale": 1e-50}, "scale"),
    ({"scale": "1"}, "number"),
    ({"layout": "sbhd"}, "layout='sbhd' must be 'bhsd'"), ({"dropout": 1.0}, "dropout=1.0"),
    ({"dropout": -0.1}, "dropout"),
    ({"dropout": 0.001}, "dropout=0.001 would drop nothing: .* give 0, or at least 1/256"),
    ({"mask": fg.causal}, r"mask 'causal' is not a mask but returns one: call it, causal\(\.\.\.\)"),
    ({"score": fg.softcap}, r"score 'softcap' is not a score but returns one: call it, softcap\(\.\.\.\)"),
    ({"mask": np.ones((4, 4), bool)}, r"mask is an array \(4, 4\): read it in a function, lambda b, h, q, k: array\["),
    ({"dropout": 0.999}, "dropout"), ({"dropout": math.nan}, "dropout"), ({"dropout": False}, "dropout"),
    ({"mask": "causal()"}, "must be a mask .*; flashgen.parse_mask parses the text of one"),
    ({"score": "softcap(3)"}, "must be a score .*; flashgen.parse_score parses the text of one"),
    ({"mask": fg.softcap(3)}, "give it as score="),
    ({"score": fg.causal()}, "give it as mask="), ({"score": 3}, "score=3 must be a score"),
    ({"mask": True}, "mask=True"),
])  # fmt: skip
def test_refusals_name_the_argument(arguments, message):
    with pytest.raises(SpecError, match=message) as caught:
        fg.AttentionSpec(**{"head_dim": 64, **arguments})
    assert isinstance(caught.value, FlashgenError) and isinstance(caught.value, ValueError)


def test_specs_are_values():
    def make(**changes):
        return fg.AttentionSpec(**{"head_dim": 64, "mask": fg.causal(), "score": fg.softcap(30), **changes})

    assert make() == make() and hash(make()) == hash(make()) and len({make(), make()}) == 1
    assert make() == make(scale=0.125, value_dim=64, dropout=-0.0, dtype="fp16")
    different = [make(), make(scale=0.5), make(value_dim=72), make(dtype="bf16"), make(layout="bshd"),
    make(dropout=0.5),
                 make(mask=fg.full()), make(score=None), make(score=fg.softcap(31))]  # fmt: skip
    assert len(set(different)) == len({spec.digest for spec in different}) == len(different)
    assert make() != "spec"
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().head_dim = 8
    assert dataclasses.replace(make(), dropout=0.5) == make(dropout=0.5)


def test_constants_of_equal_value_and_different_kind_give_different_specs():
    one = fg.AttentionSpec(64, score=lambda s, b, h, q, k: s + 1)
    other = fg.AttentionSpec(64, score=lambda s, b, h, q, k: s + 1.0)
    assert one != other and one.digest != other.digest


@pytest.mark.parametrize(("given", "told"), [("64", "integer"), (584, "576"), (0, "576")])
def test_padding_with_zeros_is_only_advised_where_it_helps(given, told):
    with pytest.raises(SpecError, match=told) as caught:
        fg.AttentionSpec(given)
    assert "zeros" not in str(caught.value)


def test_padding_as_advised_works():
    """Scores of 60 elements, from a spec of 64 with the scale that the message names."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 1, 5, 60)) for _ in range(3))
    padded = [np.pad(array, [(0, 0)] * 3 + [(0, 4)]) for array in (q, k, v)]
    spec = fg.AttentionSpec(64, scale=60**-0.5)
    scores = q[0, 0] @ k[0, 0].T / 60**0.5
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    found = fg.reference.attention(spec, *padded)[..., :60]
    np.testing.assert_allclose(found[0, 0], weights @ v[0, 0], atol=1e-12)
