"""The `rabbitllm` command: one thin file per subcommand."""
