"""The parts of a profile and their output: totals, passes, text, JSON, a trace, a picture."""

__all__ = ["passes", "profiler"]
