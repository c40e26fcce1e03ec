"""Converts SPEC to an AttentionSpec. Expressions and JSON are parsed; only `file.py:name` runs Python code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.cli.options import SpecOptions
from flashgen.cli.user_files import name_in_file
from flashgen.errors import SpecError
from flashgen.files import read_text

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec
    from flashgen.verify import Variant

DEFAULT_HEAD_DIM = 64
_IN_A_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
_REFUSED = re.compile(r".+\.py")


def load_spec(text: str, options: SpecOptions) -> AttentionSpec:
    """Returns the spec that SPEC and the options describe.

    `file.py:name` imports the file, which runs it: use files that you trust. The name may be an AttentionSpec, a Mask,
    a mask function of (b, h, q, k), or a flashgen.verify.Variant. A complete spec (from a file or JSON) takes no
    further options, because its head dim, scale and value dim belong together. A Variant takes no score, dropout, scale
    or sink.

    Raises SpecError if SPEC is none of these, names a file or a name that does not exist, or cannot be parsed.
    """
    from flashgen.language import AttentionSpec, Tensor

    text = text.strip()
    if text.startswith("{"):
        return _complete(AttentionSpec.from_json(text), options)
    if text.endswith(".json"):
        return _complete(AttentionSpec.from_json(_read(text)), options)
    variant = load_variant(text)
    if variant is not None:
        return _spec_of_variant(text, variant, options)
    mask = _from_file_or_parsed(text, "mask")
    if isinstance(mask, AttentionSpec):
        return _complete(mask, options)

    arguments: dict[str, Any] = {"head_dim": DEFAULT_HEAD_DIM} | options.given()
    if "score" in arguments:
        arguments["score"] = _from_file_or_parsed(arguments["score"], "score")
    if "sink" in arguments:
        arguments["sink"] = Tensor(arguments["sink"], "float32", 1, grad=True)
    return AttentionSpec(**arguments, mask=mask)


def load_variant(text: str) -> Variant | None:
    """Returns the flashgen.verify.Variant that SPEC names in a file; None if SPEC is something else."""
    in_file = _IN_A_FILE.fullmatch(text.strip())
    if in_file is None:
        return None
    found = name_in_file(Path(in_file["path"]), in_file["name"])

    from flashgen.verify import Variant

    return found if isinstance(found, Variant) else None


def is_complete(text: str) -> bool:
    """Returns whether SPEC is a complete spec, so that its head dim and dtype must not be set by options."""
    from flashgen.language import AttentionSpec

    text = text.strip()
    in_file = _IN_A_FILE.fullmatch(text)
    if in_file:
        return isinstance(name_in_file(Path(in_file["path"]), in_file["name"]), AttentionSpec)
    return text.startswith("{") or text.endswith(".json")


def _spec_of_variant(text: str, variant: Variant, options: SpecOptions) -> AttentionSpec:
    from flashgen.language import AttentionSpec

    own = {"score": variant.score, "dropout": variant.dropout, "scale": variant.scale, "sink": variant.sink}
    given = options.given()
    refused = ", ".join(f"--{name}" for name in own if name in given)
    if refused:
        raise SpecError(f"SPEC {text!r} is a Variant, so {refused} cannot change it; change its definition")
    arguments: dict[str, Any] = {"head_dim": DEFAULT_HEAD_DIM} | given | own
    return AttentionSpec(**arguments, mask=variant.mask)


def _complete(spec: AttentionSpec, options: SpecOptions) -> AttentionSpec:
    given = ", ".join(f"--{name.replace('_', '-')}" for name in options.given())
    if given:
        raise SpecError(f"SPEC is a complete spec ({spec.name}), so {given} cannot change it; change its definition")
    return spec


def _read(path: str) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise SpecError(f"SPEC {path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"SPEC {path!r} is no text in UTF-8 ({error}); save it as UTF-8") from error


def _from_file_or_parsed(text: str, what: str) -> Any:
    from flashgen.language import parse_mask, parse_score

    in_file = _IN_A_FILE.fullmatch(text.strip())
    if in_file:
        return name_in_file(Path(in_file["path"]), in_file["name"])
    if _REFUSED.fullmatch(text.strip()):
        raise SpecError(f"SPEC {text!r} names a file; give a name in it, as {text}:name")
    return parse_mask(text) if what == "mask" else parse_score(text)
