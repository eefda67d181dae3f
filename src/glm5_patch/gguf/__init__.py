# SPDX-License-Identifier: Apache-2.0
"""What GLM-5 GGUF files hold, and what vLLM would make of them; headers only.

The knowledge is in the package ``glm_dsa``, which the patch installs into vLLM. It is
imported here from where the patch set keeps it, so that the command and the loader
cannot disagree. Importing this package makes ``glm_dsa`` importable.
"""

from __future__ import annotations

import importlib.util
import sys

from glm5_patch.manifest import bundled_root

_NAME = "glm_dsa"
_PLACE = "files/vllm/transformers_utils/glm_dsa"


def _make_importable() -> None:
    folder = bundled_root() / _PLACE
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)


_make_importable()
