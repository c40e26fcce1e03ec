"""The reports of `verify` about a wrong kernel, and about one that cannot be built."""

from __future__ import annotations

import numpy as np

import flashgen.language as fg
from flashgen import reference
from flashgen.verify import Case, Inputs, Shape, judged, random_inputs, verify

SMALL = Shape(9, 17, batch=1, heads_q=1, heads_kv=1)


def test_a_wrong_output_fails() -> None:
    spec = fg.AttentionSpec(8, mask=fg.causal())
    inputs = random_inputs(spec, SMALL)
    out, lse = expected(spec, inputs)
    assert judged(spec, inputs.q, inputs.k, inputs.v, out, lse, {}).ok
    assert not judged(spec, inputs.q, inputs.k, inputs.v, out + 0.01, lse, {}).ok
    assert not judged(spec, inputs.q, inputs.k, inputs.v, out, lse + 0.01, {}).ok
    assert not judged(spec, inputs.q, inputs.k, inputs.v, np.full_like(out, np.nan), lse, {}).ok


def test_the_output_of_another_variant_fails() -> None:
    spec, off_by_one = (fg.AttentionSpec(8, mask=fg.sliding_window(left)) for left in (4, 5))
    inputs = random_inputs(spec, SMALL)
    out, lse = expected(off_by_one, inputs)
    assert not judged(spec, inputs.q, inputs.k, inputs.v, out, lse, {}).ok


def test_a_kernel_that_cannot_be_built_fails_and_the_rest_runs() -> None:
    refused = Case(fg.AttentionSpec(8, "bfloat16"), SMALL)
    possible = Case(fg.AttentionSpec(8, "float16"), SMALL)
    first, second = verify([refused, possible], target="sm_75", emulate=True)
    assert not first.ok and first.verdict is None and "UnsupportedError" in str(first.problem)
    assert second.ok and second.engine == "emulator, sm_75, in_order, copies late, seed 0"


def test_each_thread_order_has_a_result() -> None:
    results = list(verify([Case(fg.AttentionSpec(8), SMALL)], emulate=True, schedule_count=3))
    assert len({result.engine for result in results}) == 3 and all(result.ok for result in results)


def expected(spec: fg.AttentionSpec, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    return reference.attention(spec, inputs.q, inputs.k, inputs.v, return_lse=True)
