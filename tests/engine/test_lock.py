# SPDX-License-Identifier: Apache-2.0
"""One writing run at a time: who waits, who gives up, and what is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_tree import ADDED, build, contents, make_plan, picture

from glm5_patch import lock, state, transaction
from glm5_patch.errors import Busy, Conflict, NotPermitted
from glm5_patch.locate import Installation


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return build(tmp_path / "site-packages")


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.exclusive.__wrapped__, "__defaults__", (0.2,))


@contextlib.contextmanager
def held_by_another(root: Path) -> Iterator[int]:
    """A child process that holds the lock until the end of the block."""
    ready, child_ready = os.pipe()
    child = os.fork()
    if child == 0:
        with lock.exclusive(root):
            os.write(child_ready, b"x")
            signal.pause()
    os.read(ready, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(child_ready)


def test_a_second_run_gives_up(installation: Installation) -> None:
    root = installation.root
    plan = make_plan(root)
    with held_by_another(root):
        before = picture(root)
        started = time.monotonic()
        for operation in (
            lambda: transaction.apply(installation, plan),
            lambda: transaction.revert(installation),
        ):
            with pytest.raises(Busy) as caught:
                operation()
            assert caught.value.exit_code == 7
            assert caught.value.where == str(root / lock.LOCK)
        assert 0.4 <= time.monotonic() - started < 5
        assert picture(root) == before
        assert lock.is_held(root)
    assert not lock.is_held(root)
    transaction.apply(installation, plan)


def test_a_lock_frees_itself_when_its_holder_is_killed(
    installation: Installation,
) -> None:
    before = picture(installation.root)
    with held_by_another(installation.root):
        pass
    assert (installation.root / lock.LOCK).exists()
    assert transaction.revert(installation) is None
    assert picture(installation.root) == before


def test_nothing_is_left_where_nothing_was_applied(installation: Installation) -> None:
    before = picture(installation.root)
    with lock.exclusive(installation.root):
        assert (installation.root / lock.LOCK).exists()
    assert picture(installation.root) == before
    assert not lock.is_held(installation.root)
    assert picture(installation.root) == before


def test_a_run_that_waits_survives_the_end_of_the_first(
    installation: Installation,
) -> None:
    """The first removes the folder that the second waits in."""
    inside: list[str] = []
    root = installation.root

    def second() -> None:
        with lock.exclusive(root, 10):
            inside.append("second")
            assert (root / lock.LOCK).exists()
            with pytest.raises(Busy), lock.exclusive(root, 0):
                pass

    with lock.exclusive(root):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        assert not inside
    thread.join(10)
    assert inside == ["second"]
    assert not (root / state.FOLDER).exists()


def test_many_runs_never_meet(installation: Installation) -> None:
    """Threads with a descriptor each meet the same lock as processes do."""
    root = installation.root
    now: list[int] = []
    most: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(10):
                with lock.exclusive(root, 30):
                    now.append(1)
                    most.append(len(now))
                    time.sleep(0.001)
                    now.pop()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(most) == 40
    assert max(most) == 1
    assert not (root / state.FOLDER).exists()


def test_a_lock_file_that_was_removed_before_it_was_locked(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = installation.root
    with lock.exclusive(root):
        opened = iter([os.open(root / lock.LOCK, os.O_RDWR)])
    real = os.open
    monkeypatch.setattr(os, "open", lambda *a: next(opened, None) or real(*a))
    with lock.exclusive(root, 0):
        assert lock.is_held(root)
    assert not (root / state.FOLDER).exists()


def test_two_applies_at_once(installation: Installation) -> None:
    """One after the other, and the tree is patched once."""
    root = installation.root
    before = picture(root)
    plan = make_plan(root)

    def child() -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                lock.exclusive.__wrapped__.__defaults__ = (30.0,)
                transaction.apply(installation, plan)
                code = 0
            finally:
                os._exit(code)
        return pid

    for pid in [child() for _ in range(4)]:
        assert os.waitpid(pid, 0)[1] == 0
    have = contents(root)
    assert have["vllm/v1/sparse.py"] == ADDED["vllm/v1/sparse.py"].encode()
    assert str(have["vllm-0.16.0.dist-info/RECORD"]).count("sparse.py") == 1
    transaction.revert(installation)
    assert picture(root) == before


def refuse(code: int) -> Callable[..., None]:
    def refused(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refused


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_made(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    plan = make_plan(installation.root)
    before = picture(installation.root)
    monkeypatch.setattr(Path, "mkdir", refuse(code))
    with pytest.raises(NotPermitted) as caught:
        transaction.apply(installation, plan)
    assert caught.value.found == os.strerror(code)
    assert picture(installation.root) == before


def test_revert_writes_nothing_where_nothing_was_applied(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", refuse(errno.EROFS))
    assert transaction.revert(installation) is None
    assert transaction.repair(installation) is False


@pytest.mark.parametrize("path", [state.FOLDER, lock.LOCK])
def test_a_lock_that_is_a_link(
    installation: Installation, path: str, tmp_path: Path
) -> None:
    root = installation.root
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).symlink_to(tmp_path / "outside")
    for operation in (
        lambda: lock.is_held(root),
        lambda: transaction.apply(installation, make_plan(root)),
    ):
        with pytest.raises(Conflict, match="not a plain one"):
            operation()
    assert not (tmp_path / "outside").exists()
