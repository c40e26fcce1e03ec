"""FlexAttention functions that call torch. Skipped if torch is not installed."""

import math

import pytest

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import KEY, QUERY, SCORE
from flashgen.language.trace import traced_node

torch = pytest.importorskip("torch")

Q, K, S = traced_node(QUERY), traced_node(KEY), traced_node(SCORE)


@pytest.mark.parametrize("function", [
    lambda s, q, k: torch.abs(q - k), lambda s, q, k: torch.where(q >= k, s, -float("inf")),
    lambda s, q, k: torch.where(q >= k, s, torch.tensor(-1.5)), lambda s, q, k: torch.tanh(s / 30) * 30,
    lambda s, q, k: torch.exp(s) + torch.exp2(s), lambda s, q, k: torch.minimum(q, k), lambda s, q, k: torch.max(q, k),
    lambda s, q, k: torch.clamp(q, 0, 5), lambda s, q, k: torch.clamp(q, max=5), lambda s, q, k: torch.sigmoid(s),
    lambda s, q, k: torch.sqrt(q.float()), lambda s, q, k: torch.rsqrt(q.to(torch.float32)),
    lambda s, q, k: torch.log(q.float()) + torch.log2(q.float()), lambda s, q, k: torch.sin(s) * torch.cos(s),
    lambda s, q, k: torch.floor(s) + torch.ceil(s), lambda s, q, k: torch.logical_and(q > k, k > 3),
    lambda s, q, k: torch.logical_not(q > k) | torch.logical_or(q > 3, k > 3), lambda s, q, k: torch.pow(s, 2),
    lambda s, q, k: torch.tensor(2.0) * s, lambda s, q, k: torch.tensor(3) - q,
    lambda s, q, k: s - torch.tensor(3), lambda s, q, k: torch.tensor(5) >= q, lambda s, q, k: q % torch.tensor(4),
    lambda s, q, k: torch.remainder(-q, 4), lambda s, q, k: torch.div(q, k, rounding_mode="floor"),
    lambda s, q, k: torch.floor_divide(q, k), lambda s, q, k: torch.sub(s, q, alpha=2), lambda s, q, k: torch.square(q),
    lambda s, q, k: torch.bitwise_and(q, k), lambda s, q, k: torch.eq(q, k) ^ torch.ne(q, 3),
    lambda s, q, k: torch.neg(s),
    lambda s, q, k: torch.relu(s), lambda s, q, k: torch.zeros_like(s), lambda s, q, k: (q - k).abs().clamp(min=1),
    lambda s, q, k: q.new_ones((), dtype=torch.bool) & (q >= k), lambda s, q, k: s.to(torch.float32).type_as(s),
    lambda s, q, k: torch.trunc(s), lambda s, q, k: torch.true_divide(s, 3), lambda s, q, k: torch.reciprocal(s),
])  # fmt: skip
def test_torch_functions(function):
    for s, q, k in [(0.5, 7, 3), (-2.5, 3, 7), (1.0, 4, 4)]:
        expected = function(torch.tensor(s, dtype=torch.float64), torch.tensor(q), torch.tensor(k)).item()
        traced = function(S, Q, K)
        arrays = {f"array__{number}": array.reshape(1).numpy() for number, array in enumerate(traced.arrays)}
        got = evaluate(traced.node, {QUERY: q, KEY: k, SCORE: s}, arrays).item()
        assert got == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_torch_functions_that_need_arrays_are_refused():
    table = torch.arange(8)
    with pytest.raises(SpecError, match=r"torch\.softmax cannot be traced"):
        torch.softmax(S, 0)
    with pytest.raises(SpecError, match=r"flashgen\.Tensor"):
        Q + table
    assert list(fg.trace_mask(lambda b, h, q, k: table[q] == table[k]).bound) == ["table"]


def test_torchs_own_combinators():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= 2

    both = fg.trace_mask(flex.and_masks(causal, near)).expression
    either = fg.trace_mask(flex.or_masks(causal, near)).expression
    everything = fg.trace_mask(flex.noop_mask).expression
    for q, k in [(5, 4), (5, 1), (1, 5)]:
        values = {QUERY: q, KEY: k}
        assert evaluate(both, values).item() == (q >= k and q - k <= 2)
        assert evaluate(either, values).item() == (q >= k or q - k <= 2)
        assert evaluate(everything, values).item() is True
    assert math.isfinite(fg.AttentionSpec(64, torch.bfloat16).scale)
    assert fg.AttentionSpec(64, torch.bfloat16).dtype == "bfloat16"
    assert fg.Tensor("ids", torch.int64, 1).capture.dtype == "int64"
