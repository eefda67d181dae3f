# SPDX-License-Identifier: Apache-2.0
"""Makes glm_dsa importable for the tests of GGUF loading, which need gguf too."""

from importlib.util import find_spec

import glm5_patch.gguf  # noqa: F401

HAVE_GGUF = find_spec("gguf") is not None
collect_ignore_glob = [] if HAVE_GGUF else ["test_*.py"]


def pytest_report_header() -> str:
    return "tests/gguf: " + ("run" if HAVE_GGUF else "left out, gguf is not installed")
