# SPDX-License-Identifier: Apache-2.0
"""What stays of a library's GPU code: made-up fat binaries of one-letter codes."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fatbin import binaries, prune

PTX, MACHINE = 1, 2


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    body = b""
    for kind, architecture, code in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(code))
        header += bytes(12) + struct.pack("<I", architecture)
        body += header.ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        pytest.param(
            [(MACHINE, 80, b"a"), (MACHINE, 90, b"b"), (PTX, 90, b"p")], b"b", id="own"
        ),
        pytest.param(
            [(MACHINE, 80, b"a"), (MACHINE, 86, b"b"), (MACHINE, 89, b"c")],
            b"",
            id="none",
        ),
        pytest.param(
            [(MACHINE, 80, b"a"), (PTX, 80, b"p"), (PTX, 100, b"q")], b"p", id="ptx"
        ),
        pytest.param(
            [(MACHINE, 90, b"a"), (MACHINE, 90, b"b"), (MACHINE, 100, b"c")],
            b"ab",
            id="both-of-one",
        ),
    ],
)
def test_keeps_what_the_loader_may_take(
    entries: list[tuple[int, int, bytes]], kept: bytes
) -> None:
    sizes = [(kind, arch, code * 40) for kind, arch, code in entries]
    library = b"\x7fELF rest" + fat_binary(*sizes) + b"between" + fat_binary(*sizes)
    pruned = prune(library, 90)
    assert len(pruned) == len(library)
    assert b"between" in pruned
    found = {e.architecture: None for b in binaries(pruned) for e in b}
    assert list(found) == list({arch: None for _, arch, _ in entries})
    codes = b"".join(
        pruned[e.start : e.start + 1] for e in binaries(pruned)[1] if pruned[e.start]
    )
    assert codes == kept


def test_newest_that_is_not_too_new() -> None:
    library = fat_binary(*[(MACHINE, a, bytes([a]) * 9) for a in (80, 86, 89, 90)])
    left = prune(library, 86)
    assert [left[e.start] for e in binaries(left)[0]] == [0, 86, 0, 0]


def test_entries_must_add_up() -> None:
    library = bytearray(fat_binary((MACHINE, 90, b"code")))
    library[8] += 1
    with pytest.raises(ValueError, match="byte 0 must end at"):
        binaries(library + bytes(200))
