"""The content of a file, a folder or a repository, without reading any weights: as records, and as a report in text."""
