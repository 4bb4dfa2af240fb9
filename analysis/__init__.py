"""Reads traces and says what they mean. Loads no torch."""

from .breakdown import StageTime, breakdown
from .latency import Latency, latency
from .trace import Trace, read_trace

__all__ = ["Latency", "StageTime", "Trace", "breakdown", "latency", "read_trace"]
