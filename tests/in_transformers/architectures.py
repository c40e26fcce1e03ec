"""Architectures of transformers with random weights: configurations, inputs and error bounds.

The reference is attn_implementation="eager" in float32; the error may be twice that of "eager" in bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

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
# All experts in each token, so that rounding selects none; weights that give scores of about 1.
DECODER = SIZES | {"head_dim": 8, "initializer_range": 0.1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DECODER |= {"num_experts": 2, "num_local_experts": 2, "shared_expert_intermediate_size": 24}
ALL_HEADS = {name: size for name, size in DECODER.items() if name != "num_key_value_heads"} | {"ffn_dim": 48}
WINDOW = DECODER | {"sliding_window": 5}
ENCODER = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "bos_token_id")}
ENCODER |= {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "initializer_range": 0.1}
DISTIL = {"vocab_size": 99, "dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "initializer_range": 0.1}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "initializer_range": 0.1}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 99, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "dropout": 0.0, "init_std": 0.1,
    "max_position_embeddings": 64,
}  # fmt: skip
WHISPER = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40}
MOONSHINE: dict[str, Any] = DECODER | {"decoder_start_token_id": 3}
MOONSHINE |= {f"{part}_num_hidden_layers": 2 for part in ("encoder", "decoder")}
MOONSHINE |= {f"{part}_num_attention_heads": 4 for part in ("encoder", "decoder")}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32}
VIT |= {"patch_size": 8, "initializer_range": 0.1}
SOUND: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "initializer_range": 0.1,
}  # fmt: skip
LATENT = SIZES | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 2, "initializer_range": 0.1,
}  # fmt: skip

# The heads of the released models in one layer: 192 columns of Q and K, 128 of V; an indexer of keys that selects all.
DEEPSEEK: dict[str, Any] = LATENT | {
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "topk_method": "greedy",
    "index_topk": 64, "index_n_heads": 2, "index_head_dim": 80,
}  # fmt: skip
# K = V of 512 columns. The layers differ in what they attend to besides a window: nothing, and compressed keys.
DEEPSEEK_4: dict[str, Any] = DECODER | {
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 512, "sliding_window": 5,
    "partial_rotary_factor": 0.125, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2,
    "n_routed_experts": 2, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 64, "mlp_layer_types": ["moe"] * 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
}  # fmt: skip
# Windows with heads of 256 columns, then a global layer of 512 whose V is the same projection as K, then layers that
# attend to the K and V of these two.
GEMMA_4: dict[str, Any] = WINDOW | {
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 256,
    "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 99,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip

# Every second layer has no attention but a cache of its own.
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}


class Architecture(NamedTuple):
    """A class of transformers and its configuration. inputs: its kind of inputs, a key of `INPUTS`."""

    kind: str
    options: dict[str, Any]
    inputs: str = "tokens"
    generates: bool = True


def _names(text: str) -> list[str]:
    return text.split()


def _decoders(names: str, options: dict[str, Any] = DECODER) -> dict[str, Architecture]:
    return {name: Architecture("ForCausalLM", options) for name in _names(names)}


def _encoders(names: str, kind: str, options: dict[str, Any], inputs: str = "tokens") -> dict[str, Architecture]:
    return {name: Architecture(kind, options, inputs, generates=False) for name in _names(names)}


def _seq2seq(names: str, options: dict[str, Any]) -> dict[str, Architecture]:
    return {name: Architecture("ForConditionalGeneration", options, "both") for name in _names(names)}


DECODERS = {
    "GPT2": Architecture("LMHeadModel", GPT2),
    **_decoders("GPTBigCode GPTJ", GPT2 | {"rotary_dim": 8, "n_inner": 48}),
    **_decoders("Llama Arcee Qwen2 Qwen3 Gemma Phi Granite Glm SmolLM3 StableLm"),
    **_decoders("OPT GPTNeoX", ALL_HEADS),
    **_decoders("Mixtral Qwen2Moe Qwen3Moe Olmoe"),
    **_decoders("Mistral Ministral Phi3 Starcoder2 Cohere2 Olmo3 Exaone4", WINDOW),
    "Doge": Architecture("ForCausalLM", WINDOW | {"is_moe": False}),
    "Gemma2": Architecture("ForCausalLM", WINDOW | {"attn_logit_softcapping": 5.0}),
    "GptOss": Architecture("ForCausalLM", WINDOW),
    **_decoders("DeepseekV2 DeepseekV3 DeepseekV32 GlmMoeDsa", DEEPSEEK),
    "DeepseekV4": Architecture("ForCausalLM", DEEPSEEK_4),
    "Gemma4Text": Architecture("ForCausalLM", GEMMA_4),
    "Jamba": Architecture("ForCausalLM", DECODER | JAMBA),
    "Lfm2": Architecture("ForCausalLM", DECODER | {"layer_types": ["conv", "full_attention"]}),
    "Qwen3Next": Architecture("ForCausalLM", DECODER | LINEAR),
}
ENCODER_DECODERS = {
    **_seq2seq("T5 MT5 UMT5", T5),
    **_seq2seq("Bart MBart Pegasus M2M100 Blenderbot", SEQ2SEQ),
    "Marian": Architecture("MTModel", SEQ2SEQ | {"scale_embedding": True}, "both"),
    "Whisper": Architecture("ForConditionalGeneration", WHISPER, "sound"),
    "Moonshine": Architecture("ForConditionalGeneration", MOONSHINE, "speech"),
}
ENCODERS = {
    **_encoders("Bert Roberta Electra Albert XLMRoberta Esm", "ForMaskedLM", ENCODER | {"embedding_size": 32}),
    "ModernBert": Architecture(
        "ForMaskedLM", SIZES | {"local_attention": 6, "global_attn_every_n_layers": 2}, generates=False
    ),
    **_encoders("DistilBert", "ForMaskedLM", DISTIL),
}
VISION = _encoders("ViT DeiT Beit Dinov2 SiglipVision CLIPVision DPT", "Model", VIT, "pictures")
AST = VIT | {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}
AUDIO = _encoders("Wav2Vec2 Hubert", "Model", SOUND, "wave") | _encoders("AST", "Model", AST, "spectrogram")
PICTURE = VIT | {"image_size": 16}
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
SIGLIP = PICTURE | {"model_type": "siglip_vision_model", "projection_dim": 32}
OF_SEVERAL_PARTS = {
    "Llava": Architecture(
        "ForConditionalGeneration",
        {
            "vision_config": PICTURE | {"model_type": "clip_vision_model"},
            "text_config": DECODER | {"model_type": "llama"},
            "image_token_index": 98,
            "vision_feature_layer": -1,
        },
        "picture",
    ),
    "PaliGemma": Architecture(
        "ForConditionalGeneration",
        {
            "vision_config": SIGLIP,
            "text_config": DECODER | {"model_type": "gemma"},
            "image_token_index": 98,
            "projection_dim": 32,
            "hidden_size": 32,
        },
        "typed picture",
    ),
    "Gemma3": Architecture(
        "ForConditionalGeneration",
        {
            "vision_config": SIGLIP,
            "text_config": WINDOW | {"model_type": "gemma3_text"},
            "image_token_index": 98,
            "mm_tokens_per_image": 4,
        },
        "typed picture",
    ),
    "Gemma4": Architecture(
        "ForConditionalGeneration",
        {
            "vision_config": PICTURE | {"num_key_value_heads": 4, "head_dim": 16, "pooling_kernel_size": 2},
            "text_config": GEMMA_4 | {"use_bidirectional_attention": "vision", "num_kv_shared_layers": 0} | TWO_LAYERS,
            "image_token_id": 98,
        },
        "patches",
    ),
}
ARCHITECTURES = DECODERS | ENCODER_DECODERS | ENCODERS | VISION | AUDIO | OF_SEVERAL_PARTS
REFUSED = _names(
    "Align Autoformer Bark BigBird BigBirdPegasus Blip Bloom BridgeTower Canine Clap ConvBert CpmAnt Cvt "
    "Data2VecVision Deberta DebertaV2 Dinat DonutSwin FSMT Falcon Flaubert Flava Funnel GLPN GPTNeo "
    "GPTNeoXJapanese Git GroupViT Hiera IBert ImageGPT Informer LED Levit Lilt LongT5 Longformer Luke Lxmert "
    "MPNet Mamba MarkupLM MegatronBert MobileViT Mpt Mra Mvp NllbMoe Nystromformer OpenAIGPT Perceiver "
    "ProphetNet Pvt PvtV2 Reformer RemBert RoFormer Rwkv SEWD SegGpt Speech2Text SpeechT5 Splinter SqueezeBert "
    "SwiftFormer Swin2SR Swinv2 SwitchTransformers Tapas TimeSeriesTransformer Timesformer Tvp Vilt VisualBert "
    "VitDet Vits WavLM XGLM XLM XLNet Yoso"
)
RIGHT = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])).long()
HOLES = torch.ones(2, LENGTH, dtype=torch.long).index_fill(1, torch.tensor([3, 4]), 0)
PADDINGS = {"whole": None, "right": RIGHT, "left": RIGHT.flip(-1), "holes": HOLES}


def _tokens(ids: Any, mask: Any, _random: Any) -> dict[str, Any]:
    return {"input_ids": ids if mask is None else ids * mask, "attention_mask": mask}


def _both(ids: Any, mask: Any, random: Any) -> dict[str, Any]:
    return _tokens(ids, mask, random) | {"decoder_input_ids": ids[:, :6]}


def _sound(ids: Any, _mask: Any, random: Any) -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 40, generator=random), "decoder_input_ids": ids[:, :6]}


def _speech(ids: Any, _mask: Any, random: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 4000, generator=random), "decoder_input_ids": ids[:, :6]}


def _picture(ids: Any, mask: Any, random: Any) -> dict[str, Any]:
    """An image, whose tokens have number 98, before text; padded rows are padded at the left."""
    ids = torch.cat([torch.full((2, 4), 98), ids.clamp(max=97)], -1)
    given = {"input_ids": ids, "attention_mask": None, "pixel_values": torch.randn(2, 3, 16, 16, generator=random)}
    if mask is not None:
        kept = torch.cat([torch.ones(2, 4, dtype=torch.long), mask.sort(descending=True).values], -1)
        order = kept.argsort(stable=True)
        given |= {"input_ids": (ids * kept).gather(-1, order), "attention_mask": kept.gather(-1, order)}
    return given


def _typed_picture(ids: Any, mask: Any, random: Any) -> dict[str, Any]:
    """With the type of each token, which lets image tokens see each other."""
    given = _picture(ids, mask, random)
    return given | {"token_type_ids": (given["input_ids"] == 98).long()}


def _patches(ids: Any, mask: Any, random: Any) -> dict[str, Any]:
    """An image as 16 patches, which are pooled to 4 tokens, before text."""
    given = _typed_picture(ids, mask, random)
    positions = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1).expand(2, -1, -1)
    given |= {"pixel_values": torch.rand(2, 16, 3 * 8 * 8, generator=random), "image_position_ids": positions}
    return given | {"mm_token_type_ids": given.pop("token_type_ids")}


INPUTS: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "tokens": _tokens,
    "both": _both,
    "sound": _sound,
    "speech": _speech,
    "picture": _picture,
    "typed picture": _typed_picture,
    "patches": _patches,
    "pictures": lambda ids, mask, random: {"pixel_values": torch.randn(2, 3, 32, 32, generator=random)},
    "wave": lambda ids, mask, random: {"input_values": torch.randn(2, 400, generator=random)},
    "spectrogram": lambda ids, mask, random: {"input_values": torch.randn(2, 32, 16, generator=random)},
}
PADDED = ("tokens", "both", "picture", "typed picture", "patches")  # kinds of inputs with a mask


def model_of(name: str, device: str) -> Any:
    """Returns a model with reproducible random weights."""
    torch.manual_seed(0)
    kind, options, *_ = ARCHITECTURES[name]
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name.removesuffix('Text')}{kind}")(config).eval().to(device)
    for part in model.modules():
        if getattr(part, "scaling", None) == 1 and hasattr(part, "q_norm"):  # its weights are the scale of the scores
            torch.nn.init.constant_(part.q_norm.weight, part.head_dim**-0.5)
    if not _has_interface(model):
        pytest.skip(f"{name} of transformers {transformers.__version__} has its own attention alone")
    return model


def _has_interface(model: Any) -> bool:
    """Whether the file of any part of a model calls transformers' attention interface."""
    files = {type(part).__module__ for part in model.modules()}
    return any(hasattr(sys.modules[file], "ALL_ATTENTION_FUNCTIONS") for file in files)


def inputs_of(name: str, padding: str, device: str) -> dict[str, Any]:
    """Returns the inputs of a model; padding is token 0."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (2, LENGTH), generator=random)
    given = INPUTS[ARCHITECTURES[name].inputs](ids, PADDINGS[padding], random)
    return {key: each.to(device) if isinstance(each, torch.Tensor) else each for key, each in given.items()}


def assert_right(got: Any, low: Any, exact: Any, what: str = "") -> None:
    """Asserts the numerics rule."""
    error, allowed = ((x.float() - exact.float()).abs().max().item() for x in (got, low))
    assert error <= 2 * allowed + 1e-5 * max(exact.abs().max().item(), 1), f"{what}: {error:.2e}, allowed {allowed:.2e}"
