"""Progress on stderr, one region per process, in a form that suits the stream; and answers as they come."""

__all__ = ["answer_printer", "pictures", "region", "split_display", "tier_picture", "wait_status"]
