# SPDX-License-Identifier: Apache-2.0
"""``python -m glm5_patch``."""

from glm5_patch.cli import main

main()
