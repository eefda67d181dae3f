# SPDX-License-Identifier: Apache-2.0
"""Rows for added files in a wheel's RECORD, so that pip removes them on uninstall.

Rows that pip wrote stay as they are, those of patched files too. Format: PEP 376 and
the wheel specification; a row is ``path,sha256=urlsafe base64 without padding,size``.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping


def with_rows(record: bytes, files: Mapping[str, bytes]) -> bytes:
    """``record`` with a row for each of ``files`` at its end, in its own line ends."""
    end = _line_end(record)
    start = record if not record or record.endswith(b"\n") else record + end
    return start + b"".join(_row(path, data) + end for path, data in files.items())


def without_rows(record: bytes, paths: frozenset[str]) -> bytes:
    """``record`` without the rows of ``paths``."""
    kept = [
        line
        for line in record.splitlines(keepends=True)
        if line.split(b",", 1)[0].decode(errors="replace") not in paths
    ]
    return b"".join(kept)


def _row(path: str, data: bytes) -> bytes:
    # No path of the patch set holds a comma or a quote: relpath and the manifest's
    # own names see to it, and the lock would not match otherwise.
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"{path},sha256={digest.decode()},{len(data)}".encode()


def _line_end(record: bytes) -> bytes:
    return b"\r\n" if b"\r\n" in record else b"\n"
