"""llama.cpp's file of a checkpoint, as `rabbitllm convert --to gguf` writes it."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.errors import CorruptVocabularyError
from rabbitllm.models.gguf_output import convert_to_gguf


def write(checkpoint: Path, path: Path, kind: str) -> Path:
    """Write the file, and return its path.

    llama.cpp loads no file without a vocabulary, and has no tokenizer like those of random models and of the bundled
    one. They are only asked by token ids, so any vocabulary of the right size will do.

    Args:
        checkpoint: folder of safetensors.
        path: of the file.
        kind: type of ggml, as "BF16".
    """
    try:
        _convert(checkpoint, path, kind)
    except CorruptVocabularyError:
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            folder = Path(made)
            for file in checkpoint.absolute().iterdir():
                if file.suffix == ".safetensors" or file.name in ("config.json", "model.safetensors.index.json"):
                    _link(file, folder / file.name)
            size = json.loads((folder / "config.json").read_text())["vocab_size"]
            (folder / "tokenizer.json").write_text(_tokenizer(size))
            _convert(folder, path, kind)
    return path


def _link(file: Path, link: Path) -> None:
    """A hard link: links that lead out of a folder are refused."""
    try:
        link.hardlink_to(file)
    except OSError:  # on another disk
        shutil.copy(file, link)


def _convert(checkpoint: Path, path: Path, kind: str) -> None:
    convert_to_gguf(str(checkpoint), path, kind.lower(), HubAccess(), max_disk=None, min_free=0)


def _tokenizer(size: int) -> str:
    """A tokenizer.json of bytes and made-up words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ([*letters, "<|endoftext|>", "w0"] + [f"w{number}" for number in range(1, size)])[:size]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [("w", "0")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return str(tokenizer.to_str())
