# SPDX-License-Identifier: Apache-2.0
"""Broken and hostile files end in one sentence: no traceback, hang or allocation."""

import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from glm_dsa.config import read_model
from glm_dsa.header import GgufError, peek_architecture, read_header
from glm_dsa.plan import Target, bytes_per_rank, make_plan
from glm_dsa.shards import read_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_gguf import FULL, glm_keys, header, key, string, tensor, write_full_size
from tiny_glm import Tiny

TINY = Tiny()
HUGE = (1 << 64) - 1
ONE = tensor("a", (8,), 0, 0)
AT_32 = header([], [ONE])


def padded(head: bytes, data: int = 32) -> bytes:
    return head + bytes(-len(head) % 32 + data)


HOSTILE = {
    "empty": (b"", "too few"),
    "short": (b"GGUF\x03\0\0\0", "too few"),
    "foreign": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "safetensors": (struct.pack("<Q", 60) + b'{"a":' + bytes(60), "not a GGUF file"),
    "version-1": (header([], version=1), "version 1 is not supported"),
    "version-4": (header([], version=4), "version 4 is not supported"),
    "big-endian": (header([], version=3 << 24), "big-endian"),
    "many-tensors": (header([], tensor_count=HUGE), "more than the file can hold"),
    "many-keys": (header([], key_count=HUGE), "more than the file can hold"),
    "one-key-too-many": (
        header([key("a", "b"), struct.pack("<Q", 9), bytes(5)], key_count=2),
        "ends at",
    ),
    "long-key": (header([struct.pack("<Q", HUGE)], key_count=1), "more than"),
    "long-string": (
        header([string("a") + struct.pack("<IQ", 8, HUGE), bytes(9)], key_count=1),
        "truncated or corrupt",
    ),
    "long-array": (
        header([string("a") + struct.pack("<IIQ", 9, 4, HUGE)], key_count=1),
        "more than the file can hold",
    ),
    "long-array-of-strings": (
        header([string("a") + struct.pack("<IIQ", 9, 8, 1 << 40)], key_count=1),
        "more than the file can hold",
    ),
    "array-of-arrays": (
        header([string("a") + struct.pack("<IIQ", 9, 9, 1)], key_count=1),
        "unsupported type 9",
    ),
    "unknown-value": (
        header([string("a") + struct.pack("<I", 99)], key_count=1),
        "unknown value type 99",
    ),
    "key-twice": (header([key("a", 1), key("a", 2)]), "occurs twice"),
    "key-not-text": (header([string(b"\xff\xfe") + bytes(8)]), "not UTF-8"),
    "key-with-escape": (header([key("a\x1b[2J", 1)]), r"'a\x1b[2J' is not printable"),
    "alignment-0": (header([key("general.alignment", 0)]), "power of two"),
    "alignment-24": (header([key("general.alignment", 24)]), "power of two"),
    "alignment-text": (header([key("general.alignment", "x")]), "power of two"),
    "tensor-twice": (padded(header([], [ONE, ONE])), "occurs twice"),
    "five-dimensions": (
        padded(header([], [tensor("a", (1,) * 5, 0, 0)])),
        "5 dimensions",
    ),
    "many-dimensions": (
        padded(header([], [string("a") + struct.pack("<I", 1 << 31)]), 64),
        "dimensions",
    ),
    "no-elements": (padded(header([], [tensor("a", (0,), 0, 0)])), "impossible shape"),
    "shape-overflows": (
        padded(header([], [tensor("a", (1 << 33, 1 << 33), 0, 0)])),
        "impossible shape",
    ),
    "part-of-a-block": (
        padded(header([], [tensor("a", (33,), 8, 0)])),
        "rows of 33 elements",
    ),
    "unaligned": (padded(header([], [tensor("a", (8,), 0, 8)])), "off its alignment"),
    "far-offset": (
        padded(header([], [tensor("a", (8,), 0, 1 << 60)])),
        "not downloaded to the end",
    ),
    "overlap": (
        padded(header([], [ONE, tensor("b", (8,), 0, 0)]), 64),
        "overlap",
    ),
    "cut-short": (padded(AT_32)[:-1], "not downloaded to the end"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_sentence(name: str, tmp_path: Path) -> None:
    data, expected = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data.ljust(24, b"\0") if len(data) > 8 else data)
    tracemalloc.start()
    with pytest.raises(GgufError, match=r"x\.gguf") as error:
        read_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_at_the_edge_is_read(tmp_path: Path) -> None:
    """The counterpart of `cut-short`: one byte more and the file is whole."""
    path = tmp_path / "x.gguf"
    path.write_bytes(padded(AT_32))
    (found,) = read_header(path).tensors
    assert (found.shape, found.type, found.size) == ((8,), "F32", 32)


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing", "loop"])
def test_no_regular_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    make = {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "missing": lambda: None,
        "loop": lambda: path.symlink_to(path),
    }
    make[kind]()
    with pytest.raises(GgufError):
        read_checkpoint(path)
    assert peek_architecture(path) is None


def shard(number: int, count: int, *tensors: bytes, total: int = 0) -> bytes:
    keys = [key("split.no", number), key("split.count", count)]
    if number == 0:
        keys.append(key("split.tensors.count", total))
    return padded(header(keys, tensors))


def write_set(folder: Path, *shards: bytes | None) -> Path:
    """Write shards as `m-0000N-of-0000M.gguf`; None leaves one out."""
    for number, data in enumerate(shards, 1):
        if data is not None:
            (folder / f"m-{number:05}-of-{len(shards):05}.gguf").write_bytes(data)
    return folder / f"m-00001-of-{len(shards):05}.gguf"


def test_split_set(tmp_path: Path) -> None:
    parts = shard(0, 2, total=1), shard(1, 2, ONE)
    first = write_set(tmp_path, *parts)
    second = first.with_name("m-00002-of-00002.gguf")
    assert read_checkpoint(first) == read_checkpoint(second)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            [shard(0, 3, total=2), None, shard(2, 3, ONE)],
            "1 of 3 files are missing: m-00",
        ),
        ([shard(0, 2, total=1), shard(0, 2, ONE)], "says that it is shard 0"),
        ([shard(0, 2, total=1), shard(1, 3, ONE)], "(from 0) of 3"),
        ([shard(0, 2, total=9), shard(1, 2, ONE)], "should hold 9 tensors"),
        ([shard(0, 2, ONE, total=2), shard(1, 2, ONE)], "tensor a is also in m-00001"),
        ([shard(0, 2, total=1), b"not a shard at all, but text"], "not a GGUF file"),
    ],
    ids=["missing", "number", "count", "tensors", "twice", "foreign"],
)
def test_split_set_that_does_not_fit(
    parts: list[bytes | None], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(GgufError) as error:
        read_checkpoint(write_set(tmp_path, *parts))
    assert expected in str(error.value)


def test_shard_that_is_a_link_to_another(tmp_path: Path) -> None:
    first = write_set(tmp_path, shard(0, 2, total=0), None)
    first.with_name("m-00002-of-00002.gguf").symlink_to(first)
    with pytest.raises(GgufError, match="says that it is"):
        read_checkpoint(first)


@pytest.mark.parametrize("name", ["m-00000-of-00002", "m-3-of-2", "m-1-of-99999"])
def test_shard_number_that_makes_no_sense(name: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="makes no sense"):
        read_checkpoint(tmp_path / f"{name}.gguf")


VALID = padded(
    header(
        [*glm_keys(TINY), key("tokenizer.ggml.tokens", ["a", "b"])],
        [ONE, tensor("output.weight", (4, 64), 8, 32)],
    ),
    32 + 4 * 68,
)


@settings(
    max_examples=1500,
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(VALID) - 1),
            st.one_of(
                st.binary(min_size=1, max_size=1),
                st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7]),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    cut=st.integers(0, len(VALID)),
)
def test_any_damage_is_either_read_or_refused(
    edits: list[tuple[int, bytes]], cut: int, tmp_path: Path
) -> None:
    data = bytearray(VALID)
    for at, new in edits:
        data[at : at + len(new)] = new
    path = tmp_path / "x.gguf"
    path.write_bytes(data if cut % 2 else data[:cut])
    peek_architecture(path)
    try:
        checkpoint = read_checkpoint(path)
        model = read_model(checkpoint)
    except GgufError:
        return
    plan = make_plan(checkpoint, model, Target(True, True, 8))
    assert bytes_per_rank(plan, 8) >= 0
    assert plan.problems


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400))
def test_any_bytes_after_the_magic(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + data)
    with pytest.raises(GgufError):
        read_model(read_checkpoint(path))


def test_largest_vocabulary_ends_soon(tmp_path: Path) -> None:
    """As many strings as are read over at all; one more is refused."""
    path = tmp_path / "x.gguf"
    for count, found in ((2_000_000, None), (2_000_001, "more than the file can")):
        array = string("a") + struct.pack("<IIQ", 9, 8, count) + bytes(8 * count)
        path.write_bytes(header([array]))
        begin = time.perf_counter()
        if found is None:
            assert read_header(path).metadata == {"a": None}
        else:
            with pytest.raises(GgufError, match=found):
                read_header(path)
        assert time.perf_counter() - begin < 5


def test_full_size_set_in_a_second(tmp_path: Path) -> None:
    first = write_full_size(tmp_path)
    begin = time.perf_counter()
    checkpoint = read_checkpoint(first)
    model = read_model(checkpoint)
    plan = make_plan(checkpoint, model, Target(True, True, 8))
    seconds = time.perf_counter() - begin
    assert len(checkpoint.tensors) == 1809
    assert checkpoint.size > 400 << 30
    assert not plan.problems
    assert len(plan.loads) + len(plan.skips) + 78 == 1809  # 78 kv_b_proj of two
    assert sum(model.full_layers) == 21
    assert [i for i, full in enumerate(model.full_layers) if full][:6] == [
        *(0, 1, 2, 6, 10, 14)
    ]
    assert seconds < 1, f"{seconds:.2f} s"


def test_full_size_set_with_types_of_a_fork(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_full_size(tmp_path, FULL, "ik"))
    plan = make_plan(checkpoint, read_model(checkpoint), Target(True, True))
    (problem,) = map(str, plan.problems)
    assert problem.startswith("blk.10.ffn_down_exps.weight and 224 more: is type 144,")
    assert "UD-Q4_K_XL" in problem
