# SPDX-License-Identifier: Apache-2.0
"""Which series serves an installed vLLM, and which patch sets are not believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_tree import unified
from packaging.version import Version

from glm5_patch import manifest, plan
from glm5_patch.errors import Conflict, Failed, NotSupported, PatchError, Usage
from glm5_patch.manifest import PatchSet, Series, sha256

REGISTRY = "vllm/registry.py"
CUDA = "vllm/cuda.py"
NEEDS = "vllm/models.py"
KNOWS = 'MODELS = ["GlmMoeDsaForCausalLM"]\n'


def release(name: str) -> dict[str, str]:
    """The files of a release: they differ in one line that no hunk touches."""
    filler = "".join(f"x{i} = {i}\n" for i in range(9))
    return {
        REGISTRY: f"release = {name!r}\n{filler}backends = 1\n",
        CUDA: f"release = {name!r}\n{filler}order = 1\n",
        NEEDS: KNOWS,
    }


def patched(text: str) -> str:
    return text.replace("s = 1\n", "s = 1\nours = 2\n").replace("r = 1\n", "r = 2\n")


RELEASES = ("0.16.0", "0.17.1", "0.18.0")
MANIFEST = """
format = 1
releases = ["0.16.0", "0.17.1", "0.18.0"]
[[needs]]
file = "vllm/models.py"
contains = "GlmMoeDsaForCausalLM"
[[feature]]
name = "backend"
summary = "A backend"
files = ["vllm/sparse.py"]
[feature.variants]
"0.18.0" = "vllm/backend/0.18.0.patch"
"0.16.0" = "vllm/backend/0.16.0.patch"
[[feature]]
name = "order"
summary = "An order"
files = []
[feature.variants]
"0.16.0" = "vllm/order/0.16.0.patch"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A patch set of two features for three releases, with its lock."""
    sources = {"files/vllm/sparse.py": "sparse = 1\n"}
    for name, path in (("backend", REGISTRY), ("order", CUDA)):
        text = release("0.16.0")[path]
        sources[f"vllm/{name}/0.16.0.patch"] = unified(path, text, patched(text))
    sources["vllm/backend/0.18.0.patch"] = sources["vllm/backend/0.16.0.patch"]
    for path, text in sources.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    rows = {
        name: {
            path: {
                "before": sha256(release(name)[path].encode()),
                "after": sha256(patched(release(name)[path]).encode()),
            }
            for path in (REGISTRY, CUDA)
        }
        for name in RELEASES
    }
    hashes = {path: sha256(text.encode()) for path, text in sources.items()}
    (tmp_path / "manifest.toml").write_text(MANIFEST)
    lock = {"format": 1, "sources": hashes, "releases": rows}
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    return tmp_path


@pytest.fixture
def patches(root: Path) -> PatchSet:
    return manifest.load(root)


def select(
    patches: PatchSet, label: str, files: Mapping[str, str], unlisted: bool = False
) -> Series:
    def read(path: str) -> bytes | None:
        return files[path].encode() if path in files else None

    series = manifest.select(patches, patches.features, label, read, unlisted)
    plan.make(series, read)
    return series


# Versions.


def test_versions_are_ordered_as_pep_440_has_it() -> None:
    order = [
        "0.1.dev20051+g487ecf187",
        "0.15.1",
        "0.16.0rc2.dev313+g662205d34",
        "0.16.0rc2",
        "0.16.0",
        "0.16.0+cu130",
        "0.16.0.post1",
        "0.17.0",
    ]
    assert sorted(reversed(order), key=Version) == order


@pytest.mark.parametrize(
    ("version", "since"),
    [
        pytest.param("0.16.0", "0.16.0", id="first"),
        pytest.param("0.16.0+cu130", "0.16.0", id="local-label"),
        pytest.param("0.17.1", "0.16.0", id="between"),
        pytest.param("0.18.0rc1", "0.16.0", id="candidate-of-the-next"),
        pytest.param("0.18.0", "0.18.0", id="next"),
        pytest.param("0.100.0", "0.18.0", id="later-by-number-not-by-text"),
        pytest.param("0.16.0rc2.dev313+g662205d34", "0.16.0", id="older-than-all"),
    ],
)
def test_a_variant_serves_until_the_next_one(
    patches: PatchSet, version: str, since: str
) -> None:
    variant = patches.features[0].variant_for(Version(version))
    assert str(variant.since) == since


# Selection: the bytes decide.


@pytest.mark.parametrize(
    "label",
    [
        "0.17.1",
        "0.17.1+cu130",
        "v0.17.1",
        "0.16.0",
        "0.16.0rc2.dev313+g662205d34",
        "0.1.dev20051+g487ecf187",
        "9.9",
        "not-a-version",
        "",
    ],
)
@pytest.mark.parametrize("unlisted", [False, True], ids=["", "allow-unlisted"])
def test_known_bytes_apply_under_any_label(
    patches: PatchSet, label: str, unlisted: bool
) -> None:
    series = select(patches, label, release("0.17.1"), unlisted)
    assert (series.release, series.tested) == ("0.17.1", True)
    assert set(series.hashes) == {REGISTRY, CUDA}
    assert series.new_files == {"vllm/sparse.py": b"sparse = 1\n"}


def test_a_release_with_equal_files_is_the_one_of_the_label(root: Path) -> None:
    lock = json.loads((root / "lock.json").read_text())
    lock["releases"]["0.17.1"] = lock["releases"]["0.16.0"]
    (root / "lock.json").write_text(json.dumps(lock))
    patches = manifest.load(root)
    files = release("0.16.0")
    assert select(patches, "0.17.1+cu130", files).release == "0.17.1"
    assert select(patches, "0.16.0", files).release == "0.16.0"
    assert select(patches, "no version", files).release == "0.16.0"


@pytest.mark.parametrize("label", ["0.16.0", "0.16.0+cu130", "0.16.0+local.7"])
def test_known_label_and_unknown_bytes(patches: PatchSet, label: str) -> None:
    files = {**release("0.16.0"), CUDA: "edited = 1\n"}
    with pytest.raises(Conflict) as caught:
        select(patches, label, files)
    assert caught.value.what == "a file is not as vLLM 0.16.0 released it"
    assert caught.value.where == CUDA
    assert caught.value.expected == f"sha256 {sha256(release('0.16.0')[CUDA].encode())}"
    assert caught.value.found == (
        f"sha256 {sha256(b'edited = 1' + bytes([10]))}; "
        "nearest release 0.16.0, 1 of 2 files the same"
    )
    assert "--allow-unlisted" in str(caught.value.todo)


def test_the_nearest_release_is_that_of_the_bytes(patches: PatchSet) -> None:
    files = {**release("0.18.0"), CUDA: "edited = 1\n"}
    with pytest.raises(Conflict) as caught:
        select(patches, "0.16.0", files)
    assert caught.value.where == REGISTRY
    assert str(caught.value.found).endswith(
        "nearest release 0.18.0, 1 of 2 files the same"
    )


def test_a_missing_file(patches: PatchSet) -> None:
    files = release("0.16.0")
    del files[CUDA]
    with pytest.raises(Conflict) as caught:
        select(patches, "0.16.0", files)
    assert caught.value.where == CUDA
    assert "no such file" in str(caught.value.found)


def test_crlf_is_named(patches: PatchSet) -> None:
    files = {**release("0.16.0"), CUDA: release("0.16.0")[CUDA].replace("\n", "\r\n")}
    with pytest.raises(Conflict) as caught:
        select(patches, "0.16.0", files)
    assert "(its lines end in CR LF)" in str(caught.value.found)


UNKNOWN = ["0.15.1", "0.16.0rc2.dev313+g662205d34", "0.1.dev20051+g487ecf187", "main"]


@pytest.mark.parametrize("label", UNKNOWN)
def test_unknown_label_and_bytes(patches: PatchSet, label: str) -> None:
    with pytest.raises(NotSupported) as caught:
        select(patches, label, release(label))
    assert label in caught.value.what
    assert caught.value.expected == (
        "vLLM 0.16.0, 0.17.1, 0.18.0, or a build with the same files"
    )
    assert "0 of 2 files the same" in str(caught.value.found)


@pytest.mark.parametrize("label", UNKNOWN)
def test_a_build_that_is_not_listed_may_be_tried(patches: PatchSet, label: str) -> None:
    series = select(patches, label, release(label), unlisted=True)
    assert not series.tested
    assert series.hashes == {}


def test_a_build_that_is_not_listed_must_fit(patches: PatchSet) -> None:
    files = {**release("main"), CUDA: "other = 1\n"}
    with pytest.raises(Conflict, match="a hunk does not match"):
        select(patches, "main", files, unlisted=True)
    files[CUDA] = release("main")[CUDA] * 2
    with pytest.raises(Conflict, match="not where they can be changed"):
        select(patches, "main", files, unlisted=True)


@pytest.mark.parametrize("unlisted", [False, True], ids=["", "allow-unlisted"])
@pytest.mark.parametrize(
    ("text", "found"),
    [("MODELS = []\n", "no such text"), (None, "no such file")],
    ids=["no-text", "no-file"],
)
def test_what_is_needed_is_not_there(
    patches: PatchSet, text: str | None, found: str, unlisted: bool
) -> None:
    files = release("0.15.1")
    del files[NEEDS]
    if text is not None:
        files[NEEDS] = text
    with pytest.raises(NotSupported, match="does not know GLM-5") as caught:
        select(patches, "0.15.1", files, unlisted)
    assert (caught.value.where, caught.value.found) == (NEEDS, found)


# Features.


def test_a_part_of_the_features(patches: PatchSet) -> None:
    (order,) = manifest.choose(patches, ["order"])
    read = {p: t.encode() for p, t in release("0.16.0").items()}.get
    series = manifest.select(patches, [order], "0.16.0", read)
    assert [d.path for d in series.diffs] == [CUDA]
    assert series.new_files == {}
    # the lock holds the files with all features on
    assert (series.tested, series.hashes) == (True, {})


def test_features_keep_their_order(patches: PatchSet) -> None:
    chosen = manifest.choose(patches, ["order", "backend", "order"])
    assert [f.name for f in chosen] == ["backend", "order"]
    assert manifest.choose(patches, []) == patches.features


def test_an_unknown_feature(patches: PatchSet) -> None:
    with pytest.raises(Usage, match="no feature is called 'gguf'"):
        manifest.choose(patches, ["gguf"])


# Sources.


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param(lambda f: f.unlink(), "is missing", id="missing"),
        pytest.param(
            lambda f: f.write_bytes(f.read_bytes()[:-1]), "cut short", id="cut-short"
        ),
        pytest.param(
            lambda f: f.write_bytes(f.read_bytes() + b"#\n"), "changed", id="longer"
        ),
        pytest.param(lambda f: f.write_bytes(b""), "changed", id="emptied"),
    ],
)
@pytest.mark.parametrize("path", ["vllm/order/0.16.0.patch", "files/vllm/sparse.py"])
def test_a_source_that_is_not_as_locked(
    patches: PatchSet, path: str, change: Callable[[Path], None], what: str
) -> None:
    change(patches.root / path)
    with pytest.raises(Failed, match=what) as caught:
        select(patches, "0.16.0", release("0.16.0"))
    assert caught.value.where == path


def test_a_source_that_the_lock_does_not_name(root: Path) -> None:
    change_lock(root, lambda lock: lock["sources"].pop("files/vllm/sparse.py"))
    with pytest.raises(Failed) as caught:
        select(manifest.load(root), "0.16.0", release("0.16.0"))
    assert caught.value.expected == "sha256 none: not in the lock"


def test_a_patch_that_is_not_utf8(root: Path) -> None:
    path = "vllm/order/0.16.0.patch"
    (root / path).write_bytes(b"\xff")
    change_lock(root, lambda lock: lock["sources"].update({path: sha256(b"\xff")}))
    with pytest.raises(Failed, match="cannot be read"):
        select(manifest.load(root), "0.16.0", release("0.16.0"))


def test_a_patched_file_that_the_lock_does_not_name(root: Path) -> None:
    change_lock(root, lambda lock: lock["releases"]["0.16.0"].pop(CUDA))
    files = {**release("0.16.0"), CUDA: release("main")[CUDA]}
    with pytest.raises(Failed, match="cannot be read") as caught:
        select(manifest.load(root), "0.16.0", files)
    assert caught.value.found == f"0.16.0 lacks a row for {CUDA}"


# Hostile or broken manifests and locks.


def change_lock(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    lock = json.loads((root / "lock.json").read_text())
    change(lock)
    (root / "lock.json").write_text(json.dumps(lock))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(MANIFEST, "", id="empty"),
        pytest.param(MANIFEST, "format = 1\n[[feature", id="cut-short"),
        pytest.param(MANIFEST, "format = 1\n", id="nothing-in-it"),
        pytest.param("format = 1", "format = 2", id="format"),
        pytest.param('["0.16.0", "0.17.1", "0.18.0"]', "[]", id="no-release"),
        pytest.param('["0.16.0", "0.17.1", "0.18.0"]', "7", id="releases-no-list"),
        pytest.param('["0.16.0", "0.17.1", "0.18.0"]', "[0.16]", id="release-no-text"),
        pytest.param('"0.17.1"', '"latest"', id="release-no-version"),
        pytest.param('name = "order"', "", id="no-name"),
        pytest.param("files = []", "files = 7", id="files-no-list"),
        pytest.param("files = []", 'files = "vllm/a.py"', id="files-a-text"),
        pytest.param("files = []", "files = [7]", id="file-no-text"),
        pytest.param("vllm/sparse.py", "../sparse.py", id="file-dot-dot"),
        pytest.param("vllm/sparse.py", "/etc/passwd", id="file-absolute"),
        pytest.param("vllm/sparse.py", "torch/sparse.py", id="file-outside"),
        pytest.param("vllm/order/0", "vllm/../../order/0", id="patch-dot-dot"),
        pytest.param("vllm/order/0", "/vllm/order/0", id="patch-absolute"),
        pytest.param('"0.16.0" = "vllm/order', '"x" = "vllm/order', id="since"),
        pytest.param('"0.16.0" = "vllm/order/0.16.0.patch"', "", id="no-variant"),
        pytest.param("vllm/models.py", "../models.py", id="needs-dot-dot"),
        pytest.param("contains =", "has =", id="needs-nothing"),
        pytest.param("[[feature]]", "[[features]]", id="no-feature"),
    ],
)
def test_a_bad_manifest(root: Path, old: str, new: str) -> None:
    assert old in MANIFEST
    (root / "manifest.toml").write_text(MANIFEST.replace(old, new))
    refused(root, "manifest.toml")


def refused(root: Path, where: str) -> None:
    with pytest.raises(Failed) as caught:
        manifest.load(root)
    assert caught.value.where == where
    assert isinstance(caught.value, PatchError)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda lock: lock.clear(), id="empty"),
        pytest.param(lambda lock: lock.update(format=0), id="format"),
        pytest.param(lambda lock: lock.pop("sources"), id="no-sources"),
        pytest.param(lambda lock: lock.update(sources=[]), id="sources-no-table"),
        pytest.param(lambda lock: lock.update(releases=[]), id="releases-no-table"),
        pytest.param(lambda lock: lock["releases"].pop("0.16.0"), id="release-missing"),
        pytest.param(
            lambda lock: lock["releases"].update({"1.0": {}}), id="release-too-many"
        ),
        pytest.param(
            lambda lock: lock["releases"].update({"0.16.0": 7}), id="release-no-table"
        ),
        pytest.param(
            lambda lock: lock["releases"]["0.16.0"].update({CUDA: {}}), id="no-hashes"
        ),
        pytest.param(
            lambda lock: lock["releases"]["0.16.0"].update({CUDA: "ab"}), id="text"
        ),
        pytest.param(
            lambda lock: lock["releases"]["0.16.0"][CUDA].update(more=1), id="more"
        ),
        pytest.param(
            lambda lock: lock["releases"]["0.16.0"].update({"../x": {}}), id="dot-dot"
        ),
        pytest.param(
            lambda lock: lock["releases"]["0.16.0"].clear(), id="release-without-files"
        ),
    ],
)
def test_a_bad_lock(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    change_lock(root, change)
    refused(root, "lock.json")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"[1]", b"null", b"[" * 200_000],
    ids=["empty", "cut-short", "not-utf8", "list", "null", "deep"],
)
@pytest.mark.parametrize("name", ["manifest.toml", "lock.json"])
def test_bytes_that_are_neither(root: Path, name: str, data: bytes) -> None:
    (root / name).write_bytes(data)
    refused(root, name)


@pytest.mark.parametrize("name", ["manifest.toml", "lock.json"])
def test_a_file_that_is_not_there(root: Path, name: str) -> None:
    (root / name).unlink()
    refused(root, name)


def test_the_project_s_own_patch_set() -> None:
    """It loads, each source is as locked, and each variant parses."""
    patches = manifest.load(manifest.bundled_root())
    for name in patches.releases:
        series = manifest.series(patches, patches.features, name, tested=True)
        assert {d.path for d in series.diffs} == set(patches.lock[name])
        assert series.new_files


def test_every_new_file_belongs_to_a_feature() -> None:
    """What none lists is never installed, whoever imports it; two may share one."""
    root = manifest.bundled_root()
    listed = {f for feature in manifest.load(root).features for f in feature.files}
    there = [path.relative_to(root / "files") for path in root.glob("files/**/*.py")]
    assert sorted(listed) == sorted(path.as_posix() for path in there)


@pytest.mark.parametrize(
    ("label", "files", "basis"),
    [
        ("0.1.dev20051+g487ecf187", release("0.17.1"), "0.17.1"),
        ("main", release("0.18.0"), "0.18.0"),
        ("0.1.dev20051", release("neither"), "0.18.0"),
        ("0.17.2", release("0.18.0"), "0.17.2"),
        ("0.16.0rc2.dev313+g662205d34", release("0.18.0"), "0.16.0rc2.dev313"),
    ],
)
def test_an_unlisted_build_is_tried_as_what_it_is_nearest_to(
    patches: PatchSet, label: str, files: dict[str, str], basis: str
) -> None:
    # Edited, so that no release's bytes are known.
    edited = {**files, REGISTRY: "# a build of our own\n" + files[REGISTRY]}
    assert select(patches, label, edited, unlisted=True).release == basis
