"""Finds the kernel that an edited text replaces, and checks that the text fits the launch of that kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

from flashgen.attention.edits import Edits, unmarked
from flashgen.attention.given_sources import GivenText
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.source_text import constants, entry_points, struct_members, without_comments
from flashgen.codegen.stages import Kernels, backward_kernels, forward_kernels, with_unique_names
from flashgen.codegen.targets import Target
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec

# The constants that determine grids, threads, lists and the shapes of arrays.
_FIXED = ("kHeadDim", "kValueDim", "kPackedHeads", "kConsumers", "kWarps", "kTileQ", "kTileK", "kRows", "kThreads")


class Emitted:
    """The emitted kernels that texts may replace, by part; those of the backward are rendered on first access."""

    def __init__(
        self,
        spec: AttentionSpec,
        target: Target,
        plan: Plan | None,
        deterministic: bool,
        backward_plan: Any | None,
    ) -> None:
        self.described = f"{spec.name} for {target.name}"
        self._spec_and_target, self._plan = (spec, target), plan
        self._deterministic, self._backward_plan = deterministic, backward_plan

    @cached_property
    def forward(self) -> Kernels:
        return forward_kernels(*self._spec_and_target, plan=self._plan)

    @cached_property
    def backward(self) -> Kernels:
        kernels = backward_kernels(*self._spec_and_target, self._deterministic, plan=self._backward_plan)
        return {"backward_lists" if part == "lists" else part: kernel for part, kernel in kernels.items()}

    @cached_property
    def released(self) -> Mapping[str, str]:
        """The names of the backward's kernels in a release, by part."""
        plain = {part.removeprefix("backward_"): kernel for part, kernel in self.backward.items()}
        renamed = with_unique_names(plain, self._deterministic).values()
        return {part: kernel.name for part, kernel in zip(self.backward, renamed, strict=True)}

    def part_of(self, given: GivenText) -> str | None:
        """Returns the part that a text replaces, or None. Raises ArgumentError if it matches two parts."""
        parts = self._parts(given, self.forward, {}) or self._parts(given, self.backward, self.released)
        if parts == ["lists"] and self._deterministic and given.kernel != "lists" and not given.of_folder:
            parts.append("backward_lists")  # has the same name and entry point
        if len(parts) > 1:
            raise ArgumentError(f"{given.origin} may be of {' or of '.join(parts)}: say source={{{parts[0]!r}: ...}}")
        return parts[0] if parts else None

    def _parts(self, given: GivenText, kernels: Kernels, released: Mapping[str, str]) -> list[str]:
        wanted = unmarked(given.kernel)
        if given.of_folder:
            return [part for part, kernel in kernels.items() if wanted == released.get(part, kernel.name)]
        if wanted:
            return [part for part, kernel in kernels.items() if wanted in (part, kernel.name, released.get(part))]
        entries = entry_points(without_comments(given.text))
        return [part for part, kernel in kernels.items() if kernel.entry in entries]

    def kernel(self, part: str) -> RenderedKernel:
        return self.forward[part] if part in self.forward else self.backward[part]

    def no_match_error(self, given: GivenText) -> ArgumentError:
        """Returns the error for a text that matches no kernel."""
        if given.kernel:
            names = ", ".join((*self.forward, *self.backward))
            return ArgumentError(f"source[{given.kernel!r}] is no kernel of {self.described}; its kernels are {names}")
        entries = ", ".join(entry_points(without_comments(given.text)))
        what = f"the entry points {entries}" if entries else 'no entry point (extern "C" __global__ ...)'
        if "\n" not in given.text:
            what += ", and one line, so that it may be a file's name: give a pathlib.Path"
        known = [f"{part} {self.kernel(part).entry}" for part in (*self.forward, *self.backward)]
        return ArgumentError(
            f"{given.origin} is no kernel of {self.described}: it has {what}. These are: {', '.join(known)}"
        )


def match_edits(texts: Sequence[GivenText], emitted: Emitted) -> Edits:
    """Returns the edits of given texts. A text that equals the emitted one is no edit.

    Raises:
        ArgumentError: a text matches no kernel or two kernels, two texts match one kernel, or a text does not fit the
            launch of its kernel.
    """
    found: dict[str, GivenText] = {}
    for given in texts:
        part = emitted.part_of(given)
        if part is None:
            if given.of_folder:
                continue
            raise emitted.no_match_error(given)
        if part in found:
            raise ArgumentError(f"{found[part].origin} and {given.origin} are both of the kernel {part}: give one")
        _check_fits(given, part, emitted.kernel(part))
        found[part] = given
    if texts and not found:
        names = [kernel.name for kernel in (*emitted.forward.values(), *emitted.backward.values())]
        raise ArgumentError(
            f"source: no file is of {emitted.described}; those are {', '.join(f'{n}.cu' for n in names)}"
        )
    return Edits({part: given for part, given in found.items() if given.text != emitted.kernel(part).source})


def _check_fits(given: GivenText, part: str, kernel: RenderedKernel) -> None:
    """Raises ArgumentError if a text visibly needs another launch than that of its kernel."""
    if "\0" in given.text:
        raise ArgumentError(f"{given.origin} of the kernel {part} holds a NUL, which no source may")
    code = without_comments(given.text)
    entries = entry_points(code)
    if kernel.entry not in entries or 'extern "C"' not in code:
        has = ", ".join(entries) or "none"
        raise ArgumentError(
            f'{given.origin} lacks the entry point of the kernel {part}, extern "C" __global__ {kernel.entry}(...); '
            f"its entry points are {has}"
        )
    declared = [" ".join(each.declaration.removesuffix(";").split()) for each in kernel.layout.fields]
    struct = entries[kernel.entry]
    members = struct_members(code, struct) if struct else None
    if members is not None and list(members) != declared:
        pairs = zip_longest(members, declared, fillvalue="nothing")
        own, filled = next(pair for pair in pairs if pair[0] != pair[1])
        raise ArgumentError(
            f"{given.origin}: {struct} of the kernel {part} has `{own}` where its launch fills `{filled}`; keep the "
            "struct as it was emitted"
        )
    ours, theirs = constants(without_comments(kernel.source)), constants(code)
    for name in _FIXED:
        if name in ours and name in theirs and ours[name] != theirs[name]:
            raise ArgumentError(
                f"{given.origin}: {name} = {theirs[name]} of the kernel {part} contradicts the plan, which launches it "
                f"with {ours[name]}; compile with another plan=... and edit what that emits"
            )
