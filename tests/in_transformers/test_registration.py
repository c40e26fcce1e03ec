"""Models that compute attention by themselves: refused by name wherever they are given flashgen's."""

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
    """A decoder that is served behind an encoder that is not."""
    encoder = transformers.MPNetConfig(**TINY)
    decoder = transformers.BertConfig(**TINY)
    return transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)


def falcon() -> Any:
    return transformers.FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize("how", ["made", "set"])
def test_a_model_with_an_attention_of_its_own(how: str) -> None:
    """Falcon says that it supports sdpa, computes by itself under any other name, and reads `flash` as flash-attn."""
    from flashgen.errors import UnsupportedError

    with pytest.raises(
        UnsupportedError, match=r"Falcon\w+ has an attention of its own.*attn_implementation='flashgen'"
    ):
        if how == "made":
            transformers.AutoModelForCausalLM.from_config(falcon(), attn_implementation="flashgen")
        else:
            transformers.FalconForCausalLM(falcon()).set_attn_implementation("flashgen")


def test_a_class_of_ones_own_is_what_it_inherits() -> None:
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


def test_a_part_with_an_attention_of_its_own() -> None:
    """The parts are named in a dictionary; those that it leaves out stay as they were."""
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


def test_other_names_are_transformers_own_affair() -> None:
    model = transformers.FalconForCausalLM(falcon())
    model.set_attn_implementation("eager")
    assert transformers.AutoModelForCausalLM.from_config(falcon(), attn_implementation="eager") is not None


def test_a_mask_is_no_tensor() -> None:
    """What would compute with it, where a model was given the name behind our back, is named."""
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
    """transformers logs a warning for these, and leaves them as they are."""
    from flashgen.errors import UnsupportedError

    kind, options = ALONE[name]
    model = getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**options))
    with pytest.raises(UnsupportedError, match=f"{name}{kind} has an attention of its own"):
        model.set_attn_implementation("flashgen")
