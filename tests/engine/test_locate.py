# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is found in environments of every make, with nothing of them imported."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from glm5_patch import locate
from glm5_patch.errors import NotFound, Usage
from glm5_patch.locate import Installation

BOOBY_TRAP = "raise SystemExit('vLLM was imported')\n"
SRC = Path(locate.__file__).parents[1]


def package(root: Path) -> Path:
    """A ``vllm`` that must not be imported."""
    (root / "vllm").mkdir(parents=True)
    (root / "vllm" / "__init__.py").write_text(BOOBY_TRAP)
    return root


def metadata(root: Path, version: str = "0.16.0", record: bool = True) -> Path:
    info = root / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    )
    if record:
        (info / "RECORD").write_text("")
    return info


def egg_info(root: Path, version: str = "0.16.0") -> Path:
    info = root / "vllm.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    )
    return info


def editable(site: Path, source: Path, version: str = "0.16.0") -> Path:
    info = metadata(site, version)
    url = {"url": source.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(url))
    return info


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """A virtual environment without pip."""
    folder = tmp_path / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    return folder


def site_of(env: Path) -> Path:
    (folder,) = env.glob("lib/python*/site-packages")
    return folder


# --site-packages


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_a_normal_installation(tmp_path: Path, name: str) -> None:
    site = package(tmp_path / "usr" / "lib" / "python3" / name)
    info = metadata(site, "0.16.0+cu130")
    assert locate.in_site_packages(site) == Installation(
        root=site, version="0.16.0+cu130", dist_info=info, editable=False, python=None
    )
    assert locate.in_site_packages(site).record == info / "RECORD"


def test_the_interpreter_above(site: Path) -> None:
    metadata(package(site))
    python = site.parents[2] / "bin" / "python3"
    python.parent.mkdir()
    python.touch()
    assert locate.in_site_packages(site).python == python


def test_a_folder_that_is_reached_by_a_link(site: Path, tmp_path: Path) -> None:
    metadata(package(site))
    (tmp_path / "link").symlink_to(site)
    assert locate.in_site_packages(tmp_path / "link").root == site


def test_a_wheel_without_a_record(site: Path) -> None:
    metadata(package(site), record=False)
    assert locate.in_site_packages(site).record is None


@pytest.mark.parametrize("inner", ["", "src"], ids=["flat", "src"])
def test_an_editable_install(site: Path, tmp_path: Path, inner: str) -> None:
    source = tmp_path / "source tree"
    package(source / inner)
    info = editable(site, source, "0.16.1.dev3+gabc")
    have = locate.in_site_packages(site)
    assert (have.root, have.version) == (source / inner, "0.16.1.dev3+gabc")
    assert (have.editable, have.dist_info, have.record) == (True, info, None)


def test_a_direct_url_that_is_not_editable(site: Path, tmp_path: Path) -> None:
    info = metadata(package(site))
    for text in (
        json.dumps({"url": "https://x/vllm.whl", "archive_info": {}}),
        json.dumps({"url": tmp_path.as_uri(), "dir_info": {}}),
        json.dumps({"dir_info": {"editable": True}}),
        json.dumps({"url": 7, "dir_info": {"editable": True}}),
        "[]",
        "{",
    ):
        (info / "direct_url.json").write_text(text)
        have = locate.in_site_packages(site)
        assert (have.root, have.editable) == (site, False)


def test_a_develop_install(site: Path, tmp_path: Path) -> None:
    """What ``setup.py develop`` leaves: a link, a path, and metadata in the source."""
    source = package(tmp_path / "source")
    egg_info(source)
    (site / "vllm.egg-link").write_text(f"{source}\n.\n")
    (site / "easy-install.pth").write_text(f"{source}\n")
    have = locate.in_site_packages(site)
    assert (have.root, have.version) == (source, "0.16.0")
    assert (have.editable, have.dist_info, have.record) == (True, None, None)


def test_a_setuptools_finder(site: Path, tmp_path: Path) -> None:
    """An editable install that answers through an import hook, not through the path."""
    source = package(tmp_path / "source")
    editable(site, source)
    (site / "__editable___vllm_0_16_0_finder.py").write_text(BOOBY_TRAP)
    (site / "__editable__.vllm-0.16.0.pth").write_text(
        "import __editable___vllm_0_16_0_finder; raise SystemExit('run')\n"
    )
    assert locate.in_site_packages(site).root == source


def test_code_in_a_path_file_is_not_run(site: Path, tmp_path: Path) -> None:
    metadata(package(site))
    (site / "evil.pth").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        f"import\tpathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "# a comment\n\nno such folder\n\0\n"
    )
    (site / "folder.pth").mkdir()
    (site / "bytes.pth").write_bytes(b"\xff\xfe\n")
    locate.in_site_packages(site)
    assert not (tmp_path / "ran").exists()


def test_leftovers_of_an_uninstall(site: Path) -> None:
    """A folder without ``__init__`` and metadata without a version are no vLLM."""
    (site / "vllm" / "__pycache__").mkdir(parents=True)
    (site / "vllm-0.15.1.dist-info").mkdir()
    with pytest.raises(NotFound, match="no vLLM here"):
        locate.in_site_packages(site)
    (site / "vllm" / "__init__.py").write_text(BOOBY_TRAP)
    info = metadata(site)
    have = locate.in_site_packages(site)
    assert (have.version, have.dist_info) == ("0.16.0", info)


def test_metadata_without_a_package(site: Path) -> None:
    metadata(site)
    with pytest.raises(NotFound) as caught:
        locate.in_site_packages(site)
    assert caught.value.found == "metadata without the package"


def test_a_package_without_metadata(site: Path) -> None:
    package(site)
    with pytest.raises(NotFound, match="that no installer put there") as caught:
        locate.in_site_packages(site)
    assert caught.value.where == str(site / "vllm" / "__init__.py")


def test_a_module_of_that_name(site: Path) -> None:
    (site / "vllm.py").write_text(BOOBY_TRAP)
    with pytest.raises(NotFound) as caught:
        locate.in_site_packages(site)
    assert caught.value.where == str(site / "vllm.py")


def test_neighbours_are_not_taken_for_it(site: Path) -> None:
    for name in ("vllm_gguf_plugin", "vllm-tpu", "notvllm"):
        (site / f"{name}-1.0.dist-info").mkdir()
        (site / f"{name}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
    with pytest.raises(NotFound) as caught:
        locate.in_site_packages(site)
    assert caught.value.found == "no metadata of it"


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Usage, match="does not name a folder"):
        locate.in_site_packages(tmp_path / name)


def test_two_of_them_in_one_environment(site: Path, tmp_path: Path) -> None:
    """The folder itself comes before what its .pth files name."""
    metadata(package(site))
    other = package(tmp_path / "other")
    metadata(other, "0.15.1")
    (site / "other.pth").write_text(f"{other}\n")
    have = locate.in_site_packages(site)
    assert (have.root, have.version, have.shadowed) == (site, "0.16.0", (other,))


# --python


def test_an_environment_without_pip(env: Path) -> None:
    site = package(site_of(env))
    info = metadata(site)
    have = locate.of_python(env / "bin" / "python")
    assert (have.root, have.dist_info, have.editable) == (site, info, False)
    assert have.python == env / "bin" / "python"


def test_an_environment_without_vllm(env: Path) -> None:
    with pytest.raises(NotFound):
        locate.of_python(env / "bin" / "python")


def test_the_first_on_the_path_wins(env: Path, tmp_path: Path) -> None:
    for python_path, first, second in (
        (tmp_path / "first", tmp_path / "first", site_of(env)),
    ):
        metadata(package(first), "0.17.0")
        metadata(package(second), "0.16.0")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(python_path))
            have = locate.of_python(env / "bin" / "python")
        assert (have.root, have.version) == (first, "0.17.0")
        assert have.shadowed == (second,)
        have = locate.of_python(env / "bin" / "python")
        assert (have.root, have.version, have.shadowed) == (second, "0.16.0", ())


def test_a_source_tree_on_pythonpath(
    env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would import it, and nobody installed it: say so, patch nothing."""
    metadata(package(site_of(env)))
    package(tmp_path / "source")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "source"))
    with pytest.raises(NotFound, match="no installer put there") as caught:
        locate.of_python(env / "bin" / "python")
    assert caught.value.found == f"only of {site_of(env)}"
    assert "PYTHONPATH" in str(caught.value.todo)


@pytest.mark.parametrize("with_metadata", [False, True])
def test_the_working_directory_never_counts(
    env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_metadata: bool
) -> None:
    here = package(tmp_path / "here")
    if with_metadata:
        metadata(here, "9.9")
    site = package(site_of(env))
    metadata(site)
    monkeypatch.chdir(here)
    assert locate.of_python(env / "bin" / "python").root == site
    assert locate.in_site_packages(site).root == site
    program = (
        "from glm5_patch import locate; print(locate.of_running_interpreter().root)"
    )
    extra = [str(SRC), *packages()]
    (site / "extra.pth").write_text("\n".join(extra))
    (here / "run.py").write_text(program)
    for arguments in (["-c", program], [str(here / "run.py")], ["-I", "-c", program]):
        done = subprocess.run(
            [env / "bin" / "python", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == str(site), done.stderr


def packages() -> list[str]:
    """Where the tests' own dependencies lie."""
    return [sysconfig.get_paths()["purelib"]]


def test_the_own_interpreter_s_command(env: Path, tmp_path: Path) -> None:
    """As ``python -m glm5_patch``, in a folder that holds a vLLM."""
    here = package(tmp_path / "here")
    site = package(site_of(env))
    metadata(site)
    (site / "extra.pth").write_text("\n".join([str(SRC), *packages()]))
    done = subprocess.run(
        [env / "bin" / "python", "-m", "glm5_patch", "status", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=here,
    )
    assert json.loads(done.stdout)["installation"]["root"] == str(site)


def script(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("#!/bin/sh\necho broken >&2\nexit 3\n", "broken", id="fails"),
        pytest.param("#!/bin/sh\nexit 3\n", "exit status 3", id="fails-silently"),
        pytest.param("#!/bin/sh\n", "list index", id="says-nothing"),
        pytest.param("#!/bin/sh\necho 7\n", "unpack", id="says-a-number"),
        pytest.param("#!/bin/sh\necho '[7, [7]]'\n", "", id="says-numbers"),
        pytest.param("#!/bin/sh\necho hello\n", "Expecting value", id="says-hello"),
        pytest.param("#!/no/such/python\n", "No such file", id="no-interpreter"),
        pytest.param("#!/bin/sh\nkill -9 $$\n", "SIGKILL", id="dies"),
    ],
)
def test_an_interpreter_that_does_not_answer(
    tmp_path: Path, text: str, found: str
) -> None:
    python = script(tmp_path / "python", text)
    with pytest.raises(Usage, match="does not name a Python interpreter") as caught:
        locate.of_python(python)
    assert caught.value.where == str(python)
    assert found in str(caught.value.found)
    assert "\n" not in str(caught.value.found)


@pytest.mark.parametrize("name", ["nothing", "."])
def test_an_interpreter_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(Usage, match="does not name a Python interpreter"):
        locate.of_python(tmp_path / name)


def test_an_interpreter_that_talks(env: Path) -> None:
    """Prints of a sitecustomize come before the answer."""
    site = package(site_of(env))
    metadata(site)
    (site / "sitecustomize.py").write_text("print('hello')\n")
    assert locate.of_python(env / "bin" / "python").root == site


def test_nothing_is_written(env: Path) -> None:
    site = package(site_of(env))
    metadata(site)
    before = sorted(os.fspath(p) for p in site.rglob("*"))
    locate.of_python(env / "bin" / "python")
    locate.in_site_packages(site)
    assert sorted(os.fspath(p) for p in site.rglob("*")) == before
