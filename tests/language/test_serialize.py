"""Canonical JSON in both directions: random trees, other processes, damaged text."""

import json
import os
import subprocess
import sys

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.operations import OPERATIONS, Capture, Load, kind_of
from flashgen.language.serialize import canonical, node_from_data, node_to_data
from flashgen.language.well_formed import SYMBOLS, build, check_expression, literal

SPEC = """
import flashgen as fg
slopes = fg.Tensor("slopes", "float32", 1, grad=True)
spec = fg.AttentionSpec(64, mask=fg.causal() & fg.document("ids") & (lambda b, h, q, k: (q - k) % 7 < fg.Scalar("w")),
                        score=lambda s, b, h, q, k: fg.where(q > k, s * 0.1, -float("inf")) + slopes[h], dropout=0.1)
"""


def make_spec():
    names: dict = {}
    exec(SPEC, names)
    return names["spec"]


LEAVES = st.one_of(
    st.sampled_from(SYMBOLS),
    st.integers(-(2**31), 2**31 - 1).map(literal),
    st.floats(width=32, allow_nan=False).map(literal),
    st.booleans().map(literal),
    st.sampled_from([Capture("size", "int32", 0), Capture("cap", "float32", 0)]),
)


@st.composite
def trees(draw, depth=5):
    """Returns a random tree of the language; operations that refuse their operands are replaced by a leaf."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return draw(LEAVES)
    cls = draw(st.sampled_from([*OPERATIONS.values()]))
    if cls is Load:
        return Load(Capture("table", "float32", 1, True), sympy.Integer(draw(st.integers(0, 9))))
    operands = [draw(trees(depth=depth - 1)) for _ in range(cls.arity)]
    try:
        return build(cls, *operands)
    except SpecError:
        return operands[0]


@given(trees())
@settings(max_examples=300, deadline=None)
def test_round_trip_of_random_trees(tree):
    check_expression(tree)
    text = canonical(node_to_data(tree))
    back = node_from_data(json.loads(text))
    assert back == tree
    assert kind_of(back) == kind_of(tree)
    assert canonical(node_to_data(back)) == text


def test_round_trip_of_specs():
    spec = make_spec()
    back = fg.AttentionSpec.from_json(spec.to_json())
    assert back == spec and back.to_json() == spec.to_json() and back.name == spec.name
    assert back.mask == spec.mask and back.score == spec.score and back.captures == spec.captures
    assert back.captures[1].grad
    data = json.loads(spec.to_json())
    assert spec.to_json() == json.dumps(data, sort_keys=True, separators=(",", ":"))


def test_the_digest_is_the_same_in_every_process():
    digests = {make_spec().digest}
    for seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", SPEC + "print(spec.digest)"]
        # Names and lines of the lambdas have no effect; the expression does.
        digests.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())
    assert len(digests) == 1


def test_the_digest_never_changes():
    """Kernels are stored under the digests of their specs: a change here needs a new version of the format."""
    assert fg.AttentionSpec(64).to_json() == (
        '{"dropout":0.0,"dtype":"float16","head_dim":64,"layout":"bhsd","mask":{"expression":true,"name":"full()"},'
        '"scale":0.125,"score":null,"value_dim":64,"version":1}'
    )
    assert node_to_data(fg.softcap(1.5).expression) == [
        "Mul", {"float": "0x1.8000000000000p+0"}, ["FastTanh", ["Divide", "score", {"float": "0x1.8000000000000p+0"}]],
    ]  # fmt: skip


def test_json_by_hand():
    spec = fg.AttentionSpec.from_json('{"head_dim": 64, "mask": "causal()", "score": "softcap(30)(alibi(8))"}')
    assert spec == fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(30)(fg.alibi(8)))
    assert fg.AttentionSpec.from_json('{"head_dim": 64, "mask": null}') == fg.AttentionSpec(64)


SHARED = '{"capture": "a", "dtype": "int32", "ndim": 1, "grad": false}'


@pytest.mark.parametrize(("expression", "message"), [
    ('["Frobnicate", "q"]', "unknown operation"), ('["__class__"]', "unknown operation"), ("[]", "unknown operation"),
    ('[["Add"], 1, 2]', "unknown operation"), ('["Less", "q"]', "takes 2 operands, got 1"),
    ('["Less", "q", "k", "k"]', "takes 2 operands, got 3"), ('"x"', "not a leaf"), ("1.5", "not a leaf"),
    ("null", "not a leaf"),
    ('{"float": "nan"}', "NaN"), ('{"float": "1.5.5"}', "hexadecimal"), ('{"float": 1.5}', "must be"),
    ('{"float": "0x1p+2000"}', "hexadecimal|float32"), ("4294967296", "32 bits"), ('["And", "q", "k"]', "booleans"),
    ('["Where", 1, "q", "k"]', "boolean condition"), ('["ShiftLeft", "q", {"float": "0x1p+0"}]', "integers"),
    ('["Less", "score", 1]', "reads the score"), ('["Add", "q", "k"]', "must be boolean"),
    ('["Load", "q", "k"]', "captured array"), (f'["Load", {SHARED}]', "ndim=1, indexed with 0"), (SHARED, "index it"),
    (f'["Less", {SHARED}, 1]', "the array 'a'"), ('{"capture": "a"}', "must be"), ("{}", "must be"),
    ('{"capture": "q", "dtype": "bool", "ndim": 1, "grad": false}', "capture name"),
    ('{"capture": "a", "dtype": "float64", "ndim": 1, "grad": false}', "dtype"),
    ('{"capture": "a", "dtype": "bool", "ndim": true, "grad": false}', "ndim"),
    ('{"capture": 3, "dtype": "bool", "ndim": 1, "grad": false}', "capture name"),
    ('{"capture": "a", "dtype": 3, "ndim": 1, "grad": false}', "dtype"),
    ('{"capture": "a", "dtype": {"a": ["f4"]}, "ndim": 1, "grad": false}', "dtype"),
    ('{"capture": "a", "dtype": {"a": ["f4"]}, "ndim": 0, "grad": false}', "dtype"),
    ('["Not", ' * 200 + "true" + "]" * 200, "too large"),
    ('["Not", ' * 100000 + "true" + "]" * 100000, "nested too deep"),
])  # fmt: skip
def test_damaged_expressions(expression, message):
    text = '{"head_dim": 64, "mask": {"name": "m", "expression": %s}}' % expression  # noqa: UP031
    with pytest.raises(SpecError, match=message):
        fg.AttentionSpec.from_json(text)


@pytest.mark.parametrize(("text", "message"), [
    ("", "cannot be read"), ("[]", "must be an object"), ("{", "cannot be read"),
    ('{"head_dim": 64, "heads": 3}', "unknown heads"),
    ("{}", "head_dim is missing"), ('{"head_dim": 64, "head_dim": 32}', "twice"),
    ('{"head_dim": 64, "version": 2}', "version=2"),
    ('{"head_dim": 64, "mask": 3}', "JSON mask"), ('{"head_dim": 64, "mask": {"name": 3, "expression": true}}', "name"),
    ('{"head_dim": 64, "mask": {"name": "m"}}', "JSON mask"), ('{"head_dim": 64, "scale": NaN}', "scale"),
    ('{"head_dim": 64, "dtype": 3}', "dtype"), ('{"head_dim": 64, "layout": []}', "layout"), (None, "must be a text"),
    ('{"head_dim": 64, "score": {"name": "s", "expression": true}}', "must be a float"), (b"{}", "must be a text"),
    ('{"head_dim": 64, "mask": "causal() and full()"}', "column"), ('{"head_dim": [64]}', "head_dim"),
    ('{"head_dim": 1e400}', "head_dim"), ('{"head_dim": 64, "scale": {}}', "scale"),
    ('{"head_dim": 64, "dtype": {"names": ["a"], "formats": ["f2"]}}', "dtype"),
    ('{"head_dim": 64, "kv_dtype": {"a": ["f2"]}}', "kv_dtype"), ('{"head_dim": 64, "kv_dtype": ["f2"]}', "kv_dtype"),
    ('{"head_dim": 64, "scale": 1%s}' % ("0" * 400), "scale"),
])  # fmt: skip
def test_damaged_specs(text, message):
    with pytest.raises(SpecError, match=message):
        fg.AttentionSpec.from_json(text)


@given(st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from(list(OPERATIONS))),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["float", "capture", "x"]),
    inner)),
    max_leaves=12,
))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_any_json_is_parsed_or_refused(data):
    try:
        node = node_from_data(data)
    except SpecError:
        return
    assert canonical(node_to_data(node))


def test_every_operation_has_a_distinct_name():
    assert list(OPERATIONS) == [cls.__name__ for cls in OPERATIONS.values()]
    assert ops.Add is OPERATIONS["Add"]
