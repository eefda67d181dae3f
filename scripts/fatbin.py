# SPDX-License-Identifier: Apache-2.0
"""The GPU code in a compiled library: blank out what one GPU architecture cannot use.

A fat binary is a header (magic, version, its own size, the size of what follows) and
entries, each a header (kind, its own size, the size of its code, and at byte 28 the
architecture) and code: machine code for one architecture, or PTX. The CUDA loader walks
the headers, so those stay, and zeros compress to nothing.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

_MAGIC = re.compile(re.escape(struct.pack("<IHH", 0xBA55ED50, 1, 16)))
_PTX, _MACHINE_CODE = 1, 2


class Entry(NamedTuple):
    kind: int
    architecture: int  # 90 for SM90
    start: int  # of the code, in bytes from the start of the library
    end: int


def binaries(library: bytes | bytearray) -> list[list[Entry]]:
    """The entries of each fat binary in a library.

    Raises:
        ValueError: the entries of one do not add up to its size.
    """
    found = []
    for match in _MAGIC.finditer(library):
        (size,) = struct.unpack_from("<Q", library, match.end())
        at = match.start() + 16
        end = at + size
        entries = []
        while at < end:
            kind, _, header, code = struct.unpack_from("<HHIQ", library, at)
            (architecture,) = struct.unpack_from("<I", library, at + 28)
            if not header:
                break
            start = at + header
            at = start + code
            entries.append(Entry(kind, architecture, start, at))
        if at != end:
            raise ValueError(
                f"the fat binary at byte {match.start()} must end at {end}, "
                f"but its entries end at {at}"
            )
        found.append(entries)
    return found


def usable(entries: list[Entry], architecture: int) -> list[Entry]:
    """What the CUDA loader may take of one fat binary: the newest machine code of the
    same major version that is no newer than the chip, else PTX."""

    def of(kind: int) -> list[Entry]:
        return [e for e in entries if e.kind == kind and e.architecture <= architecture]

    major = architecture // 10
    fits = [e for e in of(_MACHINE_CODE) if e.architecture // 10 == major]
    newest = max((e.architecture for e in fits), default=None)
    return [e for e in fits if e.architecture == newest] or of(_PTX)


def prune(library: bytes, architecture: int) -> bytes:
    """The same library, of the same size, with zeros for code that cannot be used."""
    pruned = bytearray(library)
    for entries in binaries(library):
        for entry in set(entries) - set(usable(entries, architecture)):
            pruned[entry.start : entry.end] = bytes(entry.end - entry.start)
    return bytes(pruned)
