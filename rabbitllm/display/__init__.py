"""Progress on stderr: one region per process, in a form that suits the stream."""

__all__ = ["pictures", "region", "split_display", "tier_picture"]
