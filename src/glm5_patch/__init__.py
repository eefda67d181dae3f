# SPDX-License-Identifier: Apache-2.0
"""Patches an installed vLLM so that it serves GLM-5 where stock vLLM cannot."""

__version__ = "0.1.0"
