# SPDX-License-Identifier: Apache-2.0
"""What is asked of a probe, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from glm5_patch.child.process import Failed, NotRun

BACKEND = "TRITON_MLA_SPARSE"
"""The registry name of the backend that the patch adds."""


class Capability(NamedTuple):
    """A CUDA compute capability."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class Case(NamedTuple):
    """One question: which backend serves a GLM-5 attention layer here?"""

    capability: Capability
    dtype: str
    """The model's dtype as torch names it: ``float16``, ``bfloat16``."""
    kv_cache_dtype: str
    """As ``--kv-cache-dtype`` takes it: ``auto``, ``bfloat16``, ``fp8_ds_mla``."""

    def __str__(self) -> str:
        return f"{self.capability} {self.dtype} kv={self.kv_cache_dtype}"


@dataclass(frozen=True)
class Request:
    """Everything that one child process is asked at once."""

    root: Path
    """The folder that holds ``vllm/``."""
    overlay: Mapping[str, Path | None] = field(default_factory=dict)
    """Modules served from another file than the installed one; None: absent.

    This shows a tree as it was before the patch, or as it will be after it, while
    the tree itself is only read.
    """
    modules: tuple[str, ...] = ()
    """Modules of ours that have to import."""
    cases: tuple[Case, ...] = ()
    block_size_on: tuple[Capability, ...] = ()
    """Capabilities for which to ask the size of a KV-cache block, too."""


@dataclass(frozen=True)
class ModuleImport:
    """One module of ``Request.modules``: imported, or why not."""

    name: str
    error: str | None


@dataclass(frozen=True)
class Selection:
    """What vLLM's selector did in one case."""

    case: Case
    selected: str | None
    error: str | None
    """The selector's own message, if it picked nothing."""
    reasons: Mapping[str, tuple[str, ...]]
    """In vLLM's order of priority: why each backend refuses; empty: it does not."""

    @property
    def crashed(self) -> bool:
        """It ended without an answer, for another reason than "all refuse"."""
        return self.selected is None and not (
            self.reasons and all(self.reasons.values())
        )


@dataclass(frozen=True)
class BlockSize:
    """The tokens in a KV-cache block that vLLM settles on for GLM-5."""

    capability: Capability
    requested: str | None
    """The backend asked for by name; None leaves the choice to vLLM."""
    tokens: int | None
    error: str | None


@dataclass(frozen=True)
class Ran:
    """The probe has an answer. It may still be a bad one: see ``judge``."""

    version: str
    members: tuple[str, ...]
    """Names in vLLM's registry of attention backends."""
    modules: tuple[ModuleImport, ...]
    selections: tuple[Selection, ...]
    block_sizes: tuple[BlockSize, ...]
    import_errors: Mapping[str, str]
    """The text behind each reason "ImportError", which vLLM does not show."""


Answer = Ran | NotRun | Failed
