"""The `rabbitllm` command: one thin file per subcommand."""

__all__ = ["arguments", "exit_codes", "help", "main"]
