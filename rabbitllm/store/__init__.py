"""The split directory: the interface between splitter and engine."""
