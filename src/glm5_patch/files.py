# SPDX-License-Identifier: Apache-2.0
"""The few writes that a transaction is made of, each one durable when it returns."""

from __future__ import annotations

import os
from pathlib import Path


def write(file: Path, data: bytes, like: os.stat_result) -> None:
    """Create ``file``, which must not exist, with the mode and owner of ``like``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(file, flags, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        descriptor = stream.fileno()
        now = os.fstat(descriptor)
        if (now.st_uid, now.st_gid) != (like.st_uid, like.st_gid):
            os.fchown(descriptor, like.st_uid, like.st_gid)
        os.fchmod(descriptor, like.st_mode & 0o7777)
        os.fsync(descriptor)


def copy(source: Path, target: Path) -> None:
    """Copy bytes, mode, owner and times of ``source`` to a new inode ``target``."""
    like = source.stat()
    write(target, source.read_bytes(), like)
    os.utime(target, ns=(like.st_atime_ns, like.st_mtime_ns))


def rename(source: Path, target: Path) -> None:
    """Put ``source`` in the place of ``target`` at one instant."""
    source.replace(target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def remove(file: Path) -> None:
    """Remove ``file`` if it is there."""
    file.unlink(missing_ok=True)


def make_folder(folder: Path, like: os.stat_result) -> None:
    """Create ``folder``, which must not exist, with the mode and owner of ``like``."""
    folder.mkdir()
    os.chown(folder, like.st_uid, like.st_gid)
    folder.chmod(like.st_mode & 0o7777)
    sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` if it is there and empty."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        if not any(folder.iterdir()):
            raise


def sync_folder(folder: Path) -> None:
    """Make the entries of ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
