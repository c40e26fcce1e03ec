"""Wrong arguments of a reference call raise an ArgumentError that names them."""

import numpy as np
import pytest

from flashgen.errors import ArgumentError
from flashgen.language import AttentionSpec, Scalar, Tensor
from flashgen.reference import attention, flash1, flash2, low_precision, standard


def zeros(batch=1, heads=2, length=3, dim=8, dtype=np.float16):
    return np.zeros((batch, heads, length, dim), dtype=dtype)


PLAIN = AttentionSpec(head_dim=8, value_dim=16)
Q, K, V = zeros(), zeros(), zeros(dim=16)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (zeros(dim=16), K, V, "q has a last dimension of 16.*head_dim=8"),
        (Q, zeros(dim=16), V, "k has a last dimension of 16.*head_dim=8"),
        (Q, K, zeros(dim=8), "v has a last dimension of 8.*value_dim=16"),
        (Q, K, zeros(length=4, dim=16), "k has length 3, v 4"),
        (Q, K, zeros(heads=1, dim=16), "k has heads 2, v 1"),
        (Q, K, zeros(batch=2, dim=16), "k has batch 1, v 2"),
        (zeros(batch=2), K, V, "q has batch 2, k and v 1"),
        (zeros(heads=3), K, V, "q has 3 heads, k and v 2"),
        (Q, zeros(heads=0), zeros(heads=0, dim=16), "q has 2 heads, k and v 0"),
        (Q[0], K, V, r"q has shape \(2, 3, 8\)"),
        (Q, K, V[..., None], "v has shape"),
        (Q.astype(np.int32), K, V, "q has dtype int32"),
        (Q, K.astype(complex), V, "k has dtype complex128"),
        (Q, K, None, "v is missing: give q, k and v, or declare shared_kv=True"),
    ],
)
@pytest.mark.parametrize("function", [attention, low_precision, standard])
def test_shapes_and_dtypes(function, q, k, v, message):
    with pytest.raises(ArgumentError, match=message):
        function(PLAIN, q, k, v)


class OnAnotherDevice:
    def __array__(self, *_args, **_kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")


def test_an_array_on_a_gpu_names_the_remedy():
    with pytest.raises(ArgumentError, match=r"q is not a NumPy array.*copy"):
        attention(PLAIN, OnAnotherDevice(), K, V)


def test_the_message_names_the_axes_of_the_layout():
    with pytest.raises(ArgumentError, match=r"\(batch, length, heads, dim\)"):
        attention(AttentionSpec(head_dim=8, layout="bshd"), Q[0], K, K)


def test_only_dropout_needs_and_reads_a_seed():
    spec = AttentionSpec(head_dim=8, value_dim=16, dropout=0.5)
    for function, more in ((attention, {}), (standard, {}), (flash1, {"on_chip": 999}), (flash2, {"on_chip": 999})):
        with pytest.raises(ArgumentError, match=r"seed is missing.*dropout=0.5"):
            function(spec, Q, K, V, **more)
        function(PLAIN, Q, K, V, seed=-1, **more)
    for arguments in ({"seed": -1}, {"seed": 2**64}, {"seed": 0.5}, {"seed": 1, "offset": 2**32}):
        with pytest.raises(ArgumentError, match=next(reversed(arguments))):
            attention(spec, Q, K, V, **arguments)


@pytest.mark.parametrize("function", [flash1, flash2])
def test_on_chip_holds_a_row(function):
    with pytest.raises(ArgumentError, match="on_chip=15"):
        function(PLAIN, Q, K, V, on_chip=15)


TABLE, WINDOW, FACTOR = Tensor("table", "float32", 2), Scalar("window", "int32"), Scalar("factor", "float32")
CAPTURING = AttentionSpec(
    head_dim=8,
    value_dim=16,
    mask=lambda b, h, q, k: q - k < WINDOW,
    score=lambda s, b, h, q, k: s * FACTOR + TABLE[h, k],
)
GIVEN = {"table": np.zeros((2, 3), np.float32), "window": 2, "factor": 0.1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": None}, "capture 'table' is missing"),
        ({"window": None}, "capture 'window' is missing"),
        ({"tabel": 1}, r"tabel= is not an argument or capture.*factor, table, window"),
        ({"table": np.zeros(3, np.float32)}, "capture 'table' has 1 dimensions; it was declared with 2"),
        ({"table": np.zeros((2, 3))}, "capture 'table' has dtype float64; it was declared as float32"),
        ({"table": np.zeros((2, 0), np.float32)}, "capture 'table' has shape"),
        ({"window": [2]}, "capture 'window' has 1 dimensions"),
        ({"window": 2.5}, "capture 'window'=2.5 does not fit"),
        ({"window": 2**31}, "capture 'window'=2147483648 does not fit"),
        ({"window": float("nan")}, "capture 'window'=nan does not fit"),
        ({"window": "2"}, "capture 'window'.*is not a number"),
        ({"factor": 1e39}, "capture 'factor'.*does not fit"),
    ],
)
def test_captures(change, message):
    given = {name: value for name, value in {**GIVEN, **change}.items() if value is not None}
    with pytest.raises(ArgumentError, match=message):
        attention(CAPTURING, Q, K, V, **given)


@pytest.mark.parametrize("window", [2, 2.0, np.int64(2), np.array(2, np.uint8)])
def test_numbers_take_the_declared_dtype(window):
    attention(CAPTURING, Q, K, V, **{**GIVEN, "window": window})


def test_numbers_are_rounded_as_in_the_kernel():
    q, k, v = (np.ones_like(array, dtype=np.float64) for array in (Q, K, V))
    _, lse = attention(CAPTURING, q, k, v, return_lse=True, **{**GIVEN, "window": 1})
    first_row_only = np.log(3) + 8**0.5 * float(np.float32(0.1))  # window 1: keys at or after the query
    np.testing.assert_allclose(lse[0, 0, 0], first_row_only, rtol=1e-15)


def test_integers_beyond_32_bits():
    ids = Tensor("ids", "int64", 1)
    spec = AttentionSpec(head_dim=8, mask=lambda b, h, q, k: ids[q] == ids[k])
    apart, alike = (
        attention(spec, Q, K, K, ids=np.array(given)) for given in ([1, 1 + 2**32, 1 - 2**63], [1, 2, 3])
    )  # fmt: skip
    np.testing.assert_array_equal(apart, alike)


def test_an_empty_capture_is_accepted_where_nothing_is_read():
    empty = zeros(length=0)
    attention(CAPTURING, empty, empty, zeros(length=0, dim=16), **{**GIVEN, "table": np.zeros((2, 0), np.float32)})
