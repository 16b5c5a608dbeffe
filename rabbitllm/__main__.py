"""`python -m rabbitllm` is the `rabbitllm` command."""

from rabbitllm.cli.main import main

main()
