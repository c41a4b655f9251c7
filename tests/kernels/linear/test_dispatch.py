"""The table of linear kernels: which kernel computes which sizes on which device, and that each row names its
order of sums."""

import pytest
import torch

from headway.kernels.linear.dispatch import (
    FEW_ROWS,
    MIN_ADDED_ROWS,
    DeviceTraits,
    FusedOperation,
    LinearChoice,
    LinearKernel,
    LinearShape,
    TmaGemmConfig,
    WeightFormat,
    adds_residual,
    choose,
    fuses_qkv,
    is_short_stream,
)

DEVICES = {
    "cpu": DeviceTraits(2, has_tma=False, has_triton=False),
    "interpreter": DeviceTraits(2, has_tma=False, is_interpreted=True),
    "sm_80": DeviceTraits(108, has_tma=False),
    "sm_89": DeviceTraits(142, has_tma=False),
    "sm_90": DeviceTraits(132, has_tma=True),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
ROWS = (1, 32, 33, 64, 65, 128, 129, 640, 1024)
LETTERS = {
    "T": LinearKernel.TMA,
    "S": LinearKernel.SKINNY,
    "P": LinearKernel.PERSISTENT_GATED,
    "-": LinearKernel.LIBRARY,
}
# A letter for each number of rows of ROWS, as recorded from the launches of the commit before this table.
CHOICES = """
sm_80 ADD bf16 6144x4096 SS-------
sm_80 GATED_MUL bf16 6144x4096 SS-------
sm_80 ADD fp16 6144x4096 SS-------
sm_80 GATED_MUL fp16 6144x4096 SS-------
sm_80 ADD fp32 6144x4096 ---------
sm_80 GATED_MUL fp32 6144x4096 ---------
sm_80 ADD bf16 4096x11008 SSSS-----
sm_80 GATED_MUL bf16 4096x11008 SSSS-----
sm_80 ADD fp16 4096x11008 SSSS-----
sm_80 GATED_MUL fp16 4096x11008 SSSS-----
sm_80 ADD fp32 4096x11008 ---------
sm_80 GATED_MUL fp32 4096x11008 ---------
sm_80 ADD bf16 1024x3072 SSSS-----
sm_80 GATED_MUL bf16 1024x3072 SSSS-----
sm_80 ADD bf16 1000x1000 ---------
sm_80 GATED_MUL bf16 1000x1000 ---------
sm_89 ADD bf16 6144x4096 SS-------
sm_89 GATED_MUL bf16 6144x4096 SS-------
sm_89 ADD fp16 6144x4096 SS-------
sm_89 GATED_MUL fp16 6144x4096 SS-------
sm_89 ADD fp32 6144x4096 ---------
sm_89 GATED_MUL fp32 6144x4096 ---------
sm_89 ADD fp8 6144x4096 ---------
sm_89 ADD bf16 4096x11008 SSSS-----
sm_89 GATED_MUL bf16 4096x11008 SSSS-----
sm_89 ADD fp16 4096x11008 SSSS-----
sm_89 GATED_MUL fp16 4096x11008 SSSS-----
sm_89 ADD fp32 4096x11008 ---------
sm_89 GATED_MUL fp32 4096x11008 ---------
sm_89 ADD fp8 4096x11008 ---------
sm_89 ADD bf16 1024x3072 SSSS-----
sm_89 GATED_MUL bf16 1024x3072 SSSS-----
sm_89 ADD bf16 1000x1000 ---------
sm_89 GATED_MUL bf16 1000x1000 ---------
sm_90 ADD bf16 6144x4096 TTTT-----
sm_90 GATED_MUL bf16 6144x4096 TTTT-----
sm_90 ADD fp16 6144x4096 TTTT-----
sm_90 GATED_MUL fp16 6144x4096 TTTT-----
sm_90 ADD fp32 6144x4096 ---------
sm_90 GATED_MUL fp32 6144x4096 ---------
sm_90 ADD fp8 6144x4096 TTTT-----
sm_90 ADD bf16 4096x4096 TTTT-----
sm_90 GATED_MUL bf16 4096x4096 SS------P
sm_90 ADD bf16 22016x4096 TTTT-----
sm_90 GATED_MUL bf16 22016x4096 TTTTTT---
sm_90 ADD bf16 4096x11008 TTTT-----
sm_90 GATED_MUL bf16 4096x11008 SSSS----P
sm_90 ADD fp16 4096x11008 TTTT-----
sm_90 GATED_MUL fp16 4096x11008 SSSS----P
sm_90 ADD fp32 4096x11008 ---------
sm_90 GATED_MUL fp32 4096x11008 ---------
sm_90 ADD fp8 4096x11008 ---------
sm_90 ADD bf16 151680x4096 TTTT-----
sm_90 GATED_MUL bf16 151680x4096 TTTT---PP
sm_90 ADD bf16 4096x1024 SS-------
sm_90 GATED_MUL bf16 4096x1024 SS------P
sm_90 ADD bf16 1024x2048 SS-------
sm_90 GATED_MUL bf16 1024x2048 SS-------
sm_90 ADD bf16 6144x1024 SS-------
sm_90 GATED_MUL bf16 6144x1024 SS-------
sm_90 ADD bf16 1024x3072 SSSS-----
sm_90 GATED_MUL bf16 1024x3072 SSSS-----
sm_90 ADD bf16 151680x1024 SS-------
sm_90 GATED_MUL bf16 151680x1024 SS-----PP
sm_90 ADD bf16 896x4864 SSSS-----
sm_90 GATED_MUL bf16 896x4864 SSSS-----
sm_90 ADD bf16 9728x896 SS-------
sm_90 GATED_MUL bf16 9728x896 SS-------
sm_90 ADD bf16 128256x4096 TTTT-----
sm_90 GATED_MUL bf16 128256x4096 TTTT---PP
sm_90 ADD bf16 28672x4096 TTTT-----
sm_90 GATED_MUL bf16 28672x4096 TTTT----P
sm_90 ADD bf16 4096x14336 TTTT-----
sm_90 GATED_MUL bf16 4096x14336 SSSS----P
sm_90 ADD bf16 1000x1000 ---------
sm_90 GATED_MUL bf16 1000x1000 ---------
"""


def _cases() -> list[tuple[str, FusedOperation, torch.dtype, int, int, int, str]]:
    cases = []
    for line in CHOICES.strip().splitlines():
        device, operation, dtype, size, letters = line.split()
        outputs, inputs = map(int, size.split("x"))
        cases += [
            (device, FusedOperation[operation], DTYPES[dtype], rows, outputs, inputs, letter)
            for rows, letter in zip(ROWS, letters, strict=True)
        ]
    return cases


def test_the_table_chooses_what_was_recorded() -> None:
    cases = _cases()
    assert len(cases) >= 150
    wrong = [
        (device, operation.name, dtype, rows, outputs, inputs, letter)
        for device, operation, dtype, rows, outputs, inputs, letter in cases
        if choose(LinearShape(rows, outputs, inputs, dtype), DEVICES[device], operation).kernel
        is not LETTERS[letter]
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("operation", FusedOperation)
@pytest.mark.parametrize("rows", [0, 1, 64, 1024])
def test_without_triton_the_library_computes_all(rows: int, operation: FusedOperation) -> None:
    for dtype in DTYPES.values():
        choice = choose(LinearShape(rows, 6144, 4096, dtype), DEVICES["cpu"], operation)
        assert choice == LinearChoice(LinearKernel.LIBRARY)


@pytest.mark.parametrize(
    ("rows", "changes", "operation", "expected"),
    [
        (4, {"is_bulk": False}, "ADD", LinearChoice(LinearKernel.SKINNY)),
        (4, {"is_bulk": False, "is_dense": False}, "ADD", LinearChoice(LinearKernel.LIBRARY)),
        (4, {}, "ADD", LinearChoice(LinearKernel.TMA, TmaGemmConfig(344))),
        (4, {}, "QKV_DEFERRED", LinearChoice(LinearKernel.SKINNY)),
        (65, {}, "GATED_MUL", LinearChoice(LinearKernel.TMA, TmaGemmConfig(115, tiles=3, copy_bytes=256))),
        (65, {}, "QKV", LinearChoice(LinearKernel.LIBRARY)),
        (768, {}, "GATED_MUL", LinearChoice(LinearKernel.PERSISTENT_GATED)),
        (768, {}, "GATED_MUL_BIASED", LinearChoice(LinearKernel.LIBRARY)),
        (
            65,
            {},
            "GATED_MUL_BIASED",
            LinearChoice(LinearKernel.TMA, TmaGemmConfig(115, tiles=3, copy_bytes=256)),
        ),
        (768, {"is_bulk_out": False}, "GATED_MUL", LinearChoice(LinearKernel.LIBRARY)),
    ],
    ids=str,
)
def test_the_layout_of_operands_matters(
    rows: int, changes: dict[str, bool], operation: str, expected: LinearChoice
) -> None:
    shape = LinearShape(rows, 22016, 4096, torch.bfloat16, **changes)
    assert choose(shape, DEVICES["sm_90"], FusedOperation[operation]) == expected


@pytest.mark.parametrize("kernel", LinearKernel)
def test_each_row_names_its_order_of_sums_and_its_rounding(kernel: LinearKernel) -> None:
    assert kernel.value.order_of_sums
    assert "round" in kernel.value.rounding


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype", "expected"),
    [
        (1, 2048, torch.bfloat16, True),
        (FEW_ROWS, 2048, torch.bfloat16, True),
        (FEW_ROWS + 1, 2048, torch.bfloat16, False),
        (0, 2048, torch.bfloat16, False),
        (1, 2112, torch.bfloat16, False),
        (1, 2000, torch.bfloat16, False),
        (1, 2048, torch.float16, False),
    ],
    ids=str,
)
def test_the_width_of_a_stream_decides_about_fusion_and_no_number_of_rows_up_to_32(
    rows: int, hidden: int, dtype: torch.dtype, expected: bool
) -> None:
    assert is_short_stream(rows, hidden, dtype) is expected


@pytest.mark.parametrize(
    ("device", "rows", "outputs", "inputs", "dtype", "expected"),
    [
        ("sm_90", 1, 4096, 4096, "bf16", True),  # loaded along with the weight
        ("sm_90", 64, 4096, 4096, "bf16", True),
        ("sm_90", 65, 4096, 4096, "bf16", False),  # the norm adds it
        ("sm_90", MIN_ADDED_ROWS - 1, 4096, 4096, "bf16", False),
        ("sm_90", MIN_ADDED_ROWS, 4096, 4096, "bf16", True),  # the library adds it
        ("sm_80", 1, 4096, 4096, "bf16", False),
        ("sm_80", FEW_ROWS, 1024, 3072, "bf16", True),  # a narrow stream
        ("sm_80", FEW_ROWS + 1, 1024, 3072, "bf16", False),
        ("sm_80", 1, 1024, 3072, "fp16", False),
        ("sm_80", 1, 1024, 3000, "bf16", False),
    ],
    ids=str,
)
def test_where_a_product_adds_itself_to_the_residual(
    device: str, rows: int, outputs: int, inputs: int, dtype: str, expected: bool
) -> None:
    shape = LinearShape(rows, outputs, inputs, DTYPES[dtype])
    assert adds_residual(shape, DEVICES[device], has_bias=False) is expected
    is_library = rows >= MIN_ADDED_ROWS
    assert adds_residual(shape, DEVICES[device], has_bias=True) is (expected and not is_library)


@pytest.mark.parametrize(
    ("device", "rows", "outputs", "inputs", "dtype", "plain", "deferred"),
    [
        ("sm_90", 1, 6144, 4096, "bf16", True, True),
        ("sm_90", 64, 6144, 4096, "fp16", True, False),
        ("sm_90", 65, 6144, 4096, "bf16", False, False),
        ("sm_80", 1, 6144, 4096, "bf16", False, True),  # deferred norms are of narrow streams alone
        ("sm_80", 1, 2048, 1024, "bf16", True, True),
        ("sm_80", 1, 2048, 1024, "fp16", False, True),
        ("sm_80", FEW_ROWS + 1, 2048, 1024, "bf16", False, False),
        ("cpu", 1, 2048, 1024, "bf16", False, False),
    ],
    ids=str,
)
def test_where_q_k_and_v_are_rotated_and_cached_at_once(
    device: str, rows: int, outputs: int, inputs: int, dtype: str, plain: bool, deferred: bool
) -> None:
    shape = LinearShape(rows, outputs, inputs, DTYPES[dtype])
    found = [fuses_qkv(shape, DEVICES[device], is_deferred=is_deferred) for is_deferred in (False, True)]
    assert found == [plain, deferred]


@pytest.mark.parametrize(
    ("form", "rows", "inputs", "expected"),
    [
        ("FLOAT8_OF_16_BITS", 16, 4096, "FLOAT8_SKINNY"),
        ("FLOAT8_OF_16_BITS", 17, 4096, "TMA"),
        ("FLOAT8_OF_16_BITS", 65, 4096, "LIBRARY"),
        ("INT4_SCREENED", 16, 2048, "INT4_SCREENED"),
        ("INT4_SCREENED", 17, 2048, "TMA"),
        ("INT4_SCREENED", 8, 1024, "INT4_SCREENED"),
        ("INT4_SCREENED", 9, 1024, "SKINNY"),
    ],
)
def test_the_number_of_rows_decides_about_formats_of_drafts(
    form: str, rows: int, inputs: int, expected: str
) -> None:
    dtype = torch.float8_e4m3fn if form == "FLOAT8_OF_16_BITS" else torch.bfloat16
    shape = LinearShape(rows, 151_680, inputs, dtype, format=WeightFormat[form])
    assert choose(shape, DEVICES["sm_90"], FusedOperation.ADD).kernel is LinearKernel[expected]


def test_kernels_whose_order_the_number_of_rows_may_change_order_no_dtype() -> None:
    ordered = {kernel: kernel.value.ordered_dtypes for kernel in LinearKernel if kernel.value.ordered_dtypes}
    assert ordered == {
        LinearKernel.BATCH_INVARIANT: (torch.bfloat16, torch.float16, torch.float32),
        LinearKernel.WEIGHT_ONLY: (torch.uint8,),
        LinearKernel.PADDED_CPU: (torch.float32, torch.float64),
        LinearKernel.PACKED_CPU: (torch.float32,),
    }
