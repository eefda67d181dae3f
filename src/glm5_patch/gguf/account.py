# SPDX-License-Identifier: Apache-2.0
"""Take account of a GGUF checkpoint: what it is, what it needs, who can serve it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_dsa.config import ARCHITECTURE, Model, read_model
from glm_dsa.header import GgufError
from glm_dsa.plan import Plan, Target, bytes_per_rank, make_plan
from glm_dsa.shards import Checkpoint, read_checkpoint
from packaging.version import Version

from glm5_patch.errors import Failed, NotSupported

RANKS = (1, 2, 4, 8)

# Bytes that vLLM's caches hold for a token and layer: the latent and its rotated
# part, and the indexer's key in FP8 with one float32 scale for each 128 values.
_INDEX_BLOCK, _INDEX_SCALE = 128, 4

_FIRST, _FUSES, _SHARES, _GONE = map(Version, ("0.16", "0.20", "0.21", "0.24"))


@dataclass(frozen=True)
class Account:
    """One checkpoint, and one plan for each count of ranks."""

    checkpoint: Checkpoint
    model: Model
    plans: dict[int, Plan]

    @property
    def plan(self) -> Plan:
        """For one GPU: what no number of GPUs changes."""
        return self.plans[1]

    def types(self) -> dict[str, tuple[int, int]]:
        """For each type of tensor: how many, and their bytes together."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for tensor in self.checkpoint.tensors.values():
            counts[tensor.type] += 1
            sizes[tensor.type] += tensor.size or 0
        return {kind: (count, sizes[kind]) for kind, count in counts.most_common()}

    def skipped(self) -> dict[str, int]:
        """For each reason to skip tensors: how many."""
        return dict(Counter(self.plan.skips.values()))

    def weight_bytes(self, ranks: int) -> int:
        """Weights on each GPU."""
        return bytes_per_rank(self.plans[ranks], ranks)

    def cache_bytes_per_token(self) -> int:
        """Both caches, 16 bits a value, on each GPU: tensor parallelism does not
        divide them."""
        model = self.model
        scales = -(-model.index_dim // _INDEX_BLOCK) * _INDEX_SCALE
        latent = 2 * (model.kv_rank + model.rope)
        return model.layers * (latent + model.index_dim + scales)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for ``--json``."""
        return {
            "model": self.model.name,
            "files": [
                {"path": str(h.path), "bytes": h.size, "tensors": len(h.tensors)}
                for h in self.checkpoint.headers
            ],
            "config": self.model.config(),
            "types": {
                kind: {"tensors": count, "bytes": size}
                for kind, (count, size) in self.types().items()
            },
            "parameters": len(self.plan.loads),
            "skipped": self.plan.skips,
            "cache_bytes_per_token": self.cache_bytes_per_token(),
            "gpus": {
                str(ranks): {
                    "weight_bytes": self.weight_bytes(ranks),
                    "problems": [str(problem) for problem in plan.problems],
                }
                for ranks, plan in self.plans.items()
            },
        }


def take(path: Path, release: Version) -> Account:
    """Read the headers of all files that ``path`` belongs to.

    Raises ``Failed`` if they are broken, incomplete or hold another model, and
    ``NotSupported`` if the patch does not cover GGUF files in that release of vLLM.
    """
    if not _FIRST <= Version(release.base_version) < _GONE:
        raise NotSupported(
            f"the patch does not load GGUF files in vLLM {release}",
            expected=f"a release from {_FIRST} on, before {_GONE}",
            found=str(release),
            todo="see 'glm5-patch list' for the releases that are known, and name an "
            "environment of one with --python PATH or --site-packages DIR",
        )
    try:
        checkpoint = read_checkpoint(path)
        model = read_model(checkpoint)
    except GgufError as error:
        raise Failed(
            "no GLM-5 can be read from this file",
            where=str(path),
            expected=f"GGUF files of the architecture {ARCHITECTURE}, whole, with the "
            "names they were published with, and all of a set in one folder",
            found=str(error),
            todo="see that the path is right and the download complete",
        ) from error
    plans = {
        ranks: make_plan(checkpoint, model, target_of(release, ranks))
        for ranks in RANKS
    }
    return Account(checkpoint, model, plans)


def target_of(release: Version, ranks: int) -> Target:
    """What the loader itself would find out inside that release."""
    base = Version(release.base_version)
    return Target(base >= _SHARES, base >= _FUSES, ranks)
