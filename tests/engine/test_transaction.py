# SPDX-License-Identifier: Apache-2.0
"""Apply and revert on small trees: the way there, the way back, and every stop between.

A stop is made at each primitive of ``files``: an error, or a kill of a forked child.
"""

from __future__ import annotations

import errno
import inspect
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_tree import (
    ADDED,
    PATCHED,
    STOCK,
    Picture,
    build,
    contents,
    copy,
    installed,
    make_plan,
    picture,
    row,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glm5_patch import files, state, transaction
from glm5_patch.errors import Conflict, Failed, NotPermitted
from glm5_patch.locate import Installation
from glm5_patch.plan import Plan
from glm5_patch.state import Condition, Found, Kind, Phase

PRIMITIVES = [
    name
    for name, function in inspect.getmembers(files, inspect.isfunction)
    if function.__module__ == files.__name__
]
CUDA = "vllm/platforms/cuda.py"
RECORD = "vllm-0.16.0.dist-info/RECORD"


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return build(tmp_path / "site-packages")


@pytest.fixture
def plan(installation: Installation) -> Plan:
    return make_plan(installation.root)


def condition(installation: Installation) -> Condition:
    return state.inspect(installation).condition


# There and back.


@pytest.mark.parametrize(
    ("line_end", "compiled"),
    [("\n", True), ("\n", False), ("\r\n", True)],
    ids=["lf", "no-bytecode", "crlf-record"],
)
def test_apply_then_revert_is_the_identity(
    tmp_path: Path, line_end: str, compiled: bool
) -> None:
    installation = build(tmp_path, line_end=line_end, compiled=compiled)
    (tmp_path / "vllm" / "empty").mkdir()
    before = picture(tmp_path)
    stock_record = (tmp_path / RECORD).read_bytes()

    done = transaction.apply(installation, make_plan(tmp_path))

    assert condition(installation) is Condition.APPLIED
    assert done == state.load(tmp_path)
    have = contents(tmp_path)
    for path, text in {**PATCHED, **ADDED}.items():
        assert have[path] == text.encode()
    rows = "".join(row(p, t.encode()) + line_end for p, t in ADDED.items())
    assert have[RECORD] == stock_record + rows.encode()
    untouched = {*STOCK} - {*PATCHED}
    assert {p: have[p] for p in untouched} == {p: STOCK[p].encode() for p in untouched}
    assert not [p for p in have if "__pycache__/cuda." in p or "/registry." in p[:-3]]

    reverted = transaction.revert(installation)
    assert reverted is not None and reverted.state == done
    assert picture(tmp_path) == before
    assert transaction.revert(installation) is None
    assert picture(tmp_path) == before


def test_modes(installation: Installation, plan: Plan) -> None:
    root = installation.root
    (root / CUDA).chmod(0o600)
    (root / "vllm" / "__init__.py").chmod(0o664)
    (root / "vllm").chmod(0o775)
    transaction.apply(installation, plan)
    mode = {p: m & 0o7777 for p, (m, _, _) in picture(root).items()}
    assert mode[CUDA] == 0o600
    assert mode["vllm/v1/mla/ops/kernel.py"] == 0o664
    assert mode["vllm/v1/mla"] == mode["vllm/v1/mla/ops"] == 0o775


def test_owner(installation: Installation, plan: Plan) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for path in ("vllm", "vllm/__init__.py", CUDA):
        os.chown(installation.root / path, 4321, 1234)
    transaction.apply(installation, plan)
    for path in (CUDA, *ADDED, "vllm/v1/mla"):
        info = (installation.root / path).stat()
        assert (info.st_uid, info.st_gid) == (4321, 1234)
    transaction.revert(installation)
    assert (installation.root / CUDA).stat().st_uid == 4321


def test_other_hard_links_keep_the_old_bytes(
    installation: Installation, plan: Plan, tmp_path: Path
) -> None:
    for path in (CUDA, RECORD):
        os.link(installation.root / path, tmp_path / Path(path).name)
    cached = (tmp_path / "cuda.py", tmp_path / "RECORD")
    before = [(f.read_bytes(), f.stat().st_mtime_ns) for f in cached]
    transaction.apply(installation, plan)
    assert [(f.read_bytes(), f.stat().st_mtime_ns) for f in cached] == before
    transaction.revert(installation)
    assert [(f.read_bytes(), f.stat().st_mtime_ns) for f in cached] == before


def test_python_sees_the_change_and_the_return(
    installation: Installation, plan: Plan
) -> None:
    """Stale bytecode would win: the patched file is given the old time and size."""

    def answer() -> str:
        program = "import vllm.v1.registry as r; print(sorted(vars(r.Backend))[0])"
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-c",
                f"import sys; sys.path[:0] = [{root!r}]; {program}",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    root = str(installation.root)
    assert answer() == "FLASH_ATTN"
    stock = (installation.root / "vllm/v1/registry.py").stat()
    changed = {"vllm/v1/registry.py": STOCK["vllm/v1/registry.py"].replace("FL", "AA")}
    transaction.apply(installation, make_plan(installation.root, changed, {}))
    os.utime(
        installation.root / "vllm/v1/registry.py",
        ns=(stock.st_atime_ns, stock.st_mtime_ns),
    )
    assert answer() == "AAASH_ATTN"
    transaction.revert(installation)
    assert answer() == "FLASH_ATTN"


def test_bytecode_made_while_applied_goes(
    installation: Installation, plan: Plan
) -> None:
    before = picture(installation.root)
    transaction.apply(installation, plan)
    for path in (*PATCHED, *ADDED):
        module = installation.root / path
        cache = module.parent / "__pycache__"
        cache.mkdir(exist_ok=True)
        for tag in ("cpython-311", "cpython-312.opt-1"):
            (cache / f"{module.stem}.{tag}.pyc").write_bytes(b"x")
    transaction.revert(installation)
    assert picture(installation.root) == before


def test_a_patch_without_additions(installation: Installation) -> None:
    """RECORD is not touched then: a state that listed it could not be resumed."""
    before = picture(installation.root)
    transaction.apply(installation, make_plan(installation.root, added={}))
    assert picture(installation.root)[RECORD] == before[RECORD]
    transaction.revert(installation)
    assert picture(installation.root) == before


def test_an_editable_install_has_no_record(tmp_path: Path) -> None:
    build(tmp_path)
    editable = Installation(tmp_path, "0.16.0", None, True, None)
    before = picture(tmp_path)
    transaction.apply(editable, make_plan(tmp_path))
    assert picture(tmp_path)[RECORD] == before[RECORD]
    transaction.revert(editable)
    assert picture(tmp_path) == before


def test_another_plan_takes_the_place_of_the_first(
    installation: Installation, plan: Plan
) -> None:
    root = installation.root
    before = picture(root)
    other = make_plan(root, {CUDA: "x = 1\n"}, {"vllm/other.py": "y = 1\n"})
    transaction.apply(installation, plan)
    transaction.apply(installation, other)
    have = contents(root)
    assert have[CUDA] == b"x = 1\n"
    assert have["vllm/v1/registry.py"] == STOCK["vllm/v1/registry.py"].encode()
    assert not [path for path in have if "mla" in path]
    transaction.revert(installation)
    assert picture(root) == before


def test_a_file_of_ours_that_outlived_an_uninstall(
    installation: Installation, plan: Plan
) -> None:
    before = picture(installation.root)
    (installation.root / "vllm/v1/sparse.py").write_text(ADDED["vllm/v1/sparse.py"])
    transaction.apply(installation, plan)
    transaction.revert(installation)
    assert picture(installation.root) == before


@pytest.mark.parametrize(
    ("path", "text"),
    [(CUDA, "edited\n"), (CUDA, None), ("vllm/v1/sparse.py", "theirs\n")],
    ids=["edited", "deleted", "added-by-another"],
)
def test_a_file_that_changed_since_the_plan(
    installation: Installation, plan: Plan, path: str, text: str | None
) -> None:
    file = installation.root / path
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_text(text)
    before = picture(installation.root)
    with pytest.raises(Conflict, match="changed while the patch was being planned"):
        transaction.apply(installation, plan)
    assert picture(installation.root) == before


_TEXT = st.text(
    st.one_of(st.sampled_from("ab\n\n\r\x0c\u2028"), st.characters(codec="utf-8")),
    max_size=40,
).map(lambda text: f"'''{text}'''".replace("\\", "").replace("\0", ""))


def _compiles(text: str) -> bool:
    try:
        compile(text.encode(), "x", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


_MODULE = _TEXT.filter(_compiles)
_NAMES = st.sampled_from(["a", "b", "c/d", "c/e", "f/g/h"]).map("vllm/{}.py".format)


@settings(max_examples=60, deadline=None)
@given(
    stock=st.dictionaries(_NAMES, _MODULE, min_size=1),
    wanted=st.dictionaries(_NAMES, _MODULE, min_size=1),
    record_end=st.sampled_from(["\n", "\r\n"]),
)
def test_any_tree(
    stock: dict[str, str], wanted: dict[str, str], record_end: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        installation = build(
            root, {"vllm/__init__.py": "", **stock}, "0.16.0", record_end
        )
        before = picture(root)
        edits = {p: t for p, t in wanted.items() if p in stock and t != stock[p]}
        added = {p: t for p, t in wanted.items() if p not in stock}
        assume(edits or added)
        transaction.apply(installation, make_plan(root, edits, added))
        assert condition(installation) is Condition.APPLIED
        have = contents(root)
        for path, text in {**stock, **wanted}.items():
            assert have[path] == text.encode()
        transaction.revert(installation)
        assert picture(root) == before


# Stops.


Stop = Callable[[], None]


def primitives(
    monkeypatch: pytest.MonkeyPatch, at: Callable[[int, str, str, tuple], None]
) -> list[str]:
    """Call ``at(number, moment, name, arguments)`` around each primitive; a list of
    the calls, which grows."""
    calls: list[str] = []

    def wrap(name: str) -> Callable[..., object]:
        real = getattr(files, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            number = len(calls)
            calls.append(f"{name} {args[0]}")
            at(number, "before", name, args)
            result = real(*args, **kwargs)
            at(number, "after", name, args)
            return result

        return wrapped

    for name in PRIMITIVES:
        monkeypatch.setattr(files, name, wrap(name))
    return calls


def half_written(name: str, args: tuple) -> None:
    """What a write leaves that was stopped in its middle."""
    if name == "write":
        Path(args[0]).write_bytes(args[1][: len(args[1]) // 2])


def stop(number: int, moment: str, how: Stop) -> Callable[[int, str, str, tuple], None]:
    def at(n: int, m: str, name: str, args: tuple) -> None:
        if n != number or (m == "after") != (moment == "after"):
            return
        if moment == "during":
            half_written(name, args)
        how()

    return at


def calls_of(operation: Callable[[], object], moment: str = "after") -> list[int]:
    """The numbers of the primitives of ``operation`` that have such a moment."""
    with pytest.MonkeyPatch.context() as patch:
        calls = primitives(patch, lambda *_: None)
        operation()
    assert len(calls) > 20
    written = moment == "during"
    return [
        n for n, call in enumerate(calls) if call.startswith("write") or not written
    ]


def count(operation: Callable[[], object]) -> int:
    """How many primitives ``operation`` is made of."""
    return len(calls_of(operation))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(operation: Callable[[], object], number: int, moment: str) -> None:
    """Run ``operation`` in a child that is killed at a primitive."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            primitives(pytest.MonkeyPatch(), stop(number, moment, die))
            operation()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"primitive {number} was not reached"
    assert os.WTERMSIG(status) == signal.SIGKILL


class Trees:
    """A stock tree, the same patched, and one to work on."""

    def __init__(self, folder: Path) -> None:
        self.stock = folder / "stock"
        self.patched = folder / "patched"
        self.work = folder / "work"
        self.crashed = folder / "crashed"
        build(self.stock)
        self.plan = make_plan(self.stock)
        self.is_stock = picture(self.stock)
        transaction.apply(installed(copy(self.stock, self.patched)), self.plan)
        self.is_patched = contents(self.patched)

    def start(self, operation: str) -> Callable[[], object]:
        """Lay out the tree that ``operation`` starts from; the operation on it."""
        if operation == "apply":
            work = installed(copy(self.stock, self.work))
            return lambda: transaction.apply(work, self.plan)
        work = installed(copy(self.patched, self.work))
        if operation == "revert":
            return lambda: transaction.revert(work)
        other = make_plan(self.stock, {CUDA: "x = 1\n"}, {"vllm/other.py": "y = 1\n"})
        if operation == "apply over another":
            transaction.revert(work)
            transaction.apply(work, other)
            return lambda: transaction.apply(work, self.plan)
        raise AssertionError(operation)

    def looks(self, root: Path) -> str:
        if contents(root) == self.is_patched:
            return "patched"
        if picture(root, own=False) == self.is_stock:
            return "stock"
        return "mixed"

    def check_told(self, root: Path) -> Condition:
        """The condition is what the tree looks like, or says that it is interrupted."""
        before = picture(root)
        told = condition(installed(root))
        assert picture(root) == before
        looks = self.looks(root)
        if told is Condition.NOT_APPLIED:
            assert looks == "stock"
        elif told is Condition.APPLIED:
            assert looks == "patched"
        else:
            assert told is Condition.INTERRUPTED
        return told

    def check_recovers(self) -> Condition:
        """From where the work tree is, each command ends in one of the two states."""
        told = self.check_told(self.work)
        copy(self.work, self.crashed)
        work = installed(self.work)

        repaired = transaction.repair(work)
        assert repaired == (told is Condition.INTERRUPTED)
        assert self.check_told(self.work) is not Condition.INTERRUPTED
        if repaired:
            assert picture(self.work) == self.is_stock

        copy(self.crashed, self.work)
        transaction.revert(work)
        assert picture(self.work) == self.is_stock

        copy(self.crashed, self.work)
        transaction.apply(work, self.plan)
        assert self.check_told(self.work) is Condition.APPLIED
        transaction.revert(work)
        assert picture(self.work) == self.is_stock
        return told


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return Trees(tmp_path_factory.mktemp("trees"))


def crash_everywhere(trees: Trees, operation: str, moment: str) -> Iterator[Condition]:
    for number in calls_of(trees.start(operation), moment):
        killed(trees.start(operation), number, moment)
        yield trees.check_recovers()


@pytest.mark.parametrize("moment", ["during", "after"])
@pytest.mark.parametrize("operation", ["apply", "revert"])
def test_killed_anywhere(trees: Trees, operation: str, moment: str) -> None:
    told = list(crash_everywhere(trees, operation, moment))
    if moment == "after":
        assert told.count(Condition.INTERRUPTED) > len(told) // 2


def test_killed_in_a_recovery(trees: Trees) -> None:
    """A second kill, while the first is being repaired."""
    dice = random.Random(5)
    for _ in range(25):
        operation = dice.choice(["apply", "revert"])
        run = trees.start(operation)
        number = dice.randrange(count(run))
        killed(trees.start(operation), number, "after")
        copy(trees.work, trees.crashed)
        with pytest.MonkeyPatch.context() as patch:
            calls = primitives(patch, lambda *_: None)
            transaction.repair(installed(trees.work))
        if calls:
            copy(trees.crashed, trees.work)
            work = installed(trees.work)
            killed(
                lambda work=work: transaction.repair(work),
                dice.randrange(len(calls)),
                dice.choice(["before", "after"]),
            )
        trees.check_recovers()


def test_killed_at_any_time(trees: Trees) -> None:
    """Not at a primitive but by the clock, from outside."""
    dice = random.Random(7)
    work = installed(copy(trees.stock, trees.work))
    for _ in range(15):
        child = os.fork()
        if child == 0:
            while True:
                transaction.apply(work, trees.plan)
                transaction.revert(work)
        time.sleep(dice.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        trees.check_told(trees.work)
        transaction.repair(work)
        assert trees.looks(trees.work) in ("stock", "patched")
    transaction.revert(work)
    assert picture(trees.work) == trees.is_stock


def fail(code: int) -> Stop:
    def how() -> None:
        raise OSError(code, os.strerror(code), "somewhere")

    return how


@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_an_apply_that_is_refused_leaves_nothing(
    trees: Trees, code: int, moment: str
) -> None:
    for number in calls_of(trees.start("apply"), moment):
        apply_fails(trees, number, moment, fail(code))


def apply_fails(trees: Trees, number: int, moment: str, how: Stop) -> None:
    run = trees.start("apply")
    with pytest.MonkeyPatch.context() as patch:
        calls = primitives(patch, stop(number, moment, how))
        with pytest.raises(NotPermitted) as caught:
            run()
    assert picture(trees.work) == trees.is_stock, calls[number]
    assert caught.value.where == "somewhere"
    assert caught.value.todo is not None
    assert "run this again" in caught.value.todo


def test_an_apply_that_is_interrupted_by_the_user_leaves_nothing(trees: Trees) -> None:
    def how() -> None:
        raise KeyboardInterrupt

    for number in range(count(trees.start("apply"))):
        run = trees.start("apply")
        with pytest.MonkeyPatch.context() as patch:
            primitives(patch, stop(number, "after", how))
            with pytest.raises(KeyboardInterrupt):
                run()
        assert picture(trees.work) == trees.is_stock


@pytest.mark.parametrize("operation", ["apply", "revert", "apply over another"])
def test_refused_from_some_point_on(trees: Trees, operation: str) -> None:
    """A disk that turns read-only: nothing can be taken back until it is mended."""
    for number in range(count(trees.start(operation))):
        run = trees.start(operation)
        with pytest.MonkeyPatch.context() as patch:

            def at(n: int, moment: str, *_: object, number: int = number) -> None:
                if n >= number and moment == "before":
                    fail(errno.EROFS)()

            primitives(patch, at)
            with pytest.raises(NotPermitted) as caught:
                run()
        if operation == "apply" and trees.looks(trees.work) == "mixed":
            assert "run 'glm5-patch revert'" in str(caught.value.todo)
        if operation != "apply over another":
            trees.check_told(trees.work)
        transaction.repair(installed(trees.work))
        transaction.revert(installed(trees.work))
        assert picture(trees.work) == trees.is_stock


def test_a_revert_that_is_refused_can_be_run_again(trees: Trees) -> None:
    for number in range(count(trees.start("revert"))):
        run = trees.start("revert")
        with pytest.MonkeyPatch.context() as patch:
            primitives(patch, stop(number, "before", fail(errno.EACCES)))
            with pytest.raises(NotPermitted):
                run()
        trees.check_recovers()


# Controls: with the way back cut off, the checks above have to see it.


def _no_way_back(*_: object, **__: object) -> None:
    return None


def test_control_without_a_rollback(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    middle = count(trees.start("apply")) // 2
    apply_fails(trees, middle, "before", fail(errno.ENOSPC))
    monkeypatch.setattr(transaction, "_restore", _no_way_back)
    with pytest.raises(AssertionError):
        apply_fails(trees, middle, "before", fail(errno.ENOSPC))


def test_control_without_a_repair(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    middle = count(trees.start("apply")) // 2
    killed(trees.start("apply"), middle, "after")
    trees.check_recovers()
    killed(trees.start("apply"), middle, "after")
    monkeypatch.setattr(transaction, "_restore", _no_way_back)
    with pytest.raises(AssertionError):
        trees.check_recovers()


def test_control_without_a_journal(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the note were only written at the end, a kill would go unnoticed."""
    put = transaction._put_state

    def late(root: Path, new: state.State) -> None:
        if new.phase is Phase.APPLYING:
            (root / state.FOLDER).mkdir(exist_ok=True)
        else:
            put(root, new)

    monkeypatch.setattr(transaction, "_put_state", late)
    with pytest.raises((AssertionError, Failed)):
        list(crash_everywhere(trees, "apply", "after"))


# Drift: what others did to the tree since.


def test_an_edit_is_not_lost(installation: Installation, plan: Plan) -> None:
    transaction.apply(installation, plan)
    (installation.root / CUDA).write_text("mine\n")
    before = picture(installation.root)
    assert condition(installation) is Condition.DRIFTED
    for operation in (
        lambda: transaction.revert(installation),
        lambda: transaction.apply(installation, plan),
    ):
        with pytest.raises(Failed, match="edited") as caught:
            operation()
        assert caught.value.where == str(installation.root / CUDA)
        assert "delete it here" in str(caught.value.todo)
        assert picture(installation.root) == before


def test_an_edited_addition_is_not_lost(installation: Installation, plan: Plan) -> None:
    transaction.apply(installation, plan)
    (installation.root / "vllm/v1/sparse.py").write_text("mine\n")
    with pytest.raises(Failed, match="edited"):
        transaction.revert(installation)


@pytest.mark.parametrize("path", [CUDA, RECORD, "vllm/v1/sparse.py"])
def test_what_is_missing_is_healed(
    installation: Installation, plan: Plan, path: str
) -> None:
    root = installation.root
    before = picture(root)
    transaction.apply(installation, plan)
    patched = contents(root)
    (root / path).unlink()
    assert condition(installation) is Condition.DRIFTED
    assert (path, Found.PATCHED) not in [
        (e.path, f) for e, f in state.inspect(installation).found
    ]
    if path in STOCK:
        have = state.load(root)
        assert state.stock(root, have, path) == STOCK[path].encode()
    transaction.apply(installation, plan)
    assert contents(root) == patched
    (root / path).unlink()
    transaction.revert(installation)
    assert picture(root) == before


def test_a_file_put_back_by_hand(installation: Installation, plan: Plan) -> None:
    root = installation.root
    before = picture(root, times=False)
    transaction.apply(installation, plan)
    (root / CUDA).write_text(STOCK[CUDA])
    assert condition(installation) is Condition.DRIFTED
    transaction.revert(installation)
    assert picture(root, times=False) == before


def test_a_record_that_another_tool_wrote_to(
    installation: Installation, plan: Plan
) -> None:
    root = installation.root
    stock = (root / RECORD).read_bytes()
    transaction.apply(installation, plan)
    with (root / RECORD).open("ab") as stream:
        stream.write(b"vllm/theirs.py,,\n")
    transaction.revert(installation)
    assert (root / RECORD).read_bytes() == stock + b"vllm/theirs.py,,\n"


def test_a_folder_that_others_use_stays(installation: Installation, plan: Plan) -> None:
    root = installation.root
    before = picture(root)
    transaction.apply(installation, plan)
    (root / "vllm/v1/mla/theirs.txt").write_text("x")
    transaction.revert(installation)
    (root / "vllm/v1/mla/theirs.txt").unlink()
    (root / "vllm/v1/mla").rmdir()
    assert picture(root) == before


# Another vLLM, installed over the patched one.


def reinstall(root: Path, version: str, files_: dict[str, str]) -> Installation:
    """What pip does: remove what RECORD lists, then unpack."""
    for info in root.glob("vllm-*.dist-info"):
        for line in (info / "RECORD").read_text().splitlines():
            (root / line.split(",")[0]).unlink(missing_ok=True)
        for file in info.iterdir():
            file.unlink()
        info.rmdir()
    for cache in root.rglob("__pycache__"):
        for file in cache.iterdir():
            file.unlink()
    return build(root, files_, version)


def without_bytecode(tree: Picture) -> Picture:
    return {path: what for path, what in tree.items() if not path.endswith(".pyc")}


NEWER = {
    **{path: text + "# newer\n" for path, text in STOCK.items()},
    "vllm/new.py": "",
}


@pytest.mark.parametrize(
    ("version", "stock"),
    [("0.17.0", NEWER), ("0.16.0", STOCK)],
    ids=["upgrade", "same-version"],
)
@pytest.mark.parametrize("stopped", [False, True], ids=["", "after-a-kill"])
def test_replaced(
    trees: Trees, version: str, stock: dict[str, str], stopped: bool
) -> None:
    root = trees.work
    if stopped:
        number = count(trees.start("apply")) - 8
        killed(trees.start("apply"), number, "after")
    else:
        trees.start("apply")()
    installation = reinstall(root, version, stock)
    assert not [
        p for p in contents(root) if "mla" in p and not p.endswith(("mla", "ops"))
    ]
    # Bytecode of an interrupted run may come back over that of a reinstallation: it is
    # of the same source, and as good.
    before = without_bytecode(picture(root, own=False))

    told = state.inspect(installation)
    if stopped and version == "0.16.0":
        assert told.condition is Condition.INTERRUPTED
    else:
        assert told.condition is Condition.REPLACED
    transaction.check_revertible(root, told)

    copy(root, trees.crashed)
    transaction.revert(installation)
    for path in ("vllm/v1/mla/ops", "vllm/v1/mla"):
        before.pop(path, None)
    assert without_bytecode(picture(root)) == before

    copy(trees.crashed, root)
    transaction.apply(installation, make_plan(root, {CUDA: "x = 1\n"}))
    assert condition(installation) is Condition.APPLIED
    transaction.revert(installation)
    assert without_bytecode(picture(root)) == before


def test_killed_while_a_replaced_tree_is_forgotten(trees: Trees) -> None:
    def start() -> Installation:
        transaction.apply(installed(copy(trees.stock, trees.work)), trees.plan)
        return reinstall(trees.work, "0.17.0", NEWER)

    installation = start()
    before = contents(trees.work)
    for path in ("vllm/v1/mla/ops", "vllm/v1/mla"):
        before.pop(path, None)
    with pytest.MonkeyPatch.context() as patch:
        calls = primitives(patch, lambda *_: None)
        transaction.revert(installation)
    for number in range(len(calls)):
        installation = start()
        killed(lambda i=installation: transaction.revert(i), number, "after")
        assert condition(installation) in (Condition.REPLACED, Condition.NOT_APPLIED)
        transaction.revert(installation)
        assert contents(trees.work) == before
        assert not (trees.work / state.FOLDER).exists()


# Originals, and what is no plain file.


@pytest.mark.parametrize("data", [None, b"changed\n"], ids=["missing", "changed"])
@pytest.mark.parametrize("path", [CUDA, RECORD])
def test_a_bad_original(
    installation: Installation, plan: Plan, path: str, data: bytes | None
) -> None:
    done = transaction.apply(installation, plan)
    entry = next(e for e in done.entries if e.path == path)
    kept = state.kept(installation.root, entry)
    kept.unlink()
    if data is not None:
        kept.write_bytes(data)
    before = picture(installation.root)
    with pytest.raises(Failed, match="original of a file") as caught:
        transaction.revert(installation)
    assert caught.value.where == str(kept)
    assert picture(installation.root) == before


def test_originals_without_a_note_are_not_thrown_away(
    installation: Installation, plan: Plan
) -> None:
    transaction.apply(installation, plan)
    (installation.root / state.STATE).unlink()
    before = picture(installation.root)
    for operation in (
        lambda: state.inspect(installation),
        lambda: transaction.revert(installation),
        lambda: transaction.apply(installation, plan),
    ):
        with pytest.raises(Failed, match="note of what was applied") as caught:
            operation()
        assert state.ORIGINALS in str(caught.value.todo)
    after = picture(installation.root)
    after.pop(f"{state.FOLDER}/lock", None)
    before.pop(f"{state.FOLDER}/lock", None)
    assert after == before


def _link(file: Path) -> None:
    real = file.with_name("elsewhere")
    file.rename(real)
    file.symlink_to(real)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


@pytest.mark.parametrize("make", [_link, _dangling, _pipe, _folder])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_target_that_is_no_plain_file(
    installation: Installation, plan: Plan, make: Callable[[Path], None], when: str
) -> None:
    root = installation.root
    if when == "after":
        transaction.apply(installation, plan)
    make(root / CUDA)
    before = picture(root)
    operations = [lambda: transaction.apply(installation, plan)]
    if when == "after":
        operations.append(lambda: transaction.revert(installation))
        operations.append(lambda: state.inspect(installation))
    for operation in operations:
        with pytest.raises(Conflict, match="not a plain one") as caught:
            operation()
        assert caught.value.where == str(root / CUDA)
        assert picture(root) == before


@pytest.mark.parametrize(
    "path", ["vllm/platforms", "vllm/v1", "vllm", "vllm/platforms/__pycache__"]
)
def test_a_folder_that_is_a_link(
    installation: Installation, plan: Plan, path: str, tmp_path: Path
) -> None:
    root = installation.root
    (root / path).rename(tmp_path / "outside")
    (root / path).symlink_to(tmp_path / "outside")
    before = picture(tmp_path)
    with pytest.raises(Conflict, match="not a plain one") as caught:
        transaction.apply(installation, plan)
    assert caught.value.where == str(root / path)
    assert picture(tmp_path) == before


@pytest.mark.parametrize("path", [state.FOLDER, state.STATE, state.ORIGINALS])
def test_a_state_that_is_a_link(
    installation: Installation, plan: Plan, path: str, tmp_path: Path
) -> None:
    root = installation.root
    transaction.apply(installation, plan)
    (root / path).rename(tmp_path / "outside")
    (root / path).symlink_to(tmp_path / "outside")
    before = picture(tmp_path)
    with pytest.raises(Conflict, match="not a plain one"):
        transaction.revert(installation)
    assert picture(tmp_path) == before


def test_a_file_that_is_far_too_large(installation: Installation, plan: Plan) -> None:
    os.truncate(installation.root / CUDA, (16 << 20) + 1)
    with pytest.raises(Conflict, match="far too large"):
        transaction.apply(installation, plan)


def test_entries_tell_why_each_file_is_there(
    installation: Installation, plan: Plan
) -> None:
    done = transaction.apply(installation, plan)
    kinds = {e.path: e.kind for e in done.entries}
    assert {p for p, k in kinds.items() if k is Kind.PATCHED} == set(PATCHED)
    assert {p for p, k in kinds.items() if k is Kind.ADDED} == set(ADDED)
    assert [p for p, k in kinds.items() if k is Kind.RECORD] == [RECORD]
    assert len([p for p, k in kinds.items() if k is Kind.BYTECODE]) == len(PATCHED)
    assert done.folders == ("vllm/v1/mla", "vllm/v1/mla/ops")
