# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with a GLM-5 GGUF file, asked by OpenAI's own client.

The server runs as by default: in processes of its own, compiled, with CUDA graphs and
prefix caching.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.served

MODEL = "tiny-glm"
CONTEXT = 32768
TOPK = 2048
START_SECONDS = 200
EXACTLY = {"ignore_eos": True}  # as many tokens as were asked for


def words(count: int, seed: int = 0) -> str:
    """A prompt of so many tokens."""
    rng = np.random.default_rng(seed)
    return " ".join(f"token{i}" for i in rng.integers(5, 1024, count))


def eventually(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


class Server:
    """A running `vllm serve`."""

    def __init__(self, folder: Path) -> None:
        from models import TINY, write_gguf, write_tokenizer
        from tiny_glm import uniform

        model = write_gguf(folder, MODEL, uniform("Q8_0"), topk=TOPK)
        tokenizer = model.with_suffix("")
        write_tokenizer(tokenizer, TINY.vocabulary)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "serve.log"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        command += [str(model), f"--tokenizer={tokenizer}", "--generation-config=vllm"]
        command += [f"--served-model-name={MODEL}", "--host=127.0.0.1"]
        command += [f"--port={port}", "--dtype=float16", f"--max-model-len={CONTEXT}"]
        command += ["--gpu-memory-utilization=0.1", "--max-num-seqs=64"]
        command += [f"--kv-cache-memory-bytes={4 << 30}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True
            )

    def answers(self) -> bool:
        if self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines()
            raise RuntimeError("vllm serve ended:\n" + "\n".join(lines[-20:]))
        try:
            return self.get("/health") == ""
        except OSError:
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def metric(self, name: str) -> float:
        """The sum of a metric's values over its label sets."""
        values = re.findall(
            rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.M
        )
        assert values, f"no metric vllm:{name}"
        return sum(map(float, values))

    def stop(self) -> int | None:
        """Ask it to end; the exit code, or None if it does not."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return None

    def left(self) -> list[int]:
        """Processes of its session that still run."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                session = os.getsid(int(process.name))
                ended = "\nState:\tZ" in (process / "status").read_text()
            except OSError:  # it went meanwhile
                continue
            if session == self.process.pid and not ended:
                found.append(int(process.name))
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    named = os.environ.get("GLM5_PATCH_E2E")
    folder = Path(named, "serve") if named else tmp_path_factory.mktemp("serve")
    folder.mkdir(parents=True, exist_ok=True)
    running = Server(folder)
    try:
        assert eventually(running.answers, START_SECONDS), "vllm serve does not answer"
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: Any, prompt: str, tokens: int, **options: Any) -> Any:
    return client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body=EXACTLY,
        **options,
    )


def test_streams_what_it_says_at_once(client: Any) -> None:
    whole = complete(client, words(100), 64)
    assert whole.usage.completion_tokens == 64
    chunks = list(complete(client, words(100), 64, stream=True))
    assert len(chunks) > 16
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_repeats_itself(client: Any) -> None:
    """While every token is attended to, which is what decides it: see the proof."""
    prompt = words(1900)  # and 64 more stay below TOPK
    texts = {complete(client, prompt, 64).choices[0].text for _ in range(30)}
    assert len(texts) == 1
    other = complete(client, words(1900, seed=1), 64).choices[0].text
    assert other not in texts


def test_many_at_once_and_one_that_leaves(server: Server) -> None:
    import openai

    async def leave(client: Any) -> int:
        stream = await complete(client, words(500, seed=99), 20000, stream=True)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 5:
                break
        await stream.close()
        return seen

    async def everything() -> tuple[list[Any], int]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            stay = [
                complete(client, words(10 + 130 * i, seed=i), 64) for i in range(31)
            ]
            *stayed, seen = await asyncio.gather(*stay, leave(client))
            return stayed, seen

    stayed, seen = asyncio.run(everything())
    assert seen == 5
    assert [r.usage.completion_tokens for r in stayed] == [64] * 31
    assert [r.usage.prompt_tokens for r in stayed] == [10 + 130 * i for i in range(31)]
    # vLLM counts no request as finished whose client has left. 20000 tokens in 5
    # seconds would be a quarter of a millisecond for each.
    assert eventually(lambda: server.metric("num_requests_running") == 0, 5)


def test_long_context(client: Any) -> None:
    answer = complete(client, words(CONTEXT - 16), 16)
    assert answer.usage.prompt_tokens == CONTEXT - 16
    assert answer.usage.completion_tokens == 16


def test_leaves_nothing_behind(server: Server, client: Any) -> None:
    """Runs last: it ends the server."""
    before = complete(client, words(100), 64).choices[0].text
    complete(client, words(3000, seed=7), 64)
    assert complete(client, words(100), 64).choices[0].text == before
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert eventually(lambda name=name: server.metric(name) == 0, 10), name
    assert server.stop() == 0
    assert eventually(lambda: not server.left(), 10), server.left()
