"""Messages name options as the user of the command line types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rabbitllm.cli._spelling import as_typed, options_of
from rabbitllm.cli.main import app
from tests.cli.test_convert import write_gguf


def error_of(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "rabbitllm", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    return done.stderr


def test_errors_of_commands(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    text = error_of("convert", file, "-o", tmp_path / "new", "--outtype", "f16", "--sequential")
    assert "error: --outtype f16 with sequential" in text
    assert "Use --outtype bf16" in text
    assert "--max-disk" in error_of("convert", file, "-o", tmp_path / "new", "--max-disk", "much")


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        (
            "compression='8bit' fits; compression=None does not.",
            "--compression 8bit fits; --compression none does not.",
        ),
        ("use another folder (--dir, layer_shards_saving_path).", "use another folder (--dir)."),
        ("Pass --overwrite (overwrite=True).", "Pass --overwrite."),
        ("Remove verify_source or sequential_shard_processing=True.", "Remove --verify-source or --sequential."),
        ("split=False does not split; max_disk=5,000.", "--no-split does not split; --max-disk 5,000."),
        (
            "/tmp/max_disk and 'a_model/max_disk.bin', x.max_disk",
            "/tmp/max_disk and 'a_model/max_disk.bin', x.max_disk",
        ),
        ("use_mtp=True: the device has no compression", "use_mtp=True: the device has no compression"),
    ],
)
def test_arguments_that_are_options(message: str, typed: str) -> None:
    assert as_typed(message, {*options_of(typer.main.get_command(app))}) == typed
