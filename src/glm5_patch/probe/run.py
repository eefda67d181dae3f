# SPDX-License-Identifier: Apache-2.0
"""Starts probes in the target's interpreter and waits for their answers."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from glm5_patch.probe.model import Answer, Failed, NotRun, Request
from glm5_patch.probe.wire import decode, encode

_CHILD = Path(__file__).parent / "child" / "__main__.py"
_DETAIL_LINES = 12

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

    Nothing is written but three unlinked temporary files. The child has ``timeout_s``
    seconds; then it is killed with all that it started.
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
        probes = [stack.enter_context(_Probe(python, each)) for each in requests]
        return tuple(
            probe.wait(max(0.0, deadline - time.monotonic()), timeout_s)
            for probe in probes
        )


class _Probe:
    """One child process; leaving the context ends it, finished or not."""

    def __init__(self, python: Path, request: Request) -> None:
        self._python = python.absolute()
        self._request = request
        self._files = ExitStack()
        self._child: subprocess.Popen[bytes] | None = None
        self._broken: OSError | None = None

    def __enter__(self) -> _Probe:
        self._answer = self._file()
        self._stderr = self._file()
        request = self._file()
        request.write(encode(self._request))
        request.seek(0)
        try:
            # The answer has a descriptor of its own because vLLM and its packages
            # print to both standard ones.
            self._child = subprocess.Popen(
                [str(self._python), str(_CHILD), str(self._answer.fileno())],
                cwd="/",
                env={**os.environ, **_ENVIRONMENT},
                stdin=request,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[self._answer.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._broken = error
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None and self._child.poll() is None:
            # Its own session: Ctrl-C reached us alone, and it may have children.
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._files.close()

    def wait(self, left_s: float, timeout_s: float) -> Answer:
        """The answer, at most ``left_s`` of the ``timeout_s`` seconds from now."""
        if self._child is None:
            why = self._broken and (self._broken.strerror or self._broken)
            return NotRun(f"{self._python} does not start: {why}")
        try:
            status = self._child.wait(left_s)
        except subprocess.TimeoutExpired:
            return Failed(f"no answer within {timeout_s:g} s", _tail(self._stderr))
        self._answer.seek(0)
        text = self._answer.read()
        try:
            return decode(text)
        except (ValueError, KeyError, TypeError):
            what = "a garbled answer" if text else "no answer"
            reason = f"it gave {what} and ended with {_ending(status)}"
            return Failed(reason, _tail(self._stderr))

    def _file(self) -> IO[str]:
        return self._files.enter_context(
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        )


def _ending(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    return f"signal {signal.Signals(-status).name}"


def _tail(stderr: IO[str]) -> tuple[str, ...]:
    stderr.seek(0)
    return tuple(stderr.read().splitlines()[-_DETAIL_LINES:])
