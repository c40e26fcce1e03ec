"""The entry point, the names in vLLM's registry, what the backends accept, and the refusal of other versions."""

from __future__ import annotations

import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import flashgen_vllm
from flashgen_vllm import versions
from flashgen_vllm.backend import FlashgenBackend
from flashgen_vllm.metadata import FlashgenMetadataBuilder


def test_the_entry_point_registers_the_names() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["flashgen"].partition(":")
    register = getattr(import_module(module), name)
    register()
    register()  # vLLM may call it again
    assert AttentionBackendEnum["FLASHGEN"].get_class() is FlashgenBackend
    for name in flashgen_vllm.BACKENDS:
        member = AttentionBackendEnum[name]
        assert AttentionBackendEnum[member.get_class().get_name()] is member, "vLLM looks the member up by this name"


def test_the_name_is_an_option_of_vllm() -> None:
    config = pytest.importorskip("vllm.config", reason="vLLM's configuration needs more packages", exc_type=ImportError)
    flashgen_vllm.register()
    assert config.AttentionConfig(backend="FLASHGEN").backend is AttentionBackendEnum["FLASHGEN"]


MODEL: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": True,
    "use_sparse": False,
    "use_mm_prefix": True,
    "use_per_head_quant_scales": True,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
    "has_sliding_window": True,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"head_size": 256, "dtype": torch.float16},
        {"block_size": 48},
        {"block_size": None},
    ],
    ids=str,
)
def test_models_that_are_accepted(change: dict[str, Any]) -> None:
    assert FlashgenBackend.validate_configuration(**MODEL | change) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 100}, "head_size not supported"),
        ({"head_size": 80, "kv_cache_dtype": "fp8"}, "a head size that is a multiple of 32, and this one is 80"),
        ({"kv_cache_dtype": "float16"}, "use a KV cache of the model's type"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
    ],
    ids=str,
)
def test_models_that_are_refused(change: dict[str, Any], reason: str) -> None:
    (found,) = FlashgenBackend.validate_configuration(**MODEL | change)
    assert reason in found


def test_graphs_of_all_batches_are_captured() -> None:
    config: Any = None
    assert FlashgenMetadataBuilder.get_cudagraph_support(config, config) is AttentionCGSupport.ALWAYS


@pytest.mark.parametrize("installed", ["0.32.4", "0.34.0", "1.0"])
def test_other_versions_are_refused(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: installed)
    with pytest.raises(
        ImportError, match=rf"tested with vLLM 0.33, and {installed} is installed: pip install 'vllm==0"
    ):
        versions.check_version()


def test_a_missing_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(ImportError, match=r"vLLM, which is not installed: pip install 'vllm==0.33"):
        versions.check_version()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"attn_type": "encoder_only"}, "attention of type 'encoder_only'"),
        ({"alibi_slopes": [0.5, 0.5], "logits_soft_cap": 5.0}, "ALiBi slopes together with a softcap"),
    ],
)
def test_layers_that_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(NotImplementedError, match=problem):
        FlashgenBackend.get_impl_cls()(2, 32, 1.0, 2, **arguments)
