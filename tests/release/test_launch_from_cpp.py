"""examples/launch_from_cpp: built as its README says, run on the emulator with a fake driver, and on a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flashgen import release
from flashgen.build import nvrtc
from flashgen.build.host import compile_host, find_compiler
from flashgen.build.tools import cuda_roots, wheel_roots

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "launch_from_cpp"
FAKE_DRIVER = Path(__file__).parent / "fake_driver.cpp"


def cuda_headers() -> Path | None:
    roots = [root / "include" for root in (*wheel_roots(), *cuda_roots())]
    return next((folder for folder in roots if (folder / "cuda.h").is_file()), None)


HEADERS = cuda_headers()
pytestmark = [
    pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install 'flashgen[cuda13]'"),
    pytest.mark.skipif(HEADERS is None, reason="needs cuda.h, which pip install 'flashgen[cuda13]' brings"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the release in `kernels`, and in `driver` a libcuda.so that runs the emulator."""
    folder = tmp_path_factory.mktemp("launch_from_cpp")
    for name in ("launch.cpp", "release.toml"):
        shutil.copy(EXAMPLE / name, folder)
    release.build(folder / "release.toml", folder / "kernels")
    (folder / "driver").mkdir()
    options = ["-std=c++17", "-shared", "-fPIC", "-Wall", f"-I{HEADERS}", f"-I{ROOT / 'templates'}"]
    compiler = find_compiler().command
    link = ["-Wl,-soname,libcuda.so.1", "-o", folder / "driver" / "libcuda.so.1", "-ldl"]
    subprocess.run([*compiler, *options, FAKE_DRIVER, *link], check=True)
    (folder / "driver" / "libcuda.so").symlink_to("libcuda.so.1")
    warnings = ["-Wall", "-Wextra", "-Werror"]
    program = ["-I", "kernels", "-I", HEADERS, "launch.cpp", "-o", "launch", "-Ldriver", "-lcuda"]
    subprocess.run([*compiler, "-std=c++17", "-O2", *warnings, *program], cwd=folder, check=True)
    return folder


def launched(folder: Path, capability: str, edit: tuple[str, str] = ("", "")) -> subprocess.CompletedProcess[str]:
    """Runs the program on the emulator with the edited text of the kernel for a GPU."""
    manifest = json.loads((folder / "kernels" / "manifest.json").read_text())
    kernel = next(each for each in manifest["kernels"] if each["architecture"] == f"sm_{capability}")
    source = (folder / "kernels" / kernel["files"]["source"]["path"]).read_text()
    assert edit[0] in source
    host = compile_host(source.replace(*edit) if edit[0] else source, kernel["entry"])
    settings = {
        "LD_LIBRARY_PATH": folder / "driver",
        "FAKE_DRIVER_KERNEL": host.path,
        "FAKE_DRIVER_ARGUMENT_BYTES": kernel["argument_bytes"],
        "FAKE_DRIVER_CAPABILITY": capability,
    }
    environment = os.environ | {name: str(value) for name, value in settings.items()}
    return subprocess.run([folder / "launch", folder / "kernels"], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("capability", ["80", "90", "120"])
def test_it_is_right_on_the_emulator(built: Path, capability: str) -> None:
    done = launched(built, capability)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.splitlines()
    assert re.fullmatch(rf"fwd-sm{capability}-\S+\.cubin, \d x 4 x 2 blocks of \d+ threads", first)
    assert second.startswith("output off by ") and second.endswith(": ok")


def test_it_detects_a_wrong_kernel(built: Path) -> None:
    """A missing diagonal; unwritten output, which stays NaN."""
    wrong = launched(built, "80", ("return k <= q + (", "return k < q + ("))
    assert wrong.returncode == 1 and wrong.stdout.endswith("FAILED\n")
    unwritten = launched(built, "80", ("first_row + row < row_count && chunk * 8 < kColumns", "false"))
    assert unwritten.returncode == 1 and "output off by nan" in unwritten.stdout.replace("-nan", "nan")


def test_it_reports_what_is_missing(built: Path, tmp_path: Path) -> None:
    settings = os.environ | {"LD_LIBRARY_PATH": str(built / "driver"), "FAKE_DRIVER_CAPABILITY": "75"}
    done = subprocess.run([built / "launch", built / "kernels"], env=settings, capture_output=True, text=True)
    assert done.returncode == 2 and "this GPU is of sm_75: add it to release.toml" in done.stderr
    settings |= {"FAKE_DRIVER_CAPABILITY": "80", "FAKE_DRIVER_KERNEL": ""}
    done = subprocess.run([built / "launch", tmp_path], env=settings, capture_output=True, text=True)
    assert done.returncode == 2 and "fwd-sm80-bf16-d64-causal-" in done.stderr
    assert subprocess.run([built / "launch"], env=settings, capture_output=True).returncode == 2


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_it_builds_with_nvcc(built: Path) -> None:
    command = ["nvcc", "-std=c++17", "-I", "kernels", "launch.cpp", "-o", "by-nvcc", "-Ldriver", "-lcuda"]
    subprocess.run(command, cwd=built, check=True)


def test_the_readme_names_existing_things() -> None:
    """Its commands, and the files and names that it mentions."""
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    program = (EXAMPLE / "launch.cpp").read_text(encoding="utf-8")
    for command in (
        "flashgen release build release.toml --out kernels",
        "launch.cpp -o launch -lcuda",
        "./launch kernels",
    ):
        assert command in readme
    for name in ("kCubin", "kEntry", "kThreads", "kSharedBytes", "grid_of", "set_sizes", "Arguments"):
        assert f"`{name}" in readme and name in program
    assert max(map(len, program.splitlines())) <= 120


@pytest.mark.gpu
def test_it_is_right_on_a_gpu(built: Path) -> None:
    done = subprocess.run([built / "launch", built / "kernels"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(": ok\n")
