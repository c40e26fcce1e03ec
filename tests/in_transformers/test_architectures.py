"""Architectures of transformers with random weights: logits and gradients by the numerics rule; refusals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="flashgen.transformers needs torch")
transformers = pytest.importorskip(
    "transformers", reason="flashgen.transformers needs transformers: pip install 'flashgen[transformers]'"
)
import architectures
from architectures import ARCHITECTURES, PADDED, PADDINGS, REFUSED, assert_right, inputs_of, model_of

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

# Each padding with one architecture per kind of mask; one padding with different lengths for the others.
THOROUGH = ["Bert", "ModernBert", "GPT2", "Llama", "Mistral", "Gemma2", "Qwen2", "Qwen3", "GptOss", "DeepseekV3"]
THOROUGH += ["T5", "Bart", "Whisper", "ViT", "Gemma3"]


def paddings_of(name: str) -> list[str]:
    each = ARCHITECTURES[name]
    if each.inputs not in PADDED:
        return ["whole"]
    return list(PADDINGS) if name in THOROUGH else ["left" if each.generates else "right"]


CASES = [(name, padding) for name in ARCHITECTURES for padding in paddings_of(name)]


def in_three_ways(model: Any, call: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """Returns the results with flashgen, with eager attention in the same precision, and with it in float32."""
    made = []
    for name, rounded in (("flashgen", True), ("eager", True), ("eager", False)):
        for part in model.modules():  # some versions do not change an encoder whose configuration is a copy
            if isinstance(part, transformers.PreTrainedModel):
                part.set_attn_implementation(name)
                assert part.config._attn_implementation == name
        model.zero_grad()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=rounded):
            made.append(call())
    return made[0], made[1], made[2]


@pytest.mark.rotated(36)
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_logits_and_gradients(name: str, padding: str, device: str) -> None:
    """Outputs of padding tokens are not compared."""
    model, inputs = model_of(name, device), inputs_of(name, padding, device)
    mask = None if "decoder_input_ids" in inputs else inputs.get("attention_mask")
    more = {"use_cache": False} if ARCHITECTURES[name].generates else {}
    random: Any = None

    def call() -> Any:
        nonlocal random
        outputs = model(**inputs, **more)
        result = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        result = result.float() if mask is None else result.float()[mask.bool()]
        if random is None:
            random = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).to(device)
        (result * random).sum().backward()
        gradients = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
        return result.detach(), gradients

    (got, ours), (low, theirs), (exact, wanted) = in_three_ways(model, call)
    assert_right(got, low, exact, "logits")
    assert not torch.equal(got, low), "flashgen computed the attention"
    assert ours.keys() == theirs.keys() == wanted.keys()
    error, allowed = (relative_error(each, wanted) for each in (ours, theirs))
    assert error <= 2 * allowed + 1e-5, f"gradients: {error:.2e}, allowed {allowed:.2e}"


def relative_error(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Compares all parameters together, relative to their sizes: most of the error comes from other layers, by chance.

    Gradients that are 0 except for rounding, such as those of key biases, count relative to the largest.
    """
    sizes = {key: float(one.norm()) for key, one in wanted.items()}
    least = 1e-3 * max(sizes.values())
    shares = [float((got[key] - one).norm()) / max(sizes[key], least) for key, one in wanted.items()]
    return math.sqrt(sum(share**2 for share in shares) / len(shares))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_architecture(name: str) -> None:
    """By name, before any weights are created."""
    from flashgen.errors import UnsupportedError
    from flashgen.transformers import register

    register()
    config = getattr(transformers, f"{name}Config")()
    config._attn_implementation = "flashgen"
    with pytest.raises(UnsupportedError, match=f"{name}.* takes no attn_implementation='flashgen'"):
        getattr(transformers, f"{name}Model")(config)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("decoders", architectures.DECODERS),
        ("encoders with decoders", architectures.ENCODER_DECODERS),
        ("encoders", architectures.ENCODERS),
        ("pictures", architectures.VISION),
        ("sound", architectures.AUDIO),
        ("pictures and text", architectures.OF_SEVERAL_PARTS),
        ("refused", REFUSED),
    ],
)
def test_the_page_lists_the_tested_architectures(kind: str, names: Any) -> None:
    row = re.search(rf"^\| {kind} \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None and row[1].split(", ") == sorted(names)
