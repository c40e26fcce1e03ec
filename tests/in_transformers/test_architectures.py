"""Architectures of transformers with random weights: logits, gradients and generated tokens, by the numerics' rule.

What is right is attn_implementation="eager" in float32; what it may be off by is twice what "eager" in bfloat16 is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="flashgen.transformers needs torch")
transformers = pytest.importorskip(
    "transformers", reason="flashgen.transformers needs transformers: pip install 'flashgen[transformers]'"
)

LENGTH, NEW = 14, 6
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "bos_token_id")}
ENCODER |= {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 99, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "dropout": 0.0,
}  # fmt: skip
WHISPER = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32}
LATENT = SIZES | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 2,
}  # fmt: skip


class Architecture(NamedTuple):
    """A class of transformers and its configuration. inputs: what it reads; "tokens", "both", "sound" or "pictures"."""

    kind: str
    options: dict[str, Any]
    inputs: str = "tokens"
    generates: bool = True


ARCHITECTURES = {
    "Bert": Architecture("ForMaskedLM", ENCODER, generates=False),
    "ModernBert": Architecture(
        "ForMaskedLM", SIZES | {"local_attention": 6, "global_attn_every_n_layers": 2}, generates=False
    ),
    "GPT2": Architecture("LMHeadModel", GPT2),
    "Llama": Architecture("ForCausalLM", SIZES),
    "Mistral": Architecture("ForCausalLM", SIZES | {"sliding_window": 5}),
    "Gemma2": Architecture("ForCausalLM", SIZES | {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 5.0}),
    "Qwen2": Architecture("ForCausalLM", SIZES),
    "Qwen3": Architecture("ForCausalLM", SIZES | {"head_dim": 8}),
    "GptOss": Architecture("ForCausalLM", SIZES | {"head_dim": 8, "sliding_window": 5, "num_local_experts": 4}),
    "DeepseekV3": Architecture("ForCausalLM", LATENT),
    "T5": Architecture("ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}, "both"),
    "Bart": Architecture("ForConditionalGeneration", SEQ2SEQ | {"max_position_embeddings": 64}, "both"),
    "Whisper": Architecture("ForConditionalGeneration", WHISPER, "sound"),
    "ViT": Architecture("Model", VIT | {"patch_size": 8}, "pictures", generates=False),
}
RIGHT = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])).long()
HOLES = torch.ones(2, LENGTH, dtype=torch.long).index_fill(1, torch.tensor([3, 4]), 0)
PADDINGS = {"whole": None, "right": RIGHT, "left": RIGHT.flip(-1), "holes": HOLES}
CASES = [
    (name, padding)
    for name, each in ARCHITECTURES.items()
    for padding in PADDINGS
    if padding == "whole" or each.inputs in ("tokens", "both")
]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the models are: on a GPU, or on the CPU, where the emulator runs the kernels."""
    from flashgen.torch import emulated
    from flashgen.transformers import register

    register()
    with emulated(request.param == "cpu"):
        yield request.param


def model_of(name: str, device: str) -> Any:
    torch.manual_seed(0)
    kind, options, *_ = ARCHITECTURES[name]
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}{kind}")(config).eval().to(device)
    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"{name} of transformers {transformers.__version__} has its own attention alone")
    return model


def inputs_of(name: str, padding: str, device: str) -> dict[str, Any]:
    """What a model is called with: token 0 stands where a sequence is padded."""
    given = _inputs_of(name, padding)
    return {key: each.to(device) if isinstance(each, torch.Tensor) else each for key, each in given.items()}


def _inputs_of(name: str, padding: str) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (2, LENGTH), generator=random)
    reads, mask = ARCHITECTURES[name].inputs, PADDINGS[padding]
    if reads == "pictures":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=random)}
    if reads == "sound":
        return {"input_features": torch.randn(2, 8, 40, generator=random), "decoder_input_ids": ids[:, :6]}
    given: dict[str, Any] = {"input_ids": ids if mask is None else ids * mask, "attention_mask": mask}
    if reads == "both":
        return given | {"decoder_input_ids": ids[:, :6]}
    return given | ({"use_cache": False} if ARCHITECTURES[name].generates else {})


def in_three_ways(model: Any, call: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """What a call gives by flashgen, by eager attention in the same precision, and by it in float32."""
    made = []
    for name, rounded in (("flashgen", True), ("eager", True), ("eager", False)):
        for part in model.modules():  # some versions leave an encoder whose configuration is a copy as it was
            if isinstance(part, transformers.PreTrainedModel):
                part.set_attn_implementation(name)
                assert part.config._attn_implementation == name
        model.zero_grad()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=rounded):
            made.append(call())
    return made[0], made[1], made[2]


def assert_right(got: Any, low: Any, exact: Any, what: str = "") -> None:
    """The numerics' rule."""
    error, allowed = ((x.float() - exact.float()).abs().max().item() for x in (got, low))
    assert error <= 2 * allowed + 1e-5 * max(exact.abs().max().item(), 1), f"{what}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.rotated(8)
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_logits_and_gradients(name: str, padding: str, device: str) -> None:
    """Of what a token that is none gives, nothing is asked."""
    model, inputs = model_of(name, device), inputs_of(name, padding, device)
    mask = inputs.get("attention_mask") if ARCHITECTURES[name].inputs == "tokens" else None
    random: Any = None

    def call() -> Any:
        nonlocal random
        outputs = model(**inputs)
        result = outputs.last_hidden_state if name == "ViT" else outputs.logits
        result = result.float() if mask is None else result.float()[mask.bool()]
        if random is None:
            random = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).to(device)
        (result * random).sum().backward()
        gradients = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
        return result.detach(), gradients

    (got, ours), (low, theirs), (exact, wanted) = in_three_ways(model, call)
    assert_right(got, low, exact, "logits")
    assert not torch.equal(got, low), "it was flashgen that computed"
    assert ours.keys() == theirs.keys() == wanted.keys()
    error, allowed = (relative_error(each, wanted) for each in (ours, theirs))
    assert error <= 2 * allowed + 1e-5, f"gradients: {error:.2e}, allowed {allowed:.2e}"


def relative_error(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Of all parameters together, each by its own size: most of the error is of other layers, and in one it is chance.

    Gradients that are 0 but for rounding, as those of the biases of keys, count by the largest.
    """
    sizes = {key: float(one.norm()) for key, one in wanted.items()}
    least = 1e-3 * max(sizes.values())
    shares = [float((got[key] - one).norm()) / max(sizes[key], least) for key, one in wanted.items()]
    return math.sqrt(sum(share**2 for share in shares) / len(shares))


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.generates])
def test_generating_token_by_token(name: str, device: str) -> None:
    """From a batch padded at the left, as generate has it; compared until a tie is broken otherwise."""
    padding = "whole" if ARCHITECTURES[name].inputs == "sound" else "left"
    model, inputs = model_of(name, device), inputs_of(name, padding, device)
    inputs = {key: value for key, value in inputs.items() if key not in ("use_cache", "decoder_input_ids")}
    options: dict[str, Any] = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"max_new_tokens": NEW, "min_new_tokens": NEW}
    got, low, exact = in_three_ways(model, lambda: model.generate(**inputs, **options))
    same = (got.sequences == exact.sequences) & (low.sequences == exact.sequences)
    same = same.cumprod(-1)[:, -NEW:].bool()
    for step, logits in enumerate(zip(got.logits, low.logits, exact.logits, strict=True)):
        rows = torch.ones_like(same[:, 0]) if step == 0 else same[:, step - 1]
        if rows.any():
            assert_right(*(each[rows] for each in logits), what=f"token {step}")  # type: ignore[call-arg]
