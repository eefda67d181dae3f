# SPDX-License-Identifier: Apache-2.0
"""What the vLLMs of the plan said, and how transformers judges it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plan import (
    CONTROLLED,
    CONTROLS,
    PLAIN,
    Q4_K,
    Q8_0,
    REFUSALS,
    TOPKS,
    Case,
    cases,
    emulation,
    modelled,
    modelled_plainly,
    unserved,
)

HERE = Path(__file__).parent
SECONDS = 240  # for one process, others beside it


class Failed(AssertionError):
    """A process ended badly; the text is the end of its log."""


@dataclass
class Job:
    """One reference, for the vLLMs of `names`, which all have the model of `case`."""

    case: Case
    emulation: dict[str, Any]
    dtype: str | None
    names: list[str] = field(default_factory=list)


class Evidence:
    """Answers and verdicts by name; each waits for the process that makes it."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.folder = folder
        self.models = folder / "models"
        self._pool = pool
        self._runs: dict[str, Future[Path]] = {}
        self._judges: dict[str, Future[Path]] = {}
        self.report: dict[str, Any] = {}

    def start(self, wanted: set[str]) -> None:
        """Those of the cases, controls and refusals of the plan that are wanted."""
        write_models(self.models)
        served = {
            name: case
            for name, case in cases().items()
            if name in wanted and not unserved(case)
        }
        for name, case in served.items():
            self._runs[name] = self._pool.submit(self._run, name, case)
        stock = os.environ.get("GLM5_PATCH_STOCK")
        for model in wanted & set(REFUSALS) if stock else ():
            folder = self.models / f"{PLAIN}-256"
            run = self._arguments(self.models / model, folder, "float16", "auto")
            self._runs[f"stock {model}"] = self._pool.submit(
                process,
                self.folder / f"stock-{model}",
                "engine.py",
                run,
                {"PYTHONPATH": stock},
            )
        # In the queue behind every run, so none of them can wait for one unstarted.
        jobs: dict[str, Job] = {}
        for name, case in served.items():
            job = Job(case, emulation(case), case.dtype)
            jobs.setdefault(modelled(case), job).names.append(name)
            if modelled_plainly(case):
                job = Job(case, {"indexer": False}, None)
                jobs.setdefault(f"plain float32 {case.topk}", job).names.append(name)
        for control, (wrong, _) in CONTROLS.items():
            if control in wanted:
                jobs[control] = Job(served[CONTROLLED], wrong, None, [CONTROLLED])
        for number, (key, job) in enumerate(jobs.items()):
            out = self.folder / f"judge-{number}"
            self._judges[key] = self._pool.submit(self._judge, out, job)

    @staticmethod
    def _arguments(
        model: Path, folder: Path, dtype: str, backend: str, **options: Any
    ) -> str:
        run = {"model": str(model), "tokenizer": str(folder), "dtype": dtype}
        return json.dumps({**run, "backend": backend, **options})

    def _run(self, name: str, case: Case) -> Path:
        folder = self.models / f"{case.weights}-{case.topk}"
        model = folder if case.weights == PLAIN else folder.with_suffix(".gguf")
        run = self._arguments(model, folder, case.dtype, case.backend, **case.options)
        return process(self.folder / name, "engine.py", run, case.environment)

    def _judge(self, out: Path, job: Job) -> Path:
        answers = {n: str(self._runs[n].result()) for n in job.names if self.ran(n)}
        if not answers:
            raise Failed(f"none of {', '.join(job.names)} ran")
        argument = {
            "folder": str(self.models / f"{job.case.weights}-{job.case.topk}"),
            "topk": job.case.topk,
            "dtype": job.dtype,
            "emulation": job.emulation,
            "answers": answers,
            "out": str(out.with_suffix(".json")),
        }
        return process(out, "judge.py", json.dumps(argument), {})

    def ran(self, name: str) -> bool:
        return self._runs[name].exception() is None

    def answers(self, name: str) -> list[dict[str, Any]]:
        """What a vLLM said; raises Failed."""
        return self.whole(name)["answers"]

    def whole(self, name: str) -> dict[str, Any]:
        return json.loads(self._runs[name].result().read_text())

    def verdict(self, name: str, reference: str | None = None) -> dict[str, Any]:
        """How far it is from `reference`, by default the one that models its way."""
        self._runs[name].result()
        key = reference or modelled(cases()[name])
        found = json.loads(self._judges[key].result().read_text())[name]
        self.note(f"{name} | {reference or 'modelled'}", found)
        return found

    def note(self, what: str, found: Any) -> None:
        """Keep a result, and print it at once."""
        if what in self.report:
            return
        self.report[what] = found
        print(f"\n{what}: {json.dumps(found)}", flush=True)
        path = self.folder / "evidence.json"
        path.write_text(json.dumps(self.report, indent=1))


def process(out: Path, script: str, argument: str, extra: dict[str, str]) -> Path:
    """Run a script of this folder; its log is OUT.log, its result OUT.json."""
    result, log = out.with_suffix(".json"), out.with_suffix(".log")
    command = [sys.executable, str(HERE / script)]
    command += [str(result), argument] if script == "engine.py" else [argument]
    environment = {**os.environ, **extra, "OMP_NUM_THREADS": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    began = time.monotonic()
    with log.open("w") as stream:
        try:
            code = subprocess.run(
                command, env=environment, stdout=stream, stderr=stream, timeout=SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {SECONDS} s"
    print(f"{out.name}: exit {code}, {time.monotonic() - began:.0f} s", flush=True)
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()
        raise Failed(f"{out.name}: exit {code}\n" + "\n".join(lines[-12:]))
    return result


def write_models(folder: Path) -> None:
    from models import write_gguf, write_hf
    from tiny_glm import mixed, uniform

    folder.mkdir(parents=True, exist_ok=True)
    for topk in TOPKS:
        write_hf(folder, f"{PLAIN}-{topk}", topk=topk)
    write_gguf(folder, f"{Q8_0}-256", uniform("Q8_0"), topk=256)
    experts = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q5_K"}
    write_gguf(folder, f"{Q4_K}-256", mixed("Q8_0", **experts), topk=256)
