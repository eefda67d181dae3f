# SPDX-License-Identifier: Apache-2.0
"""Runs a part of glm5_patch in the target's interpreter, where torch and vLLM live.

``process`` is our half: it starts the child and waits. ``start`` is the child's first
file; it loads the folder that it is told to. Request and answer are JSON.
"""
