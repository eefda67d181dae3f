# SPDX-License-Identifier: Apache-2.0
"""GLM-5 in GGUF files (architecture ``glm-dsa``): what a set of files holds.

Everything here but ``hf`` needs the standard library only and reads headers,
never weights, so the same code serves vLLM and the ``glm5-patch`` command.
"""
