# SPDX-License-Identifier: Apache-2.0
"""The child process: what it may see and leave behind, and how it may end.

The packages here are toys of a few lines, so that every end is quick to reach.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import glm5_patch
from glm5_patch.child.process import Failed, NotRun
from glm5_patch.probe.model import Request
from glm5_patch.probe.run import run_probe

PYTHON = Path(sys.executable)
TIMEOUT_S = 30.0


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages with a toy torch and an empty vLLM, both found first."""
    folder = tmp_path / "site-packages"
    write(folder / "torch" / "__init__.py", "from . import cuda\n")
    write(folder / "torch" / "cuda.py", "")
    write(
        folder / "torch" / "overrides.py",
        "class TorchFunctionMode:\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *error): return None\n",
    )
    write(folder / "vllm" / "__init__.py", "")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_too_slow_is_a_failure_and_all_of_it_is_killed(root: Path) -> None:
    pids = root / "pids"
    write(
        root / "vllm" / "__init__.py",
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('still here', file=sys.stderr, flush=True)\n"
        "time.sleep(60)\n",
    )
    started = time.monotonic()
    answer = run_probe(PYTHON, Request(root), 3)
    assert answer == Failed("no answer within 3 s", ("still here",))
    assert time.monotonic() - started < 10
    left = [int(pid) for pid in pids.read_text().split()]
    # A signal that was sent may not have arrived yet.
    wait_until(lambda: not any(map(alive, left)))


def test_an_interrupt_ends_all_children(root: Path) -> None:
    """Ctrl-C reaches the command alone, since a probe has a session of its own."""
    pids = root / "pids"
    pids.mkdir()
    write(
        root / "vllm" / "__init__.py",
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pids)!r}, str(os.getpid())).touch()\n"
        "time.sleep(60)\n",
    )
    command = (
        "import pathlib, sys\n"
        "from glm5_patch.probe.model import Request\n"
        "from glm5_patch.probe.run import run_probes\n"
        "request = Request(pathlib.Path(sys.argv[1]))\n"
        "run_probes(pathlib.Path(sys.executable), [request, request], 60)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(root)])}
    asked = subprocess.Popen(
        [PYTHON, "-c", command, root], env=env, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: len(list(pids.iterdir())) == 2)
    asked.send_signal(signal.SIGINT)
    assert asked.wait(10) != 0
    wait_until(lambda: not any(alive(int(pid.name)) for pid in pids.iterdir()))


def wait_until(true: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        # A killed grandchild may wait for its new parent to reap it.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_no_answer_is_a_failure_with_its_last_words(root: Path) -> None:
    write(
        root / "vllm" / "__init__.py",
        "import os, sys\n"
        "print('last words', file=sys.stderr, flush=True)\n"
        "os._exit(3)\n",
    )
    assert run_probe(PYTHON, Request(root), TIMEOUT_S) == Failed(
        "it gave no answer and ended with status 3", ("last words",)
    )


def test_a_signal_is_named(root: Path) -> None:
    write(root / "vllm" / "__init__.py", "import os\nos.abort()\n")
    answer = run_probe(PYTHON, Request(root), TIMEOUT_S)
    assert isinstance(answer, Failed)
    assert answer.reason == "it gave no answer and ended with signal SIGABRT"


def test_what_packages_print_does_not_spoil_the_answer(root: Path) -> None:
    write(
        root / "vllm" / "__init__.py", "print('{}' * 100_000)\nraise NameError('x')\n"
    )
    answer = run_probe(PYTHON, Request(root), TIMEOUT_S)
    assert isinstance(answer, Failed)
    assert answer.reason == "vLLM's selector does not start: NameError: x"
    assert answer.detail[-1] == "NameError: x"


def test_an_interpreter_that_does_not_start(tmp_path: Path) -> None:
    python = tmp_path / "python"
    assert run_probe(python, Request(tmp_path), TIMEOUT_S) == NotRun(
        f"{python} does not start: No such file or directory"
    )


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        pytest.param(
            "import absent",
            "the package absent is missing in the target's environment",
            id="lacks-a-package",
        ),
        pytest.param(
            "raise OSError('libcudart.so.12: cannot open')",
            "the package torch there is broken: OSError: libcudart.so.12: cannot open",
            id="broken",
        ),
        pytest.param(
            "raise ImportError('built for another numpy')",
            "the package torch there is broken: ImportError: built for another numpy",
            id="broken-import-without-a-name",
        ),
        pytest.param(
            "import re; re.compile('(')",
            "the package torch there is broken: error: missing ), unterminated "
            "subpattern at position 0",
            id="broken-in-the-standard-library",
        ),
    ],
)
def test_a_package_that_does_not_import_is_no_verdict(
    root: Path, torch: str, reason: str
) -> None:
    write(root / "torch" / "__init__.py", torch + "\n")
    answer = run_probe(PYTHON, Request(root), TIMEOUT_S)
    assert isinstance(answer, NotRun)
    assert answer.reason.replace("PatternError", "error") == reason


def test_a_name_that_a_package_does_not_have(root: Path) -> None:
    write(root / "vllm" / "__init__.py", "from torch import no_such_name\n")
    answer = run_probe(PYTHON, Request(root), TIMEOUT_S)
    assert isinstance(answer, NotRun)
    assert answer.reason.startswith(
        "the package torch there does not fit this vLLM: ImportError: cannot import"
    )


def test_an_error_of_vllm_itself_is_a_failure(root: Path) -> None:
    write(root / "vllm" / "__init__.py", "import re\nre.compile('(')\n")
    assert isinstance(run_probe(PYTHON, Request(root), TIMEOUT_S), Failed)


def test_a_part_of_vllm_that_is_missing_is_a_failure(root: Path) -> None:
    answer = run_probe(PYTHON, Request(root), TIMEOUT_S)
    assert isinstance(answer, Failed)
    assert answer.reason == (
        "vLLM's selector does not start: ModuleNotFoundError: "
        "No module named 'vllm.platforms'"
    )


def test_another_vllm_that_is_there_first_is_told_apart(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start-up file of the environment that imports vLLM before we can choose."""
    first = tmp_path / "first"
    write(first / "vllm" / "__init__.py", "")
    write(first / "sitecustomize.py", "import vllm\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(first), str(root)]))
    assert run_probe(PYTHON, Request(root), TIMEOUT_S) == Failed(
        f"vllm was imported from {first / 'vllm'}, not from {root}"
    )


def test_what_the_child_can_see(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    write(
        root / "vllm" / "__init__.py",
        "import json, os, sys\n"
        "seen = [os.getcwd(), sys.path, sys.dont_write_bytecode,\n"
        "        os.environ['CUDA_VISIBLE_DEVICES'], 'glm5_patch' in sys.modules]\n"
        f"open({str(seen)!r}, 'w').write(json.dumps(seen))\n",
    )
    monkeypatch.chdir(tmp_path)
    run_probe(PYTHON, Request(root), TIMEOUT_S)
    cwd, path, dont_write, gpus, ours = json.loads(seen.read_text())
    assert (cwd, dont_write, gpus, ours) == ("/", True, "", False)
    ours = {str(path) for path in Path(glm5_patch.__file__).parent.rglob("child")}
    assert len(ours) > 1
    assert not ({"", "/", str(tmp_path)} | ours) & set(path)
    assert not list(root.rglob("__pycache__"))
