"""What models of transformers pass to an attention: packed rows, caches, masks of all kinds, torch.compile; errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="flashgen.transformers needs torch")
transformers = pytest.importorskip(
    "transformers", reason="flashgen.transformers needs transformers: pip install 'flashgen[transformers]'"
)

LENGTH = 14
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", SIZES),
    "Mistral": ("ForCausalLM", SIZES | {"sliding_window": 5}),
}
LEFT = (torch.arange(LENGTH) >= torch.tensor([[0], [LENGTH - 9]])).long()


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    from flashgen.torch import emulated
    from flashgen.transformers import register

    register()
    with emulated():
        yield


def model_of(name: str, kind: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}{kind}")(config)


def tokens() -> Any:
    return torch.randint(3, 99, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def both(model: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns the results with flashgen under autocast, and with eager attention in float32."""
    model.set_attn_implementation("eager")
    expected = call()
    model.set_attn_implementation("flashgen")
    assert model.config._attn_implementation == "flashgen"
    with torch.autocast("cpu", torch.bfloat16):
        return call(), expected


def assert_close(got: Any, expected: Any) -> None:
    assert (got.float() - expected).abs().max() <= 0.02 * expected.abs().max()


def test_sequences_packed_in_a_row() -> None:
    model, ids = model_of("Llama", *DECODERS["Llama"]).eval(), tokens()[:1]
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    got, expected = both(model, lambda: model(ids, position_ids=positions, use_cache=False).logits)
    assert_close(got, expected)
    ends = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
        assert_close(model(ids, position_ids=positions, use_cache=False, **given).logits, expected)


def packed_attention(**given: Any) -> Any:
    """Returns the gradient of queries of two packed sequences, through the function that transformers looks up."""
    from transformers import AttentionInterface

    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, LENGTH, 24, generator=random).to(torch.bfloat16) for _ in range(3))
    ends = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    forward = AttentionInterface()[given.pop("name", "flashgen")]
    arguments: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "attention_mask": None} | given
    out, _ = forward(torch.nn.Module(), q.requires_grad_(), k, v, **arguments)
    return torch.autograd.grad(out.float().sum(), q)[0]


def test_packed_rows_are_deterministic_if_registered_so() -> None:
    from flashgen.torch import table
    from flashgen.transformers import register

    register("flashgen-deterministic", deterministic=True)
    known = set(table._TEXTS)
    bits = packed_attention(name="flashgen-deterministic", scaling=0.3125)
    new = set(table._TEXTS) - known
    assert new and all("+deterministic" in key for key in new), new
    assert torch.equal(bits, packed_attention(name="flashgen-deterministic", scaling=0.3125))


def test_packed_rows_ignore_dropout_in_eval() -> None:
    from flashgen.errors import UnsupportedError
    from flashgen.transformers.mask import attention_mask

    padded = attention_mask(1, LENGTH, LENGTH, attention_mask=LEFT[1:])
    for mask in (padded, torch.zeros(1, 1, LENGTH, LENGTH)):
        with pytest.raises(UnsupportedError, match="cu_seq_lens with an attention_mask"):
            packed_attention(attention_mask=mask)
    with pytest.raises(UnsupportedError, match="cu_seq_lens with a position_bias"):
        packed_attention(position_bias=torch.zeros(1, 2, LENGTH, LENGTH))


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_generation_does_not_recompile(name: str) -> None:
    from flashgen.torch import table

    model, ids = model_of(name, *DECODERS[name]).eval(), tokens()
    options: dict[str, Any] = {"attention_mask": LEFT, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "max_new_tokens": 2}
    short, _ = both(model, lambda: model.generate(ids, **options))
    known = len(table._TEXTS)
    longer, expected = both(model, lambda: model.generate(ids, **(options | {"max_new_tokens": 9})))
    assert len(table._TEXTS) == known, "tokens after the second need no other spec"
    same = (longer.sequences == expected.sequences).cumprod(-1)[:, LENGTH:]  # until a tie is resolved differently
    assert same[:, 0].all() and short.sequences.shape[1] == LENGTH + 2
    for step, (ours, theirs) in enumerate(zip(longer.logits, expected.logits, strict=True)):
        rows = torch.ones(2, dtype=torch.bool) if step == 0 else same[:, step - 1].bool()
        assert not rows.any() or (ours - theirs)[rows].abs().max() <= 0.02 * theirs.abs().max()


def test_a_static_cache() -> None:
    model, ids = model_of("Llama", *DECODERS["Llama"]).eval(), tokens()
    options: dict[str, Any] = {"attention_mask": LEFT, "do_sample": False, "max_new_tokens": 3}
    options |= {"cache_implementation": "static", "disable_compile": True, "output_logits": True}
    made = []
    for name, dtype in (("eager", torch.float32), ("flashgen", torch.bfloat16)):
        model.to(dtype).set_attn_implementation(name)
        made.append(model.generate(ids, return_dict_in_generate=True, **options))
    expected, got = made
    same = (got.sequences == expected.sequences).cumprod(-1)[:, LENGTH:]  # until a tie is resolved differently
    for step, (ours, theirs) in enumerate(zip(got.logits, expected.logits, strict=True)):
        rows = torch.ones(2, dtype=torch.bool) if step == 0 else same[:, step - 1].bool()
        assert not rows.any() or (ours.float() - theirs)[rows].abs().max() <= 0.04 * theirs.abs().max()


def test_under_torch_compile() -> None:
    model, ids = model_of("Llama", *DECODERS["Llama"]).eval(), tokens()
    model.set_attn_implementation("flashgen")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        for padding in (None, LEFT):
            expected = model(ids, attention_mask=padding, use_cache=False).logits
            assert_close(compiled(ids, attention_mask=padding, use_cache=False).logits, expected)


def test_masks_of_four_dimensions() -> None:
    model, ids = model_of("Llama", *DECODERS["Llama"]).eval(), tokens()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1).clone()
    mask[:, :, 9, 2] = False
    numbers = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    got, expected = both(model, lambda: model(ids, attention_mask=numbers, use_cache=False).logits)
    assert_close(got, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model(ids, attention_mask=mask, use_cache=False).logits, expected)


def test_refusals() -> None:
    from flashgen.errors import ArgumentError, UnsupportedError

    model, ids = model_of("Llama", *DECODERS["Llama"]).eval(), tokens()
    model.set_attn_implementation("flashgen")
    with pytest.raises(ArgumentError, match="the model is of float32"):
        model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UnsupportedError, match="output_attentions=True"):
            model(ids, output_attentions=True)
        with pytest.raises(UnsupportedError, match=r"an attention_mask of shape \(2, 14, 14\)"):
            model(ids, attention_mask=torch.ones(2, LENGTH, LENGTH))
    from flashgen.transformers.forward import attention_forward

    rows = [torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16)] * 3
    with pytest.raises(UnsupportedError, match="continuous batching"):
        attention_forward(model, *rows, None, cache=object())
    with pytest.raises(ArgumentError, match=r"attn_mask is int64: give booleans"):
        attention_forward(model, *rows, torch.ones(1, 1, 8, 8, dtype=torch.int64))
    model = model_of("Llama", *DECODERS["Llama"])
    model._supports_attention_backend = model._supports_sdpa = False
    model._supports_flash_attn = model._supports_flex_attn = False
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM declares no support of other attentions"):
        model.set_attn_implementation("flashgen")
