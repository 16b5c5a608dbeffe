"""Messages name options as the user of the command line types them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from rabbitllm.cli._spelling import TypedRecord, as_typed, options_of, runs
from rabbitllm.cli.main import app
from tests.cli.test_convert import write_gguf
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import split


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
        ("lower min_free_disk (rabbitllm pull --min-free-disk), or", "lower --min-free-disk, or"),
        ("Remove verify_source or sequential_shard_processing=True.", "Remove --verify-source or --sequential."),
        ("split=False does not split; max_disk=5,000.", "--no-split does not split; --max-disk 5,000."),
        (
            "/tmp/max_disk and 'a_model/max_disk.bin', x.max_disk",
            "/tmp/max_disk and 'a_model/max_disk.bin', x.max_disk",
        ),
        ("max_memory['cpu']='-5' is not a size.", "--max-memory cpu=-5 is not a size."),
        (
            "max_memory={0: '14GB', 'cpu': '24GB'}. Or max_memory={'cuda:1': 5,000} bytes.",
            "--max-memory 0=14GB --max-memory cpu=24GB. Or --max-memory cuda:1=5,000 bytes.",
        ),
        ("Raise max_memory[0], or max_memory", "Raise --max-memory 0, or --max-memory"),
        ("use_mtp=True: the device has no compression", "use_mtp=True: the device has no compression"),
    ],
)
def test_arguments_that_are_options(message: str, typed: str) -> None:
    assert as_typed(message, {*options_of(typer.main.get_command(app))}) == typed


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        ("pull", "--verify-source checks; a --token. Use --sequential and --delete-original together."),
        (
            "serve",
            "verify_source=True in Python checks; a --token. "
            "Use --sequential and delete_original=True in Python together.",
        ),
    ],
)
def test_an_option_of_another_command_is_one_in_python(command: str, typed: str) -> None:
    commands: Any = typer.main.get_command(app)
    runs(commands.commands[command], commands)
    message = (
        "verify_source=True checks; a --token. Use sequential_shard_processing=True and delete_original=True together."
    )
    record = TypedRecord("rabbitllm.splitter", logging.WARNING, "", 1, "%s", (message,), None)
    assert record.getMessage() == typed
    assert TypedRecord("other", logging.WARNING, "", 1, message, (), None).getMessage() == message


def test_warnings_of_commands(tmp_path: Path) -> None:
    """One of a model whose shards are newer than its split."""
    model = build_checkpoint(tmp_path / "model", "llama")
    split_folder = split(model)
    later = (split_folder / "split.json").stat().st_mtime_ns + 10**9
    for shard in model.glob("*.safetensors"):
        os.utime(shard, ns=(later, later))
    command = [sys.executable, "-m", "rabbitllm", "pull", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--verify-source checks whether they differ" in done.stderr
