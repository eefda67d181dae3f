# SPDX-License-Identifier: Apache-2.0
"""RECORD: rows of added files go in and come out, and no other byte moves."""

import csv
import io

import pytest
from engine_tree import row
from hypothesis import given
from hypothesis import strategies as st

from glm5_patch import record

ADDED = {"vllm/v1/sparse.py": b"x = 1\n", "vllm/v1/kernel.py": b""}
PATHS = frozenset(ADDED)
LF = b"vllm/__init__.py,sha256=abc,3\nvllm-0.16.0.dist-info/RECORD,,\n"
CRLF = LF.replace(b"\n", b"\r\n")
QUOTED = b'"vllm/odd,name.py",sha256=abc,3\n' + LF


def rows(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode(), newline="")))


@pytest.mark.parametrize(
    "stock",
    [
        pytest.param(LF, id="lf"),
        pytest.param(CRLF, id="crlf"),
        pytest.param(QUOTED, id="quoted-row"),
        pytest.param(b"", id="empty"),
    ],
)
def test_rows_go_in_and_come_out(stock: bytes) -> None:
    patched = record.with_rows(stock, ADDED)
    assert patched.startswith(stock)
    assert rows(patched) == rows(stock) + [
        row(path, data).split(",") for path, data in ADDED.items()
    ]
    assert record.without_rows(patched, PATHS) == stock


def test_no_final_line_end() -> None:
    patched = record.with_rows(CRLF[:-2], ADDED)
    assert record.without_rows(patched, PATHS) == CRLF
    assert patched.count(b"\n") == patched.count(b"\r\n") == 4


def test_an_empty_file_has_the_hash_of_nothing() -> None:
    assert (
        record.with_rows(b"", {"vllm/a.py": b""})
        == b"vllm/a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n"
    )


def test_rows_of_another_tool_stay() -> None:
    patched = record.with_rows(LF, ADDED) + b"vllm/theirs.py,,\n"
    assert record.without_rows(patched, PATHS) == LF + b"vllm/theirs.py,,\n"


def test_only_whole_paths_are_taken_out() -> None:
    near = b"vllm/v1/sparse.pyc,,\nx/vllm/v1/sparse.py,,\n\xff\xfe,,\n"
    assert record.without_rows(near, PATHS) == near


def test_nothing_added_changes_nothing() -> None:
    assert record.with_rows(LF, {}) == LF


_names = st.text("abcdefgh_/.-", min_size=1, max_size=12)


@given(
    st.lists(_names, unique=True),
    st.dictionaries(_names.map("vllm/new-{}".format), st.binary(max_size=9)),
    st.sampled_from(["\n", "\r\n"]),
)
def test_any_record(names: list[str], added: dict[str, bytes], end: str) -> None:
    stock = "".join(f"{name},sha256=x,1{end}" for name in names).encode()
    patched = record.with_rows(stock, added)
    assert [r[0] for r in rows(patched)] == names + list(added)
    assert record.without_rows(patched, frozenset(added)) == stock
