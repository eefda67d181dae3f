# SPDX-License-Identifier: Apache-2.0
"""The indexer's hook in the releases' own `utils/deep_gemm.py`, on simulated GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from glm5_patch import manifest, overlay, plan, tree
from glm5_patch.overlay import Overlay

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("deep_gemm_child.py")
RELEASES = ("0.16.0", "0.23.0")
OLD = ("fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata")
NEW = ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", OLD[2])
HOOKED = {"0.16.0": OLD, "0.23.0": NEW}
LIBRARY = "GLM5_PATCH_INDEXER"
HEADERS = ("sm{}_fp8_mqa_logits.cuh", "sm{}_fp8_paged_mqa_logits.cuh")

# The DeepGEMM that is installed beside vLLM: None, or the chips it has headers for.
DEEP_GEMM: dict[str, tuple[str, ...] | None] = {
    "absent": None,
    "for 90 and 100": ("90", "100"),
    "for 90, 100 and 120": ("90", "100", "120"),
}

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def python() -> Path:
    found = Path(os.environ.get("GLM5_PATCH_SELECT_PYTHON", sys.executable))
    program = "import torch, transformers, openai_harmony"
    if subprocess.run([found, "-c", program], cwd="/", capture_output=True).returncode:
        pytest.skip(f"{found} lacks the packages of requirements-select.txt")
    return found


@pytest.fixture(scope="module")
def patched(release_tree: Callable[[str], Path]) -> Iterator[dict[str, Overlay]]:
    """What the feature makes of each release."""
    patches = manifest.load(ROOT / "patches")
    features = manifest.choose(patches, ["indexer"])
    with ExitStack() as stack:
        overlays = {}
        for release in RELEASES:
            series = manifest.series(patches, features, release, tested=True)
            root = release_tree(release)
            made = plan.make(series, lambda path, root=root: tree.read(root, path))
            overlays[release] = stack.enter_context(overlay.sides(made))[1]
        yield overlays


def install_deep_gemm(folder: Path, chips: tuple[str, ...], names: Any) -> Path:
    """A `deep_gemm` package that compiles nothing but can tell what it could."""
    package = folder / "deep_gemm"
    impls = package / "include" / "deep_gemm" / "impls"
    impls.mkdir(parents=True)
    (package / "__init__.py").write_text("def fp8_gemm_nt(*_, **__): ...\n")
    for chip in chips:
        for name in names:
            (impls / name.format(chip)).touch()
    return folder


@pytest.fixture(scope="module")
def ask(
    python: Path,
    release_tree: Callable[[str], Path],
    patched: dict[str, Overlay],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Answer]:
    known: dict[Any, Answer] = {}

    def ask(
        release: str,
        state: str,
        deep_gemm: tuple[str, ...] | None,
        names: tuple[str, ...] = HEADERS,
        library: str | None = None,
    ) -> Answer:
        key = (release, state, deep_gemm, names, library)
        if key not in known:
            modules = patched[release] if state == "patched" else {}
            files = {name: file and str(file) for name, file in modules.items()}
            command = [python, CHILD, release_tree(release), json.dumps(files)]
            if deep_gemm is not None:
                folder = tmp_path_factory.mktemp("deep_gemm")
                command.append(install_deep_gemm(folder, deep_gemm, names))
            environment = {n: v for n, v in os.environ.items() if n != LIBRARY}
            if library is not None:
                environment[LIBRARY] = library
            child = subprocess.run(
                command, cwd="/", capture_output=True, text=True, env=environment
            )
            assert child.returncode == 0, child.stderr[-2000:]
            known[key] = json.loads(child.stdout.splitlines()[-1])
        return known[key]

    return ask


@pytest.mark.parametrize("deep_gemm", DEEP_GEMM)
@pytest.mark.parametrize("release", RELEASES)
def test_each_chip_gets_the_functions_it_can_run(
    release: str, deep_gemm: str, ask: Callable[..., Answer]
) -> None:
    chips = DEEP_GEMM[deep_gemm]
    answers = ask(release, "patched", chips)["answers"]
    ours = {"8.0", "8.6", "8.9", "12.0", "12.1"}
    if chips and "120" in chips:
        ours -= {"12.0", "12.1"}
    for capability, answer in answers.items():
        expected = "ours" if capability in ours else "stock"
        assert answer["called"] == dict.fromkeys(HOOKED[release], expected), capability
        assert answer["guard"] is (capability in ours or chips is not None)


@pytest.mark.parametrize("library", ["triton", "deepgemm", ""])
@pytest.mark.parametrize("release", RELEASES)
def test_the_user_may_name_the_library(
    release: str, library: str, ask: Callable[..., Answer]
) -> None:
    """Triton on every chip it has kernels for; an empty variable is an unset one."""
    answers = ask(release, "patched", ("90", "100"), library=library)["answers"]
    by_chip = ask(release, "patched", ("90", "100"))["answers"]
    if library == "":
        assert answers == by_chip
        return
    for capability, answer in answers.items():
        ours = library == "triton" and capability != "7.5"
        expected = dict.fromkeys(HOOKED[release], "ours" if ours else "stock")
        assert answer["called"] == expected, capability
        assert answer["facts"] == by_chip[capability]["facts"]
        large = capability in {"7.5", "8.0", "9.0", "10.0", "10.3"}
        assert answer["persistent_topk"] is (large or not ours), capability


@pytest.mark.parametrize("release", RELEASES)
def test_a_library_that_is_unknown_is_refused(
    release: str, ask: Callable[..., Answer]
) -> None:
    """By the first question, and the import has gone well before it."""
    assert ask(release, "patched", None, library="Triton")["refusal"] == (
        "GLM5_PATCH_INDEXER must be triton or deepgemm, found 'Triton': unset it and "
        "the GPU decides"
    )


@pytest.mark.parametrize("deep_gemm", DEEP_GEMM)
@pytest.mark.parametrize("release", RELEASES)
def test_what_gemm_and_moe_ask_has_the_same_answer(
    release: str, deep_gemm: str, ask: Callable[..., Answer]
) -> None:
    before = ask(release, "stock", DEEP_GEMM[deep_gemm])
    after = ask(release, "patched", DEEP_GEMM[deep_gemm])
    facts = {c: a["facts"] for c, a in before["answers"].items()}
    assert {c: a["facts"] for c, a in after["answers"].items()} == facts
    supported = {c for c, f in facts.items() if f["is_deep_gemm_supported"]}
    assert supported == (set() if deep_gemm == "absent" else {"9.0", "10.0", "10.3"})


@pytest.mark.parametrize("release", RELEASES)
def test_nothing_but_the_indexers_functions_is_replaced(
    release: str, ask: Callable[..., Answer]
) -> None:
    before = ask(release, "stock", None)["functions"]
    after = ask(release, "patched", None)["functions"]
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == set(HOOKED[release])
    assert {after[name] for name in changed} == {"indexer_logits.py"}
    assert set(before) - set(after) == set()


@pytest.mark.parametrize("names", [HEADERS[:1], HEADERS[1:]], ids=["no paged", "paged"])
def test_half_of_the_kernels_is_none(
    names: tuple[str, ...], ask: Callable[..., Answer]
) -> None:
    answers = ask("0.23.0", "patched", ("120",), names)["answers"]
    assert set(answers["12.0"]["called"].values()) == {"ours"}


@pytest.mark.parametrize("release", RELEASES)
def test_the_kernels_are_given_vllms_arguments(
    release: str, ask: Callable[..., Answer]
) -> None:
    answer = ask(release, "patched", None)
    prefill = ["tensor([1.])", "k", "ks", "w", "start", "end", "clean=False"]
    decode = ["tensor([1.])", "cache", "w", "lens", "table", "99"]
    schedule = ["[133, 2]", "torch.int32"]
    assert answer["handed_on"] == {
        "prefill": [*prefill, "width=None"],
        "decode": [*decode, "clean=True"],
        "schedule": schedule,
    }
    assert answer["handed_on_later"] == {
        "prefill": [*prefill, "width=77"],
        "decode": [*decode, "clean=False"],
        "schedule": schedule,
    }


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ("0.16.0", ["bounded_chunks", "one_query_each"]),
        ("0.23.0", ["has_mqa_logits", "persistent_topk_fits"]),
    ],
)
def test_the_indexer_imports_and_asks_the_hook(
    release: str, names: list[str], ask: Callable[..., Answer]
) -> None:
    assert ask(release, "patched", None)["from_hook"] == names


def test_persistent_topk_is_left_where_its_fallback_does_not_fit(
    ask: Callable[..., Answer],
) -> None:
    answers = ask("0.23.0", "patched", ("90", "100"))["answers"]
    fits = {capability for capability, a in answers.items() if a["persistent_topk"]}
    assert fits == {"7.5", "8.0", "9.0", "10.0", "10.3"}


def test_prefill_chunks_are_cut_on_our_chips_alone(ask: Callable[..., Answer]) -> None:
    answers = ask("0.16.0", "patched", ("90", "100"))["answers"]
    low, high = list(range(5)), list(range(100, 105))
    small = [7, 10, [5, 6, 7], [105, 106, 107], "kept"]
    for capability, answer in answers.items():
        if set(answer["called"].values()) == {"ours"}:
            assert answer["pieces"] == [
                [2, 6, low[:4], high[:4], "kept"],
                [6, 7, low[4:], high[4:], "kept"],
                small,
            ], capability
        else:
            assert answer["pieces"] == [[2, 7, low, high, "kept"], small], capability


@pytest.mark.parametrize("release", RELEASES)
def test_import_does_not_initialise_cuda(
    release: str, ask: Callable[..., Answer]
) -> None:
    assert ask(release, "patched", None)["cuda_initialised"] is False
