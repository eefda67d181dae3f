# SPDX-License-Identifier: Apache-2.0
"""Where the child's imports of vLLM come from: the root, an overlay, or a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

VLLM = "vllm"

EXTENSIONS = frozenset(
    {
        "vllm._C",
        "vllm._C_stable_libtorch",
        "vllm._flashmla_C",
        "vllm._flashmla_extension_C",
        "vllm._moe_C",
        "vllm._moe_C_stable_libtorch",
        "vllm._qutlass_C",
        "vllm.cumem_allocator",
        "vllm.vllm_flash_attn._vllm_fa2_C",
        "vllm.vllm_flash_attn._vllm_fa3_C",
    }
)
"""vLLM's compiled modules.

They need libcuda or libcudart to load. Their stand-ins are used on a GPU machine,
too: the answer is about a simulated GPU, so it must not depend on the one that
happens to be there, and reading must not open a CUDA context.
"""


_OP_NAMESPACES = frozenset({"_C", "_moe_C"})


class TargetFinder(MetaPathFinder):
    """Goes before all other finders; leaves what is not vLLM's or overlaid to them."""

    def __init__(self, root: Path, overlay: Mapping[str, Path | None]) -> None:
        self._root = root
        self._overlay = overlay

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Overlay first, then stand-ins, then the root; the rest is not ours."""
        if fullname in self._overlay:
            return self._from_overlay(fullname, self._overlay[fullname])
        if fullname in EXTENSIONS:
            return ModuleSpec(fullname, _StandInLoader())
        if fullname == VLLM:
            # Not through sys.path: root ahead of everything would let a package there
            # shadow the standard library, and root behind it could lose to another.
            return PathFinder.find_spec(VLLM, [str(self._root)])
        return None

    def _from_overlay(self, fullname: str, file: Path | None) -> ModuleSpec | None:
        if file is None:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        folder = self._root.joinpath(*fullname.split("."))
        # A package's other modules stay where they are: in the installed folder.
        search = [str(folder)] if file.name == "__init__.py" else None
        return spec_from_file_location(
            fullname, file, submodule_search_locations=search
        )


class _StandIn(ModuleType):
    """A compiled module, loaded as far as an ``import`` of it or from it can tell."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse_to_run


class _StandInLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _refuse_to_run(*args: object, **kwargs: object) -> None:
    raise RuntimeError("a compiled function of vLLM was called in the simulation")


def answer_for_ops(torch: Any) -> None:
    """Have compiled ops that only say what they support say: nothing.

    vLLM asks some of them while it is imported. All other ops stay absent, as
    ``hasattr`` tells vLLM, which then leaves out what needs them.
    """
    namespace = getattr(getattr(torch, "_ops", None), "_OpNamespace", None)
    if namespace is None:  # no such internals: no ops to answer for
        return
    find = namespace.__getattr__

    def find_or_answer(self: Any, name: str) -> Any:
        try:
            return find(self, name)
        except AttributeError:
            if self.name in _OP_NAMESPACES and "_supports_" in name:
                return lambda *args: False
            raise

    namespace.__getattr__ = find_or_answer


def install(root: Path, overlay: Mapping[str, Path | None]) -> None:
    """From now on ``import vllm`` means the one at root, seen through the overlay."""
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, TargetFinder(root, overlay))
    if str(root) not in sys.path:
        sys.path.append(str(root))


def imported_elsewhere(root: Path) -> str | None:
    """The folder of the imported ``vllm``, if that is not the one at root."""
    file = sys.modules[VLLM].__file__
    if file is None:
        return "a folder without __init__.py"
    found = Path(file).resolve().parent
    return None if found == (root / VLLM).resolve() else str(found)
