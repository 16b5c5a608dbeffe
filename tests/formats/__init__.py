"""Tests of file formats."""
