"""The header of a GGUF file, enough of it to refuse early what could not be converted.

    magic "GGUF" | version | tensor count | pair count | pairs: key, type, value | tensors: name,
    shape, type, offset | padding to `general.alignment` | data

Reads scalars and strings and steps over arrays. Does not read weights or vocabularies.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}$")

_Value = int | float | str


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    architecture: str
    fields: dict[str, _Value]
    """Scalars and strings; arrays are left out."""
    tensors: frozenset[str]
    kinds: frozenset[int]
    """How tensors are stored, by GGML's numbers."""


def read_header(path: Path) -> GGUFHeader:
    """Raises ModelError if this is no GGUF file, a part of one, or cut short."""
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelError(f"{path} is not a GGUF file: its first four bytes are not GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, _Cursor(data))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise ModelError(
            f"{path} is damaged or cut short: its header cannot be read; get the file again"
        ) from error


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = len(_MAGIC)

    def number(self, layout: str) -> int | float:
        (value,) = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        assert isinstance(value, int | float)
        return value

    def count(self, layout: str = "<Q") -> int:
        return int(self.number(layout))

    def text(self) -> str:
        start = self.skip(self.count())
        return self.data[start : self.position].decode()

    def skip(self, size: int) -> int:
        """Steps over `size` bytes; where they start."""
        start = self.position
        self.position += size
        if self.position > len(self.data):
            raise struct.error("past the end")
        return start

    def value(self) -> _Value | None:
        """None for an array."""
        kind = self.count("<I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        kind, length = self.count("<I"), self.count()
        if kind == _STRING:
            for _ in range(length):
                self.skip(self.count())
        else:
            self.skip(struct.calcsize(_SCALARS[kind]) * length)
        return None


def _read(path: Path, cursor: _Cursor) -> GGUFHeader:
    version = cursor.count("<I")
    if version not in _VERSIONS:
        raise ModelError(f"{path} is of GGUF version {version}; versions 2 and 3 can be read")
    num_tensors, num_fields = cursor.count(), cursor.count()
    fields: dict[str, _Value] = {}
    for _ in range(num_fields):
        key, value = cursor.text(), cursor.value()
        if value is not None:
            fields[key] = value
    if fields.get("split.count", 1) != 1 or _SPLIT_NAME.search(path.stem):
        raise ModelError(
            f"{path} is one part of a split model: merge the parts first (llama-gguf-split --merge)"
        )
    names, kinds, data_bytes = _tensors(path, cursor, num_tensors)
    alignment = int(fields.get("general.alignment", _ALIGNMENT)) or _ALIGNMENT
    expected = -(-cursor.position // alignment) * alignment + data_bytes
    if len(cursor.data) < expected:
        raise ModelError(
            f"{path} is cut short: it has {len(cursor.data)} of {expected} bytes; get it again"
        )
    return GGUFHeader(str(fields.get("general.architecture", "")), fields, names, kinds)


def _tensors(
    path: Path, cursor: _Cursor, num_tensors: int
) -> tuple[frozenset[str], frozenset[int], int]:
    """Their names and kinds, and how many bytes of data they reach."""
    from gguf import GGML_QUANT_SIZES

    block_sizes = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    names, kinds, end = set(), set(), 0
    for _ in range(num_tensors):
        name, num_values = cursor.text(), 1
        for _ in range(cursor.count("<I")):
            num_values *= cursor.count()
        kind, offset = cursor.count("<I"), cursor.count()
        if kind not in block_sizes:
            raise ModelError(f"{path}: tensor {name} is quantised in a way nobody here knows")
        block, block_bytes = block_sizes[kind]
        names.add(name)
        kinds.add(kind)
        end = max(end, offset + num_values // block * block_bytes)
    return frozenset(names), frozenset(kinds), end
