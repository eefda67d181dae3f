# SPDX-License-Identifier: Apache-2.0
"""`bench` and `verify --level kernels`: what they ask, and what they make of answers.

The interpreters here answer for a GPU that is not there, well or badly.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from scene import ADDED, Done, Scene, stamps
from targets import MakeTarget

Snapshot = Callable[..., None]

# The answers that `body` makes of a request, in place of the child of `bench`.
FAKE = """\
#!{python}
import json, os, sys

if sys.argv[1] == "-c":  # where is vLLM?
    print(json.dumps([__file__, [{root!r}]]))
    sys.exit()
folder, descriptor = sys.argv[2:]
if not folder.endswith("bench/child"):
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])

CHIP = {{
    "name": "NVIDIA Fictive 6000", "capability": "12.0", "processors": 188,
    "memory_bytes": 96 * 10**9, "l2_bytes": 128 * 10**6, "python": "3.12.3",
    "torch": "2.9.1+cu128", "triton": "3.5.1", "cuda": "12.8",
    "pool_blocks": 65536,
}}

def row(shape, timed):
    kernel, dtype, tokens, keys, heads = shape
    us = 3.0 + tokens * keys / 2000
    attention = kernel.startswith("attention")
    return {{
        "shape": shape, "launch": "16 x 32, 8 warps", "error": 0.25, "fault": None,
        "bytes": 0 if kernel == "prefill" else tokens * keys * 1000,
        "flop": tokens * keys * 10**6 if kernel == "prefill" else 0,
        "us": us if timed else None,
        "read_us": us / 2 if timed and attention else None,
    }}

request = json.load(sys.stdin)
rows = [row(shape, request["repeats"] > 0) for shape in request["shapes"]]
answer = {{"state": "ran", "chip": CHIP, "rows": rows}}
{body}
if answer is not None:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    os.write(int(descriptor), text.encode())
"""


@pytest.fixture
def interpreter(tmp_path: Path, scene: Scene) -> Callable[..., tuple[str, str]]:
    """Makes an interpreter that answers so; gives the options that name it."""

    def make(
        body: str = "", real: str = sys.executable, root: Path = scene.root
    ) -> tuple[str, str]:
        file = tmp_path / "python"
        text = FAKE.format(
            python=sys.executable,
            root=str(root),
            real=real,
            body=textwrap.dedent(body),
        )
        file.write_text(text)
        file.chmod(0o755)
        return "--python", str(file)

    return make


# How a child may answer: name, what it does, exit code, and a piece of the report.
ANSWERS: dict[str, tuple[str, str]] = {
    "no-gpu": (
        "answer = {'state': 'not run', 'reason': 'torch 2.9.1+cu128 there sees no GPU: "
        "the driver does not answer, or CUDA_VISIBLE_DEVICES hides it'}",
        "sees no GPU",
    ),
    "no-memory": (
        "answer = {'state': 'not run', 'reason': '1.1 GB of GPU memory are needed, and "
        "0.3 of 24.0 GB are free: stop what else runs on this GPU'}",
        "0.3 of 24.0 GB are free",
    ),
    "wrong": (
        "rows[1] |= {'error': 3.5, 'us': None, 'read_us': None,\n"
        "            'fault': 'wrong: the error is larger than is allowed'}\n"
        "rows[2] |= {'error': None, 'us': None, 'read_us': None,\n"
        "            'fault': 'out of GPU memory'}",
        "2 of 8 shapes failed",
    ),
    "crash": (
        "print('Xid 31', file=sys.stderr)\nsys.stderr.flush()\nos._exit(3)",
        "ended with status 3; Xid 31",
    ),
    "failed": (
        "answer = {'state': 'failed', 'reason': 'RuntimeError: no\\nway', "
        "'detail': ['line 1']}",
        "RuntimeError: no way; line 1",
    ),
}


def test_a_table_to_send_back(
    scene: Scene, interpreter: Callable[..., tuple[str, str]], snapshot: Snapshot
) -> None:
    place = interpreter()
    scene.must("apply")
    before = stamps(scene.root)
    done = scene.must("bench", *place)
    quick = scene.must("bench", "--quick", "--dtype", "float16", "--json", *place)
    assert stamps(scene.root) == before
    assert len(quick.json["rows"]) == 8
    assert {row["shape"]["dtype"] for row in quick.json["rows"]} == {
        "float16",
        "float8",
    }
    assert quick.json["chip"]["capability"] == "12.0"
    assert quick.json["digest"] in done.out
    snapshot("bench", without_digest(done, quick.json["digest"]))


@pytest.mark.parametrize("name", ANSWERS)
def test_bench_that_fails(
    name: str, scene: Scene, interpreter: Callable[..., tuple[str, str]]
) -> None:
    body, piece = ANSWERS[name]
    scene.must("apply")
    done = scene.run("bench", "--quick", *interpreter(body))
    assert done.code == 1
    assert piece in done.out + done.err
    asked = scene.run("bench", "--quick", "--json", *interpreter(body))
    assert asked.json["exit_code"] == 1


def test_bench_says_what_is_missing(
    scene: Scene, interpreter: Callable[..., tuple[str, str]], snapshot: Snapshot
) -> None:
    place = interpreter(ANSWERS["no-gpu"][0])
    commands = [scene.run("bench", *place), scene.run("bench", "--dtype", "half")]
    scene.must("apply", "--feature", "gguf")
    commands.append(scene.run("bench", *place))
    scene.must("revert")
    scene.must("apply")
    commands += [scene.run("bench", *place), scene.run("bench")]
    scene.edit(ADDED, "import torch", "import torch  # edited")
    commands.append(scene.run("bench", *place))
    snapshot("bench-refused", *commands)
    assert [done.code for done in commands] == [1, 2, 1, 1, 1, 1]


# What is no answer at all.
GARBLED = {
    "nothing": "answer = None",
    "no-json": "answer = '{'",
    "a-number": "answer = 7",
    "deep": "answer = '[' * 100_000",
    "no-rows": "answer['rows'] = []",
    "a-row-left-out": "del rows[1]",
    "other-rows": "rows.reverse()",
    "rows-no-list": "answer['rows'] = 3",
    "no-state": "del answer['state']",
    "no-time": "rows[0]['us'] = None",
    "no-error": "rows[0]['error'] = None",
    "wrong-and-silent": "rows[0]['error'] = 2.0",
    "time-nan": "rows[0]['us'] = float('nan')",
    "time-infinite": "rows[0]['us'] = float('inf')",
    "time-huge": "rows[0]['us'] = 10**400",
    "time-negative": "rows[0]['us'] = -1.0",
    "time-text": "rows[0]['us'] = '5'",
    "time-true": "rows[0]['us'] = True",
    "count-fraction": "rows[0]['bytes'] = 0.5",
    "name-of-no-text": "CHIP['name'] = ['x']",
    "name-with-an-escape": "CHIP['name'] = 'GPU \\x1b[2J'",
    "launch-with-lines": "rows[0]['launch'] = 'a\\nb'",
    "fault-with-an-escape": "rows[0]['fault'] = '\\x1b]0;x\\x07'",
    "reason-of-no-text": "answer = {'state': 'not run', 'reason': 5}",
}


@pytest.mark.parametrize("garbled", GARBLED)
def test_an_answer_is_not_trusted(
    garbled: str, scene: Scene, interpreter: Callable[..., tuple[str, str]]
) -> None:
    scene.must("apply")
    place = interpreter(GARBLED[garbled])
    done = scene.run("bench", "--quick", "--json", *place)
    assert done.code == 1
    what = "no" if garbled == "nothing" else "a garbled"
    assert done.json["error"]["found"] == (
        f"it gave {what} answer and ended with status 0"
    )
    assert "Traceback" not in done.err


def test_verify_asks_the_gpu_by_name_only(
    make_target: MakeTarget,
    interpreter: Callable[..., tuple[str, str]],
    snapshot: Snapshot,
    tmp_path: Path,
) -> None:
    target = make_target()
    scene = Scene(tmp_path, target.root)
    scene.env["CUDA_VISIBLE_DEVICES"] = ""
    own = ("--python", str(target.python))
    scene.must("apply", *own)
    before = stamps(target.root)
    none = scene.run("verify", "--level", "kernels", "--json", *own)
    level = none.json["levels"][-1]
    assert (none.code, level["level"], level["outcome"]) == (1, "kernels", "not run")
    assert "not built for CUDA" in level["details"][0] or (
        "sees no GPU" in level["details"][0]
    )
    commands: list[Done] = []
    for body in ("", ANSWERS["wrong"][0], ANSWERS["no-gpu"][0]):
        place = interpreter(body, str(target.python), target.root)
        commands.append(scene.run("verify", "--level", "kernels", *place))
    assert stamps(target.root) == before
    assert [done.code for done in commands] == [0, 1, 1]
    snapshot("verify-kernels", *commands, also=target.python.parents[1])


def without_digest(done: Done, digest: str) -> Done:
    """It changes with every patch; this is about the table."""
    out = done.out.replace(digest, "DIGEST")
    return Done(done.args, done.code, out, done.err)
