"""The argument struct that a kernel takes by value: one list of fields gives its C declaration and its layout."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.dtypes import DTYPES
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec

# C type -> (format of Python's struct module, size in bytes). Strides holds three long long: batch, head, row.
# TensorMap is the descriptor by which TMA accesses an array: 16 words, aligned to 64 bytes.
_SCALARS = {
    "TensorMap": ("16Q", 128),
    "long long": ("q", 8),
    "Strides": ("qqq", 24),
    "int": ("i", 4),
    "unsigned": ("I", 4),
    "float": ("f", 4),
}
_POINTER = ("Q", 8)
_MAP_ALIGNMENT = 64

# Arrays with tensor maps: those with rows of value_dim elements (others have head_dim), and those with rows per query
# (others have rows per key).
VALUE_WIDE = frozenset(("v", "o", "d_o", "dv"))
QUERY_ARRAYS = frozenset(("q", "o", "d_o", "dq"))


@dataclass(frozen=True)
class Field:
    """A member of the struct: its C type, name, array length (0 for a plain member) and comment."""

    type: str
    name: str
    count: int = 0
    comment: str = ""

    @property
    def declaration(self) -> str:
        return f"{self.type} {self.name}{f'[{self.count}]' if self.count else ''};"

    @property
    def format(self) -> tuple[str, int]:
        return _POINTER if self.type.endswith("*") else _SCALARS[self.type]


@dataclass(frozen=True)
class ArgumentLayout:
    """The layout of the struct. Fields are sorted by decreasing alignment, so that there is no padding between them."""

    fields: tuple[Field, ...]

    @property
    def format(self) -> str:
        """The format for struct.pack, which takes one value per plain member and per array element."""
        text = "".join(field.format[0] * max(field.count, 1) for field in self.fields)
        return f"<{text}{'x' * (-self._unpadded_size % (_MAP_ALIGNMENT if self.has_maps else 8))}"

    @property
    def has_maps(self) -> bool:
        """Whether a member is a `TensorMap`."""
        return any(field.type == "TensorMap" for field in self.fields)

    @property
    def has_strides(self) -> bool:
        """Whether a member is a `Strides`."""
        return any(field.type == "Strides" for field in self.fields)

    @property
    def _unpadded_size(self) -> int:
        return sum(field.format[1] * max(field.count, 1) for field in self.fields)

    def offset(self, name: str) -> int:
        """Returns the byte offset of a field in the struct."""
        position = 0
        for field in self.fields:
            if field.name == name:
                return position
            position += field.format[1] * max(field.count, 1)
        raise KeyError(name)


def ordered(fields: list[Field]) -> ArgumentLayout:
    """Returns the layout: tensor maps, pointers, 8-byte numbers, then 4-byte numbers, each kind in the given order."""
    maps = [field for field in fields if field.type == "TensorMap"]
    wide = [field for field in fields if field.format[1] % 8 == 0 and field not in maps]
    return ArgumentLayout(
        tuple(
            maps
            + [field for field in wide if field.type.endswith("*")]
            + [field for field in wide if not field.type.endswith("*")]
            + [field for field in fields if field.format[1] == 4]
        )
    )


def output_field(spec: AttentionSpec) -> Field:
    """Returns the pointer to the output."""
    return Field(_result_type(spec.out_dtype), "o")


def gradient_field(spec: AttentionSpec, name: str) -> Field:
    """Returns the pointer to dq, dk or dv."""
    return Field(_result_type(spec.grad_dtype), name)


def _result_type(dtype: str | None) -> str:
    """Returns the type of a pointer to results. None: the dtype of q, which kernels name Element."""
    return f"{DTYPES[dtype].c_type if dtype else 'Element'}*"


LIST_FIELDS = (
    Field("const int*", "tile_counts"),
    Field("const long long*", "tile_offsets"),
    Field("const int*", "tile_entries"),
    Field("Strides", "list_strides"),
)
DROPOUT_FIELDS = (
    Field("const uint2*", "seed", comment="null if seed_low and seed_high are the seed"),
    *(Field("unsigned", name) for name in ("seed_low", "seed_high", "offset")),
)

# Members of any kernel's struct, and macros of the emulator's headers. A capture with one of these names is renamed.
# fmt: off
_RESERVED = frozenset({
    "q", "k", "v", "o", "lse", "batch", "heads", "heads_q", "kv_reciprocal", "len_q", "len_k", "tile_counts",
    "tile_entries", "tile_offsets", "counts", "entries", "offsets", "spacing", "seed", "seed_low", "seed_high",
    "offset", "section", "tiles", "tiles_q", "tiles_k", "next_tile", "heads_at_once", "packed", "row_tiles", "splits",
    "arrivals", "partial_outputs", "partial_states", "page_table", "seqused_k", "table_pitch", "pages", "k_scale",
    "v_scale", "d_o", "d_lse", "dq", "dk", "dv", "dq_accum", "dq_tile_state", "dq_added", "dq_next", "dk_sums",
    "dv_sums", "part_sums", "part_semaphore", "part_semaphores", "divided", "parts", "lse_and_d", "rows", "keys",
    "heads_kv", "heads_per_kv",
    "sums", "gradient",
    "count", "shared_memory", "errno", "unix", "linux", "schedule", "cu_seqlens_q", "cu_seqlens_k", "total_q",
    "total_k",
})
# fmt: on
_GRADIENT = "d_"  # prefix of the member for the gradient of a captured array
_RESERVED_ENDINGS = ("_map", "_stride", "_strides", "_size", "_capture")


def member_name(capture: Capture) -> str:
    """Returns the name of a capture in the struct; `_capture` is appended if it may collide with another name."""
    name = capture.name
    taken = name in _RESERVED or name.startswith(_GRADIENT) or name.endswith(_RESERVED_ENDINGS)
    taken = taken or name != name.lower()
    return f"{name}_capture" if taken else name


def summed_gradient(capture: Capture) -> str:
    """Returns the member that points to the sums of a captured array's gradient."""
    return f"{_GRADIENT}{member_name(capture)}"


def capture_gradient(capture: Capture) -> str:
    """Returns the pass's name for a captured array's gradient if a kernel converts it from the sums."""
    return f"gradient of {capture.name}"


def capture_fields(captures: tuple[Capture, ...]) -> list[Field]:
    """Returns the members for captures: pointer, strides and sizes of an array; the value of a scalar."""
    fields: list[Field] = []
    for capture in captures:
        name = member_name(capture)
        if capture.ndim == 0:
            fields.append(Field("float" if capture.kind == "float" else "int", name))
            continue
        fields += [
            Field(f"const {DTYPES[capture.dtype].c_type}*", name),
            Field("long long", f"{name}_stride", capture.ndim),
            Field("int", f"{name}_size", capture.ndim),
        ]
    return fields
