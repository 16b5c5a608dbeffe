"""Fuzzing of the readers that are given files by strangers: `make fuzz`.

`targets.py` says what is read and what counts as an error, `one.py` fuzzes one target in a process of its own, and
`__main__.py` runs them and adds up. Corpora are made by the builders of the tests; none is kept in the repository.
"""
