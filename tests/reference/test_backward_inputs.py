"""Wrong arguments of a backward call raise an ArgumentError that names them."""

import numpy as np
import pytest

from flashgen.errors import ArgumentError
from flashgen.language import AttentionSpec, Tensor
from flashgen.reference import backward, flash_backward, low_precision_backward, standard_backward


def zeros(batch=1, heads=2, length=3, dim=8, dtype=np.float16):
    return np.zeros((batch, heads, length, dim), dtype=dtype)


PLAIN = AttentionSpec(head_dim=8, value_dim=16)
Q, K, V, OUT, LSE = zeros(), zeros(), zeros(dim=16), zeros(dim=16), np.zeros((1, 2, 3), np.float32)


def flash(spec, q, k, v, d_out, *, out=OUT, lse=LSE, on_chip=999, **more):
    return flash_backward(spec, q, k, v, out, d_out, lse, on_chip=on_chip, **more)


EACH = pytest.mark.parametrize("function", [backward, low_precision_backward, standard_backward, flash])
WITH_LSE = pytest.mark.parametrize("function", [backward, low_precision_backward])


@EACH
@pytest.mark.parametrize(
    ("d_out", "message"),
    [
        (zeros(), r"d_out has shape \(1, 2, 3, 8\); the output it belongs to has \(1, 2, 3, 16\)"),
        (zeros(batch=2, dim=16), "d_out has shape"),
        (zeros(length=4, dim=16), "d_out has shape"),
        (OUT[0], r"d_out has shape \(2, 3, 16\); layout 'bhsd' needs 4 dimensions"),
        (OUT.astype(np.int32), "d_out has dtype int32"),
        (None, "d_out has dtype object"),
    ],
)
def test_d_out(function, d_out, message):
    with pytest.raises(ArgumentError, match=message):
        function(PLAIN, Q, K, V, d_out)


@EACH
def test_d_out_is_in_the_layout(function):
    spec = AttentionSpec(head_dim=8, value_dim=16, layout="bshd")
    with pytest.raises(ArgumentError, match=r"d_out has shape \(1, 3, 2, 16\).*belongs to has \(1, 2, 3, 16\)"):
        function(spec, Q, K, V, OUT.swapaxes(1, 2))


@WITH_LSE
@pytest.mark.parametrize(
    ("d_lse", "message"),
    [
        (np.zeros((1, 3, 2)), r"d_lse has shape \(1, 3, 2\); give \(batch, heads_q, len_q\) = \(1, 2, 3\)"),
        (np.zeros((1, 2, 3, 1)), "d_lse has shape"),
        (0.0, r"d_lse has shape \(\)"),
        (np.zeros((1, 2, 3), int), "d_lse has dtype int64; give floating point numbers, best float32"),
    ],
)
def test_d_lse(function, d_lse, message):
    with pytest.raises(ArgumentError, match=message):
        function(PLAIN, Q, K, V, OUT, d_lse=d_lse)


@EACH
def test_refusals_of_the_forward(function):
    with pytest.raises(ArgumentError, match="k has length 3, v 4"):
        function(PLAIN, Q, K, zeros(length=4, dim=16), OUT)
    with pytest.raises(ArgumentError, match="q has 2 heads, k and v 0"):
        function(PLAIN, Q, zeros(heads=0), zeros(heads=0, dim=16), OUT)
    with pytest.raises(ArgumentError, match=r"seed is missing.*dropout=0.5"):
        function(AttentionSpec(head_dim=8, value_dim=16, dropout=0.5), Q, K, V, OUT)
    with pytest.raises(ArgumentError, match="tabel= is not an argument or capture"):
        function(PLAIN, Q, K, V, OUT, tabel=1)
    table = Tensor("table", "float32", 1, grad=True)
    biased = AttentionSpec(head_dim=8, value_dim=16, score=lambda s, b, h, q, k: s + table[k])
    with pytest.raises(ArgumentError, match="capture 'table' is missing"):
        function(biased, Q, K, V, OUT)
    with pytest.raises(ArgumentError, match="capture 'table' has dtype float64"):
        function(biased, Q, K, V, OUT, table=np.zeros(3))


def test_arguments_of_flash_only():
    with pytest.raises(ArgumentError, match="on_chip=15"):
        flash(PLAIN, Q, K, V, OUT, on_chip=15)
    with pytest.raises(ArgumentError, match=r"out has shape \(1, 2, 3, 8\)"):
        flash(PLAIN, Q, K, V, OUT, out=zeros())
    with pytest.raises(ArgumentError, match=r"lse has shape \(1, 2\)"):
        flash(PLAIN, Q, K, V, OUT, lse=LSE[..., 0])
