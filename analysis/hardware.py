"""What vendors say their devices can do: dense peaks, memory bandwidth and memory, each row with its source.

Figures are those without structured sparsity: where a datasheet prints the 2:4-sparse figure
(footnote "with sparsity"), half of it stands here. Names are matched word by word, and a word
that a row does not know rules it out: an L40S is no L4, an RTX 4090 Laptop no RTX 4090, a MIG
slice no whole device. A name that fits no row is unknown, never guessed.
"""

import difflib
import re
from dataclasses import dataclass, field

TERA, GIGA = 1e12, 1e9
_VENDOR_WORDS = {"nvidia", "tesla", "geforce", "amd", "instinct", "gpu", "tensor", "core"}


@dataclass(frozen=True)
class DeviceSheet:
    """One row of the table: dense peaks in FLOP/s (int8: operations/s), bandwidth in byte/s.

    `words` are those that a device's name must hold, each a choice of spellings; `optional` those
    it may hold besides. Null: the vendor gives no figure, or the device lacks the type.
    """

    name: str
    source: str
    words: tuple[frozenset[str], ...]
    optional: frozenset[str]
    float16: float
    bfloat16: float | None
    tf32: float | None
    float32: float | None
    float8: float | None
    int8: float | None
    bandwidth_bytes_per_s: float
    memory_bytes: float
    half_rate_accumulation: bool = field(default=False)

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Dense peak of a torch dtype's name or `tf32`; null where there is none."""
        if dtype.startswith("float8"):
            return self.float8
        named = {
            "float16": self.float16,
            "bfloat16": self.bfloat16,
            "tf32": self.tf32,
            "float32": self.float32,
            "int8": self.int8,
        }
        return named.get(dtype)

    def peaks(self) -> dict[str, float]:
        """All peaks that the vendor gives, by torch's name of the dtype."""
        names = ("float16", "bfloat16", "tf32", "float32", "float8_e4m3fn", "int8")
        return {name: peak for name in names if (peak := self.peak_flops_per_s(name)) is not None}


def _sheet(
    name: str,
    source: str,
    words: str,
    optional: str,
    peaks: tuple[float, float | None, float | None, float | None, float | None],
    bandwidth_gb_per_s: float,
    memory_gb: float,
    bfloat16: bool = True,
    half_rate_accumulation: bool = False,
) -> DeviceSheet:
    """Make a row; `peaks` in TFLOP/s are (fp16, tf32, fp32, fp8, int8), `words` like `h100 sxm|sxm5|hbm3`."""
    fp16, tf32, fp32, fp8, int8 = (None if peak is None else peak * TERA for peak in peaks)
    assert fp16 is not None
    return DeviceSheet(
        name=name,
        source=source,
        words=tuple(frozenset(word.split("|")) for word in words.split()),
        optional=frozenset(optional.split()),
        float16=fp16,
        bfloat16=fp16 if bfloat16 else None,
        tf32=tf32,
        float32=fp32,
        float8=fp8,
        int8=int8,
        bandwidth_bytes_per_s=bandwidth_gb_per_s * GIGA,
        memory_bytes=memory_gb * GIGA,
        half_rate_accumulation=half_rate_accumulation,
    )


_V100 = "NVIDIA V100 Tensor Core GPU datasheet"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, figures with sparsity halved"
_V100_SXM: tuple[float, None, float, None, None] = (125, None, 15.7, None, None)
_V100_PCIE: tuple[float, None, float, None, None] = (112, None, 14, None, None)
_A100_PEAKS: tuple[float, float, float, None, float] = (312, 156, 19.5, None, 624)
_H100_SXM: tuple[float, float, float, float, float] = (989, 494.5, 67, 1979, 1979)

DEVICES = (
    _sheet("V100 SXM 16GB", _V100, "v100 sxm2|sxm 16gb", "", _V100_SXM, 900, 16, bfloat16=False),
    _sheet("V100 SXM 32GB", _V100, "v100 sxm2|sxm 32gb", "", _V100_SXM, 900, 32, bfloat16=False),
    _sheet("V100 PCIe 16GB", _V100, "v100 pcie 16gb", "", _V100_PCIE, 900, 16, bfloat16=False),
    _sheet("V100 PCIe 32GB", _V100, "v100 pcie 32gb", "", _V100_PCIE, 900, 32, bfloat16=False),
    _sheet("T4", "NVIDIA T4 datasheet", "t4", "16gb", (65, None, 8.1, None, 130), 320, 16, bfloat16=False),
    _sheet("A10", "NVIDIA A10 datasheet", "a10", "24gb pcie", (125, 62.5, 31.2, None, 250), 600, 24),
    _sheet("A100 40GB", _A100, "a100 40gb", "sxm sxm4 pcie", _A100_PEAKS, 1555, 40),
    _sheet("A100 SXM 80GB", _A100, "a100 sxm|sxm4 80gb", "", _A100_PEAKS, 2039, 80),
    _sheet("A100 PCIe 80GB", _A100, "a100 pcie 80gb", "", _A100_PEAKS, 1935, 80),
    _sheet("L4", "NVIDIA L4 datasheet, figures with sparsity halved", "l4", "24gb", (121, 60, 30.3, 242, 242), 300, 24),
    _sheet("L40S", "NVIDIA L40S datasheet", "l40s", "48gb", (362, 183, 91.6, 733, 733), 864, 48),
    _sheet(
        "RTX 3090",
        "NVIDIA Ampere GA102 GPU Architecture whitepaper",
        "rtx 3090",
        "24gb",
        (71, 35.6, 35.6, None, 284),
        936,
        24,
        half_rate_accumulation=True,
    ),
    _sheet(
        "RTX 4090",
        "NVIDIA Ada GPU Architecture whitepaper",
        "rtx 4090",
        "24gb",
        (165.2, 82.6, 82.6, 330.3, 660.6),
        1008,
        24,
        half_rate_accumulation=True,
    ),
    _sheet("H100 PCIe", _H100, "h100 pcie", "80gb hbm2e", (756, 378, 51, 1513, 1513), 2000, 80),
    _sheet("H100 SXM", _H100, "h100 sxm|sxm5|hbm3", "sxm sxm5 80gb hbm3", _H100_SXM, 3350, 80),
    _sheet(
        "H200 SXM",
        "NVIDIA H200 Tensor Core GPU datasheet, figures with sparsity halved",
        "h200",
        "sxm sxm5 141gb hbm3e",
        _H100_SXM,
        4800,
        141,
    ),
    _sheet(
        "B200",
        "NVIDIA HGX B200 datasheet, figures with sparsity halved",
        "b200",
        "sxm sxm6 192gb hbm3e",
        (2250, 1125, None, 4500, 4500),
        8000,
        192,
    ),
    _sheet(
        "MI300X",
        "AMD Instinct MI300X Accelerator datasheet",
        "mi300x",
        "oam 192gb hbm3",
        (1307, 654, 163, 2615, 2615),
        5300,
        192,
    ),
)


def find(name: str) -> DeviceSheet | None:
    """Return the row of a device by the name that its driver gives, such as `NVIDIA H100 80GB HBM3`.

    Rows that ask for more words are tried first. Null where no row knows every word of the name,
    or where the name leaves open which of two devices it is (`H100`: PCIe or SXM).
    """
    words = _words(name)
    for sheet in sorted(DEVICES, key=lambda sheet: len(sheet.words), reverse=True):
        needed = all(words & choice for choice in sheet.words)
        known = sheet.optional.union(*sheet.words)
        if needed and words <= known:
            return sheet
    return None


def near_matches(name: str) -> list[str]:
    """Names of rows that a name without a row may have meant: those of the same model, else of a like spelling."""
    words = _words(name)
    same = [sheet.name for sheet in DEVICES if words & (sheet.words[-1] if "rtx" in sheet.words[0] else sheet.words[0])]
    models = {sheet.name.casefold(): sheet.name for sheet in DEVICES}
    return same or [
        models[like] for like in difflib.get_close_matches(" ".join(sorted(words)), models, n=3, cutoff=0.5)
    ]


def _words(name: str) -> set[str]:
    """The words of a name in lower case without the vendor's: `NVIDIA A100-SXM4-80GB` is a100, sxm4, 80gb."""
    text = re.sub(r"rtx(?=\d)", "rtx ", name.casefold())
    text = re.sub(r"(\d+)\s+gb\b", r"\1gb", text)
    return set(re.findall(r"[a-z0-9]+", text)) - _VENDOR_WORDS
