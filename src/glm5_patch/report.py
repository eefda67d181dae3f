# SPDX-License-Identifier: Apache-2.0
"""What a command says: a table, then one line that tells what happened and what next.

Reports are plain values. ``render`` is the only place that knows of a terminal, and
``as_json`` the only one that knows of ``--json``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from glm5_patch.errors import PatchError
from glm5_patch.locate import Installation
from glm5_patch.plan import Plan


@dataclass(frozen=True)
class Table:
    """Rows of text below column heads."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Report:
    """The outcome of a command."""

    command: str
    summary: str
    """What happened, as one sentence."""
    todo: str | None = None
    """What to do next."""
    exit_code: int = 0
    table: Table | None = None
    notes: tuple[str, ...] = ()
    """Lines before the table."""
    data: dict[str, Any] = field(default_factory=dict)
    """What ``--json`` adds."""


def where(installation: Installation) -> tuple[str, ...]:
    """The lines that say which vLLM a report is of."""
    kind = " (editable)" if installation.editable else ""
    lines = [f"vLLM {installation.version}{kind} in {installation.root}"]
    lines += [
        f"note: another vLLM, in {root}, is behind it on the path; Python would not "
        "import that one"
        for root in installation.shadowed
    ]
    return tuple(lines)


def installation_data(installation: Installation) -> dict[str, Any]:
    """An installation for ``--json``."""
    python = installation.python
    return {
        "version": installation.version,
        "root": str(installation.root),
        "editable": installation.editable,
        "python": None if python is None else str(python),
        "shadowed": [str(root) for root in installation.shadowed],
    }


def plan_table(plan: Plan, record: Path | None) -> Table:
    """The files of a plan, with their hunks and lines."""
    rows = [
        (e.path, "patch", str(e.hunks), f"+{e.added} -{e.removed}") for e in plan.edits
    ]
    rows += [
        (a.path, "add", "", f"+{len(a.data.splitlines())}") for a in plan.additions
    ]
    if record is not None:
        path = f"{record.parent.name}/{record.name}"
        rows.append((path, "rows", "", f"+{len(plan.additions)}"))
    return Table(("file", "change", "hunks", "lines"), tuple(rows))


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan for ``--json``."""
    return {
        "release": plan.release,
        "tested": plan.tested,
        "features": list(plan.features),
        "digest": plan.digest,
        "files": [
            {"path": e.path, "change": "patch", "hunks": e.hunks}
            | {"added": e.added, "removed": e.removed}
            for e in plan.edits
        ]
        + [{"path": a.path, "change": "add"} for a in plan.additions],
    }


def untested(plan: Plan) -> tuple[str, ...]:
    """The warning that a plan for an unlisted build carries."""
    if plan.tested:
        return ()
    return (
        "note: this is not a tested release. Every hunk found exactly one place, and "
        "every module compiles; whether it works is yours to find out: run "
        "'glm5-patch verify'",
    )


def as_json(report: Report) -> str:
    """The report as one JSON object."""
    return json.dumps(
        {
            "command": report.command,
            "exit_code": report.exit_code,
            "summary": report.summary,
            "next": report.todo,
            **report.data,
        },
        indent=2,
    )


def error_json(command: str | None, error: PatchError) -> str:
    """A failure as one JSON object."""
    return json.dumps(
        {"command": command, "exit_code": error.exit_code, "error": error.as_dict()},
        indent=2,
    )


def render(report: Report, stream: IO[str]) -> None:
    """Write the report for people, in colour where terminal and NO_COLOR allow."""
    # rich costs a fifth of a short command's time: --json and -q do without it
    from rich import box, table, text
    from rich.console import Console

    wide = _width(report.table) if report.table else None
    console = Console(file=stream, highlight=False, soft_wrap=True, width=wide)

    def shown(*what: text.Text | table.Table) -> str:
        # rich ends the process at a broken pipe: it writes and flushes nothing here
        with console.capture() as captured:
            for part in what:
                console.print(part)
        return captured.get()

    parts = [shown(*map(text.Text, report.notes))]
    if report.table is not None:
        grid = table.Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
        for head in report.table.heads:
            grid.add_column(head, no_wrap=True, overflow="ignore")
        for row in report.table.rows:
            grid.add_row(*(text.Text(cell) for cell in row))
        # rich fills the last column with blanks, which wrap on a narrow terminal
        lines = [line.rstrip() for line in shown(grid).splitlines()]
        parts.append("\n".join(["", *lines, "", ""]))
    style = "bold green" if report.exit_code == 0 else "bold red"
    line = text.Text(report.summary, style=style)
    if report.todo:
        line.append(f"; next: {report.todo}", style="default")
    parts.append(shown(line))
    stream.write("".join(parts))


def _width(shown: Table) -> int:
    """Wide enough for every cell: a path that is cut cannot be copied."""
    columns: Sequence[Sequence[str]] = list(zip(shown.heads, *shown.rows, strict=True))
    return sum(max(map(len, column)) + 3 for column in columns)
