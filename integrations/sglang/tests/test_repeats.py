"""Repeated calls of a layer, with launches that are recorded: they equal those of a backend that repeats none."""

from __future__ import annotations

import importlib.util
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import flashgen as fg
from flashgen.attention import compiling
from flashgen.runtime import gpu
from flashgen.runtime.caching import Cache
from flashgen_sglang import launches, layers
from serving import Layer, Server

_RECORDED = Path(__file__).parents[3] / "tests/in_torch/recorded.py"
LAYERS = {
    "pages": Layer(heads=8, dim=64),
    "tokens": Layer(page_size=1, heads=8, dim=64),
    "float8": Layer(heads=8, dim=64, scales=(0.5, 2.0)),
    "float8 without scales": Layer(heads=8, dim=64, scales=(None, None)),
    "sinks": Layer(heads=8, dim=64, sinks=torch.float16),
    "window": Layer(heads=8, dim=64, window=20, in_window_pool=True),
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
    monkeypatch.setattr(layers, "launcher", lru_cache(lambda spec, _device: launches.OnGpu(spec)))
    return module.record_launches(memory, monkeypatch), memory


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_repeat_the_launch_of_the_first(
    name: str, mode: str, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, memory = recorded
    server = Server(LAYERS[name], 3, "cpu")
    counts = [1, 1, 1] if mode == "DECODE" else [1, 5, 30]
    batch = server.batch([0, 1, 2], counts, ForwardMode[mode])
    server.backend.init_forward_metadata(batch)
    steps = [server.inputs(sum(counts)) for _ in range(3)]
    found: dict[bool, list[Any]] = {True: [], False: []}
    for repeats in (False, True):
        for step in steps:
            launched.clear()
            memory.again()
            with monkeypatch.context() as changed:
                changed.setattr(launches.CallsOfViews, *(("run", None) if repeats else ("repeat", lambda *_: None)))
                out = server.run(batch, *step)
            found[repeats].append([*launched])
            assert out.shape == (sum(counts), 8 * 64)
    assert found[True] == found[False] and len({str(each) for each in found[True]}) == 3
