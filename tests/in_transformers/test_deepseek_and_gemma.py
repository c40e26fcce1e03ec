"""What the layers of DeepSeek and Gemma 4 pass to an attention: selected keys, K = V, masks of the last queries."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="flashgen.transformers needs torch")
transformers = pytest.importorskip(
    "transformers", reason="flashgen.transformers needs transformers: pip install 'flashgen[transformers]'"
)
from architectures import LENGTH, PADDINGS, assert_right, inputs_of, model_of

OTHER_NAME = "fused-kernels"  # transformers treats names with "flash" in them differently


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    from flashgen.torch import emulated
    from flashgen.transformers import register

    register()
    register(OTHER_NAME)
    with emulated():
        yield


def assert_logits(model: Any, name: str = "flashgen", **options: Any) -> None:
    """Compares the logits of tokens that are no padding with those of eager attention, by the numerics rule."""
    inputs = inputs_of("Llama", "left", "cpu")
    low = model.to(torch.bfloat16)
    made = []
    for each, how in ((copy.deepcopy(low), name), (copy.deepcopy(low), "eager"), (copy.deepcopy(low).float(), "eager")):
        each.set_attn_implementation(how)
        with torch.no_grad():
            logits = each(**inputs, use_cache=False, **options).logits
        made.append(logits[inputs["attention_mask"][:, -logits.shape[1] :].bool()])
    assert_right(*made)
    assert not torch.equal(made[0], made[1]), "flashgen computed the attention"


@pytest.mark.rotated(3)
@pytest.mark.parametrize(("name", "shared"), [("DeepseekV4", True), ("Gemma4Text", False)])
def test_k_and_v_that_are_one_tensor(name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4 attends to one tensor. Gemma 4 projects K and V in one, and normalizes and rotates them apart."""
    from flashgen.transformers import forward

    entries, original = [], forward._entry
    monkeypatch.setattr(forward, "_entry", lambda *key: entries.append(original(*key)) or entries[-1])
    model = model_of(name, "cpu").to(torch.bfloat16)
    model.set_attn_implementation("flashgen")
    with torch.no_grad():
        model(torch.arange(3, 9)[None], use_cache=False)
    assert len(entries) == model.config.num_hidden_layers
    assert all(entry.spec.shared_kv == shared for entry in entries)
    assert {entry.spec.head_dim for entry in entries} == ({512} if shared else {256, 512})


@pytest.mark.rotated(8)
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_layers_that_compute_only_the_last_queries(kept: int) -> None:
    assert_logits(model_of("Gemma4Text", "cpu"), OTHER_NAME, logits_to_keep=kept)


def test_an_indexer_that_selects_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The selection is fixed, because that of an indexer depends on the rounding of its scores."""
    model = model_of("DeepseekV32", "cpu")

    def select(_self: Any, hidden_states: Any, *_rest: Any, **_more: Any) -> Any:
        offsets = torch.tensor([0, -2, 1, -7])
        return ((torch.arange(LENGTH)[:, None] + offsets) % LENGTH).int().expand(hidden_states.shape[0], -1, -1)

    monkeypatch.setattr(type(model.model.layers[0].self_attn.indexer), "forward", select)
    assert_logits(model)


@pytest.mark.parametrize("booleans", [True, False])
def test_indices_of_selected_keys(booleans: bool) -> None:
    from flashgen.transformers.forward import attention_forward

    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, LENGTH, 16, generator=random).to(torch.bfloat16) for _ in range(3))
    allowed = (torch.ones(LENGTH, LENGTH).tril().bool() & PADDINGS["left"].bool()[:, None])[:, None]
    indices = torch.rand(2, LENGTH, LENGTH, generator=random).topk(5).indices
    seen = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool).scatter(-1, indices, True)[:, None] & allowed
    mask = allowed if booleans else torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    got, _ = attention_forward(torch.nn.Module(), q, k, v, mask, indices=indices.int(), emulate=True)
    scores = (q.float() @ k.float().transpose(-1, -2) / 4).masked_fill(~seen, float("-inf"))
    wanted = (scores.softmax(-1) @ v.float()).transpose(1, 2)
    rows = seen.any(-1)[:, 0]
    assert (got.float() - wanted)[rows].abs().max() <= 0.02 * wanted[rows].abs().max()


def test_refused_selections() -> None:
    from flashgen.errors import UnsupportedError
    from flashgen.transformers.forward import attention_forward

    rows = [torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16)] * 3
    chosen = torch.zeros(1, 8, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"indices of selected keys .* without an attention_mask"):
        attention_forward(torch.nn.Module(), *rows, None, indices=chosen)
    with pytest.raises(UnsupportedError, match=r"blocks of keys for each query \(block_indices"):
        attention_forward(torch.nn.Module(), *rows, None, block_indices=chosen)
