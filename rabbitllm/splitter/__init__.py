"""From shards to layer files: map, plan, journal, split. Never imports the engine."""
