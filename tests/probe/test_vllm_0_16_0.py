# SPDX-License-Identifier: Apache-2.0
"""The real vLLM 0.16.0 on simulated GPUs: stock, patched, and patched wrongly."""

import dataclasses
from pathlib import Path

import pytest
from probe_target import (
    TIMEOUT_S,
    Answers,
    Overlay,
    ask,
    listing,
    ran,
)
from targets import MakeTarget, Target

from glm5_patch.child.process import NotRun
from glm5_patch.plan import Plan
from glm5_patch.probe.explain import Explanation, ask_both, compare
from glm5_patch.probe.judge import (
    BLOCK_SIZE_ON,
    CASES,
    judge_imports,
    judge_selection,
)
from glm5_patch.probe.model import BACKEND, Capability, Case, Request
from glm5_patch.probe.run import run_probe

REGISTRY = "vllm.v1.attention.backends.registry"
PLATFORM = "vllm.platforms.cuda"
OURS = "vllm.v1.attention.backends.mla.triton_mla_sparse"
HOPPER = Case(Capability(9, 0), "bfloat16", "auto")
SM120 = Case(Capability(12, 0), "float16", "auto")


def test_stock_serves_bfloat16_on_sm90_and_sm100_alone(answers: Answers) -> None:
    selected = {s.case: s.selected for s in answers.stock.selections}
    served = [case for case, backend in selected.items() if backend is not None]
    assert {(str(case.capability), case.dtype) for case in served} == {
        ("9.0", "bfloat16"),
        ("10.0", "bfloat16"),
    }
    assert {selected[case] for case in served} == {"FLASHMLA_SPARSE"}


def test_stock_gives_every_backends_reasons_in_order(answers: Answers) -> None:
    (found,) = (s for s in answers.stock.selections if s.case == SM120)
    assert found.error is not None
    assert found.error.startswith("ValueError: No valid attention backend found")
    assert list(found.reasons) == [
        "FLASH_ATTN_MLA",
        "FLASHMLA",
        "FLASHINFER_MLA",
        "TRITON_MLA",
        "FLASHMLA_SPARSE",
    ]
    assert found.reasons["FLASHMLA_SPARSE"] == (
        "dtype not supported",
        "compute capability not supported",
    )


def test_a_missing_optional_package_is_a_reason(answers: Answers) -> None:
    (found,) = (s for s in answers.stock.selections if s.case == HOPPER)
    assert found.reasons["FLASHINFER_MLA"] == ("ImportError",)
    assert answers.stock.import_errors == {
        "FLASHINFER_MLA": "No module named 'flashinfer'"
    }


def test_patched_is_right(answers: Answers, our_modules: tuple[str, ...]) -> None:
    assert [module.name for module in answers.patched.modules] == list(our_modules)
    assert judge_imports(answers.patched) == ()
    assert judge_selection(answers.stock, answers.patched) == ()


def test_the_block_size_is_64(answers: Answers) -> None:
    found = {(s.capability, s.requested): s for s in answers.patched.block_sizes}
    assert set(found) == {(c, b) for c in BLOCK_SIZE_ON for b in (None, BACKEND)}
    assert {size.tokens for size in found.values()} == {64}


def test_explain_has_both_states_in_a_row(answers: Answers) -> None:
    explained = compare(answers.stock, answers.patched)
    assert isinstance(explained, Explanation)
    assert explained.version == "0.16.0"
    (row,) = (row for row in explained.rows if row.case == SM120)
    assert (row.before.selected, row.after.selected) == (None, BACKEND)
    assert BACKEND not in row.before.reasons
    assert row.after.reasons[BACKEND] == ()


@pytest.fixture(scope="module")
def patched_on_disk(make_target: MakeTarget, patching: Plan) -> Target:
    """A tree that really holds the patched files."""
    target = make_target()
    for edit in patching.edits:
        (target.root / edit.path).write_bytes(edit.after)
    for added in patching.additions:
        file = target.root / added.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(added.data)
    return target


def test_a_patched_tree_shows_both_states_and_stays_unwritten(
    patched_on_disk: Target,
    sides: tuple[Overlay, Overlay],
    answers: Answers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    before = listing(patched_on_disk.root)
    request = Request(patched_on_disk.root, cases=CASES)
    stock = dataclasses.replace(request, overlay=sides[0])
    found = ask(patched_on_disk, stock, request)
    assert found.stock.selections == answers.stock.selections
    assert found.stock.members == answers.stock.members
    assert found.patched.selections == answers.patched.selections
    assert found.patched.members == answers.patched.members
    assert listing(patched_on_disk.root) == before
    assert list(tmp_path.rglob("*")) == []


def test_ours_put_first_takes_a_winners_place(
    stock_target: Target,
    sides: tuple[Overlay, Overlay],
    answers: Answers,
    tmp_path: Path,
) -> None:
    """Also: the answers do not depend on the order of the cases."""
    source = sides[1][PLATFORM]
    assert source is not None
    wrong = tmp_path / "cuda.py"
    head = "return [\n"
    first = f"{head}AttentionBackendEnum.{BACKEND},\n"
    wrong.write_text(source.read_text().replace(head, first))
    request = Request(stock_target.root, cases=tuple(reversed(CASES)))
    found = ask(
        stock_target,
        request,
        dataclasses.replace(request, overlay={**sides[1], PLATFORM: wrong}),
    )
    assert found.stock.selections == tuple(reversed(answers.stock.selections))
    wrong_cases = {
        violation.subject
        for violation in judge_selection(found.stock, found.patched)
        if violation.found == BACKEND
    }
    assert str(HOPPER) in wrong_cases
    assert wrong_cases == {
        str(s.case) for s in answers.stock.selections if s.selected is not None
    }


def test_no_member_and_a_broken_module_are_failures(
    stock_target: Target,
    sides: tuple[Overlay, Overlay],
    our_modules: tuple[str, ...],
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package\n")
    request = Request(stock_target.root, modules=our_modules, cases=(SM120,))
    memberless = {
        name: file
        for name, file in sides[1].items()
        if name not in (REGISTRY, PLATFORM)
    }
    found = ask(
        stock_target,
        dataclasses.replace(request, overlay=memberless),
        dataclasses.replace(request, overlay={**sides[1], OURS: broken}),
    )
    assert [str(violation) for violation in judge_imports(found.stock)] == [
        "AttentionBackendEnum: expected TRITON_MLA_SPARSE, "
        "found no member TRITON_MLA_SPARSE"
    ]
    assert [str(violation) for violation in judge_imports(found.patched)] == [
        f"{OURS}: expected imports, found ModuleNotFoundError: "
        "No module named 'no_such_package'"
    ]
    (violation,) = judge_selection(found.stock, found.patched)
    assert violation.found == (
        "no backend: TRITON_MLA_SPARSE refuses: ImportError, "
        "No module named 'no_such_package'"
    )


def test_a_vllm_elsewhere_does_not_win(
    stock_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoy = tmp_path / "vllm"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise SystemExit('the decoy was imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run_probe(stock_target.python, Request(stock_target.root), TIMEOUT_S)
    assert ran(found).version == "0.16.0"


def test_without_torch_it_is_not_run(make_target: MakeTarget) -> None:
    bare = make_target(with_packages=False)
    assert run_probe(bare.python, Request(bare.root, cases=CASES), TIMEOUT_S) == NotRun(
        "the package torch is missing in the target's environment"
    )


def test_a_package_that_vllm_or_our_kernels_need_is_named(
    stock_target: Target, sides: tuple[Overlay, Overlay], our_modules: tuple[str, ...]
) -> None:
    root = stock_target.root
    answers = ask_both(
        stock_target.python,
        Request(root, {"msgspec": None}),
        Request(root, {**sides[1], "triton": None}, our_modules),
        TIMEOUT_S,
    )
    assert answers == tuple(
        NotRun(f"the package {name} is missing in the target's environment")
        for name in ("msgspec", "triton")
    )
