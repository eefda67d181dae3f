# SPDX-License-Identifier: Apache-2.0
"""Starts children in the target's interpreter and waits for their answers."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

_START = Path(__file__).with_name("start.py")
_DETAIL_LINES = 12

T = TypeVar("T")


@dataclass(frozen=True)
class NotRun:
    """The target cannot be asked; says nothing about the patch."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The child broke, and nothing that the target lacks excuses it."""

    reason: str
    detail: tuple[str, ...] = ()
    """The last lines that it wrote."""


class Child(Generic[T]):
    """One child process; leaving the context ends it, finished or not.

    It runs the package in ``folder``, with ``request`` on its standard input and
    ``environment`` over ours. ``decode`` reads what it answers, which is not to be
    trusted: it raises ValueError, KeyError or TypeError where that is no answer.

    Nothing is written but three unlinked temporary files.
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        request: str,
        decode: Callable[[str], T],
        environment: Mapping[str, str],
    ) -> None:
        self._python = python.absolute()
        self._folder = folder.absolute()
        self._request = request
        self._decode = decode
        self._environment = environment
        self._files = ExitStack()
        self._child: subprocess.Popen[bytes] | None = None
        self._broken: OSError | None = None

    def __enter__(self) -> Child[T]:
        self._answer = self._file()
        self._stderr = self._file()
        request = self._file()
        request.write(self._request)
        request.seek(0)
        descriptor = self._answer.fileno()
        try:
            # The answer has a descriptor of its own because vLLM and its packages
            # print to both standard ones.
            self._child = subprocess.Popen(
                [str(self._python), str(_START), str(self._folder), str(descriptor)],
                cwd="/",
                env={**os.environ, **self._environment},
                stdin=request,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[descriptor],
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

    def wait(self, left_s: float, timeout_s: float) -> T | NotRun | Failed:
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
            return self._decode(text)
        except (ValueError, KeyError, TypeError, RecursionError):
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
