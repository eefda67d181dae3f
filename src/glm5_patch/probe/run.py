# SPDX-License-Identifier: Apache-2.0
"""Puts requests to probes in the target's interpreter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from glm5_patch.child.process import Child
from glm5_patch.probe.model import Answer, Request
from glm5_patch.probe.wire import decode, encode

_CHILD = Path(__file__).with_name("child")

# What the child must not do while it only reads: touch a GPU, use the network, call
# home, leave bytecode in the user's tree, or load plugins, whose code is not vLLM's.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}


def run_probe(python: Path, request: Request, timeout_s: float) -> Answer:
    """Put ``request`` to the vLLM at ``request.root``, run by ``python``.

    The child has ``timeout_s`` seconds; then it is killed with all that it started.
    """
    (answer,) = run_probes(python, (request,), timeout_s)
    return answer


def run_probes(
    python: Path, requests: Sequence[Request], timeout_s: float
) -> tuple[Answer, ...]:
    """Put all requests at once, each to a child of its own, and wait for the last.

    Most of a child's time goes into importing torch and vLLM, so that on two
    processors two answers take little longer than one.
    """
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        # Entered one by one: an interrupt while the second starts ends the first.
        probes = [
            stack.enter_context(
                Child(python, _CHILD, encode(each), decode, _ENVIRONMENT)
            )
            for each in requests
        ]
        return tuple(
            probe.wait(max(0.0, deadline - time.monotonic()), timeout_s)
            for probe in probes
        )
