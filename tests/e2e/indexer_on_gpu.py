# SPDX-License-Identifier: Apache-2.0
"""On a GPU with DeepGEMM: the indexer picks the same keys with Triton's logits.

usage: python tests/e2e/indexer_on_gpu.py

Needs a patched vLLM and a GPU that DeepGEMM has kernels for. vLLM's own builder, layer
and operators run each batch twice, with GLM5_PATCH_INDEXER=deepgemm and =triton, in
one process, and the picks are compared with each other and with a float64 reference,
the best 2048 of each token. Another token's weights are the control. Exits with 1 if
a share of common picks is below 0.999, or the control's is not.
"""

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from compare import MismatchError
from indexer_layer import (
    Batch,
    Inputs,
    build_metadata,
    check_picks,
    make_inputs,
    reference_logits,
    run_layer,
)
from mqa_compare import TOLERANCE

TOPK, MAX_MODEL_LEN = 2048, 65_536
ENOUGH = 0.999
BATCHES = [
    Batch("prefill", before=(0,), now=(2500,)),
    Batch("continued prefill", before=(30_000, 2000), now=(200, 1000)),
    Batch("decode", before=(8000,) * 8 + (60_000, 50), now=(1,) * 10),
    Batch("mixed", before=(9000, 2047, 20_000, 1500), now=(1, 1, 300, 800)),
    Batch("one draft", before=(9000, 30_000, 2046), now=(2, 2, 2), drafts=1),
    Batch("three drafts", before=(9000, 30_000), now=(4, 4), drafts=3),
    Batch("some of three", before=(9000, 30_000, 5000), now=(4, 1, 3), drafts=3),
]


def picks_of(library: str, batch: Batch, inputs: Inputs) -> torch.Tensor:
    """The picks of vLLM's layer with the logits of one library."""
    hook = importlib.import_module("vllm.utils.indexer_logits")
    os.environ[hook.LIBRARY] = library
    hook.uses_triton.cache_clear()  # it asks once a process, and this one asks twice
    if hook.uses_triton() != (library == hook.TRITON):
        sys.exit(f"{hook.LIBRARY}={library} must decide, found another library chosen")
    metadata = build_metadata(batch, inputs, MAX_MODEL_LEN)
    return run_layer(inputs, metadata, TOPK, MAX_MODEL_LEN)


def common(first: torch.Tensor, second: torch.Tensor) -> float:
    """The share of the picks of `first` that are picks of `second`."""
    width = MAX_MODEL_LEN + 1  # the last column is for -1
    chosen = [
        torch.zeros(len(picks), width, dtype=torch.bool, device=picks.device).scatter_(
            1, picks.long() % width, True
        )[:, :-1]
        for picks in (first, second)
    ]
    return float((chosen[0] & chosen[1]).sum() / chosen[0].sum())


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device, found none")
    failed = []
    print(
        "batch               common  control  DeepGEMM    Triton  (share of the best)"
    )
    for batch in BATCHES:
        inputs = make_inputs(batch, "cuda", MAX_MODEL_LEN)
        theirs = picks_of("deepgemm", batch, inputs)
        ours = picks_of("triton", batch, inputs)
        wrong = replace(inputs, weights=inputs.weights.roll(1, dims=0))
        control = common(picks_of("triton", batch, wrong), theirs)
        share = common(ours, theirs)
        expected = reference_logits(batch, inputs)
        shares = []
        for name, picks in (("DeepGEMM", theirs), ("Triton", ours)):
            try:
                shares.append(f"{check_picks(picks, expected, 2 * TOLERANCE):9.5f}")
            except MismatchError as error:
                shares.append(f"{name}: {error}")
                failed.append(batch.name)
        print(f"{batch.name:18} {share:.5f}  {control:.5f}", *shares, flush=True)
        if not share >= ENOUGH > control:
            failed.append(batch.name)
    print("failed: " + ", ".join(failed) if failed else "all agree")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
