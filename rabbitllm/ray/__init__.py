"""Work on a Ray cluster: splits, and batches of prompts. Ray is imported when it is first used."""

__all__ = ["lines", "shards"]
