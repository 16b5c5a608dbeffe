"""Tests of the split directories of this machine."""
