"""The project's own release set: `generated/` is current and stays small enough to be read."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from flashgen import release

ROOT = Path(__file__).parents[2]
MANIFEST, GENERATED = ROOT / "examples" / "release.toml", ROOT / "generated"
AGAIN = "flashgen release build examples/release.toml --out generated --sources-only"


def test_generated_is_current() -> None:
    findings = release.stale(MANIFEST, GENERATED) + release.check(GENERATED)
    shown = "\n".join(f"  {finding.path} {finding.problem}" for finding in findings)
    assert not findings, f"generated/ is out of date:\n{shown}\nrun `{AGAIN}` and review the difference"


def test_generated_equals_a_build_byte_for_byte(tmp_path: Path) -> None:
    release.build(MANIFEST, tmp_path, sources_only=True)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    differing = [name for name, data in written.items() if (GENERATED / name).read_bytes() != data]
    assert differing == [], f"run `{AGAIN}` and review the difference"


def test_the_set_stays_small() -> None:
    assert 1 <= len(list(GENERATED.glob("*.cu"))) <= 30


def test_no_two_sources_differ_only_in_names_and_numbers() -> None:
    def said(path: Path) -> str:
        code = re.sub(r"//.*|\b\w+(?=\(const __grid_constant__)", "", path.read_text(encoding="ascii"))
        return re.sub(r"[\d.]+", "", code)

    # Kernels over rows before and after the main kernel are the same in every family, and each backward is complete.
    own = [path for path in GENERATED.glob("*.cu") if not re.search("-(preprocess|postprocess)-", path.name)]
    assert not [f"{a.name}, {b.name}" for a, b in combinations(own, 2) if said(a) == said(b)]


@pytest.mark.parametrize("path", sorted(GENERATED.glob("*.cu")), ids=lambda path: path.stem)
def test_sources_name_no_machine(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    assert str(ROOT) not in text
    assert "\t" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
