"""Estimates of a split and of generation before a split is made: the scan of the source, `plan`, and its report."""

__all__ = ["cost_model", "doctor", "machine", "outline", "plan", "predict", "report", "scan", "split_estimate"]
