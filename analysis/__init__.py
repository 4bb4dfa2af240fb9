"""Reads traces and says what they mean. Loads no torch."""

from .breakdown import StageTime, breakdown
from .latency import Latency, latency
from .roofline import (
    PhaseVerdict,
    StageVerdict,
    StepVerdict,
    Verdict,
    phase_verdicts,
    rooflines,
    step_verdicts,
    verdict,
)
from .trace import Trace, read_trace
from .verdicts import Verdicts, judge

__all__ = [
    "Latency",
    "PhaseVerdict",
    "StageTime",
    "StageVerdict",
    "StepVerdict",
    "Trace",
    "Verdict",
    "Verdicts",
    "breakdown",
    "judge",
    "latency",
    "phase_verdicts",
    "read_trace",
    "rooflines",
    "step_verdicts",
    "verdict",
]
