# SPDX-License-Identifier: Apache-2.0
"""Reads the request, checks and times the kernels, writes the answer."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any

_DETAIL_LINES = 12


class NotRun(Exception):
    """The kernels cannot run there, for the reason given."""


def main(descriptor: int) -> None:
    """The whole child: a request on stdin, an answer on ``descriptor``."""
    os.set_inheritable(descriptor, False)
    sys.dont_write_bytecode = True
    answer = _answer(json.load(sys.stdin))
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        json.dump(answer, out)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        for package in ("torch", "triton"):
            _import(package)
        from .shapes import run

        return {"state": "ran", **run(request)}
    except NotRun as error:
        return {"state": "not run", "reason": str(error)}
    except Exception as error:
        return {
            "state": "failed",
            "reason": f"{type(error).__name__}: {error}",
            "detail": traceback.format_exc().splitlines()[-_DETAIL_LINES:],
        }


def _import(package: str) -> None:
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise NotRun(
            f"the package {error.name} is missing in the target's environment"
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise NotRun(f"the package {package} there is broken: {what}") from error
