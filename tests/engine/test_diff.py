# SPDX-License-Identifier: Apache-2.0
"""The hunk engine: what it refuses to read, where it puts a hunk, what it says."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from engine_tree import unified
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glm5_patch import diff
from glm5_patch.errors import Conflict, Failed

HEAD = "--- a/vllm/m.py\n+++ b/vllm/m.py\n"
HUNK = "@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"
GIT = "diff --git a/vllm/m.py b/vllm/m.py\n"
MARK = "\\ No newline at end of file\n"


def named(path: str) -> str:
    return f"--- a/{path}\n+++ b/{path}\n{HUNK}"


def one(text: str) -> diff.FileDiff:
    (file,) = diff.parse(text, "test.patch")
    return file


def between(before: str, after: str, context: int = 3) -> diff.FileDiff:
    return one(unified("vllm/m.py", before, after, context))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("vllm/../../etc/passwd", id="dot-dot"),
        pytest.param("../vllm/m.py", id="dot-dot-first"),
        pytest.param("/etc/passwd", id="absolute"),
        pytest.param("vllm//m.py", id="empty-part"),
        pytest.param("vllm/./m.py", id="dot"),
        pytest.param("vllm/", id="no-name"),
        pytest.param("vllm", id="no-folder"),
        pytest.param("vllm\\m.py", id="backslash"),
        pytest.param("vllm/a\\..\\m.py", id="backslash-dot-dot"),
        pytest.param("vllm/a\x1b[2Jm.py", id="escape"),
        pytest.param("vllm/m\x00.py", id="nul"),
        pytest.param("vllm/m\u202eyp.py", id="right-to-left"),
        pytest.param("vllm/a,b.py", id="comma"),
        pytest.param('vllm/a"b.py', id="quote"),
        pytest.param("torch/m.py", id="outside"),
        pytest.param("vllm_evil/m.py", id="outside-with-its-prefix"),
        pytest.param("VLLM/m.py", id="other-case"),
    ],
)
def test_a_path_that_leaves_is_refused(path: str) -> None:
    with pytest.raises(Failed) as caught:
        diff.parse(named(path), "bad.patch")
    assert caught.value.where == "bad.patch"
    assert path.isprintable() or path not in "\n".join(caught.value.lines())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("", "no file in it", id="empty"),
        pytest.param("not a diff\n", "no file in it", id="prose"),
        pytest.param(HEAD, "no text change", id="no-hunk"),
        pytest.param(
            HEAD + HUNK + HEAD.replace("m.", "n."), "no text", id="second-none"
        ),
        pytest.param(HUNK, "Unexpected hunk", id="hunk-without-file"),
        pytest.param(HEAD[16:] + HUNK, "Target without source", id="only-new-name"),
        pytest.param(HEAD[:16] + HUNK, "Unexpected hunk", id="only-old-name"),
        pytest.param(
            f"--- /dev/null\n+++ b/vllm/m.py\n{HUNK}", "/dev/null", id="new-file"
        ),
        pytest.param(
            f"--- a/vllm/m.py\n+++ /dev/null\n{HUNK}", "/dev/null", id="deleted-file"
        ),
        pytest.param(
            f"{GIT}new file mode 120000\n--- /dev/null\n+++ b/vllm/m.py\n"
            f"@@ -0,0 +1 @@\n+/etc\n{MARK}",
            "/dev/null",
            id="symbolic-link",
        ),
        pytest.param(
            f"--- a/vllm/m.py\n+++ b/vllm/n.py\n{HUNK}", "renamed", id="renamed"
        ),
        pytest.param(
            "diff --git a/vllm/m.py b/vllm/n.py\nsimilarity index 100%\n"
            "rename from vllm/m.py\nrename to vllm/n.py\n",
            "renamed",
            id="renamed-by-git",
        ),
        pytest.param(
            GIT + "Binary files a/vllm/m.py and b/vllm/m.py differ\n",
            "no text change",
            id="binary",
        ),
        pytest.param(
            GIT + "index 1..2 100644\nGIT binary patch\nliteral 1\nIc\n\n",
            "no text change",
            id="binary-by-git",
        ),
        pytest.param(
            f"--- vllm/m.py\n+++ vllm/m.py\n{HUNK}", "start with", id="no-prefix"
        ),
        pytest.param(
            f'--- "a/vllm/\\303.py"\n+++ "b/vllm/\\303.py"\n{HUNK}',
            "start with",
            id="quoted-name",
        ),
        pytest.param(
            HEAD + "@@ -1,0 +2,1 @@\n+b\n", "no line to find", id="no-context"
        ),
        pytest.param(HEAD + "@@ -1 +1 @@\n a\n", "changes nothing", id="no-change"),
        pytest.param(HEAD + HUNK + HEAD + HUNK, "named twice", id="same-file-twice"),
        pytest.param(HEAD + HUNK[:-3], "shorter", id="cut-in-a-hunk"),
        pytest.param(HEAD + HUNK[:-1], "has no end", id="cut-in-the-last-line"),
        pytest.param(HEAD + HUNK + "@@ -9,3 +9,3 @@\n", "shorter", id="cut-at-a-hunk"),
        pytest.param(HEAD + HUNK + "@@ -9,3 +9\n", "cut short", id="cut-hunk-header"),
        pytest.param(
            HEAD + HUNK + "--- a/vllm/n.py\n", "cut short", id="cut-file-header"
        ),
        pytest.param(HEAD + HUNK + "+D\n", "line 8 is in no hunk", id="line-too-many"),
        pytest.param(
            HEAD + HUNK.replace("1,3 @@", "1,4 @@"), "shorter", id="count-too-large"
        ),
        pytest.param(
            HEAD + "@@ -1,2 +1,2 @@\n a\n-b\n+B\n c\n",
            "line 7 is in no hunk",
            id="count-too-small",
        ),
        pytest.param(
            HEAD + "@@ -1,3 +1,3 @@\n a\nxx\n c\n", "line expected", id="odd-line"
        ),
        pytest.param(
            HEAD + f"@@ -1,3 +1,3 @@\n{MARK} a\n-b\n+B\n c\n",
            "begins with a marker",
            id="marker-first",
        ),
        pytest.param(
            HEAD + f"@@ -1,3 +1,3 @@\n a\n{MARK}-b\n+B\n c\n",
            "without an end",
            id="marker-in-the-middle",
        ),
        pytest.param(
            HEAD + HUNK.replace("-1", "-" + "9" * 5000), "digits", id="endless-number"
        ),
        pytest.param((HEAD + HUNK).replace("\n", "\r\n"), r"m.py\r", id="crlf-patch"),
    ],
)
def test_a_bad_patch_is_refused(text: str, found: str) -> None:
    with pytest.raises(Failed) as caught:
        diff.parse(text, "bad.patch")
    assert caught.value.where == "bad.patch"
    assert caught.value.found is not None
    assert found in caught.value.found


def test_no_beginning_of_a_patch_is_taken_for_less() -> None:
    """Cut anywhere, a patch is refused, or is whole files with all their hunks."""
    text = HEAD + HUNK + HUNK.replace("1,3", "7,3") + named("vllm/n.py")
    whole = diff.parse(text, "test.patch")
    first = (whole[0], diff.FileDiff("vllm/m.py", whole[0].hunks[:1]))
    for end in range(len(text)):
        try:
            parsed = diff.parse(text[:end], "test.patch")
        except Failed:
            continue
        # a diff has no end mark: only a cut between two hunks cannot be seen
        assert text[:end].endswith(" c\n")
        assert parsed in ((first[0],), (first[1],))


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        pytest.param(
            HEAD + HUNK, ("a\n", "b\n", "c\n"), ("a\n", "B\n", "c\n"), id="gnu"
        ),
        pytest.param(
            f"Why it is made.\n\n{GIT}index 12..34 100644\n{HEAD}{HUNK}",
            ("a\n", "b\n", "c\n"),
            ("a\n", "B\n", "c\n"),
            id="git-with-a-preamble",
        ),
        pytest.param(
            HEAD + "@@ -1 +1 @@ def f():\n-b\n+B\n", ("b\n",), ("B\n",), id="one-line"
        ),
        pytest.param(
            HEAD + "@@ -1,2 +1,3 @@\n a\n+b\n\n\n",
            ("a\n", "\n"),
            ("a\n", "b\n", "\n"),
            id="blank-context-and-end",
        ),
        pytest.param(
            HEAD + "@@ -1,2 +1,2 @@\n a\n--- b\n+++ B\n",
            ("a\n", "-- b\n"),
            ("a\n", "++ B\n"),
            id="lines-like-headers",
        ),
        pytest.param(
            HEAD + f"@@ -1,2 +1,2 @@\n a\n-b\n{MARK}+B\n",
            ("a\n", "b"),
            ("a\n", "B\n"),
            id="gives-the-last-line-an-end",
        ),
        pytest.param(
            HEAD + f"@@ -1,2 +1,2 @@\n a\n-b\n+B\n{MARK}",
            ("a\n", "b\n"),
            ("a\n", "B"),
            id="takes-the-last-line-its-end",
        ),
        pytest.param(
            HEAD + "@@ -1,2 +1,2 @@\n a\x0c\x1c\x85\n-b\u2028b\r\n+B\x0b\n",
            ("a\x0c\x1c\x85\n", "b\u2028b\r\n"),
            ("a\x0c\x1c\x85\n", "B\x0b\n"),
            id="no-other-line-end",
        ),
    ],
)
def test_parse(text: str, before: tuple[str, ...], after: tuple[str, ...]) -> None:
    (hunk,) = one(text).hunks
    assert hunk.before == before
    assert hunk.after == after


def numbered(n: int = 30) -> str:
    return "".join(f"line {i}\n" for i in range(n))


EDITED = numbered().replace("line 15\n", "line 15\nnew\n")


@pytest.mark.parametrize(
    ("target", "want"),
    [
        pytest.param(numbered(), EDITED, id="where-it-was"),
        pytest.param("x\n" * 50 + numbered(), "x\n" * 50 + EDITED, id="moved-down"),
        pytest.param(
            numbered().removeprefix("line 0\nline 1\n"),
            EDITED.removeprefix("line 0\nline 1\n"),
            id="moved-up",
        ),
        pytest.param(
            numbered().replace("line 2\n", "\x0c\n\u2028\x85\x1c\n\r\n"),
            EDITED.replace("line 2\n", "\x0c\n\u2028\x85\x1c\n\r\n"),
            id="odd-characters-elsewhere",
        ),
        pytest.param(numbered()[:-1], EDITED[:-1], id="no-end-elsewhere"),
    ],
)
def test_a_hunk_finds_its_place(target: str, want: str) -> None:
    assert diff.apply(between(numbered(), EDITED), target) == want


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("a\nb\nc\n", "new\na\nb\nc\n", id="before-the-first-line"),
        pytest.param("a\nb\nc\n", "a\nb\nc\nnew\n", id="after-the-last-line"),
        pytest.param("a\nb\nc", "a\nb\nc\n", id="gets-a-final-newline"),
        pytest.param("a\nb\nc\n", "a\nb\nc", id="loses-its-final-newline"),
        pytest.param("a\nb\nc", "a\nb\nC", id="stays-without"),
        pytest.param("a\nb\nc", "a\nb\nc\nd", id="grows-without"),
        pytest.param("a\nb\n", "", id="emptied"),
        pytest.param("a\r\nb\r\n", "a\r\nB\r\n", id="crlf-on-both-sides"),
        pytest.param("a\x0cb\nc\n", "a\x0cb\nC\x85\n", id="form-feed"),
        pytest.param("\ufeffa\nb\n", "\ufeffa\nB\n", id="byte-order-mark"),
    ],
)
def test_at_the_ends(before: str, after: str) -> None:
    assert diff.apply(between(before, after), before) == after


@pytest.mark.parametrize(
    ("target", "line", "expected", "found"),
    [
        pytest.param(
            numbered().replace("line 14\n", "edited\n"),
            15,
            r"'line 14\n'",
            r"'edited\n'",
            id="edited-context",
        ),
        pytest.param(
            numbered().replace("line 13\n", "edited\n") + "line 13\nother\n",
            14,
            r"'line 13\n'",
            r"'edited\n'",
            id="first-line-edited-and-found-elsewhere",
        ),
        pytest.param(EDITED, 17, r"'line 16\n'", r"'new\n'", id="patched-already"),
        pytest.param(
            numbered().replace("\n", "\r\n"),
            14,
            r"'line 13\n'",
            r"'line 13\r\n'",
            id="crlf-target",
        ),
        pytest.param(
            numbered().replace("line 16\n", "line 16 \n"),
            17,
            r"'line 16\n'",
            r"'line 16 \n'",
            id="space-at-the-end",
        ),
        pytest.param(
            numbered(16),
            17,
            r"'line 16\n'",
            "the end of the file",
            id="file-ends-in-it",
        ),
        pytest.param("line 13\n", 2, r"'line 14\n'", "the end of the file", id="short"),
        pytest.param("", 1, r"'line 13\n'", "the end of the file", id="empty"),
    ],
)
def test_a_mismatch_is_shown(target: str, line: int, expected: str, found: str) -> None:
    with pytest.raises(Conflict) as caught:
        diff.apply(between(numbered(), EDITED), target)
    assert caught.value == Conflict(
        "a hunk does not match",
        where=f"vllm/m.py, hunk @@ -14,6 +14,7 @@, line {line}",
        expected=expected,
        found=found,
        todo=diff.TOO_DIFFERENT,
    )


def test_two_places() -> None:
    with pytest.raises(Conflict) as caught:
        diff.apply(between(numbered(), EDITED), numbered() + numbered())
    assert caught.value.where == "vllm/m.py, hunk @@ -14,6 +14,7 @@"
    assert caught.value.expected == "exactly one place"
    assert caught.value.found == "lines 14, 44"


def test_two_places_that_overlap() -> None:
    with pytest.raises(Conflict) as caught:
        diff.apply(one(HEAD + "@@ -1,2 +1,2 @@\n x\n-x\n+y\n"), "x\nx\nx\n")
    assert caught.value.found == "lines 1, 2"


@pytest.mark.parametrize("order", [1, -1], ids=["in-order", "other-order"])
def test_hunks_that_overlap(order: int) -> None:
    hunks = one(HEAD + HUNK + "@@ -3,2 +3,2 @@\n c\n-d\n+D\n").hunks[::order]
    with pytest.raises(Conflict) as caught:
        diff.apply(diff.FileDiff("vllm/m.py", hunks), "a\nb\nc\nd\n")
    assert caught.value.where == "vllm/m.py, hunk @@ -3,2 +3,2 @@"
    assert (caught.value.expected, caught.value.found) == ("after line 3", "line 3")


def test_hunks_of_two_features_may_come_in_any_order() -> None:
    hunks = one(HEAD + HUNK + "@@ -4,2 +4,2 @@\n d\n-e\n+E\n").hunks
    text = "a\nb\nc\nd\ne\n"
    for order in (hunks, hunks[::-1]):
        diffs = diff.FileDiff("vllm/m.py", order)
        assert diff.apply(diffs, text) == "a\nB\nc\nd\nE\n"


def test_a_line_without_end_is_only_left_at_the_end() -> None:
    hunk = one(HEAD + f"@@ -1,2 +1,2 @@\n a\n-b\n+B\n{MARK}")
    assert diff.apply(hunk, "a\nb\n") == "a\nB"
    with pytest.raises(Conflict) as caught:
        diff.apply(hunk, "a\nb\nc\n")
    assert caught.value.expected == "the end of the file"


# Generated texts, edited at generated places.

_LINE = st.text(
    st.one_of(
        st.sampled_from("ab \t\x0c\x0b\x1c\x85\u2028\r"),
        st.characters(exclude_characters="\n\r", exclude_categories=("Cs",)),
    ),
    max_size=6,
)


@st.composite
def edits(
    draw: st.DrawFn, unique: bool, line: st.SearchStrategy[str] = _LINE
) -> tuple[str, str]:
    """A text, and the same after some of its lines were replaced."""
    lines = draw(st.lists(line, min_size=1, max_size=25, unique=unique))
    edited = list(lines)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(edited)))
        end = draw(st.integers(at, min(at + 3, len(edited))))
        edited[at:end] = draw(st.lists(line, max_size=3))
    ends = [draw(st.sampled_from(["\n", ""])) for _ in range(2)]
    before, after = (
        "\n".join(side) + (end if side else "")
        for side, end in zip((lines, edited), ends, strict=True)
    )
    assume(before not in (after, ""))
    return before, after


@given(edits(unique=True), st.integers(1, 4), st.text("xyz\n", max_size=9))
def test_apply_gives_the_edited_text(
    pair: tuple[str, str], context: int, prefix: str
) -> None:
    before, after = pair
    file = between(before, after, context)
    assert diff.apply(file, before) == after
    # and at another place, where what stands before it cannot be taken for it
    if prefix.endswith("\n") and not set(diff.split(prefix)) & set(diff.split(before)):
        assert diff.apply(file, prefix + before) == prefix + after


@given(edits(unique=False, line=st.sampled_from(["a", "b", ""])), st.integers(1, 3))
def test_never_a_wrong_text(pair: tuple[str, str], context: int) -> None:
    """With lines that repeat a hunk may be refused, but never lands elsewhere."""
    before, after = pair
    try:
        assert diff.apply(between(before, after, context), before) == after
    except Conflict as error:
        assert (
            error.what == "a hunk's lines are there, but not where they can be changed"
        )
    except Failed as error:
        assert "no line to find its place by" in str(error.found)


# The same with other programs: who makes the diff, and who applies it.


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "GIT_CONFIG_GLOBAL": "/dev/null"},
    )


def diff_by(program: str, before: str, after: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, text in (("a", before), ("b", after)):
            (folder / side / "vllm").mkdir(parents=True)
            (folder / side / "vllm" / "m.py").write_bytes(text.encode())
        sides = ("a/vllm/m.py", "b/vllm/m.py")
        if program == "gnu":
            return run("diff", "-u", "-a", *sides, cwd=folder).stdout.decode()
        return run(
            "git", "diff", "--no-index", "--text", "--no-prefix", *sides, cwd=folder
        ).stdout.decode()


def apply_by(program: str, patch: str, text: str) -> str | None:
    """The text after another program applied ``patch``; None if it refused."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "vllm").mkdir()
        target = folder / "vllm" / "m.py"
        target.write_bytes(text.encode())
        (folder / "p").write_bytes(patch.encode())
        if program != "git":
            fuzz = "-F2" if program == "gnu with fuzz" else "-F0"
            command = ("patch", fuzz, "-p1", "-s", "-f", "--binary", "-i", "p")
        else:
            command = ("git", "apply", "-p1", "--whitespace=nowarn", "p")
        done = run(*command, cwd=folder)
        if done.returncode:
            return None
        return target.read_bytes().decode() if target.exists() else ""


def ours(patch: str, text: str) -> str | None:
    try:
        return diff.apply(one(patch), text)
    except Conflict:
        return None


SLOW = settings(max_examples=60, deadline=None)


@SLOW
@given(edits(unique=True), st.sampled_from(["gnu", "git"]))
def test_a_diff_made_by_another_program(pair: tuple[str, str], program: str) -> None:
    before, after = pair
    assert diff.apply(one(diff_by(program, before, after)), before) == after


_PLAIN = st.text("abcdef", min_size=1, max_size=4)


@SLOW
@given(
    edits(unique=True, line=_PLAIN),
    st.integers(0, 24),
    st.sampled_from(["", "edited", "\r"]),
    st.integers(0, 3),
)
def test_other_programs_agree(
    pair: tuple[str, str], at: int, drift: str, moved: int
) -> None:
    """On unique lines, on a tree that drifted or not, all three do the same."""
    before, after = pair
    assume(after != "")
    lines = diff.split(before)
    at %= len(lines)
    lines[at] = lines[at].replace("\n", drift + "\n")
    target = "".join([f"moved {i}\n" for i in range(moved)] + lines)
    patch = unified("vllm/m.py", before, after)
    mine = ours(patch, target)
    gnu, git = (apply_by(program, patch, target) for program in ("gnu", "git"))
    # A hunk with less context on one side was at an end of its file. The others then
    # ask for that end; we only ask for the one place.
    if git is not None:
        assert git == mine
    if gnu is not None:
        assert gnu == mine
    if not moved and at in range(3, len(lines) - 3):
        assert gnu == git == mine


@pytest.mark.parametrize("program", ["gnu", "git"])
def test_the_others_take_the_nearest_of_two_places(program: str) -> None:
    """Where we differ by design: a line number does not make a place the right one."""
    patch = unified("vllm/m.py", numbered(), EDITED)
    assert apply_by(program, patch, numbered() * 2) == EDITED + numbered()
    assert ours(patch, numbered() * 2) is None


@pytest.mark.parametrize("program", ["gnu", "git"])
def test_all_refuse_a_patched_file(program: str) -> None:
    patch = unified("vllm/m.py", numbered(), EDITED)
    assert apply_by(program, patch, EDITED) is None
    assert ours(patch, EDITED) is None


def test_what_fuzz_would_do() -> None:
    """The danger that this engine is there for: context that differs, and it lands."""
    patch = unified("vllm/m.py", numbered(), EDITED)
    drifted = numbered().replace("line 13\n", "x\n")
    assert apply_by("gnu with fuzz", patch, drifted) is not None
    assert apply_by("gnu", patch, drifted) is None
    assert apply_by("git", patch, drifted) is None
    assert ours(patch, drifted) is None


def test_a_hunk_from_the_start_of_a_file_may_move() -> None:
    """Where git asks for the start of the file, and we for the only place."""
    after = numbered().replace("line 0\n", "line 0\nnew\n")
    patch = unified("vllm/m.py", numbered(), after)
    moved = "x\n" * 5 + numbered()
    assert ours(patch, moved) == "x\n" * 5 + after
    assert apply_by("git", patch, moved) is None
