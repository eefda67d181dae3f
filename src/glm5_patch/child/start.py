# SPDX-License-Identifier: Apache-2.0
"""Entry point: ``python .../start.py FOLDER ANSWER_DESCRIPTOR < request``.

Python puts a script's own folder first on the path, where any file name would shadow
a module of the target. That entry goes at once; FOLDER is loaded by location, as a
package under a name that nobody else uses, and its ``answer.main`` does the rest.

Standard library only, and nothing of glm5_patch: the target has neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

_PACKAGE = "_glm5_patch_child"


def _start(folder: str, descriptor: int) -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    cwd = os.getcwd()  # noqa: PTH109
    sys.path[:] = [entry for entry in sys.path if entry not in ("", here, cwd)]
    spec = importlib.util.spec_from_file_location(
        _PACKAGE,
        os.path.join(folder, "__init__.py"),  # noqa: PTH118
        submodule_search_locations=[folder],
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)
    importlib.import_module(f"{_PACKAGE}.answer").main(descriptor)


if __name__ == "__main__":
    _start(sys.argv[1], int(sys.argv[2]))
