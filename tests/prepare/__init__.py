"""Tests of what comes before and after a split."""
