"""Text ends before the first stop text, however it was cut into pieces, and nothing of one is ever handed out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.generation.streams import StoppedText

few = st.text("ab\n", max_size=12)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple)


@given(st.lists(few, max_size=10), stops)
def test_any_pieces(pieces: list[str], stops: tuple[str, ...]) -> None:
    text = StoppedText(stops)
    taken = []
    for piece in pieces:
        text.add(piece)
        taken.append(text.take())
    before = "".join(taken)
    taken.append(text.take(last=True))
    whole = "".join(pieces)
    ends = [(at + len(stop), at, stop) for stop in stops if (at := whole.find(stop)) >= 0]
    _, begin, stop = min(ends, default=(0, len(whole), None))
    assert ("".join(taken), text.stop) == (whole[:begin], stop)
    assert not any(stop in before for stop in stops)


def test_the_one_that_is_complete_first_came() -> None:
    text = StoppedText(("it>", "<end of it>", "<end of it> and"))
    text.add("so <end of it> and")
    assert (text.take(), text.stop) == ("so ", "<end of it>")


def test_what_might_become_one_waits() -> None:
    text = StoppedText(("\nUser:",))
    text.add("yes\nUs")
    assert text.take() == "yes"
    text.add("ually")
    assert text.take() == "\nUsually"
