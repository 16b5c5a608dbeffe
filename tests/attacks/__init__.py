"""Files that must be refused: a builder for each, and the error it must raise.

What is in them is harmless even if something ran it: the most that a payload does is to touch a marker file.
"""
