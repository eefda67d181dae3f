# SPDX-License-Identifier: Apache-2.0
"""The half of the probe that runs in the target's interpreter.

Standard library only, and nothing of glm5_patch: the target has neither. torch and
vLLM are imported by name, at run time, and never from the working directory.
"""
