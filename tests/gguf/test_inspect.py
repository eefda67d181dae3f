# SPDX-License-Identifier: Apache-2.0
"""What `inspect` says of a set of files, and what the metadata must hold."""

import io
import json
from pathlib import Path

import pytest
from glm_dsa.config import read_model
from glm_dsa.header import GgufError
from glm_dsa.shards import Checkpoint
from packaging.version import Version
from raw_gguf import FULL, write_full_size
from tiny_glm import SHARING, Tiny, metadata, mixed, to_gguf, weights, write

from glm5_patch.errors import Failed, NotSupported
from glm5_patch.gguf.account import take
from glm5_patch.gguf.report import inspect
from glm5_patch.report import as_json, render

NEW, OLD = Version("0.23.0"), Version("0.16.0")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of a set with GLM-5.2's own dimensions."""
    first = write_full_size(tmp_path_factory.mktemp("full"))
    return first.with_name(first.name.replace("-00001-", "-00007-"))


def text(path: Path, release: Version) -> str:
    stream = io.StringIO()
    render(inspect(path, release), stream)
    return stream.getvalue()


def test_glm_52(full: Path) -> None:
    shown = text(full, NEW)
    for line in (
        "GLM-5.2: 78 layers, 256 experts of which 2 run, context 1,048,576",
        "indexers: 21 of 78 layers run one, the others share its selection",
        "files: 11, 404.4 GiB; the first holds no tensors",
        "skipped: 285 tensors, an indexer that is never run",
        "skipped: 27 tensors, a draft layer",
        "vLLM 0.23.0, patched, loads every parameter",
    ):
        assert line in shown


def test_glm_52_on_a_release_that_cannot_share(full: Path) -> None:
    report = inspect(full, OLD)
    assert report.exit_code == 1
    assert "use vLLM 0.21 or later, or GLM-5 or 5.1" in report.summary


def test_memory(full: Path) -> None:
    """8 GPUs hold an eighth of what is divided, and all of the rest."""
    account = take(full, NEW)
    whole, eighth = account.weight_bytes(1), account.weight_bytes(8)
    assert 0 < 8 * eighth - whole < 0.05 * whole
    kv_b = next(load for load in account.plan.loads if "kv_b" in load.name)
    assert kv_b.bytes_per_rank(1) == 28672 * 512 * 2
    # 78 layers of 576 values in 16 bits, 128 in 8 and one scale.
    assert account.cache_bytes_per_token() == 78 * (2 * 576 + 128 + 4)


def test_json(full: Path) -> None:
    found = json.loads(as_json(inspect(full, NEW)))
    assert found["exit_code"] == 0
    assert found["config"]["index_topk_pattern"].startswith("FFFSSSFSSS")
    assert found["types"]["Q4_K"]["tensors"] == 228
    assert len(found["files"]) == 11
    assert found["gpus"]["8"]["problems"] == []


def test_types_without_a_kernel(tmp_path: Path) -> None:
    report = inspect(write_full_size(tmp_path, FULL, "TQ1_0"), NEW)
    assert report.exit_code == 1
    assert "blk.10.ffn_down_exps.weight and 224 more: is TQ1_0" in report.summary
    assert any(line.startswith("refused: ") for line in report.notes)


def test_ranks_that_cannot_divide_it(tmp_path: Path) -> None:
    tiny = Tiny()
    types = mixed("Q8_0", _exps="Q4_K")
    path = write(tmp_path / "x.gguf", tiny, to_gguf(tiny, weights(tiny)), types)
    verdicts = [row[2] for row in inspect(path, NEW).table.rows]
    assert verdicts[0] == "loads"
    assert all("cannot be divided over" in verdict for verdict in verdicts[1:])


@pytest.mark.parametrize("release", ["0.15.1", "0.24.0", "0.33.0"])
def test_release_without_this_loader(release: str, full: Path) -> None:
    with pytest.raises(NotSupported, match="does not load GGUF files") as caught:
        inspect(full, Version(release))
    assert caught.value.found == release
    assert caught.value.todo is not None


def test_nightly_counts_as_its_release(full: Path) -> None:
    take(full, Version("0.16.0rc2.dev313+g662205d34"))


def test_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model, but long enough to be read")
    with pytest.raises(Failed) as caught:
        inspect(path, NEW)
    told = caught.value
    assert told.found is not None and "not a GGUF file" in told.found
    assert None not in (told.where, told.expected, told.todo)


def keys(tiny: Tiny, **changes: object) -> dict:
    found = {"general.architecture": "glm-dsa"}
    found |= {f"glm-dsa.{key}": value for key, value in metadata(tiny).items()}
    found |= {f"glm-dsa.{key.replace('__', '.')}": v for key, v in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def test_config_is_the_one_of_hf() -> None:
    """Every field of the HF config, but for what the metadata have no tokens for."""
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id"}
    found = read_model(Checkpoint((), keys(SHARING), {})).config()
    expected = {k: v for k, v in SHARING.config().items() if k not in tokens}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_count": None}, "the metadata lack glm-dsa.block_count"),
        ({"block_count": "many"}, "is 'many', not of type int"),
        ({"block_count": 1 << 40}, "an impossible size"),
        ({"block_count": 0}, "an impossible size"),
        ({"nextn_predict_layers": 5}, "block_count is 5 with 5"),
        ({"attention__key_length": 9}, "do not fit attention.key_length"),
        ({"expert_gating_func": 1}, "not 2 (sigmoid)"),
        ({"expert_weights_norm": 1}, "is 1, not of type bool"),
        ({"attention__indexer__types": (True,)}, "does not list each of the 4 layers"),
        ({"attention__indexer__types": (False,) * 4}, "share an indexer with none"),
    ],
)
def test_metadata_that_make_no_sense(changes: dict, expected: str) -> None:
    with pytest.raises(GgufError) as error:
        read_model(Checkpoint((), keys(Tiny(), **changes), {}))
    assert expected in str(error.value)


def test_name_that_would_move_the_cursor() -> None:
    found = keys(Tiny()) | {"general.name": "GLM\x1b[2J\n" + "x" * 200}
    assert read_model(Checkpoint((), found, {})).name == "GLM[2J" + "x" * 74


def test_another_architecture() -> None:
    with pytest.raises(GgufError, match="'llama', not 'glm-dsa'"):
        read_model(Checkpoint((), {"general.architecture": "llama"}, {}))


@pytest.mark.parametrize(
    ("changes", "full_layers"),
    [
        ({}, (True,) * 4),
        ({"context_length": 1 << 20}, (True, True, True, False)),
        ({"attention__indexer__types": (1, 0, 1, 0, 1)}, (True, False, True, False)),
    ],
    ids=["5.1", "5.2", "by-key"],
)
def test_which_layers_run_an_indexer(changes: dict, full_layers: tuple) -> None:
    model = read_model(Checkpoint((), keys(Tiny(), **changes), {}))
    assert model.full_layers == full_layers
