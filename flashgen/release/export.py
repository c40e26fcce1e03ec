"""Exports specs as a Python package that needs torch only, in the layout of Hugging Face's kernels.

    README.md
    tests/test_<name>.py
    build/torch-cuda/               the variant of the package that `kernels` loads; its modules import torch only
        metadata.json               id, architectures, and the hash of each file
        specs.json                  the exported specs, and their kernels by target and pass
        kernels/                    a release: sources, cubins, and manifest.json
        __init__.py, operators.py, ...    copies of templates/export/
        <name>/__init__.py          for programs that import the package without `kernels`

The launches follow from the manifest of the release, which the package evaluates.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build.written import record_file, recorded_hashes
from flashgen.codegen.arguments import member_name
from flashgen.codegen.environment import environment
from flashgen.codegen.stages import PASSES, Pass, kernels_of
from flashgen.codegen.targets import Target, target_named
from flashgen.errors import BuildError, SpecError, UnsupportedError
from flashgen.files import is_plain_name, why_not_writable
from flashgen.language.indexed_sizes import distance_of, position_of
from flashgen.language.operations import Capture, Load
from flashgen.language.spec import AttentionSpec
from flashgen.release.folder import Progress, contents, emit
from flashgen.release.request import Request
from flashgen.release.writing import Files, refuse_changed, write_folder
from flashgen.strict_json import parse_json
from flashgen.templates_path import template_root

VARIANT = "build/torch-cuda"
_METADATA, _SPECS, _OPS = "metadata.json", "specs.json", "_ops.py"
_MODULES = ("__init__.py", "driver.py", "formulas.py", "launches.py", "operators.py", "specs.py")
_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
_LICENSE = "Apache-2.0"
_ID_DIGITS = 10
_RELEASE = "build a release of it (`flashgen release build`) and call it by flashgen.compile(spec)"


@dataclass(frozen=True)
class _Request:
    """What to export.

    Attributes:
        specs: the specs.
        targets: the targets, each of which gets kernels for all specs.
        passes: ("forward",), or ("forward", "backward") for gradients.
        deterministic: whether gradients are bitwise equal in every run.
        name: the name of the package, of lower-case letters, digits and "-".
    """

    specs: tuple[AttentionSpec, ...]
    targets: tuple[Target, ...]
    name: str
    passes: tuple[Pass, ...]
    deterministic: bool

    @property
    def module(self) -> str:
        """The name of the package in Python."""
        return self.name.replace("-", "_")

    def check(self) -> None:
        """Raises SpecError or UnsupportedError for what cannot be exported, with the remedy."""
        if not _NAME.fullmatch(self.name):
            raise SpecError(
                f"the name {self.name!r} of the package must have lower-case letters, digits and '-', begin with a "
                "letter and not end with '-': choose one with --name (name=... in Python)"
            )
        if "forward" not in self.passes:
            raise SpecError("the backward cannot be exported without the forward: export both passes")
        if self.deterministic and "backward" not in self.passes:
            raise SpecError("deterministic applies to the backward: export both passes, or leave it out")
        for spec in self.specs:
            problem = _unsupported(spec)
            if problem is not None:
                raise UnsupportedError(f"{spec.name} cannot be exported: {problem}")


def _unsupported(spec: AttentionSpec) -> str | None:
    """Returns why exported packages cannot run a spec, with the remedy; None if they can."""
    if spec.sharded:
        return f"its calls take parts of q and k; export the whole spec, or {_RELEASE}"
    if spec.of_cache:
        return f"it reads a KV cache (pages or 8-bit keys); {_RELEASE}"
    if spec.shared_kv:
        return f"its V is a part of K; {_RELEASE}"
    return None


def export(
    specs: Iterable[AttentionSpec],
    out: Path | str,
    *,
    targets: Iterable[str],
    passes: Iterable[Pass] = ("forward", "backward"),
    deterministic: bool = False,
    name: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Mapping[str, Any]:
    """Writes a Python package with the compiled kernels of specs, which needs torch only. Returns its metadata.

    Args:
        specs: the specs.
        out: the folder, which is created, or holds an earlier export that is updated.
        targets: the names of GPU architectures, such as "sm_90a", each of which gets kernels for all specs.
        passes: ("forward", "backward"), or ("forward",) for a package without gradients.
        deterministic: take the backward with bitwise equal gradients in every run.
        name: the name of the package, of lower-case letters, digits and "-"; None for that of the folder.
        force: replace files that were edited or that no export wrote.
        progress: called after each kernel.

    Raises:
        SpecError: the request is invalid.
        UnsupportedError: a spec cannot be exported, or a target cannot run it; the message names both.
        BuildError: a kernel does not compile, NVRTC is missing, or the folder cannot be written.
    """
    out = Path(out)
    name = name or out.resolve().name.lower().replace("_", "-")
    own = (tuple(dict.fromkeys(specs)), tuple(dict.fromkeys(map(target_named, targets))), name)
    request = _Request(*own, tuple(each for each in PASSES if each in set(passes)), deterministic)
    request.check()
    previous = _previous_files(out)
    requests = [
        Request(spec, target, request.passes, request.deterministic)
        for spec in request.specs
        for target in request.targets
    ]
    described = [_describe_spec(spec, request) for spec in request.specs]
    manifest, kernels = contents(emit(requests), headers=False, progress=progress)
    files = {f"kernels/{name}": data for name, data in kernels.items()}
    files |= {name: (template_root() / "export" / name).read_bytes() for name in _MODULES}
    files[_SPECS] = (json.dumps(described, indent=1) + "\n").encode()
    files[f"{request.module}/__init__.py"] = _rendered("direct.py.jinja", request=request)
    identity = _identity(request, files)
    files[_OPS] = _rendered("ops.py.jinja", id=identity)
    metadata = _metadata(request, identity, files)
    context = {"request": request, "specs": described, "metadata": metadata, "nvrtc": manifest["nvrtc_version"]}
    outer = {
        "README.md": _rendered("README.md.jinja", **context),
        f"tests/test_{request.module}.py": _rendered("test.py.jinja", **context),
    }
    complete = outer | {f"{VARIANT}/{name}": data for name, data in sorted(files.items())}
    complete[f"{VARIANT}/{_METADATA}"] = (json.dumps(metadata, indent=2) + "\n").encode()
    if not force:
        known = {each: {"sha256": each} for each in recorded_hashes()}
        refuse_changed(out, complete, {**previous, **known})
    write_folder(out, complete, previous)
    for name in (*outer, f"{VARIANT}/{_METADATA}"):  # which has the hashes of the other files
        record_file(out / name)
    return metadata


def _describe_spec(spec: AttentionSpec, request: _Request) -> dict[str, Any]:
    """Returns what the package must know of a spec. The manifest of its kernels has the complete JSON of the spec."""
    return {
        "name": spec.name,
        "mask": spec.mask.name,
        "score": spec.score.name if spec.score else None,
        "head_dim": spec.head_dim,
        "value_dim": spec.value_dim,
        "scale": spec.scale,
        "dropout": spec.dropout,
        "layout": spec.layout,
        "dtype": spec.dtype,
        "out_dtype": spec.out_element.name,
        "grad_dtype": spec.grad_element.name,
        "captures": [_describe_capture(spec, capture) for capture in spec.captures],
        "kernels": {target.name: _kernel_names(spec, target, request) for target in request.targets},
    }


def _kernel_names(spec: AttentionSpec, target: Target, request: _Request) -> dict[str, list[str]]:
    """Returns the names of the kernels of each pass, in launch order."""
    options: dict[str, Any] = {"deterministic": request.deterministic, "unique_names": True}
    return {
        each: [kernel.name for kernel in kernels_of(spec, target, (each,), **options).values()]
        for each in request.passes
    }


def _describe_capture(spec: AttentionSpec, capture: Capture) -> dict[str, Any]:
    """Returns what the package must know of a captured array or number.

    indexed: (axis, index, block) of each axis that is read at b, h, q or k, or at blocks of them. distances: (axis,
    farthest) of each axis that is read at a distance up to a number, or up to a captured number of this name.
    """
    expressions = [spec.mask.expression, *([spec.score.expression] if spec.score else [])]
    loads = [load for each in expressions for load in each.atoms(Load) if load.capture == capture]
    positions = {(axis, position_of(index)) for load in loads for axis, index in enumerate(load.indices)}
    distances = {(axis, distance_of(index)) for load in loads for axis, index in enumerate(load.indices)}
    return {
        "name": capture.name,
        "member": member_name(capture),
        "dtype": capture.dtype,
        "ndim": capture.ndim,
        "grad": capture.grad,
        "sink": capture == spec.sink,
        "indexed": sorted([axis, str(found[0]), found[1]] for axis, found in positions if found),
        "distances": [
            [axis, farthest.name if isinstance(farthest, Capture) else farthest]
            for axis, farthest in sorted(distances, key=str)
            if farthest is not None
        ],
    }


def _rendered(template: str, **context: Any) -> bytes:
    return environment().get_template(f"export/{template}").render(context).encode()


def _identity(request: _Request, files: Mapping[str, bytes]) -> str:
    """Returns the id of the package, which is also the namespace of its operators: it differs if any file differs."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    return f"_{request.module}_cuda_{digest.hexdigest()[:_ID_DIGITS]}"


def _metadata(request: _Request, identity: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns the content of metadata.json, as `kernels` reads it."""
    hashes = {name: base64.b64encode(hashlib.sha256(data).digest()).decode() for name, data in sorted(files.items())}
    return {
        "id": identity,
        "name": request.name,
        "version": 1,
        "license": _LICENSE,
        "python-depends": [],
        "backend": {"type": "cuda", "archs": [_architecture(target) for target in request.targets]},
        "digest": {"algorithm": "sha256", "files": hashes},
    }


def _architecture(target: Target) -> str:
    """Returns the name of a target in metadata.json, such as "9.0a"."""
    major, minor = divmod(target.compute_capability, 10)
    return f"{major}.{minor}{'a' if target.is_of_one_generation else ''}"


def _previous_files(out: Path) -> Files:
    """Returns the files of the export in a folder with their hashes; none for a new or empty folder.

    Raises BuildError if the folder cannot be written, or has other content.
    """
    problem = why_not_writable(out)
    if problem is not None:
        raise BuildError(f"out={str(out)!r} cannot be written: {problem}")
    if not out.exists() or not any(out.iterdir()):
        return {}
    path = out / VARIANT / _METADATA
    try:
        hashes = parse_json(path.read_bytes())["digest"]["files"]
        foreign = [name for name in hashes if not all(map(is_plain_name, name.split("/")))]
        if foreign:
            raise ValueError(f"it names a file outside of the folder, {foreign[0]!r}")
        return {f"{VARIANT}/{name}": {"sha256": base64.b64decode(each).hex()} for name, each in hashes.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(
            f"out={str(out)!r} is not empty, and holds no package that `flashgen export` wrote ({path} cannot be read: "
            f"{error}); name an empty or a new folder"
        ) from error
