"""Builds a folder of sources, cubins, headers and `manifest.json`. A request gives the same bytes on every machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build import Entry, KernelCache, kernel_key, nvrtc
from flashgen.build.cache import default_root
from flashgen.build.entries import describe
from flashgen.build.keys import readable_name
from flashgen.build.prebuilt import MANIFEST, MANIFEST_FORMAT
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import kernels_by_sizes, kernels_of
from flashgen.errors import BuildError, UnsupportedError
from flashgen.language.spec import AttentionSpec
from flashgen.release.launch_facts import FORMULAS, launch_facts, step_facts
from flashgen.release.launch_header import launch_header
from flashgen.release.request import AnyRequest, Step, read_requests
from flashgen.release.writing import SUFFIXES, previous_files, refuse_changed, write_folder

Progress = Callable[[int, int, str], None]
"""Called after each kernel with the number of finished kernels, the total, and the name of the kernel."""


@dataclass(frozen=True)
class EmittedKernel:
    """A kernel of a release before compilation, with its spec, if any, and the facts of its launch."""

    spec: AttentionSpec | None
    rendered: RenderedKernel
    launch: Mapping[str, Any]

    @property
    def stem(self) -> str:
        """The name of its files, without the extension."""
        return readable_name(self.rendered.name)


def build(
    manifest_path: Path | str,
    out: Path | str,
    *,
    sources_only: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Mapping[str, Any]:
    """Builds everything that a release manifest requests. Returns the content of the `manifest.json` that it writes.

    The folder of an earlier release is updated: files of kernels that are no longer requested are removed, unless they
    have been changed. A file that would be replaced and has been changed is an error, unless `force` is True. If the
    folder cannot be written, it stays as it was.

    Args:
        manifest_path: a TOML or JSON file, described in `flashgen.release.request`.
        out: the folder, created if it does not exist. A folder with other content is rejected.
        sources_only: write no cubins, which needs no NVRTC. The kernels of such a folder cannot be run.
        force: replace files that have been changed since the earlier release wrote them.
        progress: called after each kernel.

    Raises:
        SpecError: the manifest requests something invalid.
        UnsupportedError: a target cannot run a requested spec; the message names both.
        BuildError: a kernel does not compile, NVRTC is missing, the folder cannot be written, or a file in it was
            changed.
    """
    out = Path(out)
    previous = previous_files(out)
    emitted = emit(read_requests(manifest_path))
    if not force:
        suffixes = SUFFIXES[:1] if sources_only else SUFFIXES
        refuse_changed(out, [f"{kernel.stem}{suffix}" for kernel in emitted for suffix in suffixes], previous)
    manifest, files = contents(emitted, sources_only=sources_only, progress=progress)
    write_folder(out, files, previous)
    return manifest


def contents(
    emitted: Sequence[EmittedKernel],
    *,
    sources_only: bool = False,
    headers: bool = True,
    progress: Progress | None = None,
) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    """Compiles kernels. Returns the manifest of a release of them, and its files by name; `manifest.json` is the last.

    Args:
        headers: whether each cubin has a C++ header.
    """
    entries = _without_cubins(emitted, progress) if sources_only else _compiled(emitted, progress)
    version = None if sources_only else nvrtc.version()
    files: dict[str, bytes] = {}
    kernels = [
        _describe_kernel(kernel, entry, version, files, headers) for kernel, entry in zip(emitted, entries, strict=True)
    ]
    manifest = {
        "format": MANIFEST_FORMAT,
        "formulas": FORMULAS,
        "nvrtc_version": list(version) if version else None,
        "kernels": kernels,
    }
    files[MANIFEST] = manifest_text(manifest).encode()
    return manifest, files


def emit(requests: Iterable[AnyRequest]) -> tuple[EmittedKernel, ...]:
    """Emits the kernels that the requests need, sorted by file name. Raises UnsupportedError naming spec and target."""
    kernels: dict[str, EmittedKernel] = {}
    for request in requests:
        for kernel in _emit_request(request):
            other = kernels.setdefault(kernel.stem, kernel)
            if other.rendered.source != kernel.rendered.source:
                raise BuildError(f"two different kernels of the release would both be written to {kernel.stem}.cu")
    return tuple(kernels[stem] for stem in sorted(kernels))


def _emit_request(request: AnyRequest) -> Iterator[EmittedKernel]:
    """Yields every kernel that calls of a requested spec launch, as rendered by `flashgen.attention`."""
    if isinstance(request, Step):
        rendered = request.rendered()
        yield EmittedKernel(None, rendered, step_facts(rendered))
        return
    spec, target = request.spec, request.target
    try:
        for name in request.passes:
            default = kernels_of(spec, target, (name,), deterministic=request.deterministic, unique_names=True)
            others = kernels_by_sizes(spec, target, name, request.heads_per_kv, request.deterministic)
            for kernels in (default, *(others if request.heads_per_kv else ())):
                facts = launch_facts(kernels, spec)
                yield from (EmittedKernel(spec, kernel, facts[part]) for part, kernel in kernels.items())
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{spec.name} for {target.name}: {error}; take it out of the release manifest, "
            "for instance by a group of its own for the targets that can"
        ) from error


def _without_cubins(emitted: Sequence[EmittedKernel], progress: Progress | None) -> list[Entry | None]:
    for number, kernel in enumerate(emitted, start=1):
        if progress:
            progress(number, len(emitted), kernel.rendered.name)
    return [None] * len(emitted)


def _compiled(emitted: Sequence[EmittedKernel], progress: Progress | None) -> list[Entry | None]:
    """Compiles the kernels into the kernel cache, so that an interrupted build resumes where it stopped."""
    cache = KernelCache(default_root())
    nvrtc.version()  # loads NVRTC before threads use it

    def compile_kernel(kernel: EmittedKernel) -> Entry:
        rendered = kernel.rendered
        return cache.load_or_compile(rendered.name, rendered.source, rendered.target.architecture)

    entries: list[Entry | None] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = [pool.submit(compile_kernel, kernel) for kernel in emitted]
        try:
            for kernel, future in zip(emitted, futures, strict=True):
                entries.append(future.result())
                if progress:
                    progress(len(entries), len(emitted), kernel.rendered.name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return entries


def _describe_kernel(
    kernel: EmittedKernel, entry: Entry | None, version: tuple[int, int] | None, files: dict[str, bytes], headers: bool
) -> dict[str, Any]:
    """Returns the entry of a kernel in `manifest.json`, and adds its files to `files`."""
    rendered, architecture = kernel.rendered, kernel.rendered.target.architecture
    described: dict[str, Any] = {
        "name": rendered.name,
        "entry": rendered.entry,
        "target": rendered.target.name,
        "architecture": architecture,
        "spec": json.loads(kernel.spec.to_json()) if kernel.spec else None,
        "threads": rendered.threads,
        "shared_bytes": rendered.shared_bytes,
        "files": {"source": _add_file(f"{kernel.stem}.cu", rendered.source.encode(), files)},
    }
    described |= kernel.launch
    if entry is not None and version is not None:
        described["key"] = kernel_key(rendered.source, architecture, nvrtc.options(architecture, version), version)
        described["nvrtc_version"] = list(version)
        described["resources"] = entry.resources.to_dict()
        described["files"]["cubin"] = _add_file(f"{kernel.stem}.cubin", entry.cubin, files)
        if headers:
            described["files"]["header"] = _add_file(f"{kernel.stem}.h", launch_header(described).encode(), files)
    return described


def _add_file(name: str, data: bytes, files: dict[str, bytes]) -> dict[str, Any]:
    files[name] = data
    return {"path": name, **describe(data)}


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Serializes a manifest to canonical JSON that is readable in diffs, with one line per fact of a kernel.

    Objects in a list, such as the members of an argument struct, have a line each.
    """

    def compact(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    def fact(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return "[\n" + ",\n".join(f"   {compact(each)}" for each in value) + "\n  ]"
        return compact(value)

    kernels = [
        " {\n" + ",\n".join(f"  {compact(name)}: {fact(kernel[name])}" for name in sorted(kernel)) + "\n }"
        for kernel in manifest["kernels"]
    ]
    rest = [f"{compact(name)}: {compact(manifest[name])}" for name in sorted(manifest) if name != "kernels"]
    return "{\n" + ",\n".join([*rest, '"kernels": [\n' + ",\n".join(kernels) + "\n]"]) + "\n}\n"
