"""Context parallelism on GPUs with NCCL: the same checks as on the CPU, on two GPUs, and on four if available.

pytest -m gpu tests/in_torch/context_parallel -n 0
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import pool

pytestmark = pytest.mark.gpu
SPECS = ["full", "window", "both_sides", "prefix", "documents", "lengths", "of_heads", "alibi", "learned", "sinks"]
SPECS += ["dropped", "all_of_it", "bshd", "wide_values"]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, and here are {torch.cuda.device_count()}")
    group = pool.Pool(request.param, "nccl", timeout=60)
    yield group
    group.close()


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("shards", ["zigzag", "plain", "random"])
def test_ranks_equal_one_gpu(ranks: Any, scheme: str, shards: str) -> None:
    assert ranks.run("acceptance", spec="causal", scheme=scheme, shards=shards)[0] == []


@pytest.mark.parametrize("spec", SPECS)
def test_every_kind_of_variant_in_a_ring(ranks: Any, spec: str) -> None:
    assert ranks.run("acceptance", spec=spec, scheme="ring")[0] == []


@pytest.mark.parametrize("spec", ["documents", "of_heads", "learned", "sinks", "dropped", "bshd"])
@pytest.mark.parametrize("scheme", ["all_gather", "ulysses"])
def test_variants_in_other_schemes(ranks: Any, spec: str, scheme: str) -> None:
    assert ranks.run("acceptance", spec=spec, scheme=scheme)[0] == []


@pytest.mark.parametrize("spec", ["causal", "learned", "dropped"])
def test_heads_within_a_node_and_a_ring_across(ranks: Any, spec: str) -> None:
    assert ranks.run("acceptance", spec=spec, scheme="ulysses_ring")[0] == []


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_more_keys_than_queries(ranks: Any, scheme: str) -> None:
    assert ranks.run("acceptance", spec="causal", scheme=scheme, cross=True)[0] == []


def test_the_baseline_ring(ranks: Any) -> None:
    assert not any(ranks.run("ring_over_flash"))


def test_longer_sequences(ranks: Any) -> None:
    assert ranks.run("acceptance", spec="causal", scheme="ring", scale=4)[0] == []


@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_rows_that_are_not_contiguous(ranks: Any, shards: str) -> None:
    assert ranks.run("turned", shards=shards)[0] == []


WITH_HALOS = ["window", "both_sides", "dropped", "near", "parts"]


@pytest.mark.parametrize("spec", WITH_HALOS)
@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_boundaries_of_windows(ranks: Any, spec: str, shards: str) -> None:
    assert ranks.run("boundaries", spec=spec, shards=shards)[0] == []


def test_dropout_equals_that_of_one_gpu(ranks: Any) -> None:
    assert all(ranks.run("drops_the_same"))


@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
def test_deterministic_gradients_have_the_same_bits(ranks: Any, scheme: str) -> None:
    assert all(ranks.run("deterministic", scheme=scheme))


@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_deterministic_gradients_of_boundaries(ranks: Any, shards: str) -> None:
    assert all(ranks.run("deterministic", scheme="ring", spec="near", shards=shards, scale=8))


def test_gradients_of_captures_without_reduction(ranks: Any) -> None:
    assert ranks.run("shares_of_captures")[0] == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "compile"])
def test_a_layer_is_trained(ranks: Any, kind: str) -> None:
    """Under torch.compile the graph breaks before the messages and continues after them."""
    assert max(ranks.run("trained", kind=kind)) < 2e-2


@pytest.mark.parametrize(("name", "scheme", "shards"), [("Llama", "ring", "zigzag"), ("Mistral", "ulysses", "plain")])
def test_models_of_transformers(ranks: Any, name: str, scheme: str, shards: str) -> None:
    pytest.importorskip("transformers")
    for errors in ranks.run("models", name=name, scheme=scheme, shards=shards, padded=True):
        assert errors.pop("halos") == 0
        assert max(errors.values()) < 2e-2, errors


@pytest.mark.parametrize(("name", "halos"), [("Mistral", 2), ("Gemma2", 1)])
def test_window_layers_of_models_have_halos(ranks: Any, name: str, halos: int) -> None:
    """With the sharding that suits the causal layers, which alternate with window layers in Gemma."""
    pytest.importorskip("transformers")
    for errors in ranks.run("models", name=name, scheme="ring", shards="zigzag", padded=True, rows=512):
        assert errors.pop("halos") == halos
        assert max(errors.values()) < 2e-2, errors


def test_distributed_tensors(ranks: Any) -> None:
    assert ranks.run("distributed_tensors")[0] == []


def test_the_watchdog_ends_the_others_if_a_rank_dies(tmp_path: Path) -> None:
    """Messages fail on the GPU: torch's watchdog logs it and ends the process within the timeout of the group."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and here are {torch.cuda.device_count()}")
    stderr = tmp_path / "stderr"
    group = pool.Pool(2, "nccl", timeout=60, stderr=stderr)
    try:
        group.ask("one_rank_fails", how="dies", rank=1, timeout=15, scheme="ring", during="backward")
        answer = group.answer(0)
    finally:
        group.kill()
    assert "watchdog" in stderr.read_text().lower() or "a message between ranks failed" in str(answer)


@pytest.mark.parametrize("spec", ["causal", "window"])
def test_back_to_back_calls_equal_the_first(ranks: Any, spec: str) -> None:
    assert all(ranks.run("again_and_again", spec=spec))


@pytest.mark.parametrize(
    ("spec", "shards"), [("causal", "zigzag"), ("window", "zigzag"), ("both_sides", "zigzag"), ("window", "plain")]
)
def test_graph_capture(ranks: Any, spec: str, shards: str) -> None:
    assert all(ranks.run("captured", spec=spec, shards=shards))


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize(("spec", "shards"), [("causal", "zigzag"), ("window", "plain"), ("documents", "plain")])
def test_sent_bytes_equal_the_plan(ranks: Any, spec: str, scheme: str, shards: str) -> None:
    for forward, planned, backward, planned_backward in ranks.run(
        "bytes_are_those_of_the_plan", spec=spec, scheme=scheme, shards=shards
    ):
        assert (forward, backward) == (planned, planned_backward)


@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_bytes_of_halos_equal_the_plan(ranks: Any, shards: str) -> None:
    counts = ranks.run("bytes_are_those_of_the_plan", spec="both_sides", scheme="ring", shards=shards, scale=8)
    for forward, planned, backward, planned_backward in counts:
        assert forward == planned > 0 and backward == planned_backward > 0
