"""`python -m rabbitllm` is the `rabbitllm` command."""

from rabbitllm.base.interrupts import answer_interrupts


def main() -> None:
    """Run the command line."""
    answer_interrupts()
    from rabbitllm.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
