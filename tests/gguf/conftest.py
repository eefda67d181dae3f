# SPDX-License-Identifier: Apache-2.0
"""Makes glm_dsa importable for the tests of GGUF loading."""

import glm5_patch.gguf  # noqa: F401
