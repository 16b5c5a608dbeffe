"""Tests of what a profile is made of and how it is shown."""
