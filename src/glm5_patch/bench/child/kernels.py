# SPDX-License-Identifier: Apache-2.0
"""The kernels of an installed vLLM, imported without vLLM."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

OPS = "vllm/v1/attention/ops"
_PACKAGE = "_glm5_patch_ops"


def from_installed(root: Path) -> None:
    """Let ``kernel_module`` find the modules below ``root``.

    As a package under a name of its own: they import each other relatively, and
    importing vLLM would take its whole self with it.
    """
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(root / OPS)]
    sys.modules[_PACKAGE] = package


def kernel_module(name: str) -> ModuleType:
    """One module of the folder, such as ``triton_sparse_mla``."""
    return import_module(f"{_PACKAGE}.{name}")
