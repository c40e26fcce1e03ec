"""SPEC on the command line: expressions, names in files, JSON, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashgen.language as fg
from flashgen.cli.options import SpecOptions
from flashgen.cli.specs import is_complete, load_spec, load_variant
from flashgen.errors import SpecError

USER_FILE = """
import flashgen.language as fg
from flashgen.verify import Variant

def near(b, h, q, k):
    return abs(q - k) <= 3

window = fg.sliding_window(5)
complete = fg.AttentionSpec(head_dim=16, mask=window)
steep = Variant(fg.causal(), fg.softcap(5), dropout=0.5, scale=2.0)

def doubled(score, b, h, q, k):
    return score * 2
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "variants.py"
    path.write_text(USER_FILE)
    return path


def test_an_expression() -> None:
    spec = load_spec("causal() & sliding_window(16)", SpecOptions())
    assert spec == fg.AttentionSpec(head_dim=64, mask=fg.causal() & fg.sliding_window(16))


def test_an_expression_with_every_option() -> None:
    options = SpecOptions("softcap(30)", 0.5, 128, 64, "bfloat16", 0.25, "bshd")
    assert load_spec("full()", options) == fg.AttentionSpec(
        head_dim=128, value_dim=64, dtype="bfloat16", scale=0.25, layout="bshd", dropout=0.5, score=fg.softcap(30)
    )


def test_names_in_a_file(user_file: Path) -> None:
    assert load_spec(f"{user_file}:window", SpecOptions(head_dim=16)).mask.name == "sliding_window(5)"
    assert load_spec(f"{user_file}:near", SpecOptions()).mask.name == "near"
    assert load_spec(f"{user_file}:complete", SpecOptions()).head_dim == 16
    assert load_spec("full()", SpecOptions(score=f"{user_file}:doubled")).score is not None


def test_a_variant_in_a_file(user_file: Path) -> None:
    spec = load_spec(f"{user_file}:steep", SpecOptions(head_dim=16, dtype="bfloat16"))
    assert spec == fg.AttentionSpec(16, "bfloat16", scale=2.0, dropout=0.5, score=fg.softcap(5), mask=fg.causal())
    variant = load_variant(f"{user_file}:steep")
    assert variant is not None and variant.scale == 2.0
    assert load_variant(f"{user_file}:near") is None and load_variant("causal()") is None
    with pytest.raises(SpecError, match="is a Variant, so --score cannot"):
        load_spec(f"{user_file}:steep", SpecOptions(score="softcap(1)"))


def test_json_as_text_and_file(tmp_path: Path) -> None:
    spec = fg.AttentionSpec(head_dim=24, mask=fg.causal())
    path = tmp_path / "spec.json"
    path.write_text(spec.to_json())
    assert load_spec(spec.to_json(), SpecOptions()) == spec
    assert load_spec(str(path), SpecOptions()) == spec


def test_full_specs(user_file: Path) -> None:
    assert is_complete("{}") and is_complete("a.json") and is_complete(f"{user_file}:complete")
    assert not is_complete("causal()") and not is_complete(f"{user_file}:near")


def test_a_full_spec_takes_no_options(user_file: Path) -> None:
    with pytest.raises(SpecError, match="--head-dim, --dtype cannot change it"):
        load_spec(f"{user_file}:complete", SpecOptions(head_dim=32, dtype="float16"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("casual()", "did you mean causal"),
        ("__import__('os').getcwd()", "expected a mask"),
        ("nowhere.py:name", "is not a file"),
        ("nowhere.json", "cannot be read"),
        ("{}", "head_dim"),
        ("", "1 to"),
    ],
)
def test_error_messages(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_spec(text, SpecOptions())


def test_a_file_needs_an_existing_name(user_file: Path) -> None:
    with pytest.raises(SpecError, match="give a name in it"):
        load_spec(str(user_file), SpecOptions())
    with pytest.raises(SpecError, match=r"has no 'far'; it has .*near"):
        load_spec(f"{user_file}:far", SpecOptions())
    with pytest.raises(SpecError):
        load_spec(f"{user_file}:fg", SpecOptions())
