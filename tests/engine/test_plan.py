# SPDX-License-Identifier: Apache-2.0
"""The plan: complete or none, and nothing but bytes in and bytes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from engine_tree import unified

from glm5_patch import diff, plan
from glm5_patch.errors import Conflict, Failed
from glm5_patch.manifest import Hashes, Series, sha256

PATH = "vllm/m.py"
BEFORE = "a = 1\nb = 2\nc = 3\n"
AFTER = "a = 1\nb = 20\nb2 = 21\nc = 3\n"
NEW = {"vllm/new.py": b"n = 1\n", "vllm/new.json": b"{not python"}


def series(after: str = AFTER, new: Mapping[str, bytes] = NEW) -> Series:
    diffs = diff.parse(unified(PATH, BEFORE, after), "test.patch")
    return Series("0.16.0", True, ("backend",), diffs, new, {})


def make(wanted: Series, files: Mapping[str, bytes]) -> plan.Plan:
    return plan.make(wanted, files.get)


STOCK = {PATH: BEFORE.encode()}


def test_a_plan_holds_every_byte() -> None:
    made = make(series(), STOCK)
    assert made.edits == (
        plan.Edit(PATH, BEFORE.encode(), AFTER.encode(), hunks=1, added=2, removed=1),
    )
    assert {a.path: a.data for a in made.additions} == NEW
    assert (made.release, made.tested, made.features) == ("0.16.0", True, ("backend",))


def test_the_digest_names_the_result() -> None:
    digest = make(series(), STOCK).digest
    assert len(digest) == 12
    assert make(series(), {**STOCK, **NEW}).digest == digest
    others = [
        replace(series(), release="0.17.0"),
        replace(series(), features=("order",)),
        series("a = 1\nb = 5\nc = 3\n"),
        series(new={"vllm/new.py": b"n = 2\n"}),
    ]
    digests = {make(other, STOCK).digest for other in others} | {digest}
    digests.add(make(series(), {PATH: b"# moved\n" + BEFORE.encode()}).digest)
    assert len(digests) == 6


def test_an_empty_series() -> None:
    with pytest.raises(Failed, match="empty"):
        make(Series("0.16.0", True, (), (), {}, {}), STOCK)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        pytest.param(None, "is missing", id="missing"),
        pytest.param(b"\xff\xfe", "is not UTF-8", id="not-utf8"),
        pytest.param(b"", "does not match", id="empty"),
        pytest.param(AFTER.encode(), "does not match", id="patched-already"),
        pytest.param(
            BEFORE.replace("\n", "\r\n").encode(), "does not match", id="crlf"
        ),
        pytest.param(BEFORE.encode() * 2, "not where they can be", id="two-places"),
    ],
)
def test_a_target_that_does_not_fit(data: bytes | None, what: str) -> None:
    with pytest.raises(Conflict, match=what) as caught:
        plan.make(series(), {PATH: data}.get)
    assert str(caught.value.where).startswith(PATH)


def test_a_result_that_is_not_the_lock_s() -> None:
    hashes = {PATH: Hashes(sha256(BEFORE.encode()), "0" * 64)}
    with pytest.raises(Failed, match="not what the lock holds") as caught:
        make(replace(series(), hashes=hashes), STOCK)
    assert caught.value.expected == "sha256 " + "0" * 64
    assert caught.value.found == f"sha256 {sha256(AFTER.encode())}"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a = 1\nb = \nc = 3\n", id="syntax"),
        pytest.param("a = 1\n  b = 2\nc = 3\n", id="indent"),
        pytest.param("a = 1\nb = 2\0\nc = 3\n", id="nul"),
        pytest.param("a = 1\nreturn 1\nc = 3\n", id="return-outside"),
        pytest.param("# coding: nonsense\na = 1\nb = 2\nc = 3\n", id="coding"),
    ],
)
def test_a_module_that_does_not_compile(text: str) -> None:
    with pytest.raises(Failed, match="does not compile") as caught:
        make(series(text), STOCK)
    assert caught.value.where == PATH
    with pytest.raises(Failed, match="does not compile") as caught:
        make(series(new={"vllm/new.py": text.encode()}), STOCK)
    assert caught.value.where == "vllm/new.py"


def test_a_warning_is_no_error(recwarn: pytest.WarningsRecorder) -> None:
    make(series("a = 1\nb = '\\d' is 1\nc = 3\n"), STOCK)
    assert not recwarn.list


def test_future_statements_of_ours_do_not_leak() -> None:
    """compile() would otherwise take this project's own ``annotations``."""
    make(series("a = 1\nb: (yield_) = 2\nc = 3\n"), STOCK)


def test_an_addition_that_is_there() -> None:
    assert make(series(), {**STOCK, "vllm/new.py": NEW["vllm/new.py"]})
    with pytest.raises(Conflict, match="a file stands where") as caught:
        make(series(), {**STOCK, "vllm/new.py": b"theirs = 1\n"})
    assert caught.value.where == "vllm/new.py"
    assert caught.value.found == f"sha256 {sha256(b'theirs = 1' + bytes([10]))}"
