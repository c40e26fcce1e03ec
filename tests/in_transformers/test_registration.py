"""Models that compute attention by themselves are refused by name in every way to select flashgen's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="flashgen.transformers needs torch")
transformers = pytest.importorskip(
    "transformers", reason="flashgen.transformers needs transformers: pip install 'flashgen[transformers]'"
)

TINY: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    from flashgen.torch import emulated
    from flashgen.transformers import register

    register()
    with emulated():
        yield


def of_two_parts() -> Any:
    """A supported decoder behind an unsupported encoder."""
    encoder = transformers.MPNetConfig(**TINY)
    decoder = transformers.BertConfig(**TINY)
    return transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)


def falcon() -> Any:
    return transformers.FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize("how", ["made", "set"])
def test_a_model_with_its_own_attention(how: str) -> None:
    """Falcon declares support of sdpa, computes by itself under any other name, and takes `flash` for flash-attn."""
    from flashgen.errors import UnsupportedError

    with pytest.raises(
        UnsupportedError, match=r"Falcon\w+ has an attention of its own.*attn_implementation='flashgen'"
    ):
        if how == "made":
            transformers.AutoModelForCausalLM.from_config(falcon(), attn_implementation="flashgen")
        else:
            transformers.FalconForCausalLM(falcon()).set_attn_implementation("flashgen")


def test_subclasses_inherit_support() -> None:
    from flashgen.errors import UnsupportedError

    class Mine(transformers.FalconForCausalLM):  # type: ignore[misc, name-defined]
        pass

    with pytest.raises(UnsupportedError, match="Mine has an attention of its own"):
        Mine(falcon()).set_attn_implementation("flashgen")

    class Served(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        class Attention(torch.nn.Module):  # type: ignore[misc, name-defined]
            pass

    model = Served(transformers.LlamaConfig(**TINY))
    model.set_attn_implementation("flashgen")
    assert model.config._attn_implementation == "flashgen"


def test_a_part_with_its_own_attention() -> None:
    """The parts are named in a dictionary; other parts keep their implementation."""
    from flashgen.errors import UnsupportedError

    config = of_two_parts()
    with pytest.raises(UnsupportedError, match="MPNetModel has an attention of its own"):
        transformers.EncoderDecoderModel(config).set_attn_implementation("flashgen")
    model = transformers.EncoderDecoderModel(of_two_parts())
    with pytest.raises(UnsupportedError, match="MPNetModel has an attention of its own"):
        model.set_attn_implementation({"encoder": "flashgen"})
    model.set_attn_implementation({"decoder": "flashgen"})
    assert model.decoder.config._attn_implementation == "flashgen"
    assert model.encoder.config._attn_implementation == "eager"


def test_other_names_are_passed_to_transformers() -> None:
    model = transformers.FalconForCausalLM(falcon())
    model.set_attn_implementation("eager")
    assert transformers.AutoModelForCausalLM.from_config(falcon(), attn_implementation="eager") is not None


def test_a_mask_is_no_tensor() -> None:
    """A model that computes with the mask is named, if flashgen was selected in another way."""
    from flashgen.errors import UnsupportedError
    from flashgen.transformers.mask import attention_mask

    mask, scores = attention_mask(1, 4, 4), torch.zeros(1, 1, 4, 4)
    with pytest.raises(UnsupportedError, match="a model uses add of its mask"):
        scores + mask
    with pytest.raises(UnsupportedError, match="an index"):
        mask[:, :, :, :4]
    with pytest.raises(UnsupportedError, match=r"\.to of its mask"):
        mask.to(torch.float32)
    assert not hasattr(mask, "unsqueeze") and mask.ndim == len(mask.shape) == 4


ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "Bloom": ("ForCausalLM", {"vocab_size": 32, "hidden_size": 16, "n_layer": 1, "n_head": 2}),
    "Mpt": ("ForCausalLM", {"vocab_size": 32, "d_model": 16, "n_layers": 1, "n_heads": 2}),
    "Deberta": ("ForMaskedLM", TINY),
    "DebertaV2": ("ForMaskedLM", TINY),
}


@pytest.mark.parametrize("name", ALONE)
def test_no_model_keeps_its_own_attention_silently(name: str) -> None:
    """For these transformers logs a warning and changes nothing."""
    from flashgen.errors import UnsupportedError

    kind, options = ALONE[name]
    model = getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**options))
    with pytest.raises(UnsupportedError, match=f"{name}{kind} has an attention of its own"):
        model.set_attn_implementation("flashgen")
