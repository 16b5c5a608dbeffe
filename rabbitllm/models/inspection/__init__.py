"""What a file, a folder or a repository holds, without reading any weights: facts as records, and a report as text."""
