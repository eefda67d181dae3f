# SPDX-License-Identifier: Apache-2.0
"""Write patches/lock.json from the manifest, the patch files and the releases.

Run it after every change below patches/. It fails where a hunk does not fit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fetch import release_tree

from glm5_patch import manifest, plan, tree
from glm5_patch.errors import PatchError
from glm5_patch.manifest import PatchSet, sha256

ROOT = Path(__file__).resolve().parents[1] / "patches"


def lock() -> dict[str, object]:
    """The content of lock.json for what lies below patches/ now."""
    features, releases, needs = manifest.read_manifest(ROOT)
    names = {v.patch for f in features for v in f.variants}
    names |= {f"files/{path}" for f in features for path in f.files}
    sources = {name: sha256((ROOT / name).read_bytes()) for name in sorted(names)}
    patches = PatchSet(ROOT, features, releases, needs, sources, {})
    rows = {}
    for release in releases:
        folder = release_tree(release)
        series = manifest.series(patches, features, release, tested=True)
        made = plan.make(series, lambda path, folder=folder: tree.read(folder, path))
        rows[release] = {
            edit.path: {"before": sha256(edit.before), "after": sha256(edit.after)}
            for edit in made.edits
        }
    return {"format": manifest.FORMAT, "sources": sources, "releases": rows}


if __name__ == "__main__":
    try:
        text = json.dumps(lock(), indent=1) + "\n"
    except PatchError as error:
        sys.exit("\n".join(error.lines()))
    (ROOT / manifest.LOCK).write_text(text)
