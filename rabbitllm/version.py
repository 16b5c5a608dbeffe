"""Versions: of this package, and of transformers."""

__version__ = "2.0.0"
TRANSFORMERS = ("5.23", "5.24")
"""The lowest and the newest version of transformers with which the tests pass."""
