"""`KvRecord`: KV caches whose rows are records of bytes, with scales of their own, instead of arrays of one type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashgen.dtypes import DTYPES, DType
from flashgen.errors import SEE_LIMITS, SpecError


@dataclass(frozen=True)
class KvRecord:
    """The bytes of a token in a cache of latent attention, whose V is the first columns of K.

    First come `scaled_columns` float8 e4m3 numbers, then a float32 scale for each `group` of them, then the other
    columns of K as bfloat16. The value of a float8 number is multiplied by the scale of its group.

    Attributes:
        name: The value of `AttentionSpec.kv_dtype`.
        short_name: In the names of specs and kernels.
        head_dim: The columns of K.
        scaled_columns: The float8 columns, which are those of V.
        group: The adjacent columns that share a scale.
    """

    name: str
    short_name: str
    head_dim: int
    scaled_columns: int
    group: int

    @property
    def element(self) -> DType:
        """The element type of the array that holds the records."""
        return DTYPES["uint8"]

    @property
    def groups(self) -> int:
        """The number of scales."""
        return self.scaled_columns // self.group

    @property
    def plain_columns(self) -> int:
        """The columns that are stored as bfloat16."""
        return self.head_dim - self.scaled_columns

    @property
    def first_plain_byte(self) -> int:
        """The first byte of the bfloat16 columns. The scales lie before it, from byte `scaled_columns` on."""
        return self.scaled_columns + DTYPES["float32"].bytes * self.groups

    @property
    def bytes(self) -> int:
        """The size of a record."""
        return self.first_plain_byte + DTYPES["bfloat16"].bytes * self.plain_columns


KV_RECORDS = {
    record.name: record for record in (KvRecord("fp8_ds_mla", "dsmla", head_dim=576, scaled_columns=512, group=128),)
}
"""By the name. fp8_ds_mla: vLLM's and FlashMLA's cache of DeepSeek-V3.2, 656 bytes for a token."""


def check_record(record: KvRecord, values: dict[str, Any]) -> None:
    """Raises SpecError if the fields of a spec do not fit a record, which is its kv_dtype."""
    wanted = {"head_dim": record.head_dim, "value_dim": record.scaled_columns, "shared_kv": True, "dtype": "bfloat16"}
    for name, value in wanted.items():
        if values[name] != value:
            raise SpecError(f"{name}={values[name]!r} must be {value!r} with kv_dtype={record.name!r} {SEE_LIMITS}")
    if not values["page_size"]:
        raise SpecError(
            f"kv_dtype={record.name!r} needs a page_size: its array is (pages, page_size, 1, {record.bytes}) of uint8"
        )
    if values["dropout"]:
        raise SpecError(f"dropout={values['dropout']!r} is not supported with kv_dtype={record.name!r} {SEE_LIMITS}")
    if values["layout"] == "thd":
        raise SpecError(
            f"layout='thd' is not supported with kv_dtype={record.name!r}: give queries of equal length in layout "
            f"'bshd' or 'bhsd' {SEE_LIMITS}"
        )
