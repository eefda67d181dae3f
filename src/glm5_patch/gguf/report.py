# SPDX-License-Identifier: Apache-2.0
"""The report of ``inspect``: an account in words."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

from glm5_patch.gguf.account import RANKS, Account, take
from glm5_patch.report import Report, Table

_SHOWN_PROBLEMS = 8


def inspect(path: Path, release: Version) -> Report:
    """Say what the files hold, what each GPU needs, and what vLLM would refuse."""
    account = take(path, release)
    problems = account.plan.problems
    rows = tuple(_row(account, ranks) for ranks in RANKS)
    loads = f"vLLM {release}, patched, "
    return Report(
        "inspect",
        loads
        + (f"cannot serve it: {problems[0]}" if problems else "loads every parameter"),
        exit_code=1 if problems else 0,
        table=Table(("GPUs", "weights on each", "verdict"), rows),
        notes=(*_notes(account), *_problem_notes(account)),
        data={"release": str(release), **account.as_dict()},
    )


def _notes(account: Account) -> list[str]:
    model, headers = account.model, account.checkpoint.headers
    running = sum(model.full_layers)
    types = ", ".join(
        f"{kind} {count} ({_bytes(size)})"
        for kind, (count, size) in account.types().items()
    )
    lines = [
        f"{model.name}: {model.layers} layers, {model.experts} experts of which "
        f"{model.experts_used} run, context {model.context:,}, "
        f"vocabulary {model.vocabulary:,}",
        f"indexers: {running} of {model.layers} layers run one"
        + (", the others share its selection" if model.shares_indexers else ""),
        f"files: {len(headers)}, {_bytes(account.checkpoint.size)}"
        + ("; the first holds no tensors" if not headers[0].tensors else ""),
        f"tensors: {len(account.checkpoint.tensors)}: {types}",
    ]
    lines += [
        f"skipped: {count} tensors, {reason}"
        for reason, count in account.skipped().items()
    ]
    lines.append(
        f"cache: {_bytes(account.cache_bytes_per_token() * 1024)} for 1,024 tokens "
        "on each GPU, at 16 bits"
    )
    return lines


def _problem_notes(account: Account) -> list[str]:
    problems = account.plan.problems
    lines = [f"refused: {problem}" for problem in problems[:_SHOWN_PROBLEMS]]
    if more := len(problems) - len(lines):
        lines.append(f"refused: {more} reasons more; --json lists all")
    return lines


def _row(account: Account, ranks: int) -> tuple[str, str, str]:
    own = [
        str(problem)
        for problem in account.plans[ranks].problems
        if str(problem) not in map(str, account.plan.problems)
    ]
    verdict = own[0] if own else "refused" if account.plan.problems else "loads"
    return str(ranks), _bytes(account.weight_bytes(ranks)), verdict


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
