"""Progress on stderr: one region per process, in a form that suits the stream."""
