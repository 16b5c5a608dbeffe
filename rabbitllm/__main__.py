"""`python -m rabbitllm` is the `rabbitllm` command."""

from rabbitllm.base.interrupts import answer_interrupts, end_at_interrupts


def main() -> None:
    """Run the command line."""
    answer_interrupts()
    from rabbitllm.cli.main import main as run

    try:
        run()
    finally:
        end_at_interrupts()


if __name__ == "__main__":
    main()
