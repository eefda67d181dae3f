# SPDX-License-Identifier: Apache-2.0
"""Read the header of one GGUF file: metadata and where each tensor lies.

The gguf package's own reader parses a header too, but it raises on types that it
does not know, builds an array for every tokenizer entry, and trusts the counts in
the file. This one needs nothing but the standard library, checks every count
against the bytes that are left before it acts on it, and keeps no large value, so
a corrupt or hostile file ends in a ``GgufError`` and never in a huge allocation.
"""

import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .ggml import TYPES, type_name

Value: TypeAlias = "bool | int | float | str | tuple[bool | int | float, ...] | None"

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9

# GLM-5 has about 60 keys, 1,809 tensors and 320,000 merges.
_MAX_KEYS = 100_000
_MAX_TENSORS = 1_000_000
_MAX_STRINGS = 2_000_000
_MAX_NAME = 1024
# Longer values are read over: chat templates are kept, vocabularies are not.
_KEPT_STRING = 1 << 18
_KEPT_ARRAY = 4096


class GgufError(ValueError):
    """A file or a set of files that cannot be used; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies.

    Attributes:
        name: its name in the file.
        shape: outermost dimension first, as numpy and torch count.
        type_id: GGML's number for its type; see ``ggml.TYPES``.
        path: the file that holds it.
        offset: of its first byte in that file.
        size: in bytes; None if the type is not known.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    path: Path
    offset: int
    size: int | None

    @property
    def type(self) -> str:
        return type_name(self.type_id)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The header of one file.

    Attributes:
        metadata: key to value; None stands for values too large to keep.
        tensors: in the file's order.
        identity: device and inode, equal for two names of one file.
    """

    path: Path
    size: int
    identity: tuple[int, int]
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...]


def read_header(path: Path) -> Header:
    """Read the header of `path`.

    Raises:
        GgufError: the file is missing, no GGUF file, of an unsupported version,
            truncated, or contradicts itself.
    """
    try:
        # A pipe would block the open itself; looking first is enough here, since
        # nobody gains anything by winning the race.
        if not stat.S_ISREG(path.stat().st_mode):
            raise GgufError(f"{path}: not a regular file")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < 24:
                raise GgufError(
                    f"{path}: {status.st_size} bytes are too few for a GGUF file"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                identity = (status.st_dev, status.st_ino)
                return _Parser(path, data).header(identity)
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror or error}") from error


def peek_architecture(path: Path) -> str | None:
    """The architecture that `path` names, or None if it is no such file.

    Looks no further than that key, so that a file which turns out to be broken
    further on is still known for what it is.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Parser(path, data).architecture()
    except (OSError, ValueError):
        return None


class _Parser:
    """A cursor over the bytes of one file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.at = 0

    def fail(self, problem: str) -> GgufError:
        return GgufError(f"{self.path}: {problem}")

    def skip(self, count: int, what: str) -> int:
        """Step over `count` bytes; return where they began."""
        start = self.at
        if count > self.end - start:
            raise self.fail(
                f"{what} needs {count} bytes at offset {start}, but the file ends at "
                f"{self.end}: truncated or corrupt"
            )
        self.at = start + count
        return start

    def number(self, code: str, what: str) -> int:
        start = self.skip(struct.calcsize(code), what)
        value: int = struct.unpack_from(code, self.data, start)[0]
        return value

    def count(self, what: str, limit: int, least_bytes: int) -> int:
        """A count of things that take at least `least_bytes` each."""
        value = self.number("<Q", what)
        if value > limit or value * least_bytes > self.end - self.at:
            raise self.fail(f"{what} is {value}, more than the file can hold")
        return value

    def name(self, what: str) -> str:
        length = self.number("<Q", what)
        if not 0 < length <= _MAX_NAME:
            raise self.fail(f"{what} of {length} bytes at offset {self.at}")
        start = self.skip(length, what)
        try:
            text = self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} at offset {start} is not UTF-8") from error
        if not text.isprintable():
            raise self.fail(f"{what} {text!a} is not printable")
        return text

    def counts(self) -> tuple[int, int]:
        """Read the file's first bytes: how many tensors and keys follow."""
        magic = self.data[self.skip(4, "the magic number") : self.at]
        if magic != b"GGUF":
            raise self.fail(f"not a GGUF file: it begins with {magic!r}")
        version = self.number("<I", "the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            raise self.fail(
                f"big-endian GGUF version {swapped} is not supported"
                if swapped < 1 << 16
                else f"GGUF version {version} is not supported, only 2 and 3"
            )
        tensor_count = self.count("the number of tensors", _MAX_TENSORS, 24)
        key_count = self.count("the number of metadata keys", _MAX_KEYS, 13)
        return tensor_count, key_count

    def entries(self, count: int) -> Iterator[tuple[str, Value]]:
        for _ in range(count):
            key = self.name("a metadata key")
            yield key, self.value(key)

    def architecture(self) -> str | None:
        _, key_count = self.counts()
        for key, value in self.entries(key_count):
            if key == "general.architecture":
                return value if isinstance(value, str) else None
        return None

    def header(self, identity: tuple[int, int]) -> Header:
        tensor_count, key_count = self.counts()
        metadata: dict[str, Value] = {}
        for key, value in self.entries(key_count):
            if key in metadata:
                raise self.fail(f"metadata key {key} occurs twice")
            metadata[key] = value
        tensors = self.tensors(tensor_count, self.alignment(metadata))
        return Header(self.path, self.end, identity, metadata, tensors)

    def value(self, key: str) -> Value:
        type_id = self.number("<I", key)
        if type_id == _STRING:
            return self.string(key)
        if type_id == _ARRAY:
            return self.array(key)
        return self.scalar(type_id, key)

    def scalar(self, type_id: int, key: str) -> "bool | int | float":
        if type_id not in _SCALARS:
            raise self.fail(f"{key} has the unknown value type {type_id}")
        value: bool | int | float = self.number(_SCALARS[type_id], key)
        return value

    def string(self, key: str) -> str | None:
        length = self.number("<Q", key)
        start = self.skip(length, key)
        if length > _KEPT_STRING:
            return None
        return self.data[start : self.at].decode(errors="replace")

    def array(self, key: str) -> Value:
        type_id = self.number("<I", key)
        if type_id == _STRING:
            count = self.count(f"the length of {key}", _MAX_STRINGS, 8)
            for _ in range(count):
                self.skip(self.number("<Q", key), key)
            return None
        if type_id not in _SCALARS:
            raise self.fail(f"{key} is an array of the unsupported type {type_id}")
        code = _SCALARS[type_id]
        width = struct.calcsize(code)
        count = self.count(f"the length of {key}", self.end, width)
        start = self.skip(count * width, key)
        if count > _KEPT_ARRAY:
            return None
        return struct.unpack_from(f"<{count}{code[1]}", self.data, start)

    def alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or not 8 <= alignment <= 1 << 20
            or alignment & (alignment - 1)
        ):
            raise self.fail(
                f"general.alignment is {alignment!r}, not a power of two from 8 up"
            )
        return alignment

    def tensors(self, count: int, alignment: int) -> tuple[Tensor, ...]:
        found: dict[str, tuple[tuple[int, ...], int, int, int | None]] = {}
        for _ in range(count):
            name = self.name("a tensor name")
            if name in found:
                raise self.fail(f"tensor {name} occurs twice")
            found[name] = self.layout(name, alignment)
        # Offsets count from the first aligned byte after the header.
        base = -(-self.at // alignment) * alignment
        tensors = tuple(
            Tensor(name, shape, type_id, self.path, base + offset, size)
            for name, (shape, type_id, offset, size) in found.items()
        )
        self.check_places(tensors)
        return tensors

    def layout(
        self, name: str, alignment: int
    ) -> tuple[tuple[int, ...], int, int, int | None]:
        dimensions = self.number("<I", name)
        if not 1 <= dimensions <= 4:
            raise self.fail(f"tensor {name} has {dimensions} dimensions, not 1 to 4")
        # GGML counts the innermost dimension first.
        shape = tuple(self.number("<Q", name) for _ in range(dimensions))[::-1]
        elements = math.prod(shape)
        if not 0 < elements < 1 << 62:
            raise self.fail(f"tensor {name} has the impossible shape {shape}")
        type_id = self.number("<I", name)
        offset = self.number("<Q", name)
        if offset % alignment:
            raise self.fail(f"tensor {name} lies at {offset}, off its alignment")
        known = TYPES.get(type_id)
        if known is None:
            return shape, type_id, offset, None
        if shape[-1] % known.block:
            raise self.fail(
                f"tensor {name} has rows of {shape[-1]} elements, no multiple of the "
                f"{known.block} that a block of {known.name} holds"
            )
        return shape, type_id, offset, elements // known.block * known.size

    def check_places(self, tensors: tuple[Tensor, ...]) -> None:
        """Every tensor lies within the file and over no other."""
        last: Tensor | None = None
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if last and last.offset + (last.size or 0) > tensor.offset:
                raise self.fail(f"tensors {last.name} and {tensor.name} overlap")
            last = tensor
            end = tensor.offset + (tensor.size or 1)
            if end > self.end:
                raise self.fail(
                    f"tensor {tensor.name} ends at byte {end}, but the file at "
                    f"{self.end}: truncated, or not downloaded to the end"
                )
