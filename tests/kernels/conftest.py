# SPDX-License-Identifier: Apache-2.0
"""Where the kernels run: compiled on a GPU when there is one, else interpreted.

Nothing is skipped for want of a GPU but what measures the GPU itself. Triton
decides at import, function by function, so this file must come before it.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

# Each release's vllm needs a process of its own: see test_backend_releases.py.
collect_ignore = ["test_backend.py"]

FILES = Path(__file__).parents[2] / "patches" / "files"
# The kernels import no vLLM, but each other: as the package `ops`.
sys.path.insert(0, str(FILES / "vllm" / "v1" / "attention"))

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

if DEVICE == "cpu" and not isinstance(tl.cdiv, interpreter.InterpretedFunction):
    raise pytest.UsageError(
        "triton was imported before tests/kernels/conftest.py could ask for its "
        "interpreter: run with TRITON_INTERPRET=1"
    )

# The interpreter turns the bounds of a loop into integers by int() of an array with
# one element, which numpy 2.4 refuses: a loop over range(tensor) would not run.
_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: type, scope: interpreter._LangPatchScope) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE
