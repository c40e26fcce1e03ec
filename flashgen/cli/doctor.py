"""`flashgen doctor`: reports what is installed and what works on this machine, and what to install for the rest."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.cli.console import note, print_json, print_table, stdout
from flashgen.cli.machine import driver_version, gpus, package_version
from flashgen.cli.options import Json
from flashgen.errors import FlashgenError
from flashgen.remedies import install, install_cuda

PACKAGES = ("numpy", "sympy", "jinja2", "ml_dtypes", "typer", "rich")


@dataclass(frozen=True)
class Finding:
    """A row of the report.

    area: the component, such as "cuda". found: the version or result, None if it is missing or does not work. remedy:
    how to get it.
    """

    area: str
    name: str
    found: str | None
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return self.found is not None


def doctor(json: Json = False) -> None:
    """Report what is installed, which targets and emulator modes work here, and how to install what is missing.

    Each emulator mode is tested: a small kernel is generated, compiled for this CPU, run and compared with NumPy. The
    exit status is 0 even if something is missing.
    """
    note("checking this machine; the first run of the emulator compiles it, which takes some seconds")
    findings = list(examine())
    if json:
        print_json([described(finding) for finding in findings])
        return
    print_table(("area", "what", "found"), [row(finding) for finding in findings])
    missing = remedies(findings)
    if missing:
        stdout().print()
        print_table(("missing", "to get it"), missing)


def row(finding: Finding) -> tuple[str, ...]:
    from rich.markup import escape

    found = f"[green]{escape(finding.found)}[/]" if finding.found is not None else "[yellow]no[/]"
    return (finding.area, finding.name, found)


def remedies(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Returns each remedy once, as rows of (what is missing, separated by commas; the remedy) in rich markup."""
    from rich.markup import escape

    missing: dict[str, list[str]] = {}
    for finding in findings:
        if not finding.ok:
            missing.setdefault(finding.remedy, []).append(finding.name)
    return [(escape(", ".join(names)), escape(remedy)) for remedy, names in missing.items()]


def described(finding: Finding) -> dict[str, Any]:
    """Returns a finding for JSON, with a remedy only if something is missing."""
    return asdict(finding) | {"ok": finding.ok, "remedy": "" if finding.ok else finding.remedy}


def examine() -> Iterator[Finding]:
    """Yields all findings in the order of the table."""
    yield Finding("python", "python", platform.python_version())
    yield from (Finding("python", name, package_version(name), install()) for name in PACKAGES)
    yield examine_cache()
    yield from examine_cuda()
    yield from examine_targets()
    yield from examine_emulator()
    yield from examine_frameworks()
    yield from examine_engines()


def examine_cache() -> Finding:
    """Reports the folder of the cache, its size and owner, and whether it is usable, which is tested."""
    from flashgen.build.cache import KernelCache
    from flashgen.build.cache_folder import why_unusable
    from flashgen.build.trust import mode_text, owner_name

    try:
        cache = KernelCache.from_environment()
        problem = why_unusable(cache.path())
        if problem is None:
            entries, status = cache.list(), cache.path().stat()
            size = sum(entry.bytes for entry in entries) / 2**20
            owner = f"of {owner_name(status)}, mode {mode_text(status)}, writable"
            return Finding("cache", "folder", f"{cache.path()}: {len(entries)} entries, {size:.1f} MiB, {owner}")
    except FlashgenError as error:
        problem = str(error)
    return Finding("cache", "folder", None, problem)


def examine_cuda() -> Iterator[Finding]:
    from flashgen.build import nvrtc
    from flashgen.build.tools import find_tool

    yield Finding("cuda", "CuPy", package_version("cupy-cuda13x", "cupy-cuda12x", "cupy"), install_cuda())
    yield Finding("cuda", "cuda-bindings", package_version("cuda-bindings"), install_cuda())
    version = ".".join(str(part) for part in nvrtc.version()) if nvrtc.is_available() else None
    yield Finding("cuda", "NVRTC", version, install_cuda())
    yield Finding(
        "cuda", "driver", driver_version(), "install NVIDIA's driver; without one, kernels run on the emulator"
    )
    described = [f"{gpu.name} ({gpu.architecture}, {gpu.memory / 2**30:.0f} GiB)" for gpu in gpus()]
    yield Finding("cuda", "GPU", ", ".join(described) or None, gpu_remedy())
    for tool in ("nvdisasm", "cuobjdump"):
        path = find_tool(tool)
        yield Finding("cuda", tool, str(path) if path else None, install("inspect"))


def gpu_remedy() -> str:
    """Returns the likely reason for a missing GPU: CuPy for CUDA 13 finds none with a driver for CUDA 12."""
    driver = driver_version()
    if driver and package_version("cupy-cuda13x") and int(driver.partition(".")[0]) < 13:
        return (
            f"the driver supports CUDA {driver} and CuPy needs CUDA 13: update the driver to 580 or newer, or "
            f"pip uninstall cupy-cuda13x && {install('cuda12')}"
        )
    return "none is needed: kernels compile and run on the emulator"


def examine_targets() -> Iterator[Finding]:
    """Reports the targets for which kernels can be compiled, and those that the GPUs of this machine run."""
    from flashgen.build import nvrtc
    from flashgen.codegen.targets import TARGETS

    supported = nvrtc.supported_architectures() if nvrtc.is_available() else ()
    for name, target in TARGETS.items():
        runs = any(target.runs_on(*gpu.compute_capability) for gpu in gpus())
        known = target.base_architecture in supported  # NVRTC lists architectures without suffixes
        found = None if not known else "compiles and runs" if runs else "compiles"
        remedy = f"an NVRTC that supports it: {install_cuda()}" if supported else install_cuda()
        yield Finding("target", name, found, remedy)


def examine_emulator() -> Iterator[Finding]:
    from flashgen.build.host import MODES, find_compiler

    try:
        compiler: str | None = find_compiler().identity
        remedy = ""
    except FlashgenError as error:
        compiler, remedy = None, str(error)
    yield Finding("emulator", "C++ compiler", compiler, remedy)
    for mode in MODES:
        problem = emulator_problem(mode) if compiler else remedy
        yield Finding("emulator", mode, None if problem else "works", problem or "")


FRAMEWORKS = {"flashgen.torch": "torch", "flashgen.transformers": "transformers", "flashgen.jax": "jax"}


def examine_frameworks() -> Iterator[Finding]:
    """Reports the frameworks with an integration. Each integration is imported, to detect versions that are too old."""
    for module, package in FRAMEWORKS.items():
        version = package_version(package)
        if version is None:
            yield Finding("framework", module, None, install(package))
            continue
        problem = framework_problem(module)
        found = None if problem else f"{package} {version}"
        yield Finding("framework", module, found, f"{package} {version}: {problem}" if problem else "")
        if package == "torch" and not problem:
            yield examine_sdpa_registry()


def examine_sdpa_registry() -> Finding:
    """Reports whether flashgen can take the place of torch's flash operators (`flashgen.torch.register_sdpa`)."""
    registry = importlib.import_module("flashgen.torch.sdpa_registry")
    problem = registry.why_not_here()
    found = None if problem else f'activate_flash_attention_impl("{registry.NAME}"), after register_sdpa()'
    return Finding("framework", "torch's SDPA registry", found, problem or "")


ENGINES = {"flashgen_sglang": "sglang", "flashgen_vllm": "vllm"}
"""The packages of `integrations/` and their engines. Each has a module `versions` with a function `check_version`."""


def examine_engines() -> Iterator[Finding]:
    """Reports the engines for which attention backends are installed. Engines take long to import, and are not."""
    for module, package in ENGINES.items():
        problem = engine_problem(module, package)
        found = None if problem else f"{package} {package_version(package)}"
        yield Finding("engine", module, found, problem or "")


def engine_problem(module: str, package: str) -> str | None:
    """Returns why an engine cannot use its package of attention backends here, or None."""
    try:
        importlib.import_module(f"{module}.versions").check_version()
    except ModuleNotFoundError:
        return f"pip install ./integrations/{package}, in a checkout of flashgen"
    except ImportError as error:
        return str(error)
    return None


def framework_problem(module: str) -> str | None:
    """Returns the error of importing the integration of a framework, or None."""
    try:
        importlib.import_module(module)
    except Exception as error:  # the import of a framework can raise any exception
        return f"{type(error).__name__}: {error}"
    return None


def emulator_problem(mode: str) -> str | None:
    """Runs a small kernel in an emulator mode. Returns None if it agrees with NumPy, else what is wrong."""
    from flashgen.language import AttentionSpec
    from flashgen.verify import Case, Shape, verify

    case = Case(AttentionSpec(head_dim=16), Shape(3, 3, batch=1, heads_q=1, heads_kv=1))
    sanitize: Any = None if mode == "plain" else mode
    (result,) = verify([case], emulate=True, sanitize=sanitize)
    return None if result.ok else result.problem or f"the small kernel is wrong: {result.verdict}"
