"""The on-disk cache of compiled kernels. Entries are found by a hash of their inputs and verified on every use.

FLASHGEN_CACHE_DIR      the cache folder; the default is `flashgen` in the platform's folder for caches
FLASHGEN_CACHE_SHARED=1 also trusts the owner and the group of the cache folder (`flashgen.build.trust`)
FLASHGEN_JIT=0          disables compilation; a missing kernel raises an error that names it
FLASHGEN_RELEASE        a folder written by `flashgen release build`, which is searched first

A cache folder that cannot be used (because it is full, read-only or owned by another user) causes one warning. This
process then keeps what it builds in memory.
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
from flashgen.build.cache_folder import (
    UnusableCache,
    absolute,
    accessible,
    create_folder,
    default_root,
    trusted,
    warn_once,
    warn_user,
)
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

    `cubin` holds the bytes that were verified; exactly these are loaded. `path` and `cubin_path` are the entry's folder
    and file, or None for a kernel that could not be stored. `hit` is True if nothing was compiled for this request.
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
    """A line of `flashgen cache list`: the entry's name, the digits of its key, its folder and its size in bytes."""

    name: str
    key: str
    path: Path
    bytes: int


class KernelCache:
    """A folder of entries `<readable-name>.<16 hex>`. Any number of threads and processes may share one."""

    def __init__(self, root: Path | str, *, jit: bool = True, release: Path | str | None = None) -> None:
        """Does not access the file system yet.

        Args:
            root: the folder of the entries; created when the first one is written.
            jit: if False, a missing entry raises an error instead of being built.
            release: a folder of prebuilt kernels that is searched first.
        """
        self.root = absolute(root, "root")
        self.jit = jit
        self.release = absolute(release, "release") if release else None
        self._prebuilt: PrebuiltFolder | None = None

    @classmethod
    def from_environment(cls) -> KernelCache:
        """Returns the cache that FLASHGEN_CACHE_DIR, FLASHGEN_JIT and FLASHGEN_RELEASE currently describe."""
        jit = os.environ.get("FLASHGEN_JIT", "")
        if jit not in ("", "0", "1"):
            raise BuildError(f"FLASHGEN_JIT must be 0 (compile nothing) or 1, got {jit!r}")
        release = os.environ.get("FLASHGEN_RELEASE")
        return cls(default_root(), jit=jit != "0", release=absolute(release, "FLASHGEN_RELEASE") if release else None)

    def load_or_compile(self, name: str, source: str, architecture: str, *, prebuild: str | None = None) -> Entry:
        """Returns the compiled kernel from the release folder or the cache, or compiles it.

        Args:
            name: the readable name of the kernel.
            source: its emitted CUDA.
            architecture: `sm_80`, `sm_90a`, ...
            prebuild: the command that would put it into the cache, for the error message under FLASHGEN_JIT=0.

        Raises:
            BuildError: the kernel does not compile, NVRTC is missing, or FLASHGEN_JIT=0 is set and the kernel is
                neither in the release folder nor in the cache.
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
        """Returns the folder of an entry of any kind. Arguments and errors are the same as in `entry`."""
        return self.entry(name, key, build).path

    def entry(self, name: str, key: str, build: Build) -> StoredEntry:
        """Returns an entry of any kind; `build` creates it if it is missing.

        The returned bytes stay valid when another process clears the cache. If the cache folder cannot be used, the
        entry is stored in a temporary folder of this process.

        Args:
            name: a readable name.
            key: the result of `keys.content_key` for everything that the files are made from.
            build: returns the files by plain name, or `Artifacts`. Concurrent processes call it only once in total.

        Raises:
            BuildError: FLASHGEN_JIT=0 is set and the entry is missing, or temporary files cannot be written.
        """
        refusal = (
            f"{name} is not in the cache {self.root}, and FLASHGEN_JIT=0 forbids building it now; "
            "run once without FLASHGEN_JIT=0, which puts it there"
        )
        stored, _ = self._get_or_build(name, key, build, refusal)
        if isinstance(stored, StoredEntry):
            return stored
        return self._write_temporary(name, key, stored)

    def temporary_entry(self, name: str, key: str, build: Build) -> StoredEntry:
        """Returns the same as `entry`, in a temporary folder that is not affected by clearing the cache."""
        stored = self.entry(name, key, build)
        return self._write_temporary(name, key, Artifacts(stored.files))

    def _write_temporary(self, name: str, key: str, artifacts: Artifacts) -> StoredEntry:
        try:
            folder = MEMORY.write_to_disk(self._location(name, key), artifacts)
        except OSError as error:
            raise BuildError(f"{name} needs a folder for temporary files ({error}); set TMPDIR to one") from error
        return StoredEntry(folder, artifacts.files, artifacts.facts)

    def find(self, name: str, key: str) -> StoredEntry | None:
        """Returns the entry of that name and key with every byte verified, or None if there is none.

        A damaged entry or a cache folder that cannot be used counts as no entry and causes a warning.
        """
        try:
            return self._read(*self._location(name, key), remedy="it is not used")
        except UnusableCache as problem:
            warn_once(problem, "its entries are not used")
            return None

    def put(self, name: str, key: str, artifacts: Artifacts) -> StoredEntry:
        """Writes an entry, replacing an existing one. Raises BuildError if the cache folder cannot be used."""
        with self._locked(key), trusted(self.root):
            return write_entry(*self._location(name, key), artifacts)

    def path(self) -> Path:
        """Returns the folder of the entries, which may not exist yet."""
        return self.root

    def list(self) -> tuple[Listed, ...]:
        """Lists the entries by name without verifying their files. Raises BuildError if the folder cannot be read."""
        with accessible(self.root):
            return tuple(_listed(folder) for folder in sorted(self._entry_folders()))

    def clear(self) -> int:
        """Removes all entries and the remains of killed builds. Returns the number of entries removed.

        Builds may run concurrently. Other files in the folder stay. Raises BuildError if the cache folder cannot be
        written.
        """
        with accessible(self.root):
            removed = sum(discard(folder, folder.name.rpartition(".")[2]) for folder in self._entry_folders())
            for short_key in leftover_keys(self.root):
                with exclusive(lock_path(self.root, short_key), wait=False) as held:
                    if held:
                        remove_leftovers(self.root, short_key)
        return removed

    def _get_or_build(self, name: str, key: str, build: Build, refusal: str) -> tuple[StoredEntry | Artifacts, bool]:
        """Returns the stored entry, or the artifacts that only this process keeps, and whether they already existed.

        refusal: the error message for an entry that is missing while building is disabled.
        """
        in_memory = MEMORY.find(self._location(name, key))

        def build_once() -> Artifacts:
            """Builds at most once, because the disk may turn out to be full only after the kernel was built."""
            nonlocal in_memory
            if in_memory is None:
                built = build()
                in_memory = built if isinstance(built, Artifacts) else Artifacts(built)
            return in_memory

        try:
            return self._get_or_store(name, key, build_once, refusal)
        except UnusableCache as problem:
            if not self.jit:
                raise BuildError(f"{refusal} ({problem})") from problem
            warn_once(problem, "until then each process keeps what it builds in memory")
            return MEMORY.get_or_build(self._location(name, key), build_once)

    def _get_or_store(
        self, name: str, key: str, build: Callable[[], Artifacts], refusal: str
    ) -> tuple[StoredEntry, bool]:
        found = self._read(*self._location(name, key))
        if found is not None:
            return found, True
        if not self.jit:
            raise BuildError(refusal)
        with self._locked(key):
            # Another process may have built it while this one waited for the lock.
            found = self._read(*self._location(name, key), warn=False)
            if found is not None:
                return found, True
            _log.info("building %s", folder_name(name, key))
            artifacts = build()
            with trusted(self.root):
                return write_entry(*self._location(name, key), artifacts), False

    def _location(self, name: str, key: str) -> tuple[Path, str]:
        return self.root / folder_name(name, key), key

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Holds the lock of a key and removes remains of killed builds. Errors of the body are not translated."""
        with ExitStack() as stack:
            with trusted(self.root):
                create_folder(self.root)
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
                warn_user(f"the cache entry {folder} is damaged: {damage}; {remedy}")
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
            warn_user(f"the kernel {name} of the release folder {self.release} is damaged: {damage}; it is not used")
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
    """Returns the cache that the environment variables currently describe."""
    return KernelCache.from_environment()


def _listed(folder: Path) -> Listed:
    name, _, key = folder.name.rpartition(".")
    try:
        size = sum(file.stat().st_size for file in folder.iterdir())
    except FileNotFoundError:  # cleared concurrently
        size = 0
    return Listed(name, key, folder, size)
