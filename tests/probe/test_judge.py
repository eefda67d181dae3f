# SPDX-License-Identifier: Apache-2.0
"""The two rules, on answers made by hand."""

import dataclasses

import pytest

from glm5_patch.probe.judge import judge_imports, judge_selection
from glm5_patch.probe.model import (
    BACKEND,
    BlockSize,
    Capability,
    Case,
    ModuleImport,
    Ran,
    Selection,
)

STOCK = "FLASHMLA_SPARSE"
SM120 = Case(Capability(12, 0), "float16", "auto")
SM90 = Case(Capability(9, 0), "bfloat16", "auto")
SM100 = Case(Capability(10, 0), "float16", "auto")
FLOAT16_FP8 = Case(Capability(8, 6), "float16", "fp8_ds_mla")
BFLOAT16_FP8 = Case(Capability(8, 6), "bfloat16", "fp8_ds_mla")
REFUSES = ("compute capability not supported",)


def answer(*selections: Selection, **changes: object) -> Ran:
    ran = Ran("0.16.0", (BACKEND,), (), selections, (), {})
    return dataclasses.replace(ran, **changes)  # type: ignore[arg-type]


def picks(case: Case, backend: str, **reasons: tuple[str, ...]) -> Selection:
    return Selection(case, backend, None, {**reasons, backend: ()})


def picks_none(case: Case, **reasons: tuple[str, ...]) -> Selection:
    everyone = {STOCK: ("dtype not supported",), **reasons}
    return Selection(case, None, "ValueError: none is valid", everyone)


@pytest.mark.parametrize(
    ("stock", "patched"),
    [
        pytest.param(picks_none(SM120), picks(SM120, BACKEND), id="none-then-ours"),
        pytest.param(picks(SM90, STOCK), picks(SM90, STOCK), id="winner-stays"),
        pytest.param(picks(SM120, STOCK), picks(SM120, STOCK), id="winner-on-sm120"),
        pytest.param(picks_none(SM100), picks(SM100, BACKEND), id="sm100-ours"),
        pytest.param(
            picks_none(SM100),
            picks_none(SM100, **{BACKEND: REFUSES}),
            id="sm100-ours-refuses",
        ),
        pytest.param(
            picks_none(FLOAT16_FP8),
            picks_none(FLOAT16_FP8, **{BACKEND: REFUSES}),
            id="float16-fp8-refused",
        ),
    ],
)
def test_right(stock: Selection, patched: Selection) -> None:
    assert judge_selection(answer(stock), answer(patched)) == ()


@pytest.mark.parametrize(
    ("stock", "patched", "message"),
    [
        pytest.param(
            picks(SM90, STOCK),
            picks(SM90, BACKEND),
            "9.0 bfloat16 kv=auto: expected FLASHMLA_SPARSE, found TRITON_MLA_SPARSE",
            id="winner-lost",
        ),
        pytest.param(
            picks_none(SM120),
            picks_none(SM120),
            "12.0 float16 kv=auto: expected TRITON_MLA_SPARSE, found no backend: "
            "TRITON_MLA_SPARSE is not in the list of priorities",
            id="not-in-list",
        ),
        pytest.param(
            picks_none(SM120),
            picks_none(SM120, **{BACKEND: REFUSES}),
            "12.0 float16 kv=auto: expected TRITON_MLA_SPARSE, found no backend: "
            "TRITON_MLA_SPARSE refuses: compute capability not supported",
            id="ours-refuses",
        ),
        pytest.param(
            picks_none(FLOAT16_FP8),
            picks_none(FLOAT16_FP8),
            "8.6 float16 kv=fp8_ds_mla: expected TRITON_MLA_SPARSE, found no backend: "
            "TRITON_MLA_SPARSE is not in the list of priorities",
            id="float16-fp8-without-a-reason",
        ),
        pytest.param(
            picks_none(BFLOAT16_FP8),
            picks_none(BFLOAT16_FP8, **{BACKEND: REFUSES}),
            "8.6 bfloat16 kv=fp8_ds_mla: expected TRITON_MLA_SPARSE, found no backend: "
            "TRITON_MLA_SPARSE refuses: compute capability not supported",
            id="bfloat16-fp8-refused",
        ),
        pytest.param(
            picks_none(SM100),
            picks(SM100, STOCK),
            "10.0 float16 kv=auto: expected TRITON_MLA_SPARSE, found FLASHMLA_SPARSE",
            id="sm100-another",
        ),
        pytest.param(
            picks_none(SM120),
            Selection(SM120, None, "TypeError: oops", {}),
            "12.0 float16 kv=auto: expected TRITON_MLA_SPARSE, found TypeError: oops",
            id="selector-crashes",
        ),
        pytest.param(
            Selection(SM120, None, "TypeError: oops", {STOCK: ()}),
            picks(SM120, BACKEND),
            "12.0 float16 kv=auto: expected an answer from stock vLLM to compare "
            "with, found TypeError: oops",
            id="stock-crashes",
        ),
    ],
)
def test_wrong(stock: Selection, patched: Selection, message: str) -> None:
    violations = judge_selection(answer(stock), answer(patched))
    assert [str(violation) for violation in violations] == [message]


def test_the_text_behind_an_import_error_is_shown() -> None:
    patched = answer(
        picks_none(SM120, **{BACKEND: ("ImportError",)}),
        import_errors={BACKEND: "No module named 'triton'"},
    )
    (violation,) = judge_selection(answer(picks_none(SM120)), patched)
    assert violation.found.endswith("refuses: ImportError, No module named 'triton'")


def test_a_block_of_another_size_is_wrong() -> None:
    sizes = (
        BlockSize(Capability(12, 0), None, 64, None),
        BlockSize(Capability(12, 0), BACKEND, 16, None),
        BlockSize(Capability(8, 0), BACKEND, None, "TypeError: oops"),
    )
    violations = judge_selection(answer(), answer(block_sizes=sizes))
    assert [str(violation) for violation in violations] == [
        "block size on 12.0 with TRITON_MLA_SPARSE: expected 64 tokens, "
        "found 16 tokens",
        "block size on 8.0 with TRITON_MLA_SPARSE: expected 64 tokens, "
        "found TypeError: oops",
    ]


def test_other_cases_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="same cases"):
        judge_selection(answer(picks(SM90, STOCK)), answer(picks(SM120, BACKEND)))


def test_imports() -> None:
    good = answer(modules=(ModuleImport("vllm.ours", None),))
    assert judge_imports(good) == ()
    bad = answer(modules=(ModuleImport("vllm.ours", "NameError: x"),), members=(STOCK,))
    assert [str(violation) for violation in judge_imports(bad)] == [
        "vllm.ours: expected imports, found NameError: x",
        "AttentionBackendEnum: expected TRITON_MLA_SPARSE, "
        "found no member TRITON_MLA_SPARSE",
    ]
