# SPDX-License-Identifier: Apache-2.0
"""The few writes that a transaction is made of, each one durable when it returns."""

from __future__ import annotations

import os
from pathlib import Path


def write(
    file: Path, data: bytes, like: os.stat_result, keep_times: bool = False
) -> None:
    """Create ``file``, which must not exist, with the mode and owner of ``like``.

    With ``keep_times`` it gets the times of ``like`` too.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(file, flags, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        descriptor = stream.fileno()
        now = os.fstat(descriptor)
        if (now.st_uid, now.st_gid) != (like.st_uid, like.st_gid):
            _give(descriptor, file, like)
        os.fchmod(descriptor, like.st_mode & 0o7777)
        if keep_times:
            os.utime(descriptor, ns=(like.st_atime_ns, like.st_mtime_ns))
        os.fsync(descriptor)


def copy(source: Path, target: Path) -> None:
    """Copy bytes, mode, owner and times of ``source`` to a new inode ``target``."""
    write(target, source.read_bytes(), source.stat(), keep_times=True)


def rename(source: Path, target: Path) -> None:
    """Put ``source`` in the place of ``target`` at one instant."""
    source.replace(target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def remove(file: Path) -> None:
    """Remove ``file`` if it is there."""
    try:
        file.unlink()
    except FileNotFoundError:
        return
    sync_folder(file.parent)


def make_folder(folder: Path, like: os.stat_result) -> None:
    """Create ``folder``, which must not exist, with the mode and owner of ``like``."""
    folder.mkdir()
    now = folder.stat()
    if (now.st_uid, now.st_gid) != (like.st_uid, like.st_gid):
        _give(folder, folder, like)
    folder.chmod(like.st_mode & 0o7777)
    sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` if it is there and empty."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError:
        if not any(folder.iterdir()):
            raise
        return
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the entries of ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give(opened: int | Path, file: Path, like: os.stat_result) -> None:
    """Give ``file`` the owner and group of ``like``; an error names all three."""
    try:
        os.chown(opened, like.st_uid, like.st_gid)
    except OSError as error:
        why = f"{error.strerror}: to give it to user {like.st_uid}, group {like.st_gid}"
        raise OSError(error.errno, why, str(file)) from error
