# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command: each says what, where, found, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar


@dataclass
class PatchError(Exception):
    """A failure that the user is told about in full.

    ``what`` is one sentence. The rest is optional: ``where`` is a file and hunk,
    ``expected`` and ``found`` are short values, ``todo`` is the next step.
    """

    what: str
    where: str | None = None
    expected: str | None = None
    found: str | None = None
    todo: str | None = None

    exit_code: ClassVar[int] = 1
    # Whether the run that raised this held the lock: then no other run is its cause.
    alone = False

    def __str__(self) -> str:
        return self.what

    def lines(self) -> list[str]:
        """The message, a line for each part that is known."""
        parts = [
            ("where", self.where),
            ("expected", self.expected),
            ("found", self.found),
            ("next", self.todo),
        ]
        return [f"error: {self.what}"] + [
            f"  {name + ':':<10}{text}" for name, text in parts if text is not None
        ]

    def as_dict(self) -> dict[str, str]:
        """The parts that are known, for ``--json``."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: text for name, text in parts.items() if text is not None}


class Failed(PatchError):
    """A check failed, or an installed file is not what we left there."""

    exit_code = 1


class Usage(PatchError):
    """The arguments make no sense."""

    exit_code = 2


class NotFound(PatchError):
    """There is no vLLM to work on."""

    exit_code = 3


class NotSupported(PatchError):
    """The patch set has nothing for this vLLM."""

    exit_code = 4


class Conflict(PatchError):
    """A file's bytes are no known pre-image, or it is no plain file."""

    exit_code = 5


class NotPermitted(PatchError):
    """The file system refused: permission, read-only, or out of space."""

    exit_code = 6


class Busy(PatchError):
    """Another run holds the lock."""

    exit_code = 7
