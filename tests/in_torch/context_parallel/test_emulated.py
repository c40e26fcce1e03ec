"""Context parallelism on the CPU: two and four processes, gloo, and the emulator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import pool

SPECS = ["full", "window", "both_sides", "prefix", "documents", "lengths", "of_heads", "alibi", "learned", "sinks"]
SPECS += ["dropped", "all_of_it", "bshd", "wide_values"]


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    ranks = pool.Pool(2)
    yield ranks
    ranks.close()


@pytest.mark.rotated(3)
@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("shards", ["zigzag", "plain", "random"])
def test_two_ranks_equal_one(two: Any, scheme: str, shards: str) -> None:
    assert two.run("acceptance", spec="causal", scheme=scheme, shards=shards)[0] == []


@pytest.mark.rotated(9)
@pytest.mark.parametrize("spec", SPECS)
def test_every_kind_of_variant_in_a_ring(two: Any, spec: str) -> None:
    assert two.run("acceptance", spec=spec, scheme="ring")[0] == []


@pytest.mark.parametrize("spec", ["documents", "of_heads", "learned", "sinks", "dropped", "bshd"])
@pytest.mark.parametrize("scheme", ["all_gather", "ulysses"])
@pytest.mark.covering(4)
def test_variants_in_other_schemes(two: Any, spec: str, scheme: str) -> None:
    assert two.run("acceptance", spec=spec, scheme=scheme)[0] == []


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_more_keys_than_queries(two: Any, scheme: str) -> None:
    assert two.run("acceptance", spec="causal", scheme=scheme, cross=True)[0] == []


def test_rows_that_are_not_contiguous(two: Any) -> None:
    assert two.run("turned", shards="zigzag")[0] == []


WITH_HALOS = ["window", "both_sides", "dropped", "near", "parts"]


@pytest.mark.parametrize("spec", WITH_HALOS)
@pytest.mark.parametrize("shards", ["zigzag", "plain"])
@pytest.mark.covering(9)
def test_boundaries_of_windows(two: Any, spec: str, shards: str) -> None:
    assert two.run("boundaries", spec=spec, shards=shards)[0] == []


def test_dropout_equals_that_of_one_rank(two: Any) -> None:
    assert all(two.run("drops_the_same"))


@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
def test_deterministic_gradients_have_the_same_bits(two: Any, scheme: str) -> None:
    assert all(two.run("deterministic", scheme=scheme))


@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_deterministic_gradients_of_boundaries(two: Any, shards: str) -> None:
    assert all(two.run("deterministic", scheme="ring", spec="near", shards=shards, scale=4))


def test_gradients_of_captures_without_reduction(two: Any) -> None:
    assert two.run("shares_of_captures")[0] == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "compile"])
def test_a_layer_is_trained(two: Any, kind: str) -> None:
    """Under torch.compile the graph breaks before the messages and continues after them."""
    assert max(two.run("trained", kind=kind)) < 2e-2


@pytest.mark.parametrize(
    ("name", "scheme", "shards", "padded"),
    [
        ("Llama", "ring", "zigzag", False),
        ("Llama", "all_gather", "plain", True),
        ("Mistral", "ring", "plain", True),
        ("Mistral", "ulysses", "zigzag", False),
    ],
)
@pytest.mark.rotated(6)
def test_models_of_transformers(two: Any, name: str, scheme: str, shards: str, padded: bool) -> None:
    pytest.importorskip("transformers")
    for errors in two.run("models", name=name, scheme=scheme, shards=shards, padded=padded):
        assert errors.pop("halos") == 0
        assert max(errors.values()) < 2e-2, errors


@pytest.mark.parametrize(("name", "halos"), [("Mistral", 2), ("Gemma2", 1)])
@pytest.mark.rotated(3)
def test_window_layers_of_models_have_halos(two: Any, name: str, halos: int) -> None:
    """With the sharding that suits the causal layers, which alternate with window layers in Gemma."""
    pytest.importorskip("transformers")
    for errors in two.run("models", name=name, scheme="ring", shards="zigzag", padded=True, rows=512):
        assert errors.pop("halos") == halos
        assert max(errors.values()) < 2e-2, errors


def test_distributed_tensors(two: Any) -> None:
    assert two.run("distributed_tensors")[0] == []


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"scheme": "butterfly"}, "scheme='butterfly'"),
        ({"shards": "striped"}, "shards='striped'"),
        ({"rows": 33}, "pad the sequence to 68"),
        ({"shards": "twice"}, "must have each position from 0 to 255 once"),
        ({"scheme": "ulysses_ring"}, "device mesh of two dimensions"),
        ({"group": "mesh"}, "give mesh\\['a'\\]"),
        ({"declared": {"layout": "thd"}}, "layout='thd'"),
        ({"declared": {"page_size": 16}}, "page_size=16"),
        ({"declared": {"kv_dtype": "int8"}}, "kv_dtype='int8'"),
        ({"listed": True}, "q of type list is no tensor of torch"),
        ({"seed": 3}, "no dropout"),
        ({"slopes": 3}, "unknown argument 'slopes'"),
        ({"differs": True, "rows": 64}, "another call than rank"),
    ],
)
def test_errors_are_raised_on_all_ranks(two: Any, how: dict[str, Any], message: str) -> None:
    for said in two.run("refused", how=how):
        assert re.search(message, said), said


@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_unshard_inverts_shard(two: Any, shards: str) -> None:
    assert all(two.run("roundtrip", shards=shards))


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize(("spec", "shards"), [("causal", "zigzag"), ("window", "plain"), ("documents", "plain")])
@pytest.mark.covering(4)
def test_sent_bytes_equal_the_plan(two: Any, spec: str, scheme: str, shards: str) -> None:
    for forward, planned, backward, planned_backward in two.run(
        "bytes_are_those_of_the_plan", spec=spec, scheme=scheme, shards=shards
    ):
        assert (forward, backward) == (planned, planned_backward)


@pytest.mark.parametrize("shards", ["zigzag", "plain"])
def test_bytes_of_halos_equal_the_plan(two: Any, shards: str) -> None:
    counts = two.run("bytes_are_those_of_the_plan", spec="both_sides", scheme="ring", shards=shards, scale=4)
    for forward, planned, backward, planned_backward in counts:
        assert forward == planned > 0 and backward == planned_backward > 0
