"""Exported packages: they import torch only, launch what flashgen launches, and give its results."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="exported packages need torch: pip install 'flashgen[torch]'")

import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode

import exported
from exported import DENSE, FOREIGN, LEARNED, MULTIPROCESSORS, PACKED, Driver, export_package, import_package, install
from flashgen import release
from flashgen.attention.launches import launch_of, workspaces
from flashgen.attention.problem import problem_of
from flashgen.build import nvrtc
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import target_named
from flashgen.language import AttentionSpec
from flashgen.release.export import VARIANT
from flashgen.runtime import tensor_maps
from flashgen.runtime.arrays import View
from flashgen.verify import Shape, judged, judged_gradients, random_gradients, random_inputs

pytestmark = pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC: pip install '.[cuda13]'")
NAME = "exported-attention"


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_package(tmp_path_factory.mktemp("export"), DENSE, PACKED, LEARNED, name=NAME)


@pytest.fixture(scope="module")
def package(variant: Path) -> ModuleType:
    return import_package(variant, NAME.replace("-", "_"))


@pytest.fixture(scope="module")
def driver(variant: Path) -> Driver:
    return Driver(variant / "kernels")


@pytest.fixture(params=[(8, 0), (9, 0)], ids=["sm_80", "sm_90a"])
def capability(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def on_a_gpu(
    package: ModuleType, driver: Driver, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    install(package, driver, capability, monkeypatch)
    driver.launches.clear()
    yield driver


def rows(spec: AttentionSpec, length: int, heads: int, batch: int = 2) -> torch.Tensor:
    """Returns a tensor of zeros. In layout "bhsd" its memory has the order of "bshd"."""
    if spec.layout == "thd":
        return torch.zeros(length, heads, 64, dtype=torch.bfloat16)
    if spec.layout == "bshd":
        return torch.zeros(batch, length, heads, 32, dtype=torch.float16)
    return torch.zeros(batch, length, heads, 64, dtype=torch.float16).transpose(1, 2)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CALLS: dict[str, tuple[AttentionSpec, tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "dense": (DENSE, (100, 150), (4, 2), {}),
    "one query": (DENSE, (1, 1), (1, 1), {}),
    "captures": (LEARNED, (90, 90), (4, 2), {}),
    "packed": (PACKED, (90, 120), (4, 2), {"cu_seqlens_q": offsets(0, 50, 90), "cu_seqlens_k": offsets(0, 40, 120)}),
    "packed, bounded": (
        PACKED,
        (90, 120),
        (2, 2),
        {
            "cu_seqlens_q": offsets(0, 50, 50, 90),
            "cu_seqlens_k": offsets(0, 40, 60, 120),
            "seqused_k": offsets(30, 20, 60),
            "max_seqlen_q": 50,
        },
    ),
}


def run(package: ModuleType, call: str) -> tuple[AttentionSpec, dict[str, torch.Tensor], dict[str, Any]]:
    """Calls the operators of both passes. Returns the spec, the arrays of the call by name, and its other arguments."""
    spec, lengths, heads, options = CALLS[call]
    q, k, v = rows(spec, lengths[0], heads[0]), rows(spec, lengths[1], heads[1]), rows(spec, lengths[1], heads[1])
    seed = torch.tensor([5]) if spec.dropout else None
    given = [options.get(n) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k")]
    arrays, numbers = [], []
    if spec == LEARNED:
        arrays = [torch.zeros(2, 90, dtype=torch.int32), torch.zeros(4), torch.zeros(4, 21).half()[:, ::1]]
        numbers = [10.0]
    ops = package.operators.ops
    out, lse = ops.forward(q, k, v, spec.name, arrays, numbers, seed, *given)
    d_out, d_lse = torch.empty_like(out), torch.zeros_like(lse)
    gradients = ops.backward(d_out, d_lse, q, k, v, out, lse, spec.name, arrays, numbers, seed, *given)
    named = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "d_o": d_out, "d_lse": d_lse, "seed": seed}
    named |= dict(zip(("dq", "dk", "dv"), gradients, strict=False))
    named |= {capture.name: array for capture, array in zip(package.SPECS[spec.name].arrays, arrays, strict=True)}
    learned = [capture for capture in package.SPECS[spec.name].arrays if capture.grad]
    for capture, gradient in zip(learned, gradients[3:], strict=True):
        named |= {f"d_{capture.name}": gradient, f"gradient of {capture.name}": gradient}
    named |= {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    return spec, {name: array for name, array in named.items() if array is not None}, options


def view(tensor: torch.Tensor) -> View:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, None, tensor)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("call", CALLS)
def test_launches_are_those_of_flashgen(
    call: str,
    package: ModuleType,
    on_a_gpu: Driver,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, arrays, options = run(package, call)
    target = target_named("sm_80" if capability == (8, 0) else "sm_90a")
    monkeypatch.setattr(tensor_maps, "driver", lambda: on_a_gpu)
    views = {name: view(array) for name, array in arrays.items()}
    problem = problem_of(spec, views, MULTIPROCESSORS, (options.get("max_seqlen_q"), options.get("max_seqlen_k")))
    for name in ("o", "d_o", "dq", "dk", "dv"):
        problem.strides[name] = spec.batch_layout.to_bhsd(views[name].strides)[:3]
    captured = {capture.name: views[capture.name] for capture in spec.captures if capture.ndim}
    numbers = {"seed_low": 0, "seed_high": 0, "offset": 0, "reach": 10}
    launched = iter(on_a_gpu.launches)
    for part in ("forward", "backward"):
        kernels = kernels_of(spec, target, (part,))
        spaces = workspaces(kernels, problem, captured)
        addresses: dict[str, int] = {}
        for role, kernel in kernels.items():
            found = next(launched)
            sized = [captured[space.of_capture] for space in kernel.workspaces if space.of_capture]
            own = replace(problem, count=math.prod(sized[0].shape)) if sized else problem
            expected = launch_of(kernel, spec, own, captured)
            assert (found.kernel["entry"], found.grid) == (kernel.entry, expected.grid)
            assert found.block == (kernel.threads, 1, 1) and found.shared_bytes == kernel.shared_bytes
            assert found.stream == 7
            lists = kernel.lists or kernel.reads
            given = {name: array.data_ptr() for name, array in arrays.items()}
            for member, offset in expected.writer.offsets.items():
                name = kernel.pointers.get(member, member)
                if lists and member.removeprefix("tile_") in ("counts", "offsets", "entries"):
                    name = f"{lists} {member.removeprefix('tile_')}"
                if name in spaces or name == "next_tile" or name not in given:
                    address = int.from_bytes(found.struct[offset : offset + 8], "little")
                    assert addresses.setdefault(name, address) == address, f"{name} moved between the kernels of a pass"
                given[member] = addresses.get(name) or given.get(name, 0)
            if kernel.counts and not expected.num_counters:
                assert addresses.pop("next_tile", 0) == 0
            assert found.struct == bytes(expected.writer.write(given, numbers)), role
        assert all(addresses[name] for name in spaces)
        listed = [
            f"{kernel.reads} {name}" for kernel in kernels.values() if kernel.reads for name in ("counts", "entries")
        ]
        assert all(addresses[name] for name in listed)
    assert next(launched, None) is None


def test_workspaces_are_those_of_flashgen(package: ModuleType, on_a_gpu: Driver, capability: tuple[int, int]) -> None:
    _, arrays, _ = run(package, "dense")
    chosen = package.SPECS[DENSE.name]
    target = target_named("sm_80" if capability == (8, 0) else "sm_90a")
    problem = problem_of(DENSE, {name: view(array) for name, array in arrays.items()}, MULTIPROCESSORS)
    expected = workspaces(kernels_of(DENSE, target, ("backward",)), problem, {})
    names = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")
    sizes = chosen.sizes(arrays["q"], arrays["k"], None, (None, None))
    prepared = chosen.prepare("backward", sizes, {name: arrays[name] for name in names}, [], names)
    found = {space.name: (space.shape, str(space.dtype), space.zeroed) for space in prepared.workspaces}
    assert found == {name: (each.shape, f"torch.{each.dtype}", each.zeroed) for name, each in expected.items()}


@pytest.mark.parametrize("spec", [DENSE, PACKED, LEARNED], ids=["dense", "packed", "captures"])
@pytest.mark.parametrize("capability", [(8, 0)], ids=["sm_80"], indirect=True)
def test_results_on_the_emulator(
    spec: AttentionSpec, package: ModuleType, on_a_gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_a_gpu, "emulate", True)
    shape = Shape(70, 70 if spec == LEARNED else 90, batch=1, heads_q=2, heads_kv=1)
    inputs, (d_out, d_lse) = random_inputs(spec, shape, 1), random_gradients(spec, shape, 1, of_lse=True)

    q, k, v = (tensor(each).requires_grad_() for each in inputs.rows)
    options = {name: tensor(each) if hasattr(each, "shape") else each for name, each in inputs.ragged.items()}
    captures = {name: tensor(each) if hasattr(each, "shape") else each for name, each in inputs.captures.items()}
    learned = [captures[each.name].requires_grad_() for each in package.SPECS[spec.name].arrays if each.grad]
    random = {"seed": 5} if spec.dropout else {}
    options |= {"seed": torch.tensor([5]) if spec.dropout else None, "captures": captures, "spec": spec.name}
    given = inputs.captures | inputs.ragged
    for attention in (package.attention, torch.compile(package.attention, backend="aot_eager", fullgraph=True)):
        out, lse = attention(q, k, v, return_lse=True, **options)
        found = torch.autograd.grad((out, lse), (q, k, v, *learned), (tensor(d_out), tensor(d_lse)))
        assert judged(spec, *inputs.rows, array(out), array(lse), given, **random).ok
        of_captures = [f"d_{each.name}" for each in spec.captures if each.grad]
        names = dict(zip(("dq", "dk", "dv", *of_captures), map(array, found), strict=True))
        verdicts = judged_gradients(spec, *inputs.rows, d_out, names, d_lse=d_lse, **given, **random)
        assert all(verdict.ok for verdict in verdicts.values()), verdicts


def tensor(array: Any) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def array(tensor: torch.Tensor) -> Any:
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("capability", [(9, 0)], ids=["sm_90a"], indirect=True)
def test_checks_of_torch(package: ModuleType, on_a_gpu: Driver) -> None:
    q, k, v = (rows(DENSE, 70, 2).requires_grad_() for _ in range(3))
    given = (q, k, v, DENSE.name, [], [], None, None, None, None, None, None)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(package.operators.ops.forward.default, given, test_utils=tests)
    out, lse = package.operators.ops.forward(*given)
    gradient = (torch.zeros_like(out), None, q, k, v, out, lse, DENSE.name, [], [], None, None, None, None, None, None)
    given = tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in gradient)
    torch.library.opcheck(package.operators.ops.backward.default, given, test_utils=tests)
    first = torch.autograd.grad(package.attention(q, k, v).sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


def test_results_without_data(package: ModuleType) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 50, 4, 64, dtype=torch.float16).transpose(1, 2).requires_grad_()
        k = torch.empty(2, 2, 60, 64, dtype=torch.float16, requires_grad=True)
        out, lse = package.attention(q, k, k, return_lse=True)
        assert out.shape == q.shape and out.stride() == q.stride() and out.dtype == torch.float16
        assert lse.shape == (2, 4, 50) and lse.dtype == torch.float32
        dq, dk = torch.autograd.grad(out.sum(), (q, k))
        assert (dq.shape, dq.stride(), dk.shape) == (q.shape, q.stride(), k.shape)


@pytest.mark.parametrize("capability", [(9, 0)], ids=["sm_90a"], indirect=True)
def test_calls_without_elements_launch_nothing(package: ModuleType, on_a_gpu: Driver) -> None:
    q, k = rows(DENSE, 5, 2).requires_grad_(), rows(DENSE, 0, 2).requires_grad_()
    out = package.attention(q, k, k)
    launched = len(on_a_gpu.launches)
    assert launched == 1  # the forward writes zeros
    assert not torch.autograd.grad(out.sum(), q)[0].any()
    assert package.attention(rows(DENSE, 0, 2), q, q).shape == (2, 2, 0, 64)
    assert len(on_a_gpu.launches) == launched


@pytest.mark.parametrize("capability", [(9, 0)], ids=["sm_90a"], indirect=True)
def test_tensors_of_a_transform_that_has_ended(package: ModuleType, on_a_gpu: Driver) -> None:
    leaked: list[torch.Tensor] = []
    torch.func.grad(lambda x: leaked.append(x) or x.sum())(rows(DENSE, 5, 2).float())
    q = leaked[0].half().requires_grad_()
    k = rows(DENSE, 5, 2)
    gradient = torch.autograd.grad(package.attention(q, k, k).sum(), q)[0]
    assert gradient.shape == k.shape and len(on_a_gpu.launches) > 1


@pytest.mark.parametrize("capability", [(8, 0)], ids=["sm_80"], indirect=True)
def test_sinks_have_gradients_without_keys(
    package: ModuleType, on_a_gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The LSE of a row without keys is the sink."""
    monkeypatch.setattr(on_a_gpu, "emulate", True)
    q, k = rows(LEARNED, 5, 2), rows(LEARNED, 0, 2)
    captures = {"ids": torch.zeros(2, 5, dtype=torch.int32), "table": torch.zeros(2, 3).half(), "reach": 1}
    captures["sinks"] = torch.tensor([1.0, 2.0], requires_grad=True)
    out, lse = package.attention(q, k, k, return_lse=True, captures=captures)
    assert not out.any() and torch.equal(lse[:, :, 0], captures["sinks"].expand(2, 2))
    (found,) = torch.autograd.grad(lse.sum(), captures["sinks"])
    assert torch.equal(found, torch.tensor([10.0, 10.0]))


@pytest.mark.parametrize("capability", [(8, 0)], ids=["sm_80"], indirect=True)
def test_wrong_captures_are_refused(package: ModuleType, on_a_gpu: Driver) -> None:
    q = rows(LEARNED, 5, 2)
    captures = {"ids": torch.zeros(2, 5, dtype=torch.int32), "table": torch.zeros(2, 3).half(), "reach": 1}
    captures["sinks"] = torch.zeros(2)
    wrong = {
        "ids": (torch.zeros(2, 4, dtype=torch.int32), "axis 1 needs 5 elements, or 1"),
        "table": (torch.zeros(2, 5).half(), "axis 1 is of distances, it needs 3 elements, or 1"),
        "reach": (1.5, "give an integer of 32 bits"),
        "sinks": (torch.zeros(3), "give one for each of 2 heads"),
        "other": (1, r"captures are .* takes \['ids', 'reach', 'sinks', 'table'\]"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            package.attention(q, q, q, captures=captures | {name: value})


def test_derivatives_that_would_be_missing_are_refused(
    package: ModuleType, on_a_gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = rows(DENSE, 5, 2)
    run = partial(package.attention, spec=DENSE.name)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        run(forward_ad.make_dual(q, q), q, q)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: run(x, q, q), (q,), (q,))
    spec = package.SPECS[LEARNED.name]
    monkeypatch.setattr(spec, "arrays", [capture._replace(grad=False) for capture in spec.arrays])
    captures: dict[str, Any] = {"ids": torch.zeros(2, 5, dtype=torch.int32), "table": torch.zeros(2, 3).half()}
    captures |= {"reach": 1, "sinks": torch.zeros(2, requires_grad=True)}
    q = rows(LEARNED, 5, 2)
    with pytest.raises(RuntimeError, match=r"'sinks' requires a gradient, and .* declares none: detach it"):
        package.attention(q, q, q, captures=captures)
    assert not on_a_gpu.launches


WRONG: dict[str, tuple[Any, str]] = {
    "dtype": (lambda q: (q.float(), q, q), "q is torch.float32"),
    "head dim": (lambda q: (q, q[..., :32], q), r"k has shape \(2, 2, 70, 32\)"),
    "rows": (lambda q: (q, q, q[:, :, :5]), "every key needs one value"),
    "heads": (lambda q: (q[:, :1], q, q), "q has 1 heads, no multiple of the 2"),
    "batch": (lambda q: (q[:1], q, q), "q has batch 1 and k 2"),
    "last stride": (lambda q: (q, q.mT.contiguous().mT, q), r"k has strides .* give k.contiguous\(\)"),
    "row stride": (lambda q: (q, q, torch.zeros(2, 2, 70, 66).half()[..., :64]), "v has strides"),
    "address": (
        lambda q: (torch.zeros(2 * 2 * 70 * 64 + 1).half()[1:].view(2, 2, 70, 64), q, q),
        "must begin at a multiple of 16",
    ),
}


@pytest.mark.parametrize("capability", [(8, 0)], ids=["sm_80"], indirect=True)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_tensors_are_refused(wrong: str, package: ModuleType, on_a_gpu: Driver) -> None:
    make, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        package.attention(*make(rows(DENSE, 70, 2)), spec=DENSE.name)
    assert not on_a_gpu.launches


@pytest.mark.parametrize("capability", [(7, 5)], ids=["sm_75"], indirect=True)
def test_other_calls_are_refused(package: ModuleType, on_a_gpu: Driver) -> None:
    q = rows(DENSE, 70, 2)
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5, .* sm_80, sm_90a: export it .* --target sm_75"):
        package.attention(q, q, q)
    with pytest.raises(ValueError, match="spec='other' is not in this package"):
        package.attention(q, q, q, spec="other")
    with pytest.raises(ValueError, match="the specs that take them: none"):
        package.attention(q.float(), q.float(), q.float())
    with pytest.raises(ValueError, match="takes no packed sequences"):
        package.attention(q, q, q, cu_seqlens_q=offsets(0, 70))
    packed = rows(PACKED, 70, 2)
    with pytest.raises(ValueError, match="cu_seqlens_q is missing"):
        package.attention(packed, packed, packed)
    with pytest.raises(ValueError, match=r"cu_seqlens_k is torch.int64 .* give int32 \(2,\)"):
        package.attention(packed, packed, packed, cu_seqlens_q=offsets(0, 70), cu_seqlens_k=offsets(0, 70).long())


@pytest.mark.parametrize("capability", [(9, 0)], ids=["sm_90a"], indirect=True)
def test_both_passes_need_the_seed_of_the_dropout(package: ModuleType, on_a_gpu: Driver) -> None:
    """A kernel reads it from memory."""
    packed, at = rows(PACKED, 70, 2), offsets(0, 70)
    rest = (PACKED.name, [], [], None, at, at, None, None, None)
    with pytest.raises(ValueError, match="give a seed"):
        package.operators.forward(packed, packed, packed, *rest)
    lse = torch.zeros(2, 70)
    with pytest.raises(ValueError, match="give a seed"):
        package.operators.backward(packed, None, packed, packed, packed, packed, lse, *rest)
    assert not on_a_gpu.launches


def test_the_seed_comes_from_the_generator_of_torch(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    monkeypatch.setattr(
        package.operators, "ops", type("Ops", (), {"forward": lambda *given: (seeds.append(given[6]), None)})
    )
    monkeypatch.setattr(package.operators, "_is_plain", lambda *tensors: False)
    packed, given = rows(PACKED, 70, 2), {"cu_seqlens_q": offsets(0, 70), "cu_seqlens_k": offsets(0, 70)}
    for _ in range(2):
        torch.manual_seed(3)
        package.attention(packed, packed, packed, **given)
    package.attention(packed, packed, packed, **given)
    assert seeds[0] == seeds[1] != seeds[2] and seeds[0].dtype == torch.int64


def test_a_changed_cubin_is_refused(variant: Path, package: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    path.write_bytes(b"other")
    function = package.operators.driver.Function(path, "0" * 64, "entry", 128, 0)
    with pytest.raises(RuntimeError, match="is not the file that was exported"):
        function._load(0)


def test_only_formulas_are_evaluated(package: ModuleType) -> None:
    evaluate = sys.modules[f"{package.__name__}.formulas"].evaluate
    assert evaluate("max(a - b * 2, ceil_div(a, 4)) / 2", {"a": 10, "b": 1}) == 4
    for formula in ("__import__('os')", "a.b", "a if a else b", "a ** 2", "'a'"):
        with pytest.raises((ValueError, KeyError)):
            evaluate(formula, {"a": 1, "b": 1})


def test_modules_import_only_torch_and_the_standard_library(variant: Path) -> None:
    for path in variant.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                assert name.partition(".")[0] in {"torch", *sys.stdlib_module_names}, (path, name)


REFUSES = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FOREIGN}:
            raise ImportError(f"{{name}} is imported")

import torch
sys.meta_path.insert(0, Refuse())
import exported_attention as package
q = torch.zeros(1, 2, 70, 64, dtype=torch.float16)
try:
    package.attention(q, q, q)
except RuntimeError as error:
    print(error)
"""


def test_a_package_needs_torch_only_and_says_what_it_runs_on(variant: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", REFUSES],
        env={"PYTHONPATH": str(variant), "CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        cwd=variant,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert "q is on cpu: these kernels run on NVIDIA GPUs" in found.stdout
    assert "torch finds no CUDA GPU on this machine" in found.stdout


def test_kernels_are_those_of_a_release(variant: Path, tmp_path: Path) -> None:
    groups = [
        {"spec": spec.to_json(), "target": list(exported.TARGETS), "passes": ["forward", "backward"]}
        for spec in (DENSE, PACKED, LEARNED)
    ]
    (tmp_path / "release.json").write_text(json.dumps({"kernels": groups}))
    expected = release.build(tmp_path / "release.json", tmp_path / "release")
    for kernel in expected["kernels"]:
        del kernel["files"]["header"]
    assert json.loads((variant / "kernels" / "manifest.json").read_text()) == json.loads(json.dumps(expected))
    assert release.check(variant / "kernels") == []
    assert variant.name == Path(VARIANT).name


def test_the_package_of_hugging_face_loads_it(variant: Path) -> None:
    """Its reader of metadata, its digest, its choice of a variant for CUDA, and its import."""
    pytest.importorskip("kernels.importer", reason="needs Hugging Face's package: pip install kernels")
    from kernels._rust import Digest, DigestAlgorithm, Metadata
    from kernels.importer import _import_from_path
    from kernels.variants import get_variants_local

    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert str(metadata.name) == NAME
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    (found,) = get_variants_local(variant.parent)
    assert found.variant_str == variant.name
    loaded = _import_from_path(variant, {})
    assert loaded.__name__ == metadata.id == loaded.operators.NAMESPACE and loaded.SPECS.keys() == {
        DENSE.name,
        PACKED.name,
        LEARNED.name,
    }
