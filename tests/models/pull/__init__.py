"""Tests of getting a model ready."""
