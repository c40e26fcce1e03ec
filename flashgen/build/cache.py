"""Compiled kernels on disk: found by what they were made from, built once, checked whenever they are used.

FLASHGEN_CACHE_DIR      where entries stand; else `flashgen` in the platform's folder for caches
FLASHGEN_CACHE_SHARED=1 trust that folder's owner and group too (`flashgen.build.trust`)
FLASHGEN_JIT=0          compile nothing: a kernel that is not there is an error that says which
FLASHGEN_RELEASE        a folder of `flashgen release build`, looked up before anything else

A folder that cannot be used (it is full, read-only, somebody else's) stops nobody: the user is told once, and this
process keeps what it builds in memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build import nvrtc
from flashgen.build.cache_folder import UnusableCache, absolute, accessible, default_root, make, say, say_once, trusted
from flashgen.build.entries import (
    Artifacts,
    DamagedEntry,
    StoredEntry,
    discard,
    is_entry,
    leftover_keys,
    lock_path,
    read_entry,
    remove_leftovers,
    write_entry,
)
from flashgen.build.keys import SHORT_KEY, folder_name, kernel_key
from flashgen.build.locks import exclusive
from flashgen.build.memory import MEMORY
from flashgen.build.prebuilt import PrebuiltFolder
from flashgen.build.resources import Resources
from flashgen.errors import BuildError

SOURCE, CUBIN = "kernel.cu", "kernel.cubin"

_log = logging.getLogger(__name__)

Build = Callable[[], Mapping[str, bytes] | Artifacts]


@dataclass(frozen=True)
class Entry:
    """A compiled kernel.

    `cubin` holds the very bytes that were checked, and these are loaded. `path` and `cubin_path` say where they stand,
    and are None for a kernel that no cache folder took. `hit` says that nothing was compiled for it.
    """

    path: Path | None
    source: str
    cubin_path: Path | None
    cubin: bytes
    resources: Resources
    meta: Mapping[str, Any]
    hit: bool


@dataclass(frozen=True)
class Listed:
    """A line of `flashgen cache list`: an entry's name, the digits of its key, its folder and its size in bytes."""

    name: str
    key: str
    path: Path
    bytes: int


class KernelCache:
    """A folder of entries `<readable-name>.<16 hex>`. Any number of threads and processes may share one."""

    def __init__(self, root: Path | str, *, jit: bool = True, release: Path | str | None = None) -> None:
        """Reads and makes nothing yet.

        Args:
            root: the folder of the entries; made when the first one is written.
            jit: False refuses to build what is not there.
            release: a folder of prebuilt kernels that is looked up first.
        """
        self.root = absolute(root, "root")
        self.jit = jit
        self.release = absolute(release, "release") if release else None
        self._prebuilt: PrebuiltFolder | None = None

    @classmethod
    def from_environment(cls) -> KernelCache:
        """The cache that FLASHGEN_CACHE_DIR, FLASHGEN_JIT and FLASHGEN_RELEASE describe at this moment."""
        jit = os.environ.get("FLASHGEN_JIT", "")
        if jit not in ("", "0", "1"):
            raise BuildError(f"FLASHGEN_JIT must be 0 (compile nothing) or 1, got {jit!r}")
        release = os.environ.get("FLASHGEN_RELEASE")
        return cls(default_root(), jit=jit != "0", release=absolute(release, "FLASHGEN_RELEASE") if release else None)

    def load_or_compile(self, name: str, source: str, architecture: str, *, prebuild: str | None = None) -> Entry:
        """The compiled kernel: from the release folder, else from the cache, else compiled now.

        Args:
            name: the readable name of the kernel.
            source: its emitted CUDA.
            architecture: `sm_80`, `sm_90a`, ...
            prebuild: the command that would put it into the cache, for the message of FLASHGEN_JIT=0.

        Raises:
            BuildError: it does not compile, NVRTC is missing, or FLASHGEN_JIT=0 and the kernel is in neither place.
        """
        found = self._from_release(name, source, architecture)
        if found is not None:
            return found
        version = nvrtc.version()
        key = kernel_key(source, architecture, nvrtc.options(architecture), version)

        def build() -> Artifacts:
            compiled = nvrtc.compile(source, architecture, name)
            facts = {
                "name": name,
                "architecture": architecture,
                "nvrtc_version": list(version),
                "options": list(nvrtc.options(architecture)),
                "resources": compiled.resources.to_dict(),
                "log": compiled.log,
            }
            return Artifacts({SOURCE: source.encode(), CUBIN: compiled.cubin}, facts)

        stored, hit = self._get_or_build(name, key, build, self._refusal(f"{name} for {architecture}", prebuild))
        if isinstance(stored, Artifacts):
            path, cubin_path, facts = None, None, stored.facts
        else:
            path, cubin_path, facts = stored.path, stored.path / CUBIN, stored.meta
        return Entry(path, source, cubin_path, stored.files[CUBIN], Resources.from_dict(facts["resources"]), facts, hit)

    def get_or_build(self, name: str, key: str, build: Build) -> Path:
        """The folder of an entry of any kind. Takes and raises what `entry` does."""
        return self.entry(name, key, build).path

    def entry(self, name: str, key: str, build: Build) -> StoredEntry:
        """An entry of any kind, which `build` makes when it is not there. Its bytes stay when others clear the cache.

        Args:
            name: a readable name.
            key: what `keys.content_key` makes of everything that the files are made from.
            build: makes the files, by plain name, or `Artifacts` of them; called once however many processes ask.

        Where the cache folder cannot be used, the entry stands in a temporary folder of this process.

        Raises:
            BuildError: FLASHGEN_JIT=0 and the entry is not there, or there is no room for temporary files either.
        """
        refusal = (
            f"{name} is not in the cache {self.root}, and FLASHGEN_JIT=0 forbids building it now; "
            "run once without FLASHGEN_JIT=0, which puts it there"
        )
        stored, _ = self._get_or_build(name, key, build, refusal)
        if isinstance(stored, StoredEntry):
            return stored
        return self._apart(name, key, stored)

    def entry_apart(self, name: str, key: str, build: Build) -> StoredEntry:
        """The same entry in a temporary folder of this process, where clearing the cache does not remove it."""
        stored = self.entry(name, key, build)
        return self._apart(name, key, Artifacts(stored.files))

    def _apart(self, name: str, key: str, artifacts: Artifacts) -> StoredEntry:
        try:
            folder = MEMORY.on_disk(self._place(name, key), artifacts)
        except OSError as error:
            raise BuildError(f"{name} needs a folder for temporary files ({error}); set TMPDIR to one") from error
        return StoredEntry(folder, artifacts.files, artifacts.facts)

    def find(self, name: str, key: str) -> StoredEntry | None:
        """The entry of that name and key, every byte checked; None where there is none.

        A damaged entry and a cache folder that cannot be used count as none, and the user is told.
        """
        try:
            return self._read(*self._place(name, key), remedy="it is not used")
        except UnusableCache as problem:
            say_once(problem, "what is kept there is not used")
            return None

    def put(self, name: str, key: str, artifacts: Artifacts) -> StoredEntry:
        """Writes an entry, in place of one that may be there. BuildError: the cache folder cannot be used."""
        with self._locked(key), trusted(self.root):
            return write_entry(*self._place(name, key), artifacts)

    def path(self) -> Path:
        """The folder of the entries, which may not exist yet."""
        return self.root

    def list(self) -> tuple[Listed, ...]:
        """The entries by name, their files not checked. BuildError: the cache folder cannot be read."""
        with accessible(self.root):
            return tuple(_listed(folder) for folder in sorted(self._entry_folders()))

    def clear(self) -> int:
        """Remove every entry, and what killed builders left; returns how many entries. Builders may run beside it.

        Everything else in the folder stays, whatever it is called. BuildError: the cache folder cannot be written.
        """
        with accessible(self.root):
            removed = sum(discard(folder, folder.name.rpartition(".")[2]) for folder in self._entry_folders())
            for short_key in leftover_keys(self.root):
                with exclusive(lock_path(self.root, short_key), wait=False) as held:
                    if held:
                        remove_leftovers(self.root, short_key)
        return removed

    def _get_or_build(self, name: str, key: str, build: Build, refusal: str) -> tuple[StoredEntry | Artifacts, bool]:
        """(the entry, or what this process alone keeps of it, whether it was there already).

        refusal: the error message where building is forbidden.
        """
        kept = MEMORY.find(self._place(name, key))

        def build_once() -> Artifacts:
            """The disk may turn out to be full only after the kernel was built."""
            nonlocal kept
            if kept is None:
                built = build()
                kept = built if isinstance(built, Artifacts) else Artifacts(built)
            return kept

        try:
            return self._get_or_store(name, key, build_once, refusal)
        except UnusableCache as problem:
            if not self.jit:
                raise BuildError(f"{refusal} ({problem})") from problem
            say_once(problem, "until then what is built is kept in memory, by each process for itself")
            return MEMORY.get_or_build(self._place(name, key), build_once)

    def _get_or_store(
        self, name: str, key: str, build: Callable[[], Artifacts], refusal: str
    ) -> tuple[StoredEntry, bool]:
        found = self._read(*self._place(name, key))
        if found is not None:
            return found, True
        if not self.jit:
            raise BuildError(refusal)
        with self._locked(key):
            # Another process may have built it while this one waited.
            found = self._read(*self._place(name, key), warn=False)
            if found is not None:
                return found, True
            _log.info("building %s", folder_name(name, key))
            artifacts = build()
            with trusted(self.root):
                return write_entry(*self._place(name, key), artifacts), False

    def _place(self, name: str, key: str) -> tuple[Path, str]:
        return self.root / folder_name(name, key), key

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Holds the key's lock, over a tidy folder. Errors that the body raises pass through as they are."""
        with ExitStack() as stack:
            with trusted(self.root):
                make(self.root)
                stack.enter_context(exclusive(lock_path(self.root, key)))
                remove_leftovers(self.root, key[:SHORT_KEY])
            yield

    def _read(self, folder: Path, key: str, *, warn: bool = True, remedy: str | None = None) -> StoredEntry | None:
        try:
            with trusted(self.root):
                return read_entry(folder, key)
        except DamagedEntry as damage:
            if warn:
                remedy = remedy or ("it is built again" if self.jit else "it is not used")
                say(f"the cache entry {folder} is damaged: {damage}; {remedy}")
            return None

    def _from_release(self, name: str, source: str, architecture: str) -> Entry | None:
        if self.release is None:
            return None
        if self._prebuilt is None:
            try:
                self._prebuilt = PrebuiltFolder.open(self.release)
            except BuildError as error:
                raise BuildError(f"FLASHGEN_RELEASE cannot be used: {error}") from error
        try:
            found = self._prebuilt.find(source, architecture)
        except DamagedEntry as damage:
            say(f"the kernel {name} of the release folder {self.release} is damaged: {damage}; it is not used")
            return None
        if found is None:
            return None
        resources = Resources.from_dict(found.meta["resources"])
        return Entry(self.release, source, found.cubin_path, found.cubin, resources, found.meta, hit=True)

    def _refusal(self, what: str, prebuild: str | None) -> str:
        searched = f"neither in the release folder {self.release} nor" if self.release else "not"
        command = f"`{prebuild or 'flashgen release build MANIFEST --out DIR'}`"
        if prebuild is None:
            command += " and set FLASHGEN_RELEASE=DIR"
        return (
            f"kernel {what} is {searched} in the cache {self.root}, and FLASHGEN_JIT=0 forbids building it now; "
            f"build it beforehand with {command}, or unset FLASHGEN_JIT"
        )

    def _entry_folders(self) -> Iterator[Path]:
        return filter(is_entry, self.root.iterdir() if self.root.is_dir() else ())


def default_cache() -> KernelCache:
    """The cache that the environment describes at this moment."""
    return KernelCache.from_environment()


def _listed(folder: Path) -> Listed:
    name, _, key = folder.name.rpartition(".")
    try:
        size = sum(file.stat().st_size for file in folder.iterdir())
    except FileNotFoundError:  # somebody cleared it meanwhile
        size = 0
    return Listed(name, key, folder, size)
