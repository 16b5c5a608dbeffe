"""Tests of the split directory."""
