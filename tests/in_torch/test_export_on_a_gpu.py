"""An exported package on a GPU, in a process that imports torch and no other package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="exported packages need torch: pip install 'flashgen[torch]'")

import torch

from exported import DENSE, FOREIGN, LEARNED, PACKED, export_package
from flashgen.codegen.targets import target_of_capability
from flashgen.verify import Shape, judged, judged_gradients, random_gradients, random_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.quick]
SEED = 5

RUN = f"""
import sys
import torch

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FOREIGN[:2]}:
            raise ImportError(f"{{name}} is imported")

sys.meta_path.insert(0, Refuse())
import exported_attention as package

results = []
for spec, q, k, v, d_out, d_lse, options, captures in torch.load("calls.pt", weights_only=True):
    q, k, v = (each.cuda().requires_grad_() for each in (q, k, v))
    options, captures = (
        {{name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in given.items()}}
        for given in (options, captures)
    )
    learned = [captures[each.name].requires_grad_() for each in package.SPECS[spec].arrays if each.grad]

    def run(q, k, v):
        return package.attention(q, k, v, return_lse=True, spec=spec, captures=captures, **options)

    given = (d_out.cuda(), d_lse.cuda())
    eager = run(q, k, v)
    found = (*eager, *torch.autograd.grad(eager, (q, k, v, *learned), given))
    backend = "aot_eager" if learned or "seed" in options else "inductor"  # which takes long to start
    compiled = torch.compile(run, fullgraph=True, backend=backend)(q, k, v)
    gradients = torch.autograd.grad(compiled, (q, k, v, *learned), given)
    assert torch.equal(eager[0], compiled[0]) and torch.equal(eager[1], compiled[1]), spec
    for one, other in zip(found[2:], gradients):  # their sums have no fixed order
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = run(q, k, v)
    stream = torch.cuda.Stream()
    for _ in range(3):
        captured[0].fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured[0], eager[0]), spec
    with torch.cuda.stream(stream), torch.no_grad():
        stream.wait_stream(torch.cuda.default_stream())
        other = run(q, k, v)
    torch.cuda.synchronize()
    assert torch.equal(other[0], eager[0]), spec
    results.append([each.detach().float().cpu() for each in found])
torch.save(results, "results.pt")
"""


def tensor(array: Any) -> Any:
    """Returns a tensor with the values of an array; numbers as they are."""
    if not hasattr(array, "shape"):
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = target_of_capability(*torch.cuda.get_device_capability()).name
    folder = tmp_path_factory.mktemp("export")
    return export_package(folder, DENSE, PACKED, LEARNED, name="exported-attention", targets=(target,))


def environment(variant: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(variant)}


def test_results_are_those_of_the_reference(variant: Path, tmp_path: Path) -> None:
    calls, references = [], []
    for spec in (DENSE, PACKED, LEARNED):
        shape = Shape(300, 300 if spec == LEARNED else 400, batch=2, heads_q=4, heads_kv=2)
        inputs, (d_out, d_lse) = random_inputs(spec, shape, 1), random_gradients(spec, shape, 1, of_lse=True)
        options = {name: tensor(each) for name, each in inputs.ragged.items()}
        options |= {"seed": torch.tensor([SEED])} if spec.dropout else {}
        captures = {name: tensor(each) for name, each in inputs.captures.items()}
        calls.append((spec.name, *map(tensor, (*inputs.rows, d_out, d_lse)), options, captures))
        references.append((spec, inputs, d_out, d_lse, {"seed": SEED} if spec.dropout else {}))
    torch.save(calls, tmp_path / "calls.pt")
    command = [sys.executable, "-c", RUN]
    found = subprocess.run(command, cwd=tmp_path, env=environment(variant), capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    for (spec, inputs, d_out, d_lse, random), results in zip(
        references, torch.load(tmp_path / "results.pt"), strict=True
    ):
        out, lse, *gradients = (each.numpy() for each in results)
        given = inputs.captures | inputs.ragged
        assert judged(spec, *inputs.rows, out, lse, given, **random).ok, spec.name
        of_captures = [f"d_{each.name}" for each in spec.captures if each.grad]
        names = dict(zip(("dq", "dk", "dv", *of_captures), gradients, strict=True))
        verdicts = judged_gradients(spec, *inputs.rows, d_out, names, d_lse=d_lse, **given, **random)
        assert all(verdict.ok for verdict in verdicts.values()), (spec.name, verdicts)


def test_the_tests_of_the_package_pass(variant: Path) -> None:
    """Those of one spec, as each spec starts the compiler of torch."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
        "tests",
        "-k",
        DENSE.name,
    ]
    found = subprocess.run(command, cwd=variant.parents[1], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and "skipped" not in found.stdout, found.stdout
