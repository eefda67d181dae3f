# SPDX-License-Identifier: Apache-2.0
"""A plan's two sides as overlays for the probe: stock files, and patched ones.

With them the probe sees the tree before and after, whatever its state, unwritten.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from glm5_patch.plan import Plan

Overlay = Mapping[str, "Path | None"]


def module_of(path: str) -> str:
    """The dotted name of the module at ``path``, relative to site-packages."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@contextlib.contextmanager
def sides(plan: Plan) -> Iterator[tuple[Overlay, Overlay]]:
    """The overlays (stock, patched) of ``plan``, in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="glm5-patch-") as folder:
        stock: dict[str, Path | None] = {}
        patched: dict[str, Path | None] = {}
        for edit in plan.edits:
            name = module_of(edit.path)
            stock[name] = _put(Path(folder, "stock", edit.path), edit.before)
            patched[name] = _put(Path(folder, "patched", edit.path), edit.after)
        for addition in plan.additions:
            name = module_of(addition.path)
            stock[name] = None
            patched[name] = _put(Path(folder, "patched", addition.path), addition.data)
        yield stock, patched


def _put(file: Path, data: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file
