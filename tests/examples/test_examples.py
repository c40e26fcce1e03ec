"""The examples that need a framework: tiny on the emulator, in full on a GPU, and their errors without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = {
    "train_gpt2.py": ("torch", "safetensors"),
    "bert_padding.py": ("torch", "transformers"),
    "flex_migration.py": ("torch",),
    "context_parallel.py": ("torch",),
    "jax_attention.py": ("jax",),
    "latent_attention.py": ("torch",),
    "serve.py": ("torch",),
}


def run(name: str, *arguments: str, program: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *program, str(ROOT / "examples" / name), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def shown(name: str, *arguments: str) -> str:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    done = run(name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.rotated(4)
@pytest.mark.parametrize("name", [name for name in NEEDS if name not in ("serve.py", "train_gpt2.py")])
def test_on_the_emulator(name: str) -> None:
    """Each example checks its results."""
    assert shown(name, "--emulate")


@pytest.mark.rotated(8)
def test_training_on_the_emulator(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    options = ("--emulate", "--folder", str(tmp_path))
    first = shown("train_gpt2.py", *options, "--steps", "6")
    losses = [float(text) for text in re.findall(r"loss (\S+) -> (\S+)", first)[0]]
    assert losses[1] < losses[0]
    again = shown("train_gpt2.py", *options, "--resume")
    straight = shown("train_gpt2.py", "--emulate", "--folder", str(tmp_path / "whole"))
    of_both = [re.findall(r"loss .* steps", text) for text in (again, straight)]
    assert of_both[0] == of_both[1] and "in 9 steps" in again, "resuming changes nothing"
    assert (tmp_path / "gpt2-flashgen.svg").read_text(encoding="utf-8").startswith("<svg")
    other = shown("train_gpt2.py", *options, "--steps", "6", "--attention", "sdpa")
    assert abs(float(re.findall(r"-> (\S+)", other)[0]) - losses[1]) <= 0.01 * losses[1]


@pytest.mark.parametrize("name", NEEDS)
def test_error_without_the_framework(name: str) -> None:
    missing = NEEDS[name][0]
    program = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = run(name, program=("-c", program))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "pip install" in done.stderr


@pytest.mark.rotated(9)
@pytest.mark.parametrize("name", NEEDS)
def test_error_without_a_gpu(name: str) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    done = run(name, CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    assert done.returncode == 1 and done.stderr.startswith("error: there is no GPU"), done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert_padding.py", "flex_migration.py", "jax_attention.py", "latent_attention.py"])
def test_on_a_gpu(name: str) -> None:
    assert shown(name)


@pytest.mark.gpu
def test_several_gpus() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and here are {torch.cuda.device_count()}")
    for scheme in ("ring", "all_gather", "ulysses"):
        assert shown("context_parallel.py", "--ranks", "2", "--scheme", scheme)


@pytest.mark.gpu
@pytest.mark.slow
def test_training_on_a_gpu(tmp_path: Path) -> None:
    folder = ("--folder", str(tmp_path), "--steps", "30", "--batch", "8")
    ends = [
        float(re.findall(r"-> (\S+)", shown("train_gpt2.py", *folder, "--attention", name, *more))[0])
        for name, more in (("flashgen", ("--compile",)), ("standard", ()))
    ]
    assert abs(ends[0] - ends[1]) <= 0.01 * ends[1]
