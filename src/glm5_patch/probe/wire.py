# SPDX-License-Identifier: Apache-2.0
"""The JSON between the two processes."""

from __future__ import annotations

import json
from typing import Any

from glm5_patch.child.process import Failed, NotRun
from glm5_patch.probe.model import (
    BACKEND,
    Answer,
    BlockSize,
    Capability,
    Case,
    ModuleImport,
    Ran,
    Request,
    Selection,
)


def encode(request: Request) -> str:
    """The request as ``child.answer`` reads it, in another working directory."""
    return json.dumps(
        {
            "root": str(request.root.absolute()),
            "overlay": {
                name: None if path is None else str(path.absolute())
                for name, path in request.overlay.items()
            },
            "modules": request.modules,
            "cases": request.cases,
            "block_size_on": request.block_size_on,
            "backend": BACKEND,
        }
    )


def decode(text: str) -> Answer:
    """The answer that ``child.answer`` wrote.

    Raises ValueError, KeyError or TypeError if it is none.
    """
    document = json.loads(text)
    state = document["state"]
    if state == "not run":
        return NotRun(document["reason"])
    if state == "failed":
        return Failed(document["reason"], tuple(document["detail"]))
    return Ran(
        version=document["version"],
        members=tuple(document["members"]),
        modules=tuple(ModuleImport(**each) for each in document["modules"]),
        selections=tuple(_selection(each) for each in document["selections"]),
        block_sizes=tuple(
            BlockSize(**{**each, "capability": Capability(*each["capability"])})
            for each in document["block_sizes"]
        ),
        import_errors=document["import_errors"],
    )


def _selection(document: dict[str, Any]) -> Selection:
    capability, dtype, kv_cache_dtype = document["case"]
    return Selection(
        case=Case(Capability(*capability), dtype, kv_cache_dtype),
        selected=document["selected"],
        error=document["error"],
        reasons={name: tuple(why) for name, why in document["reasons"].items()},
    )
