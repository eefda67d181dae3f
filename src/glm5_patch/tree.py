# SPDX-License-Identifier: Apache-2.0
"""Reading the files of an installed vLLM, with links refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from glm5_patch.errors import Conflict, NotPermitted

MAX_BYTES = 16 << 20
"""Larger than any module of vLLM; what is larger is not one."""


def target(root: Path, path: str) -> Path:
    """``root / path``, after checking that no part below ``root`` is a link.

    Raises ``Conflict`` for a symbolic link, and for anything else that is neither a
    folder on the way nor a plain file, or nothing, at the end.
    """
    parts = path.split("/")
    here = root
    for i, part in enumerate(parts):
        here = here / part
        try:
            mode = here.lstat().st_mode
        except FileNotFoundError:
            return root / path
        except NotADirectoryError:
            mode = stat.S_IFREG
        except OSError as error:
            raise refused(error, here) from error
        last = i == len(parts) - 1
        if not (stat.S_ISREG(mode) if last else stat.S_ISDIR(mode)):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "something else"
            raise Conflict(
                f"a {'file' if last else 'folder'} of vLLM is not a plain one",
                where=str(here),
                expected=f"a plain {'file' if last else 'folder'}",
                found=f"{kind}{_destination(here)}",
                todo="put the real one there, or point --site-packages at it",
            )
    return here


def folder(root: Path, path: str) -> Path:
    """As ``target``, for a ``path`` that has to be a plain folder, or nothing."""
    return target(root, f"{path}/-").parent


def read(root: Path, path: str) -> bytes | None:
    """The bytes of the plain file ``path`` below ``root``, or None if it is absent."""
    file = target(root, path)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(error, file) from error
    with os.fdopen(descriptor, "rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise Conflict(
            "a file of vLLM is far too large",
            where=str(file),
            expected=f"at most {MAX_BYTES} bytes",
            found=f"{file.stat().st_size} bytes",
            todo="install vLLM again",
        )
    return data


def refused(error: OSError, file: Path) -> NotPermitted:
    """The message for an operation that the file system refused."""
    return NotPermitted(
        "the file system refused",
        where=str(error.filename or file),
        found=error.strerror or str(error),
        todo=_REMEDIES.get(error.errno or 0, "see what is wrong with that place")
        + ", then run this again",
    )


_AS_OWNER = "run as the user who owns the files of vLLM, or as root"
_REMEDIES = {
    errno.EACCES: f"{_AS_OWNER}, or be given the permission",
    errno.EPERM: f"{_AS_OWNER}; a file keeps its owner and group, and only root, or a "
    "member of the group who owns the file, can give it those",
    errno.EROFS: "make that file system writable",
    errno.ENOSPC: "make space on that file system",
    errno.EDQUOT: "make space in your quota on that file system",
}


def _destination(path: Path) -> str:
    try:
        return f" to {path.readlink()}"
    except OSError:
        return ""
