"""Messages between hosts: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.errors import HostsError
from rabbitllm.pipeline._frames import ALIGNMENT, Frame, FrameType, from_bytes, to_bytes


def test_every_dtype_and_shape_round_trips() -> None:
    tensors = (
        torch.randn(2, 3, 5).to(torch.bfloat16),
        torch.tensor(True),
        torch.arange(7),
        torch.randn(4, 6)[:, ::2],
        torch.zeros(0, 3),
        torch.ones(()).expand(2, 2),
    )
    content = {"events": [["crop", 1, -3]], "text": "ä", "nothing": None, "scale": float("inf")}
    for word in FrameType:
        frame = from_bytes(to_bytes(Frame(word, 12, content, tensors)))
        assert (frame.type, frame.number, frame.content) == (word, 12, content)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(frame.tensors, tensors, strict=True))


def test_tensors_are_aligned() -> None:
    buffer = to_bytes(Frame(FrameType.HIDDEN, 1, "x", (torch.ones(3), torch.ones(5))))
    begins = [tensor.data_ptr() - buffer.data_ptr() for tensor in from_bytes(buffer).tensors]
    assert [begin % ALIGNMENT for begin in begins] == [0, 0]


@given(st.binary(max_size=64), st.integers(0, 200))
def test_bytes_of_another_protocol_are_refused(added: bytes, keep: int) -> None:
    raw = bytes(to_bytes(Frame(FrameType.HIDDEN, 3, None, (torch.ones(9),))).numpy())
    wrong = raw[:keep][: len(raw) - 1] + added
    if len(wrong) >= len(raw) and wrong.startswith(raw[: len(raw) - 1]):
        return
    buffer = torch.frombuffer(bytearray(wrong or b"\0"), dtype=torch.uint8)
    if len(wrong) >= len(raw) and wrong.startswith(raw[: 8 + int.from_bytes(raw[:8], "little")]):
        frame = from_bytes(buffer)  # only the bytes of the tensor are others
        assert (frame.type, frame.number, [t.shape for t in frame.tensors]) == (FrameType.HIDDEN, 3, [(9,)])
    else:
        with pytest.raises(HostsError, match="invalid message"):
            from_bytes(buffer)


@pytest.mark.parametrize(
    "head",
    ['["hidden", 1, null, [["float32", [1000000]]]]', '["hidden", 1, null, [["load", [1]]]]', '["run", 1, null, []]']
    + ['["hidden", 1, null, [["float32", [-1]]]]', "[1]", "[" * 100_000],
)
def test_invalid_heads_are_refused(head: str) -> None:
    data = len(head).to_bytes(8, "little") + head.encode()
    with pytest.raises(HostsError, match="invalid message"):
        from_bytes(torch.frombuffer(bytearray(data), dtype=torch.uint8))
