# SPDX-License-Identifier: Apache-2.0
"""Asks the patched vLLM's own interpreter which attention backend it would pick.

The question is put to a child process (``child/``), because vLLM and torch live in
the target's environment and never in ours. ``run`` puts it, ``model`` is what goes
out and what comes back, ``judge`` decides, ``explain`` compares before and after.
"""
