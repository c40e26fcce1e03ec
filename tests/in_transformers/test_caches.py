"""transformers' caches in steps, in chunks, in `generate` and with beams, compared with eager attention.

Tokens do not depend on logits, so that ties make no difference: all logits of all steps are compared.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="flashgen.transformers needs torch")
transformers = pytest.importorskip(
    "transformers", reason="flashgen.transformers needs transformers: pip install 'flashgen[transformers]'"
)
from architectures import ARCHITECTURES, ENCODER_DECODERS, LENGTH, PADDED, assert_right, inputs_of, model_of

NEW = 4
MODES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 5},
    "static-chunks": {"cache_implementation": "static", "prefill_chunk_size": 5},
    "beams": {"num_beams": 3},
    "static-beams": {"cache_implementation": "static", "num_beams": 3},
}
CASES = [
    (name, mode)
    for name, each in ARCHITECTURES.items()
    for mode in MODES
    # For a decoder behind an encoder, transformers cuts the encoder's mask to the decoder's chunk.
    if each.generates and not (name in ENCODER_DECODERS and "chunks" in mode)
    # transformers has no StaticCache for compressed keys.
    if not (name == "DeepseekV4" and "static" in mode)
]
STEPS = [(LENGTH,), (5, 1, 1, 7), (8, 6), (1,) * LENGTH]
QUANTIZED = ("fp8", "quanto", "hqq")  # models without windows


def quantized(backend: str, config: Any) -> Any:
    try:
        return transformers.QuantizedCache(backend, config)
    except (ImportError, ValueError, TypeError) as error:  # not installed, or not in this version
        pytest.skip(f"transformers has no such cache here: {error}")


CACHES: dict[str, Callable[[Any], Any]] = {
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=LENGTH + 3),
    "dynamic": lambda config: transformers.DynamicCache(),
    "sliding": lambda config: transformers.DynamicCache(config=config),
    **{backend: functools.partial(quantized, backend) for backend in QUANTIZED},
    "offloaded": lambda config: transformers.DynamicCache(config=config, offloading=True),
    "offloaded-static": lambda config: transformers.StaticCache(
        config=config, max_cache_len=LENGTH + 3, offloading=True
    ),
}


class Forced(transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
    """Returns scores that depend only on the step."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        random = torch.Generator().manual_seed(input_ids.shape[1])
        return torch.randn(scores.shape, generator=random).log_softmax(-1).to(scores.device)


def compare(name: str, device: str, call: Callable[[Any], Any]) -> None:
    """Compares flashgen and eager attention in bfloat16 with eager attention in float32, with equal weights."""
    low = model_of(name, device).to(torch.bfloat16)
    mine, exact = copy.deepcopy(low), copy.deepcopy(low).float()
    for model, how in ((mine, "flashgen"), (low, "eager"), (exact, "eager")):
        model.set_attn_implementation(how)
    with torch.no_grad():
        wanted, allowed, got = call(exact), call(low), call(mine)
    assert_right(got, allowed, wanted, name)
    assert not torch.equal(got, allowed), "flashgen computed the attention"


def given_to(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Converts inputs to the precision of a model."""
    return {key: each.to(model.dtype) if key.endswith(("values", "features")) else each for key, each in inputs.items()}


def generate(name: str, mode: str, device: str) -> None:
    """Returns all logits of a generation, from a left-padded batch."""
    padding = "left" if ARCHITECTURES[name].inputs in PADDED else "whole"
    inputs = {key: each for key, each in inputs_of(name, padding, device).items() if key != "decoder_input_ids"}
    options: dict[str, Any] = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"max_new_tokens": NEW, "min_new_tokens": NEW, "disable_compile": True, "eos_token_id": None}
    options |= {"logits_processor": transformers.LogitsProcessorList([Forced()]), "pad_token_id": 0} | MODES[mode]
    compare(name, device, lambda model: torch.stack(model.generate(**given_to(model, inputs), **options).logits))


@pytest.mark.rotated(48)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_generation(name: str, mode: str, device: str) -> None:
    generate(name, mode, device)


@pytest.mark.parametrize(
    ("name", "mode"), [("Llama", "static-chunks"), ("GptOss", "static-chunks"), ("Bart", "static"), ("Llava", "static")]
)
def test_generation_where_queries_once_saw_too_many_keys(name: str, mode: str, device: str) -> None:
    generate(name, mode, device)


def in_steps(name: str, make: Callable[[Any], Any], sizes: tuple[int, ...], padding: str, device: str) -> None:
    """Returns the logits of tokens that are no padding; each step gets the mask of all tokens so far."""
    inputs = inputs_of(name, padding, device)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def call(model: Any) -> Any:
        cache, begin, parts = make(model.config), 0, []
        for size in sizes:
            end = begin + size
            given: dict[str, Any] = {"input_ids": ids[:, begin:end], "past_key_values": cache}
            if mask is not None:
                positions = (mask.cumsum(-1) - 1).clamp(min=0)
                given |= {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
            parts.append(model(**given).logits)
            begin = end
        logits = torch.cat(parts, 1)
        return logits if mask is None else logits[mask.bool()]

    compare(name, device, call)


@pytest.mark.rotated(36)
@pytest.mark.parametrize("padding", ["whole", "left"])
@pytest.mark.parametrize("sizes", STEPS, ids=lambda sizes: f"{len(sizes)}-steps")
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *(("Llama", cache) for cache in CACHES),
        *((name, cache) for name in ("Mistral", "GptOss") for cache in CACHES if cache not in QUANTIZED),
    ],
)
def test_steps(name: str, cache: str, sizes: tuple[int, ...], padding: str, device: str) -> None:
    if "offloaded" in cache and device == "cpu":
        pytest.skip("there is nowhere to offload to")
    in_steps(name, CACHES[cache], sizes, padding, device)


@pytest.mark.parametrize("padding", ["whole", "left"])
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_steps_where_queries_once_saw_too_many_keys(name: str, padding: str, device: str) -> None:
    in_steps(name, CACHES["static"], (5, 1, 1, 7), padding, device)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["Bart", "T5", "Whisper"])
def test_steps_of_a_decoder_behind_an_encoder(name: str, static: bool, device: str) -> None:
    """The keys of the encoder are written in the first step and read in all."""
    inputs = inputs_of(name, "left" if ARCHITECTURES[name].inputs in PADDED else "whole", device)
    ids = inputs.pop("decoder_input_ids")

    def call(model: Any) -> Any:
        with_encoder = given_to(model, inputs)
        states = model.get_encoder()(**with_encoder)
        length = states.last_hidden_state.shape[1]
        lengths = (ids.shape[1] + 3, length) if static else (None, None)
        parts = [
            transformers.StaticCache(config=model.config, max_cache_len=each) if each else transformers.DynamicCache()
            for each in lengths
        ]
        cache = transformers.EncoderDecoderCache(*parts)
        mask = inputs.get("attention_mask")
        logits = [
            model(encoder_outputs=states, attention_mask=mask, decoder_input_ids=step, past_key_values=cache).logits
            for step in ids.split([3, 1, 2], 1)
        ]
        return torch.cat(logits, 1)

    compare(name, device, call)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("padding", ["whole", "left"])
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_compiled_steps_with_masks_created_before(name: str, padding: str, device: str) -> None:
    """As in `generate` on a GPU: the prompt runs eagerly, later tokens run compiled, with masks created outside."""
    from transformers.masking_utils import create_masks_for_generate

    inputs = inputs_of(name, padding, device)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def call(model: Any) -> Any:
        cache, begin, parts = CACHES["static"](model.config), 0, []
        mine = model.config._attn_implementation == "flashgen"
        compiled = torch.compile(model, backend="aot_eager") if mine else model
        for size in (9, 1, 1, 3):
            end = begin + size
            made: Any = None if mask is None else mask[:, :end]
            if begin and mine:
                embeds = torch.empty(2, size, 1, dtype=model.dtype, device=device)
                made = create_masks_for_generate(model.config, embeds, made, cache)
            positions = torch.arange(begin, end, device=device).expand(2, -1)
            given = {"attention_mask": made, "position_ids": positions, "past_key_values": cache}
            run = compiled if begin else model
            parts.append(run(input_ids=ids[:, begin:end], **given).logits)
            begin = end
        logits = torch.cat(parts, 1)
        return logits if mask is None else logits[mask.bool()]

    torch._dynamo.reset()
    compare(name, device, call)
