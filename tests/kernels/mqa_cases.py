# SPDX-License-Identifier: Apache-2.0
"""Inputs for the indexer's logits, with NaN wherever nothing may be read.

Keys outside of every range, what a page holds beyond the context, pages that no
request names and scales of all these are NaN: a program that lets one of them
into a logit, or writes one where a key is, cannot pass.
"""

from dataclasses import dataclass

import torch

PAGE = 64
HEAD_DIM = 128
NAN_BYTE = 0x7F


def float8(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Normal values of the size that a quantiser writes, up to 448."""
    values = torch.randn(*shape, generator=generator) * 120
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Prefill:
    """Arguments of mqa_logits for requests that lie one after another."""

    name: str
    heads: int = 32
    # (tokens before the query tokens, query tokens) of each request
    requests: tuple[tuple[int, int], ...] = ((40, 5),)
    seed: int = 0

    def build(self, device: str) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        starts, ends, first = [], [], 0
        for before, queries in self.requests:
            starts += [first] * queries
            ends += [first + before + j + 1 for j in range(queries)]
            first += before + queries
        num_queries, num_keys = len(starts), first + 7  # 7 keys of nobody
        k = float8(num_keys, HEAD_DIM, generator=generator)
        k_scale = torch.rand(num_keys, generator=generator) / 100
        k.view(torch.uint8)[first:] = NAN_BYTE
        k_scale[first:] = torch.nan
        q = float8(num_queries, self.heads, HEAD_DIM, generator=generator)
        weights = torch.randn(num_queries, self.heads, generator=generator)
        arguments = {
            "q": q,
            "k": k,
            "k_scale": k_scale,
            "weights": weights,
            "starts": torch.tensor(starts, dtype=torch.int32),
            "ends": torch.tensor(ends, dtype=torch.int32),
        }
        return {name: tensor.to(device) for name, tensor in arguments.items()}


@dataclass(frozen=True)
class Decode:
    """Arguments of paged_mqa_logits."""

    name: str
    heads: int = 32
    next_n: int = 1
    lens: tuple[int, ...] = (100,)
    shape: str = "B"  # of context_lens: "B", "B1" or "Bn"
    max_len: int = 300
    spare_pages: int = 2  # columns of the block table that no request uses
    padding: int = 0  # bytes between two blocks of the cache
    seed: int = 0

    def build(self, device: str) -> dict[str, object]:
        generator = torch.Generator().manual_seed(self.seed)
        batch = len(self.lens)
        pages = [-(-max(0, n) // PAGE) for n in self.lens]
        num_blocks = sum(pages) + 3
        free = torch.randperm(num_blocks, generator=generator).tolist()

        stride = PAGE * (HEAD_DIM + 4) + self.padding
        memory = torch.full((num_blocks, stride), NAN_BYTE, dtype=torch.uint8)
        memory[:, PAGE * HEAD_DIM :] = 0xFF  # NaN as float32
        table = torch.full((batch, max(pages) + self.spare_pages), -1)
        for b, length in enumerate(self.lens):
            for page in range(pages[b]):
                block = table[b, page] = free.pop()
                used = min(PAGE, length - page * PAGE)
                keys = float8(used, HEAD_DIM, generator=generator)
                scales = torch.rand(used, generator=generator) / 100
                flat = memory[block]
                flat[: used * HEAD_DIM] = keys.view(torch.uint8).reshape(-1)
                at = PAGE * HEAD_DIM
                flat[at : at + 4 * used] = scales.view(torch.uint8)
        # One column further than used, the table names a block of NaN.
        for b in range(batch):
            if self.spare_pages:
                table[b, pages[b]] = free[0]

        lens = torch.tensor(self.lens)
        if self.shape == "B1":
            lens = lens.view(-1, 1)
        elif self.shape == "Bn":
            lens = lens.view(-1, 1) - self.next_n + 1 + torch.arange(self.next_n)
        q = float8(batch, self.next_n, self.heads, HEAD_DIM, generator=generator)
        rows = batch * self.next_n
        memory = memory.to(device)  # before the view, which keeps its strides
        return {
            "q": q.to(device),
            "kv_cache": memory[:, : PAGE * (HEAD_DIM + 4)].view(
                num_blocks, PAGE, 1, HEAD_DIM + 4
            ),
            "weights": torch.randn(rows, self.heads, generator=generator).to(device),
            "context_lens": lens.int().to(device),
            "block_table": table.int().to(device),
            "max_len": self.max_len,
        }


PREFILL: list[Prefill] = [
    Prefill("one-token", requests=((0, 1),)),
    Prefill("heads-64", heads=64, requests=((70, 9),)),
    Prefill("three-requests", requests=((3, 6), (90, 2), (0, 11))),
    Prefill("three-requests-64", heads=64, requests=((3, 6), (90, 2), (0, 11))),
    Prefill("block-edges", requests=((63, 1), (64, 1), (127, 2))),
    Prefill("beyond-one-span", requests=((2040, 12),)),
    Prefill("far-requests", requests=((0, 1), (4200, 2))),
]

DECODE: list[Decode] = [
    Decode("one-key", lens=(1,)),
    Decode("heads-64", heads=64, lens=(130, 5)),
    Decode("lengths", lens=(64, 65, 0, 63, 128, 1, 290)),
    Decode("empty-first-and-last", lens=(0, 0, 70, 0)),
    Decode("all-empty", lens=(0, 0)),
    Decode("negative-length", lens=(-3, 20), next_n=2),
    Decode("two-dimensions", lens=(64, 7), shape="B1"),
    Decode("next-2", next_n=2, lens=(66, 2, 128)),
    Decode("next-2-each", next_n=2, lens=(66, 2, 128), shape="Bn"),
    Decode("next-3", next_n=3, lens=(66, 2, 128), shape="Bn"),
    Decode("next-5-64", next_n=5, heads=64, lens=(66, 5), shape="Bn"),
    Decode("next-4-one-length", next_n=4, lens=(66, 3)),
    Decode("next-2-short", next_n=2, lens=(1, 0, 65)),
    Decode("longer-than-max-len", lens=(300, 10), max_len=100),
    Decode("longer-than-the-table", lens=(128,), spare_pages=0, max_len=500),
    Decode("padded-blocks", lens=(100, 70), padding=64),
    # A program's share is more pages than it reads block numbers at once.
    Decode("many-pages", lens=(64 * 45, 9), max_len=64 * 45 * 2, spare_pages=0),
    Decode(
        "many-pages-8", heads=64, next_n=2, lens=(64 * 40, 64 * 70 - 3), max_len=5000
    ),
    Decode("many-requests", lens=tuple(n % 3 for n in range(260)), max_len=70),
]
