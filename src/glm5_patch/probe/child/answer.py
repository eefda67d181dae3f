# SPDX-License-Identifier: Apache-2.0
"""Reads the request, puts it to vLLM, writes the answer."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from . import importing
from .cuda import Device, install_platform, without_device
from .fault import excuse
from .select_backend import Simulation

_DETAIL_LINES = 12


class _NotRun(Exception):
    """The environment cannot be asked, for the reason given."""


class _Failed(Exception):
    """The answer is no, for the reason given."""


def main(descriptor: int) -> None:
    """The whole child: a request on stdin, an answer on ``descriptor``."""
    os.set_inheritable(descriptor, False)
    answer = _answer(json.load(sys.stdin))
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        json.dump(answer, out)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    root = Path(request["root"])
    overlay = {
        name: None if file is None else Path(file)
        for name, file in request["overlay"].items()
    }
    ours = _files_of_ours(root, overlay, request["modules"])
    try:
        importing.install(root, overlay)
        return {"state": "ran", **_ask(request, root, ours)}
    except _NotRun as error:
        return {"state": "not run", "reason": str(error)}
    except _Failed as error:
        return {"state": "failed", "reason": str(error), "detail": []}
    except BaseException as error:  # SystemExit too: a package may leave that way
        reason = excuse(error, (root / importing.VLLM).resolve(), ours)
        if reason is not None:
            return {"state": "not run", "reason": reason}
        detail = traceback.format_exc().splitlines()[-_DETAIL_LINES:]
        reason = f"vLLM's selector does not start: {type(error).__name__}: {error}"
        return {"state": "failed", "reason": reason, "detail": detail}


def _ask(
    request: Mapping[str, Any], root: Path, ours: frozenset[Path]
) -> dict[str, Any]:
    torch = import_module("torch")
    importing.answer_for_ops(torch)
    with without_device(torch):
        vllm = import_module(importing.VLLM)
        elsewhere = importing.imported_elsewhere(root)
        if elsewhere is not None:
            raise _Failed(f"vllm was imported from {elsewhere}, not from {root}")
        # Import-time branches of vLLM take a GPU that every release knows.
        Device.capability = (9, 0)
        simulation = Simulation(torch, install_platform())
        modules = [_import(name, root, ours) for name in request["modules"]]
        selections = [
            simulation.select((major, minor), dtype, kv_cache_dtype)
            for (major, minor), dtype, kv_cache_dtype in request["cases"]
        ]
        unimportable = {
            name
            for selection in selections
            for name, why in selection["reasons"].items()
            if any(reason.startswith("ImportError") for reason in why)
        }
        members = list(simulation.backends.__members__)
        wanted = [None, *({request["backend"]} & set(members))]
        return {
            "version": str(getattr(vllm, "__version__", "unknown")),
            "members": members,
            "modules": modules,
            "selections": selections,
            "block_sizes": [
                simulation.block_size((major, minor), requested)
                for major, minor in request["block_size_on"]
                for requested in wanted
            ],
            "import_errors": simulation.import_errors(unimportable),
        }


def _import(name: str, root: Path, ours: frozenset[Path]) -> dict[str, str | None]:
    try:
        import_module(name)
    except Exception as error:
        reason = excuse(error, (root / importing.VLLM).resolve(), ours)
        if reason is not None:
            raise _NotRun(reason) from error
        return {"name": name, "error": f"{type(error).__name__}: {error}"}
    return {"name": name, "error": None}


def _files_of_ours(
    root: Path, overlay: Mapping[str, Path | None], modules: list[str]
) -> frozenset[Path]:
    served = {file for file in overlay.values() if file is not None}
    for name in modules:
        folder = root.joinpath(*name.split("."))
        served |= {folder.with_suffix(".py"), folder / "__init__.py"}
    return frozenset(file.resolve() for file in served)
