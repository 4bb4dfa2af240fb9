import math

import pytest

from lifetrace.analysis.hardware import DEVICES, find, near_matches


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tesla V100-SXM2-16GB", "V100 SXM 16GB"),
        ("Tesla V100-SXM2-32GB", "V100 SXM 32GB"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_that_drivers_give(name, expected):
    assert find(name).name == expected


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40",
        "NVIDIA A10G",
        "NVIDIA H100",  # PCIe or SXM: 2000 or 3350 GB/s
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA A100 80GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GH200 480GB",
        "Intel(R) Xeon(R) Processor",
        "cpu",
        "",
    ],
)
def test_unknown_devices_are_not_guessed(name):
    assert find(name) is None


def test_near_matches_name_what_may_have_been_meant():
    assert near_matches("NVIDIA H100") == ["H100 PCIe", "H100 SXM"]
    assert near_matches("NVIDIA A100 80GB")[:3] == ["A100 40GB", "A100 SXM 80GB", "A100 PCIe 80GB"]
    assert "RTX 4090" in near_matches("NVIDIA GeForce RTX 4090 Laptop GPU")
    assert "L40S" in near_matches("NVIDIA L40")
    assert near_matches("Intel(R) Xeon(R) Processor") == []


@pytest.mark.parametrize("sheet", DEVICES, ids=lambda sheet: sheet.name)
def test_ratios_are_those_of_dense_figures(sheet):
    """Halving the width doubles the rate; a sparse figure beside a dense one would show as a factor of 2."""
    if sheet.tf32 is not None:
        assert math.isclose(sheet.float16, 2 * sheet.tf32, rel_tol=0.02)
    if sheet.float8 is not None:
        assert math.isclose(sheet.float8, 2 * sheet.float16, rel_tol=0.02)
    if sheet.int8 is not None:
        # GeForce sums float16 products in float32 at half the rate of its integer units.
        assert math.isclose(sheet.int8, (4 if sheet.half_rate_accumulation else 2) * sheet.float16, rel_tol=0.02)
    if sheet.float32 is not None:
        assert sheet.float32 < sheet.float16


@pytest.mark.parametrize("sheet", DEVICES, ids=lambda sheet: sheet.name)
def test_each_row_names_its_source_and_is_found_by_its_own_name(sheet):
    assert sheet.source.startswith(("NVIDIA", "AMD"))
    assert find(sheet.name) is sheet


def test_peaks_by_dtype():
    h100, t4 = find("H100 SXM"), find("T4")
    assert h100.peak_flops_per_s("bfloat16") == 989e12
    assert h100.peak_flops_per_s("float8_e4m3fn") == h100.peak_flops_per_s("float8_e5m2") == 1979e12
    assert t4.peak_flops_per_s("bfloat16") is None
    assert t4.peak_flops_per_s("float64") is None
    assert "bfloat16" not in t4.peaks()
    assert h100.bandwidth_bytes_per_s == 3350e9
