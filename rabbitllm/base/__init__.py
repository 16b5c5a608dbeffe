"""Foundations: options, events of a split, forks, logs, text."""
