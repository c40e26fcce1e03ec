"""Untrusted JSON gives values or one error message, never a traceback of another kind."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.strict_json import MAX_DEPTH, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


@given(VALUES)
def test_valid_json_is_read(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert parse_json(text) == parse_json(text.encode()) == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), f"more than {MAX_DEPTH} levels"),
        ('{"a": [1, {"b": NaN}]}', "b is nan"),
        ('{"a": [1e999]}', "a is inf"),
        ("-Infinity", "it is -inf"),
        ('{"a": 1, "b": 2, "b": 3}', "the key 'b' twice"),
        ('["\\ud800"]', "surrogates not allowed"),
        ('{"\\ud800": 1}', "surrogates not allowed"),
        (b'{"a": "\xff"}', "codec can't decode"),
        ('{"a": 1}'.encode("utf-16"), "codec can't decode"),
        ("9" * 10_000, "digits"),
        ("", "Expecting value"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_invalid_json_is_refused(data: bytes | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(data)


@pytest.mark.parametrize("text", ["[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH, '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH])
def test_values_that_were_read_can_be_written(text: str) -> None:
    assert json.dumps(parse_json(text), indent=1, allow_nan=False)
