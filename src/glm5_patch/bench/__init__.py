# SPDX-License-Identifier: Apache-2.0
"""Checks and times the kernels of a patched vLLM on the GPU that is there.

The work is done by a child in the target's interpreter (``child/``), which has torch
and triton. ``model`` is what goes out and what comes back, ``wire`` the JSON between,
``run`` puts it, ``report`` is the table that a user can send back.
"""
