"""What the published Llama 2 looks like from outside: its file of weights with zeros that take no disk, its vocabulary.

The weights are written by `torch.save` itself, which leaves out the data and the bytes that it would take on the disk;
the vocabulary has the pieces that people show of the real one at their places, and made-up ones between them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.attacks.protobuf_files import number, piece, real, span

WIDTH, INNER, VOCABULARY, LAYERS = 4096, 11008, 32000, 32
KNOWN_PIECES = {259: "▁▁", 260: "▁t", 261: "er", 1001: "ied", 10001: "ång", 31001: "동"}


def llama_2_shapes() -> dict[str, tuple[int, ...]]:
    """The 292 tensors of the 7B model under Meta's names, in its file's order."""
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (VOCABULARY, WIDTH),
        "norm.weight": (WIDTH,),
        "output.weight": (VOCABULARY, WIDTH),
    }
    for layer in range(LAYERS):
        lead = f"layers.{layer}."
        shapes |= {f"{lead}attention.w{part}.weight": (WIDTH, WIDTH) for part in "qkvo"}
        shapes |= {f"{lead}feed_forward.w{part}.weight": (INNER, WIDTH) for part in "13"}
        shapes[f"{lead}feed_forward.w2.weight"] = (WIDTH, INNER)
        shapes |= {f"{lead}{part}_norm.weight": (WIDTH,) for part in ("attention", "ffn")}
    return {**shapes, "rope.freqs": (64,)}


def write_llama_2_weights(folder: Path) -> Path:
    """`consolidated.00.pth` of 13 GB, of which 1 MB is on the disk."""
    with FakeTensorMode():
        weights = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in llama_2_shapes().items()}
    path = folder / "consolidated.pth"  # the name that the zip's own folder gets
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(weights, path)
    return path.rename(folder / "consolidated.00.pth")


def write_llama_2_vocabulary(folder: Path) -> Path:
    """`tokenizer.model` of 32,000 pieces, with its trainer's spec and its normaliser's."""
    pieces = [piece("<unk>", 0, 2), piece("<s>", 0, 3), piece("</s>", 0, 3)]
    pieces += [piece(f"<0x{value:02X}>", 0, 6) for value in range(256)]
    pieces += [
        piece(KNOWN_PIECES.get(token, f"piece{token}"), -1e9 if token == 259 else 259 - token)
        for token in range(259, VOCABULARY)
    ]
    trainer = span(2, "spm_model_32k_200M_charcov099995_allowWSO__v2") + number(3, 2) + number(4, VOCABULARY)
    trainer += real(10, 0.99995) + number(11, 200_000_000) + number(25, 1) + number(26, 1) + number(35, 1)
    path = folder / "tokenizer.model"
    path.write_bytes(b"".join(pieces) + span(2, trainer) + span(3, span(1, "identity") + number(3, 1) + number(4, 0)))
    return path
