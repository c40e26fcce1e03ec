"""Models of transformers on the emulator: logits, gradients and generated tokens beside attn_implementation="eager"."""

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
ENCODER = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "bos_token_id")}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
WHISPER: dict[str, Any] = {
    "vocab_size": 99, "num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_source_positions": 20, "max_target_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3,
}  # fmt: skip
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", SIZES),
    "Mistral": ("ForCausalLM", SIZES | {"sliding_window": 5}),
    "Gemma2": ("ForCausalLM", SIZES | {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 5.0}),
    "Qwen3": ("ForCausalLM", SIZES | {"head_dim": 8}),
    "GptOss": ("ForCausalLM", SIZES | {"head_dim": 8, "sliding_window": 5, "num_local_experts": 4}),
    "GPT2": ("LMHeadModel", GPT2 | {"eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
}
RIGHT = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])).long()
LEFT = RIGHT.flip(-1)
HOLES = torch.ones(2, LENGTH, dtype=torch.long).index_fill(1, torch.tensor([3, 4]), 0)


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
    """What a call gives by flashgen under autocast, and by eager attention in float32."""
    model.set_attn_implementation("eager")
    expected = call()
    model.set_attn_implementation("flashgen")
    assert model.config._attn_implementation == "flashgen"
    with torch.autocast("cpu", torch.bfloat16):
        return call(), expected


def assert_close(got: Any, expected: Any, kept: Any = None, share: float = 0.02) -> None:
    error = (got.float() - expected).abs()
    error = error if kept is None else error[kept]
    assert error.max() <= share * expected.abs().max()


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("padding", [None, RIGHT, LEFT], ids=["whole", "right", "left"])
def test_decoders(name: str, padding: Any) -> None:
    model, ids = model_of(name, *DECODERS[name]).eval(), tokens()
    got, expected = both(model, lambda: model(ids, attention_mask=padding, use_cache=False).logits)
    assert_close(got, expected, None if padding is None else padding.bool())


@pytest.mark.parametrize("padding", [None, RIGHT, LEFT, HOLES], ids=["whole", "right", "left", "holes"])
def test_an_encoder(padding: Any) -> None:
    model, ids = model_of("Bert", "ForMaskedLM", ENCODER).eval(), tokens()
    got, expected = both(model, lambda: model(ids, attention_mask=padding).logits)
    assert_close(got, expected, None if padding is None else padding.bool())


def test_relative_biases() -> None:
    model, ids = model_of("T5", "ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}).eval(), tokens()
    call = lambda: model(input_ids=ids, attention_mask=LEFT, decoder_input_ids=ids[:, :6]).logits
    assert_close(*both(model, call))


def test_cross_attention() -> None:
    model, sound = model_of("Whisper", "ForConditionalGeneration", WHISPER).eval(), torch.randn(2, 8, 40)
    assert_close(*both(model, lambda: model(input_features=sound, decoder_input_ids=tokens()[:, :6]).logits))


def test_pictures() -> None:
    model, pictures = model_of("ViT", "Model", VIT | {"patch_size": 8}).eval(), torch.randn(2, 3, 32, 32)
    assert_close(*both(model, lambda: model(pictures).last_hidden_state))


def test_training() -> None:
    """Gradients beside those of sdpa in the same precision: most of the error of both is of the other layers."""
    model, ids = model_of("Llama", *DECODERS["Llama"]), tokens()
    made = {}
    for name in ("flashgen", "sdpa", "eager"):
        model.set_attn_implementation(name)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=name != "eager"):
            loss = model(ids, labels=ids, attention_mask=LEFT).loss
        loss.backward()
        made[name] = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    for key, exact in made["eager"].items():
        ours, theirs = ((made[name][key] - exact).norm() for name in ("flashgen", "sdpa"))
        assert ours <= 2 * theirs + 1e-5, key


def test_sequences_packed_in_a_row() -> None:
    model, ids = model_of("Llama", *DECODERS["Llama"]).eval(), tokens()[:1]
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    got, expected = both(model, lambda: model(ids, position_ids=positions, use_cache=False).logits)
    assert_close(got, expected)
    ends = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
        assert_close(model(ids, position_ids=positions, use_cache=False, **given).logits, expected)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_generating_token_by_token_compiles_nothing_anew(name: str) -> None:
    from flashgen.torch import table

    model, ids = model_of(name, *DECODERS[name]).eval(), tokens()
    options: dict[str, Any] = {"attention_mask": LEFT, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "max_new_tokens": 2}
    short, _ = both(model, lambda: model.generate(ids, **options))
    known = len(table._TABLE)
    longer, expected = both(model, lambda: model.generate(ids, **(options | {"max_new_tokens": 9})))
    assert len(table._TABLE) == known, "the tokens after the second need no other spec"
    same = (longer.sequences == expected.sequences).cumprod(-1)[:, LENGTH:]  # until a tie is broken otherwise
    assert same[:, 0].all() and short.sequences.shape[1] == LENGTH + 2
    for step, (ours, theirs) in enumerate(zip(longer.logits, expected.logits, strict=True)):
        rows = torch.ones(2, dtype=torch.bool) if step == 0 else same[:, step - 1].bool()
        assert not rows.any() or (ours - theirs)[rows].abs().max() <= 0.02 * theirs.abs().max()


def test_a_cache_of_a_fixed_size() -> None:
    model, ids = model_of("Llama", *DECODERS["Llama"]).eval(), tokens()
    options: dict[str, Any] = {"attention_mask": LEFT, "do_sample": False, "max_new_tokens": 3}
    options |= {"cache_implementation": "static", "disable_compile": True, "output_logits": True}
    made = []
    for name, dtype in (("eager", torch.float32), ("flashgen", torch.bfloat16)):
        model.to(dtype).set_attn_implementation(name)
        made.append(model.generate(ids, return_dict_in_generate=True, **options))
    expected, got = made
    same = (got.sequences == expected.sequences).cumprod(-1)[:, LENGTH:]  # until a tie is broken otherwise
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


def test_what_is_refused() -> None:
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
    model = model_of("Llama", *DECODERS["Llama"])
    model._supports_attention_backend = model._supports_sdpa = False
    model._supports_flash_attn = model._supports_flex_attn = False
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has an attention of its own"):
        model.set_attn_implementation("flashgen")
