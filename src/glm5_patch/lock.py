# SPDX-License-Identifier: Apache-2.0
"""One writing run at a time for each site-packages.

The kernel's ``flock`` frees itself when its holder dies, and needs no library. The
lock file lies in the state's folder and goes with it, so a run that waited must see
whether the file it locked is still the one that others would find.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from glm5_patch import files, tree
from glm5_patch.errors import Busy, PatchError
from glm5_patch.state import FOLDER, STATE

LOCK = f"{FOLDER}/lock"
WAIT_S = 10.0
_POLL_S = 0.05

T = TypeVar("T")


@contextlib.contextmanager
def exclusive(root: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of ``root``; leave no folder behind if no state is in it.

    What fails meanwhile has no other run as its cause: ``PatchError.alone`` tells.
    Raises ``Busy`` after ``wait_s`` seconds, and ``NotPermitted`` where the folder
    cannot be made.
    """
    try:
        descriptor = _acquire(root, wait_s)
    except BaseException as error:
        with contextlib.suppress(OSError):
            (root / FOLDER).rmdir()  # only if nothing is in it
        if not isinstance(error, OSError):
            raise
        raise tree.refused(error, root / LOCK) from error
    try:
        yield
    except PatchError as error:
        error.alone = True
        raise
    finally:
        if not (root / STATE).exists():
            with contextlib.suppress(OSError):
                (root / LOCK).unlink()
                (root / FOLDER).rmdir()
        os.close(descriptor)


def settled(root: Path, look: Callable[[], T]) -> T:
    """What ``look`` finds, for a writing run.

    If it fails while another run is at work, or was, it looks again when that is done.
    """
    before = tree.read(root, STATE)
    try:
        return look()
    except PatchError:
        if not is_disturbed(root, before):
            raise
    with exclusive(root):
        return look()


def is_disturbed(root: Path, before: bytes | None) -> bool:
    """Whether another run is at work, or was since ``STATE`` held ``before``."""
    return is_held(root) or tree.read(root, STATE) != before


def is_held(root: Path) -> bool:
    """Whether a writing run is at work; writes nothing."""
    try:
        descriptor = os.open(tree.target(root, LOCK), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise tree.refused(error, root / LOCK) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _acquire(root: Path, wait_s: float) -> int:
    deadline = time.monotonic() + wait_s
    file = tree.target(root, LOCK)
    package = (root / "vllm").stat()  # whoever may read that may read the state
    while True:
        if not file.parent.exists():
            with contextlib.suppress(FileExistsError):
                files.make_folder(file.parent, package)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(file, flags, 0o600)
        except FileNotFoundError:
            continue  # the run before us has just removed the folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise Busy(
                    "another run of glm5-patch is at work here",
                    where=str(file),
                    expected=f"this lock, within {wait_s:g} s",
                    found="held by that run",
                    todo="wait for it to end, then try again",
                ) from None
            time.sleep(_POLL_S)
            continue
        if os.fstat(descriptor).st_nlink > 0:
            _open_to_readers(descriptor, package)
            return descriptor
        os.close(descriptor)


def _open_to_readers(descriptor: int, package: os.stat_result) -> None:
    """Give the lock the owner of the package, and the mode of a file in it."""
    now = os.fstat(descriptor)
    mode = package.st_mode & 0o666
    with contextlib.suppress(PermissionError):  # another's, who saw to it
        if (now.st_uid, now.st_gid) != (package.st_uid, package.st_gid):
            os.fchown(descriptor, package.st_uid, package.st_gid)
        if now.st_mode & 0o7777 != mode:
            os.fchmod(descriptor, mode)
