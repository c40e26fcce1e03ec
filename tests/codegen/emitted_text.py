"""Checks of the text of emitted kernels, for every pass."""

from __future__ import annotations

import re

from flashgen.codegen.environment import _primitive_templates
from flashgen.codegen.rendered_kernel import RenderedKernel

LONGEST_FUNCTION, LONGEST_KERNEL, LONGEST_FILE = 60, 90, 392  # lines; of a file, without primitives
_NAME = re.compile(r"(operator\W+|\w+)\(")
_ATTRIBUTES = re.compile(r"__(?:launch_bounds|cluster_dims)__\(")
_TYPES = re.compile(r"^template <[^>]*>\nstruct (?:Fragment|PipelineState) \{$.*?^\};\n", re.MULTILINE | re.DOTALL)


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*", "", source)


def without_types(source: str) -> str:
    """Removes the types of fragments and pipelines: they are the same in all kernels, which use parts of them."""
    return _TYPES.sub("", source)


def functions(source: str) -> dict[str, str]:
    """Returns the text of each function by name."""
    found, lines, inside = {}, [], False
    for line in without_types(source).splitlines():
        if not inside and line.startswith(("template", "__device__ ", 'extern "C"')) and not line.endswith(";"):
            lines, inside = [], True
        if inside:
            lines.append(line)
            if line.startswith("struct "):  # a class template
                inside = False
            elif line == "}" or (line.endswith("}") and lines[-1].startswith("__device__")):
                inside = False
                name = _NAME.search(_ATTRIBUTES.sub("", "\n".join(lines)))
                assert name, lines
                found[name[1]] = "\n".join(lines)
    assert not inside
    return found


def tidy(source: str) -> None:
    assert source.endswith("}\n") and not source.startswith("\n")
    assert not re.search(r"[ \t]\n", source), "trailing blanks"
    assert "\n\n\n" not in source and "\t" not in source
    assert "{{" not in source.replace("{{}}", "") and "{%" not in source and "{#" not in source
    assert not re.search(r"\{\n\n|\n\n +\}", source), "an empty line after { or before }"


def functions_fit(
    kernel: RenderedKernel, longest_kernel: int = LONGEST_KERNEL, longest_file: int = LONGEST_FILE
) -> None:
    for name, text in functions(kernel.source).items():
        lines = text.count("\n") + 1
        is_kernel = name == kernel.entry
        assert lines <= (longest_kernel if is_kernel else LONGEST_FUNCTION), f"{name} has {lines} lines"
    body = without_types(without_comments(kernel.source)).split("#endif\n", 1)[1]
    lines = sum(bool(line.strip()) for line in body.splitlines())
    most = longest_file + lines_of_element_loads(kernel.source) + of_diagonals(kernel.source)
    assert lines <= most, f"{lines} lines of code"


def lines_of_element_loads(source: str) -> int:
    """Returns the extra lines of a kernel whose tiles read one element of an array, or load elements in pairs."""
    return (12 if "reads_uniform" in source else 0) + (48 if "ElementPairs" in source else 0)


def of_diagonals(source: str) -> int:
    """Returns the extra lines for gradients that are sums along the diagonals of a tile."""
    return 37 if "sum_diagonals" in source else 0


def unconditional(source: str) -> None:
    directives = re.findall(r"^ *#(\w+.*)$", without_comments(source), re.MULTILINE)
    assert [text.strip() for text in directives if not text.startswith("pragma unroll")] == [
        "ifndef FLASHGEN_EMULATOR", "endif",
    ]  # fmt: skip
    assert "#include" not in source


def all_used(kernel: RenderedKernel) -> None:
    source = without_comments(kernel.source)
    words = re.findall(r"[A-Za-z_]\w*", source)
    defined = [name for name in functions(source) if name != kernel.entry]
    unused = [name for name in defined if words.count(name) < 2 and not name.startswith("operator")]
    assert not unused, f"functions without callers: {unused}"
    constants = re.findall(r"^ *(?:static )?constexpr \w+ (k\w+) =", without_types(source), re.MULTILINE)
    unread = [name for name in constants if words.count(name) < 2]
    assert not unread, f"unused constants: {unread}"


def all_called(kernel: RenderedKernel) -> None:
    source = without_comments(kernel.source)
    words, defined = set(re.findall(r"[A-Za-z_]\w*", source)), functions(source)
    lacking = [name for name in _primitive_templates() if name in words and name not in defined]
    assert not lacking, f"primitives that are called but missing: {lacking}"


def members_read(kernel: RenderedKernel) -> None:
    source = without_comments(kernel.source)
    unread = [field.name for field in kernel.layout.fields if f"arguments.{field.name}" not in source]
    assert not unread, unread
