"""Installation hints in messages: the README's command in a checkout, and one that works for an installed wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashgen.remedies import install, install_cuda

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_in_a_checkout_it_is_the_readmes_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install("cuda13") == "pip install '.[cuda13]'" and f"`{install('cuda13')}`" in README
    assert install_cuda().startswith(f"{install('cuda13')} (cuda12 in place of cuda13 for a driver older than 580")
    assert install() == "pip install '.'"
    monkeypatch.chdir(tmp_path)
    assert install("inspect", "test") == f"pip install '{ROOT}[inspect,test]'"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///srv/my%20wheels/flashgen-0.1.0-py3-none-any.whl", "archive_info": {}},
         "pip install '/srv/my wheels/flashgen-0.1.0-py3-none-any.whl[cuda13]'"),
        ({"url": "file:///home/me/flashgen", "dir_info": {"editable": False}},
         "pip install '/home/me/flashgen[cuda13]'"),
        ({"url": "https://host/flashgen.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
         "pip install 'flashgen[cuda13] @ git+https://host/flashgen.git'"),
        ({"url": "https://host/flashgen-0.1.0-py3-none-any.whl", "archive_info": {}},
         "pip install 'flashgen[cuda13] @ https://host/flashgen-0.1.0-py3-none-any.whl'"),
        (None, "pip install 'flashgen[cuda13]'"),
    ],
)  # fmt: skip
def test_for_an_installed_package_it_names_the_installed_source(
    origin: dict[str, Any] | None, command: str, tmp_path: Path
) -> None:
    """Mimics pip: the package, and the record of its origin beside it."""
    (tmp_path / "flashgen").mkdir()
    (tmp_path / "flashgen" / "__init__.py").touch()
    shutil.copy(ROOT / "flashgen" / "remedies.py", tmp_path / "flashgen")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "something else"\n')  # some packages install one there
    recorded = tmp_path / "flashgen-0.1.0.dist-info"
    recorded.mkdir()
    (recorded / "METADATA").write_text("Metadata-Version: 2.4\nName: flashgen\nVersion: 0.1.0\n")
    if origin is not None:
        (recorded / "direct_url.json").write_text(json.dumps(origin))
    program = "from flashgen.remedies import install; print(install('cuda13'))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == command + "\n"


def test_no_other_module_writes_an_install_command() -> None:
    for path in (ROOT / "flashgen").rglob("*.py"):
        if path.name != "remedies.py":
            assert not re.search(r"pip install '?flashgen", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(("framework", "needed"), [("torch", "torch"), ("transformers", "torch"), ("jax", "jax")])
def test_a_missing_framework_is_named_with_its_remedy(framework: str, needed: str, tmp_path: Path) -> None:
    said = f"flashgen.{framework} needs {needed}: pip install '{ROOT}[{framework}]'"
    program = f"import sys; sys.modules[{needed!r}] = None; import flashgen.{framework}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and said in done.stderr, done.stderr


def test_unknown_names_of_the_package() -> None:
    import flashgen

    for name, said in (("sliding_windw", "did you mean sliding_window"), ("nothing_like_it", "'nothing_like_it'$")):
        with pytest.raises(AttributeError, match=said):
            getattr(flashgen, name)
    program = "import flashgen; flashgen.torch"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "before it is imported by itself: import flashgen.torch" in done.stderr
