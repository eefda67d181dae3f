# SPDX-License-Identifier: Apache-2.0
"""Relative paths that cannot leave the folder they are joined to."""

from __future__ import annotations

from glm5_patch.errors import Failed


def checked(path: object, source: str, top: tuple[str, ...]) -> str:
    """Return ``path`` if it is a plain relative POSIX path below one of ``top``.

    ``source`` names the file that the path was read from, for the message.
    Raises ``Failed`` for an absolute path, ``..``, an empty part, a backslash, a
    control character, or a first part that is not in ``top``.
    """
    if isinstance(path, str):
        parts = path.split("/")
        plain = all(part not in ("", ".", "..") for part in parts)
        printable = path.isprintable() and "\\" not in path
        if plain and printable and len(parts) > 1 and parts[0] in top:
            return path
    raise Failed(
        "a path leaves the place it is meant for",
        where=source,
        expected=f"a relative path below {' or '.join(top)}, without '..'",
        found=repr(path),
        todo="do not use this copy of glm5-patch; install it again",
    )
