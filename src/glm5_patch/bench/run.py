# SPDX-License-Identifier: Apache-2.0
"""Puts a request to a child in the target's interpreter."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from glm5_patch.bench.model import Answer, Request
from glm5_patch.bench.wire import decode, encode
from glm5_patch.child.process import Child

TIMEOUT_S = 1800.0
"""Most of it is compiling, which takes as long as the host is slow."""

_CHILD = Path(__file__).with_name("child")


def run_bench(python: Path, request: Request, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run the kernels below ``request.root`` on the first visible GPU.

    Nothing is left behind: Triton's cache is a temporary folder, so that what is
    measured was also compiled there and then.
    """
    with tempfile.TemporaryDirectory(prefix="glm5-patch-") as cache:
        environment = {
            "PYTHONDONTWRITEBYTECODE": "1",
            "TRITON_CACHE_DIR": cache,
            "TRITON_INTERPRET": "0",
        }
        known = partial(decode, request)
        child = Child(python, _CHILD, encode(request), known, environment)
        with child:
            return child.wait(timeout_s, timeout_s)
