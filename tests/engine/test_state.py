# SPDX-License-Identifier: Apache-2.0
"""The note of an apply: what it holds, and what is not believed in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tree import build, make_plan, picture

from glm5_patch import state, transaction
from glm5_patch.errors import Conflict, Failed
from glm5_patch.locate import Installation


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    installation = build(tmp_path)
    transaction.apply(installation, make_plan(tmp_path))
    return installation


def test_the_note_comes_back_as_it_was_written(installation: Installation) -> None:
    have = state.load(installation.root)
    assert have is not None
    assert state.dump(have) == (installation.root / state.STATE).read_bytes()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut-short"),
        pytest.param(b"\xff\xfe", id="not-utf8"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"null", id="null"),
        pytest.param(b"7", id="number"),
        pytest.param(b"{}", id="no-format"),
        pytest.param(b'{"format": 2}', id="format-of-another-version"),
        pytest.param(b'{"format": 1}', id="nothing-in-it"),
        pytest.param(b"[" * 200_000, id="deep"),
    ],
)
def test_bytes_that_are_no_note(installation: Installation, data: bytes) -> None:
    (installation.root / state.STATE).write_bytes(data)
    is_refused(installation, "note of what was applied")


def is_refused(installation: Installation, what: str) -> None:
    before = picture(installation.root)
    for operation in (
        lambda: state.inspect(installation),
        lambda: transaction.repair(installation),
        lambda: transaction.revert(installation),
    ):
        with pytest.raises(Failed, match=what):
            operation()
        assert picture(installation.root) == before


Change = Callable[[dict[str, Any]], None]


def put(*keys: str | int, value: object) -> Change:
    def change(table: dict[str, Any]) -> None:
        at: Any = table
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(put("phase", value="done"), id="phase"),
        pytest.param(put("release", value="the newest"), id="release"),
        pytest.param(put("release", value=0.16), id="release-no-text"),
        pytest.param(put("features", value=None), id="features"),
        pytest.param(put("entries", value={"a": 1}), id="entries-no-list"),
        pytest.param(put("entries", 0, value=None), id="entry-no-table"),
        pytest.param(put("entries", 0, "kind", value="link"), id="kind"),
        pytest.param(put("entries", 0, "kind", value=[]), id="kind-no-text"),
        pytest.param(put("entries", 0, "before", value="abc"), id="hash"),
        pytest.param(put("entries", 0, "after", value=7), id="hash-no-text"),
        pytest.param(put("folders", value=7), id="folders-no-list"),
        pytest.param(lambda table: table.pop("folders"), id="no-folders"),
    ],
)
def test_a_note_with_wrong_values(installation: Installation, change: Change) -> None:
    rewrite(installation, change)
    is_refused(installation, "note of what was applied")


@pytest.mark.parametrize(
    "path",
    [
        "../outside.py",
        "vllm/../../outside.py",
        "/etc/passwd",
        "torch/__init__.py",
        "vllm",
        "vllm-0.16.0.dist-info/RECORD",
        7,
        None,
    ],
)
@pytest.mark.parametrize("where", ["entries", "folders"])
def test_a_note_that_leaves_the_package(
    installation: Installation, path: object, where: str
) -> None:
    keys = ("entries", 0, "path") if where == "entries" else ("folders", 0)
    rewrite(installation, put(*keys, value=path))
    is_refused(installation, "a path leaves the place it is meant for")


@pytest.mark.parametrize(
    "path",
    [
        "../RECORD",
        "RECORD",
        "torch-2.0.dist-info/RECORD",
        "vllm-0.16.0.dist-info/../../RECORD",
        "vllm-0.16.0.dist-info/METADATA",
        "vllm/RECORD",
        "/vllm-0.16.0.dist-info/RECORD",
    ],
)
def test_a_record_that_is_not_of_vllm(installation: Installation, path: str) -> None:
    def change(table: dict[str, Any]) -> None:
        (entry,) = (e for e in table["entries"] if e["kind"] == "record")
        entry["path"] = path

    rewrite(installation, change)
    is_refused(installation, "a path leaves the place it is meant for")


def test_a_wrong_hash_never_leads_to_a_wrong_file(installation: Installation) -> None:
    rewrite(installation, put("entries", 2, "before", value="0" * 64))
    before = picture(installation.root)
    with pytest.raises(
        Failed, match="the original of a file is missing or was changed"
    ):
        transaction.revert(installation)
    assert picture(installation.root) == before


def test_a_note_that_is_a_folder(installation: Installation) -> None:
    (installation.root / state.STATE).unlink()
    (installation.root / state.STATE).mkdir()
    with pytest.raises(Conflict, match="not a plain one"):
        state.inspect(installation)


def rewrite(installation: Installation, change: Change) -> None:
    file = installation.root / state.STATE
    table = json.loads(file.read_bytes())
    change(table)
    file.write_text(json.dumps(table))
