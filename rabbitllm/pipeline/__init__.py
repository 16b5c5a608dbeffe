"""Pipeline parallelism: spans of a model's layers in several processes, on one machine or several."""

__all__ = ["spread"]
