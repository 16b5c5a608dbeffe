"""Text ends before the first stop text, however it was cut into pieces, and nothing of one is ever handed out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.batching.stop_texts import StoppedText

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
    ends = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert "".join(taken) == whole[: min(ends)] if ends else "".join(taken) == whole
    assert (text.stop is not None) == bool(ends)
    if text.stop is not None:
        assert whole.startswith(text.stop, min(ends))
    assert not any(stop in before for stop in stops)


def test_of_stop_texts_that_begin_together_the_longest_one_came() -> None:
    text = StoppedText(("<end", "<end of it>"))
    text.add("so <end of it> and")
    assert (text.take(), text.stop) == ("so ", "<end of it>")


def test_what_might_become_one_waits() -> None:
    text = StoppedText(("\nUser:",))
    text.add("yes\nUs")
    assert text.take() == "yes"
    text.add("ually")
    assert text.take() == "\nUsually"
