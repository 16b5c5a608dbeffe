"""Tests of sources of shards."""
