# SPDX-License-Identifier: Apache-2.0
"""The inputs on which kernel and reference are compared.

Every cache row that no slot names holds NaN unless a case asks otherwise: a
kernel that reads one row too many cannot pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import reference
import torch

PAGE = 64
ROW_DIM = 576
GLM_SCALE = (192 + 64) ** -0.5


@dataclass(frozen=True)
class Inputs:
    """Arguments of the operator, as tensors."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    slots: torch.Tensor
    scale: float = GLM_SCALE


@dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype = torch.float16
    tokens: int = 3
    heads: int = 16
    topk: int = 50
    num_blocks: int = 5
    # Turns a list of [tokens, topk] good slots into the one of the case.
    spoil: Callable[[torch.Tensor], torch.Tensor] = lambda slots: slots
    amplitude: float = 1.0
    poison: bool = True
    seed: int = 0

    def build(self, device: str) -> Inputs:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        # Without repetition within a token, as the indexer picks.
        num_slots = self.num_blocks * PAGE
        order = torch.rand(self.tokens, num_slots, generator=generator).argsort(dim=1)
        slots = self.spoil(order[:, : self.topk].int())

        q = normal(self.tokens, self.heads, ROW_DIM) * self.amplitude
        rows = normal(num_slots, ROW_DIM) * self.amplitude
        if self.amplitude > 1.0:  # float16 ends at 65504
            q, rows = q.clamp(-6e4, 6e4), rows.clamp(-6e4, 6e4)
        if self.poison:
            named = slots[(slots >= 0) & (slots < num_slots)].long()
            unused = torch.ones(num_slots, dtype=torch.bool)
            unused[named] = False
            rows[unused] = torch.nan
        return Inputs(
            q=q.to(self.dtype).to(device),
            kv_cache=rows.to(self.dtype).view(-1, PAGE, ROW_DIM).to(device),
            slots=slots.to(device),
        )


def in_fp8(inputs: Inputs) -> Inputs:
    """The same inputs with a cache of 656-byte rows; NaN stays NaN, in all parts."""
    return replace(
        inputs, kv_cache=reference.encode_fp8(inputs.kv_cache, inputs.q.dtype)
    )


def _set(slots: torch.Tensor, where: slice, value: int) -> torch.Tensor:
    slots = slots.clone()
    slots[:, where] = value
    return slots


def _scattered(slots: torch.Tensor) -> torch.Tensor:
    """-1, the most negative number, one past the end, and far past the end."""
    slots = slots.clone()
    slots[:, 3::11] = -1
    slots[:, 4::11] = -(2**31)
    slots[:, 5::11] = 5 * PAGE
    slots[:, 6::11] = 2**31 - 1
    return slots


def _one_token_empty(slots: torch.Tensor) -> torch.Tensor:
    slots = slots.clone()
    slots[1] = -1
    return slots


def _in_both(*cases: Case) -> list[Case]:
    return [
        replace(case, name=f"{case.name}-{name}", dtype=dtype)
        for case in cases
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
    ]


CASES: list[Case] = [
    *_in_both(
        *(Case(f"heads-{n}", heads=n, tokens=2) for n in (1, 3, 8, 16, 17, 64, 128)),
        Case("all-empty", spoil=lambda s: _set(s, slice(None), -1)),
        Case("one-token-empty", spoil=_one_token_empty),
        # 40 is more than the first block of every configuration.
        Case("leading-empty", topk=90, spoil=lambda s: _set(s, slice(0, 40), -1)),
        Case("trailing-empty", topk=90, spoil=lambda s: _set(s, slice(50, None), -1)),
        Case("scattered-invalid", topk=77, spoil=_scattered),
    ),
    *(Case(f"topk-{n}", topk=n) for n in (1, 15, 16, 31, 32, 33, 100, 257)),
    Case("one-key", topk=64, spoil=lambda s: _set(s, slice(1, None), -1)),
    Case("same-slot-twice", topk=40, spoil=lambda s: s[:, :1].repeat(1, 40)),
    Case("fp16-6e4", amplitude=4e4),
    Case("fp16-6e4-heads-64", amplitude=4e4, heads=64, tokens=1, topk=70),
    Case("many-tokens", tokens=21, heads=8, topk=20),
]

# Real sizes, for a real GPU.
LARGE_CASES: list[Case] = _in_both(
    Case("decode-128x64x2048", tokens=128, heads=64, topk=2048, num_blocks=128),
    Case("decode-8x128x2048", tokens=8, heads=128, topk=2048, num_blocks=128),
    Case("decode-32x8x1024", tokens=32, heads=8, topk=1024, num_blocks=64),
    Case("prefill-512x16x2048", tokens=512, heads=16, topk=2048, num_blocks=64),
)
