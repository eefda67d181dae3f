# SPDX-License-Identifier: Apache-2.0
"""The half that runs in the target's interpreter; ``scripts/bench_*`` use it, too.

torch, triton and the standard library only. The kernels are handed in, because they
are those of an installed vLLM here and those of the repository there.
"""
