"""This machine's models: pull, library, convert, inspection."""
