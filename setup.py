"""For tools that still ask for it: all that it would say is in pyproject.toml."""

from setuptools import setup

setup()
