"""What several frozen tests use; nothing of it imports from inside the package."""
