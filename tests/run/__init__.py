"""Tests of one prompt and its answer."""
