# SPDX-License-Identifier: Apache-2.0
"""Environments of their own that hold a vLLM."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RELEASE = "0.16.0"


@dataclass(frozen=True)
class Target:
    """An interpreter, and the site-packages that vLLM is in."""

    python: Path
    root: Path


MakeTarget = Callable[..., Target]
