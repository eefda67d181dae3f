# SPDX-License-Identifier: Apache-2.0
"""A small site-packages with a vLLM in it, a plan for it, and pictures of trees."""

from __future__ import annotations

import base64
import difflib
import hashlib
import os
import py_compile
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from glm5_patch import diff, plan, state, tree
from glm5_patch.locate import Installation
from glm5_patch.manifest import Series
from glm5_patch.plan import Plan

VERSION = "0.16.0"
STOCK = {
    "vllm/__init__.py": '"""A vLLM."""\n\n__version__ = "0.16.0"\n',
    "vllm/platforms/__init__.py": "",
    "vllm/platforms/cuda.py": (
        "import sys\n\n\ndef priorities(capability):\n"
        '    if capability.major == 10:\n        return ["FLASHMLA"]\n'
        '    return ["FLASH_ATTN"]\n'
    ),
    "vllm/v1/__init__.py": "",
    "vllm/v1/registry.py": 'class Backend:\n    FLASH_ATTN = "fa"\n    FLEX = "flex"\n',
    "vllm/v1/selector.py": "def select():\n    return None\n",
}
PATCHED = {
    "vllm/platforms/cuda.py": STOCK["vllm/platforms/cuda.py"].replace(
        '["FLASH_ATTN"]', '["FLASH_ATTN", "TRITON_MLA_SPARSE"]'
    ),
    "vllm/v1/registry.py": STOCK["vllm/v1/registry.py"]
    + '    TRITON_MLA_SPARSE = "sparse"\n',
}
ADDED = {
    "vllm/v1/mla/ops/kernel.py": "def kernel():\n    return 1\n",
    "vllm/v1/sparse.py": "from vllm.v1.mla.ops.kernel import kernel\n",
}

Picture = dict[str, tuple[int, int | None, bytes | str | None]]
"""Each path's mode, time if wanted, and content: bytes, a link's target, or None."""


def build(
    root: Path,
    files: Mapping[str, str] = STOCK,
    version: str = VERSION,
    line_end: str = "\n",
    compiled: bool = True,
) -> Installation:
    """Install ``files`` below ``root`` as pip would; every file has its own time."""
    for i, (path, text) in enumerate(sorted(files.items())):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
        file.chmod(0o640 if i % 2 else 0o644)
        os.utime(file, ns=(10**18 + i, 10**18 + 7 * i))
        if compiled and file.suffix == ".py":
            py_compile.compile(str(file), doraise=True)
    info = root / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    )
    (info / "INSTALLER").write_text("pip\n")
    rows = [row(path, text.encode()) for path, text in sorted(files.items())]
    rows += [f"{info.name}/METADATA,,", f"{info.name}/RECORD,,", "../../bin/vllm,,"]
    (info / "RECORD").write_bytes("".join(r + line_end for r in rows).encode())
    return installed(root, version)


def installed(root: Path, version: str = VERSION) -> Installation:
    return Installation(
        root=root,
        version=version,
        dist_info=root / f"vllm-{version}.dist-info",
        editable=False,
        python=None,
    )


def row(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"{path},sha256={digest.decode()},{len(data)}"


def unified(path: str, before: str, after: str, context: int = 3) -> str:
    """A unified diff by difflib, with the marker that it leaves out."""
    lines = difflib.unified_diff(
        diff.split(before), diff.split(after), f"a/{path}", f"b/{path}", n=context
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )


def make_plan(
    root: Path,
    patched: Mapping[str, str] = PATCHED,
    added: Mapping[str, str] = ADDED,
    release: str = VERSION,
) -> Plan:
    """The plan that turns the tree's files into ``patched`` and adds ``added``."""
    diffs = []
    for path, after in sorted(patched.items()):
        before = (root / path).read_bytes().decode()
        diffs += diff.parse(unified(path, before, after), "test.patch")
    new_files = {path: text.encode() for path, text in sorted(added.items())}
    series = Series(release, True, ("sparse",), tuple(diffs), new_files, {})
    return plan.make(series, lambda path: tree.read(root, path))


def picture(root: Path, times: bool = True, own: bool = True) -> Picture:
    """All there is below ``root``; without ``own``, leave out what the state keeps."""
    seen: Picture = {}
    for folder, _, names in os.walk(root):
        here = Path(folder)
        if not own and here.relative_to(root).parts[:1] == (state.FOLDER,):
            continue
        for file in (here, *(here / name for name in names)):
            info = file.lstat()
            content: bytes | str | None = None
            if stat.S_ISLNK(info.st_mode):
                content = str(file.readlink())
            elif stat.S_ISREG(info.st_mode):
                content = file.read_bytes()
            time = info.st_mtime_ns if times and content is not None else None
            seen[file.relative_to(root).as_posix()] = (info.st_mode, time, content)
    return seen


def contents(root: Path) -> dict[str, bytes | str | None]:
    """What ``picture`` shows, but only the content, and not of what the state keeps."""
    shown = picture(root, times=False, own=False)
    return {path: content for path, (_, _, content) in shown.items()}


def copy(source: Path, target: Path) -> Path:
    """A second tree like ``source``, times included; what was at ``target`` goes."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target
