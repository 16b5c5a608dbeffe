"""Tests of the splitter."""
