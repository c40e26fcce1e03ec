"""Repeated calls of a layer, with launches that are recorded: they equal those of a backend that repeats none."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from batches import Setup, built, make
from flashgen.attention import compiling
from flashgen.runtime import gpu
from flashgen.runtime.caching import Cache
from flashgen_vllm import backend, launches

_RECORDED = Path(__file__).parents[3] / "tests/in_torch/recorded.py"
DECODE = Setup([1, 1, 1], [33, 40, 17], heads=8, dim=64)
SETUPS = {
    "single tokens": DECODE,
    "float8": replace(DECODE, cache_dtype="fp8", scales=(0.5, 2.0)),
    "a float8 scale for each head": replace(DECODE, cache_dtype="fp8", scales=([0.5, 1.0], [2.0, 1.0])),
    "sinks": replace(DECODE, layer={"sinks": torch.zeros(8, dtype=torch.float16)}),
    "slopes": replace(DECODE, layer={"alibi_slopes": [0.5] * 8}),
    "short requests": replace(DECODE, queries=[1, 3, 2]),
    "a prompt": replace(DECODE, queries=[1, 1, 80], keys=[33, 40, 96]),
}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launches of the test, and the memory that they are given."""
    if not _RECORDED.exists():
        pytest.skip("flashgen's own tests are not beside this package")
    loaded = importlib.util.spec_from_file_location("recorded", _RECORDED)
    assert loaded is not None and loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    memory = module.Memory()
    monkeypatch.setattr(compiling, "_COMPILED", Cache())  # other attentions allocate from the memory of other tests
    monkeypatch.setattr(launches.fg, "compile", partial(fg.compile, target="sm_90a"))
    monkeypatch.setattr(gpu, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(backend, "launcher", lru_cache(lambda spec, _device: launches.OnGpu(spec)))
    return module.record_launches(memory, monkeypatch), memory


def _forward(setup: Setup, made: Any, impl: Any, output: torch.Tensor, recorded: Any) -> list[Any]:
    """Returns the launches of a layer."""
    launched, memory = recorded
    launched.clear()
    memory.again()
    metadata = built(setup, made.q.device)[0].build(0, made.common)
    impl.forward(made.layer, made.q, made.k_new, made.v_new, made.cache, metadata, output)
    return list(launched)


@pytest.mark.parametrize("name", SETUPS)
def test_layers_repeat_the_launch_of_the_first(name: str, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has a cache, an output and scales of its own."""
    setup = SETUPS[name]
    layers = [make(setup, torch.device("cpu")) for _ in range(3)]
    calls = [(layer, built(setup, layer.q.device)[1], torch.empty_like(layer.q)) for layer in layers]
    expected = []
    for call in calls:
        with monkeypatch.context() as without:
            without.setattr(launches.CallsOfViews, "repeat", lambda *_: None)
            expected.append(_forward(setup, *call, recorded))
    assert len({str(each) for each in expected}) == len(layers)
    monkeypatch.setattr(launches.CallsOfViews, "run", None)
    for call, launched in zip(calls, expected, strict=True):
        assert _forward(setup, *call, recorded) == launched != []


def test_other_batches_are_other_calls(recorded: Any) -> None:
    """With the arrays of one batch: a bound of the queries of a request, and fewer tokens."""
    made = make(SETUPS["a prompt"], torch.device("cpu"))
    impl, runs = built(SETUPS["a prompt"], made.q.device)[1], []
    metadata = built(SETUPS["a prompt"], made.q.device)[0].build(0, made.common)
    output = torch.empty_like(made.q)
    launched = recorded[0]
    for step in (
        metadata,
        metadata,
        replace(metadata, is_short=True),
        replace(metadata, num_actual_tokens=60),
        metadata,
    ):
        launched.clear()
        recorded[1].again()
        impl.forward(made.layer, made.q, made.k_new, made.v_new, made.cache, step, output)
        runs.append(str(launched))
    assert runs[0] == runs[1] == runs[4] and len(set(runs)) == 3
