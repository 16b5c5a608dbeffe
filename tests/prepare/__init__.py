"""Tests of what comes before a split, and of what it ends in."""
