"""`rabbitllm bench` as a user meets it: what it prints, writes, leaves alone and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from rabbitllm.errors import MissingPackageError, OptionError
from tests.support.builders import build_checkpoint
from tests.support.commands import invoke
from tests.support.small_disk import small_disk
from tests.support.splitting import names_in
from tests.support.tiny_models import one_thread, split  # noqa: F401  a fixture that applies by itself

SHORT = ["--device", "cpu", "--tokens", "4", "--prompt-tokens", "5", "--turns", "2"]
STREAMED = [*SHORT, "--max-memory", "cpu=0"]
KEYS = {
    *("model", "device", "dtype", "compression", "tokens", "prompt_tokens", "batch", "load_seconds", "turns"),
    *("first_after_load_seconds", "first_token_seconds", "token_seconds", "tokens_per_second", "bytes_per_token"),
    *("overlap", "bottleneck", "peak_memory_bytes", "placement", "profile"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_checkpoint(tmp_path_factory.mktemp("bench") / "model", "llama", shards=2)
    split(folder)
    return folder


def bench(*arguments: str) -> Result:
    return invoke("bench", *arguments)


def record(*arguments: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(bench(*arguments, "--json").stdout)
    return parsed


def test_json_of_a_streamed_model(checkpoint: Path) -> None:
    measured = record(str(checkpoint), *STREAMED)
    assert measured.keys() == KEYS
    assert (measured["tokens"], measured["prompt_tokens"], measured["batch"], len(measured["turns"])) == (4, 5, 1, 2)
    streamed = next(row for row in measured["placement"] if row["tier"] == "streamed")
    assert (streamed["device"], streamed["units"]) == ("cpu", 4)
    # what was read ahead may belong to the pass before or after
    assert measured["bytes_per_token"]["disk"] == pytest.approx(streamed["bytes"], rel=0.5)
    assert measured["bytes_per_token"]["copied"] == 0
    assert 0 < measured["token_seconds"] == pytest.approx(1 / measured["tokens_per_second"])
    assert 0 < measured["overlap"] <= 1
    assert measured["bottleneck"] in ("compute", "dequantise", "wait for disk")
    assert measured["peak_memory_bytes"] > 50e6
    assert measured["profile"]["sums"]["further"]["passes"] == 3
    assert measured["profile"]["sums"]["prompt"]["tokens_in"] == 5


def test_batch_shares_reads(checkpoint: Path) -> None:
    single, batched = (record(str(checkpoint), *STREAMED, "--batch", batch) for batch in ("1", "8"))
    ratio = single["bytes_per_token"]["disk"] / batched["bytes_per_token"]["disk"]
    assert 4 < ratio < 16
    assert batched["tokens_per_second"] == pytest.approx(8 / batched["token_seconds"])
    assert batched["profile"]["sums"]["prompt"]["tokens_in"] == 40


def test_what_drafts_bring_is_shown(checkpoint: Path) -> None:
    """The model's own file as the draft is always right; how often it drafts depends on measured times."""
    options = [str(checkpoint), *STREAMED, "--turns", "1", "--tokens", "40"]
    plain, measured = record(*options), record(*options, "--draft", str(checkpoint))
    drafts, further = measured["profile"]["drafts"], measured["profile"]["sums"]["further"]
    assert plain["profile"]["drafts"] is None
    assert drafts["tokens"] == 40
    assert drafts["passes"] == further["passes"] + 1
    assert drafts["tokens_per_pass"] == 40 / drafts["passes"] >= 1
    assert set(drafts["right_by_depth"]) <= {1.0}
    assert 0 <= drafts["share"] < 1
    read = plain["bytes_per_token"]["disk"] * further["passes"] / 39
    assert measured["bytes_per_token"]["disk"] == pytest.approx(read, rel=0.2)
    text = bench(*options, "--draft", "ngram").stdout
    assert re.search(r"^drafts +[\d.]+ tokens a pass(: | by )ngram", text, re.MULTILINE)


def test_text_output(checkpoint: Path) -> None:
    result = bench(str(checkpoint), *STREAMED)
    text = result.stdout
    assert text.startswith(f"{checkpoint}, float32, on cpu\n")
    for fact in (
        "generated",
        "load",
        "first token",
        "each further",
        "bytes a token",
        "overlap",
        "limit",
        "peak memory",
    ):
        assert re.search(rf"^{fact} +\S", text, re.MULTILINE), fact
    assert re.search(r"^  compute +[\d.,]+ ms +\d+%  █*$", text, re.MULTILINE)
    assert "cpu     streamed" in text
    assert "from the disk at" in text
    shares = [int(share) for share in re.findall(r" ms +(\d+)%", text)]
    assert 97 <= sum(shares) <= 103


def test_compressed_resident_model(checkpoint: Path) -> None:
    measured = record(str(checkpoint), *SHORT, "--compression", "4bit")
    assert measured["compression"] == "4bit"
    assert measured["bytes_per_token"]["disk"] == 0
    assert set(measured["bytes_per_token"]["in_place"]) == {"cpu resident"}
    assert record(str(checkpoint), *SHORT, "--compression", "4bit", "--exact")["compression"] == "4bit"


def test_files_are_written(checkpoint: Path, tmp_path: Path) -> None:
    plot, trace = tmp_path / "time.png", tmp_path / "trace.json"
    bench(str(checkpoint), *STREAMED, "--plot", str(plot), "--trace", str(trace))
    assert plot.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event.get("cat") == "pass" for event in events) == 4


def test_a_checkpoint_is_split_and_kept(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", shards=2)
    before = names_in(folder)
    result = bench(str(folder), *SHORT, "--dir", str(tmp_path / "layers"), "--json")
    json.loads(result.stdout)  # the profile of the split is not among it
    assert names_in(folder) == before
    assert (tmp_path / "layers" / "splitted_model" / "split.json").exists()


def test_no_files_are_written_without_a_split(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", shards=2)
    before = names_in(tmp_path)
    assert record(str(folder), *STREAMED, "--no-split")["bytes_per_token"]["disk"] > 0
    assert names_in(tmp_path) == before


@pytest.mark.long
def test_progress_is_on_stderr(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "rabbitllm", "bench", str(checkpoint), *STREAMED, "--json"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout).keys() == KEYS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-memory", "24GiB"], "names no device"),
        (["--max-memory", "cpu=much"], "is not a size"),
        (["--plot", "time.txt"], "not the name of a picture"),
        (["--compression", "3bit"], "does not exist"),
    ],
)
def test_wrong_options_are_refused(checkpoint: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        invoke("bench", checkpoint, *SHORT, *arguments)


def test_a_plot_without_matplotlib_is_refused_before_loading(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"\.\[plot\]"):
        invoke("bench", checkpoint, "--plot", "a.png")


def test_help_names_the_written_files() -> None:
    text = " ".join(invoke("bench", "--help", columns=200).stdout.split())
    assert "Nothing is ever deleted." in text


@pytest.mark.parametrize("option", ["--trace", "--plot", "--plot-tiers"])
def test_no_shard_is_replaced(checkpoint: Path, tmp_path: Path, option: str) -> None:
    """And that is said before anything is measured."""
    shard = next(checkpoint.glob("*.safetensors"))
    before = shard.read_bytes()
    target = tmp_path / "file.png"
    target.symlink_to(shard)
    with pytest.raises(OptionError, match="it was not changed"):
        bench(str(checkpoint), option, str(target))
    assert shard.read_bytes() == before


@pytest.mark.parametrize("option", ["--trace", "--plot", "--plot-tiers"])
def test_a_path_without_a_folder_is_refused_before_loading(tmp_path: Path, option: str) -> None:
    with pytest.raises(OptionError, match=f"There is no folder {tmp_path}/none for time.svg"):
        bench("no-model", option, f"{tmp_path}/none/time.svg")
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    with pytest.raises(OptionError, match=f"{folder} is a folder"):
        bench("no-model", option, str(folder))


def test_a_read_only_disk_is_refused_before_loading(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder, 2**20):
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(OptionError, match=f"This user cannot write in the folder {folder}"):
            bench("no-model", "--trace", str(folder / "time.json"))


def test_the_split_that_exists_is_taken(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", shards=2)
    split(folder, "4bit")
    before = names_in(folder)
    assert record(str(folder), *SHORT)["compression"] == "4bit"
    assert names_in(folder) == before
    assert record(str(folder), *SHORT, "--compression", "none", "--no-split")["compression"] is None
