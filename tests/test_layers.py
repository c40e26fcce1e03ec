"""The layers of the packages: allowed imports, and the cost of `import flashgen`."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flashgen"

# The ground, for everybody: the errors, files and JSON as strangers leave them, what to type where a part is missing,
# and where the templates stand.
GROUND = {"dtypes", "errors", "files", "remedies", "strict_json", "templates_path"}
# Each part, and the parts that it may see besides itself and the ground.
BELOW_ATTENTION = {"language", "build", "analysis", "reference", "codegen", "runtime", "launch"}
MAY_SEE: dict[str, set[str]] = {
    **{part: set() for part in GROUND},
    "language": set(),
    "build": set(),
    "analysis": {"language"},
    "ranks": {"language", "analysis"},
    "reference": {"language"},
    "codegen": {"language", "analysis"},
    "runtime": {"build"},
    "launch": {"language", "build", "codegen", "runtime"},
    "attention": {"language", "analysis", "build", "codegen", "runtime", "launch"},
    "verify": BELOW_ATTENTION | {"attention"},
    "report": BELOW_ATTENTION | {"attention", "verify"},
    "release": BELOW_ATTENTION | {"attention", "verify"},
    "torch": BELOW_ATTENTION | {"attention", "verify", "ranks"},
    "transformers": BELOW_ATTENTION | {"attention", "verify", "torch"},
    "jax": BELOW_ATTENTION | {"attention", "verify"},
    "bench": BELOW_ATTENTION | {"attention"},
    # doctor imports packages above it by name
    "cli": BELOW_ATTENTION | {"attention", "verify", "report", "release", "bench", "ranks"},
    "__main__": {"cli"},
}

OUTSIDE = ("benchmarks", "docs", "examples", "tests")  # folders of the repository that a wheel does not have
NOT_ON_IMPORT = ("cupy", "cuda", "torch", "jax", "jinja2", "typer", "click", "rich", "pygments", "safetensors", "scipy")
MOST_WORK_OF_IMPORT = 0.1  # relative to importing NumPy and SymPy


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Returns (line, dotted name) of each import in a file, at any level; `from a import b` gives a.b."""
    module = module_of(path)
    package = module.removesuffix(".__init__") if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{name.name}") for name in node.names)


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_each_package_has_an_entry() -> None:
    assert {part_of(path) for path in sources()} == set(MAY_SEE), (
        "MAY_SEE lacks a new package, or has one that was removed"
    )


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_upward(path: Path) -> None:
    part = part_of(path)
    allowed = MAY_SEE[part] | GROUND | {part}
    for line, name in imported_modules(path):
        assert name.split(".")[0] not in OUTSIDE, f"{path}:{line}: the package imports {name}, which is not installed"
        if name.startswith("flashgen.") and name.split(".")[1] in MAY_SEE:
            seen = name.split(".")[1]
            assert seen in allowed, f"{path}:{line}: {part} imports {name}, but may see only {sorted(allowed)}"


def test_the_layers_are_an_order() -> None:
    """No two packages import each other, directly or indirectly."""
    settled: set[str] = set()
    while remaining := MAY_SEE.keys() - settled:
        ready = {part for part in remaining if MAY_SEE[part] <= settled}
        assert ready, f"a cycle among {sorted(remaining)}"
        settled |= ready


def test_no_modules_import_each_other() -> None:
    """Not indirectly, not within functions, and not only for types."""
    paths = {module_of(path).removesuffix(".__init__"): path for path in PACKAGE.rglob("*.py")}
    imports = {
        module: {name if name in paths else name.rpartition(".")[0] for _, name in imported_modules(path)}
        for module, path in paths.items()
    }
    try:
        TopologicalSorter({module: imports[module] for module in paths}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def run_python(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True).stdout


def test_import_brings_in_nothing_heavy() -> None:
    loaded = json.loads(run_python("import flashgen, json, sys; print(json.dumps(sorted(sys.modules)))"))
    found = [name for name in loaded if name.split(".")[0] in NOT_ON_IMPORT]
    assert not found, f"`import flashgen` loads {found}"


def test_no_test_measures_time() -> None:
    """Timings depend on what else runs: use `python -m benchmarks host`."""
    clocks = re.compile(r"\b(perf_counter|process_time|thread_time)\w*\(")
    found = [path for path in Path(__file__).parent.rglob("*.py") if clocks.search(path.read_text(encoding="utf-8"))]
    assert not found


WORK_OF_IMPORT = """
import json, sys
calls = {"import numpy, sympy": 0, "import flashgen; flashgen.AttentionSpec": 0}
for statement in calls:
    def seen(frame, event, argument):
        calls[statement] += event == "call"
    sys.setprofile(seen)
    exec(statement)
    sys.setprofile(None)
    if "before" not in globals():
        before = set(sys.modules)
print(json.dumps([*calls.values(), sorted(set(sys.modules) - before)]))
"""


def test_import_costs_little_more_than_numpy_and_sympy() -> None:
    """Counts calls of Python functions, which do not depend on load; `python -m benchmarks host` measures time."""
    base, ours, modules = json.loads(run_python(WORK_OF_IMPORT))
    assert 0 < ours < MOST_WORK_OF_IMPORT * base, f"import flashgen makes {ours} calls, NumPy and SymPy {base}"
    others = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
    assert others == {"flashgen"}
    parts = {name.split(".")[1] for name in modules if name.startswith("flashgen.")}
    assert parts == {"dtypes", "errors", "language", "strict_json"}
