"""Splits shards into layer files: map, plan, journal, split. Never imports the engine."""
