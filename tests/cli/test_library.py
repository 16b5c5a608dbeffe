"""`rabbitllm pull`, `ls`, `show`, `rm` and `verify` on one machine, as a user meets them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.errors import CheckpointNotFoundError, OptionError, SplitError, SplitMismatchError
from rabbitllm.models.convert import convert
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.builders import build_checkpoint, cut, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.quick_measuring import quick_measuring  # noqa: F401  a fixture that applies by itself
from tests.support.splitting import Call, contents, interrupted

REPO = "org/rabbit"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "models" / "hare", "llama", shards=3)


@pytest.fixture
def repository(tmp_path: Path, hub_environment: HubEnvironment) -> Path:
    return build_checkpoint(tmp_path / "hub" / REPO, "llama", shards=3)


def record(*arguments: object, code: int = 0) -> Any:
    return json.loads(invoke(*arguments, "--json", code=code).stdout)


def test_pull_ls_show_verify_rm(repository: Path, hub_environment: HubEnvironment) -> None:
    assert "No model is split here yet" in invoke("ls").stdout
    assert "none; `rabbitllm plan`" in invoke("show", REPO).stdout
    text = invoke("pull", REPO, "--compression", "4bit").stdout
    assert re.search(rf"^{REPO}, 4bit, is ready$", text, re.MULTILINE)
    assert "the downloaded shards are not kept" in text
    assert f'rabbitllm run {REPO} --compression 4bit "What is a rabbit?"' in text
    [entry] = record("ls")
    assert (entry["name"], entry["compression"], entry["state"]) == (REPO, "4bit", "whole")
    assert re.search(rf"^{REPO} +4bit .* complete +[0-9a-f]{{8}} ", invoke("ls").stdout, re.MULTILINE)
    assert "sound: every checksum" in invoke("verify", REPO).stdout
    freed = record("rm", REPO, "--yes")
    assert freed == {"folder": entry["folder"], "freed_bytes": freed["freed_bytes"]}
    assert freed["freed_bytes"] > 0.9 * entry["bytes"]
    assert record("ls") == []


def test_pull_of_a_finished_split(folder: Path) -> None:
    invoke("pull", folder)
    before = contents(folder)
    assert "is ready; it was complete already" in invoke("pull", f"{folder}/splitted_model").stdout
    assert record("pull", folder)["already_whole"] is True
    assert contents(folder) == before


def test_exit_code_of_a_dry_run(folder: Path) -> None:
    before = contents(folder)
    assert "The split fits." in invoke("pull", folder, "--dry-run").stdout
    short = invoke("pull", folder, "--dry-run", "--max-disk", "1kB", code=1)
    assert re.search(
        r"The split does not fit: it needs .* of --max-disk at its peak; 1,000 bytes is allowed by --max-disk 1,000",
        short.stdout,
    )
    assert record("pull", folder, "--dry-run", "--max-disk", "1kB", code=1)["fits"] is False
    assert contents(folder) == before
    invoke("pull", folder)
    assert "Already complete." in invoke("pull", folder, "--dry-run").stdout


def test_progress_of_a_pull_is_not_on_stdout(folder: Path) -> None:
    result = invoke("pull", folder, "--json")
    assert json.loads(result.stdout)["state"] == "whole"
    assert result.stderr.count("split into ") == 1


def test_ls_finds_a_split_inside_a_checkpoint_of_the_working_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("pull", folder)
    for place, count in ((folder.parent, 1), (folder, 1), (folder / "splitted_model", 1), (folder.parent.parent, 0)):
        monkeypatch.chdir(place)
        assert [entry["folder"] for entry in record("ls")] == [str(folder / "splitted_model")] * count
    monkeypatch.chdir(folder.parent)
    assert len(record("ls", ".", folder)) == 1  # not twice
    invoke("rm", "hare", "--yes")
    assert record("ls") == []


@pytest.mark.long
def test_ls_of_folders_with_unfinished_ones(folder: Path) -> None:
    interrupted(Call(str(folder), compression="8bit", sequential=False), 2)
    invoke("pull", folder, "--compression", "4bit")
    text = invoke("ls", folder.parent).stdout
    assert re.search(r"^hare +8bit +\S+ \S+ +\d+ of \d+ +unfinished", text, re.MULTILINE)
    assert f"hare: 2 of 3 shards used, 1 to go; to resume: rabbitllm pull {folder} --compression 8bit" in text
    assert "2 in all" in text
    assert [entry["shards_used"] for entry in record("ls", folder.parent, folder)] == [2, 3]
    invoke("pull", folder, "--compression", "8bit")
    assert {entry["state"] for entry in record("ls", folder)} == {"whole"}


def test_show_of_a_repository_before_and_after(
    repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    before = record("show", REPO)
    assert before["config"]["architecture"] == "LlamaForCausalLM"
    assert before["splits"] == []
    invoke("pull", REPO, "--compression", "8bit")
    local_hub.stop()  # what is split is shown without asking anybody
    after = record("show", REPO)
    assert after["parameters"] == before["parameters"]
    assert after["config"] == before["config"]
    [entry] = after["splits"]
    assert (entry["state"], entry["original_there"]) == ("whole", True)
    assert "on the hub" in entry["original"]
    text = invoke("show", REPO).stdout
    for fact in ("architecture", "layers", "context", "vocabulary", "parameters", "split", "folder", "made from"):
        assert re.search(rf"^{fact} +\S", text, re.MULTILINE), fact


def test_show_reports_whether_the_original_exists(folder: Path) -> None:
    invoke("pull", folder, "--sequential")
    [entry] = record("show", folder)["splits"]
    assert entry["original_there"] is False
    assert "3 of its 3 shards not in" in entry["original"]


def test_show_tells_copies_from_layer_files(folder: Path) -> None:
    def fact(name: str) -> list[str]:
        return re.findall(rf"^{name} +(\S.*)$", invoke("show", folder).stdout, re.MULTILINE)

    invoke("pull", folder)
    before = fact("layer files")
    assert (len(before), fact("copies")) == (1, [])
    copies = folder / "splitted_model" / "copies"
    copies.mkdir()
    (copies / "layers.0.Q4_K.safetensors").write_bytes(b"1" * (1 << 20))
    assert fact("layer files") == before
    assert re.fullmatch(r"1\.05 MB, for --draft self", *fact("copies"))


def test_rm_lists_files_and_asks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("pull", folder)
    with pytest.raises(OptionError, match="no terminal"):
        invoke("rm", folder)
    monkeypatch.setattr("rabbitllm.cli._splits.has_terminal", lambda: True)
    refused = invoke("rm", folder, typed="n\n", code=1)
    assert "Nothing was removed." in refused.stderr
    assert (folder / "splitted_model").exists()
    agreed = invoke("rm", folder, typed="y\n")
    assert re.search(r"frees +[\d.,]+ \w+ in \d+ files", agreed.stderr)
    assert f"original      stays: in {folder}" in agreed.stderr
    assert re.search(rf"Removed {folder}/splitted_model: [\d.,]+ \w+ freed\.\n$", agreed.stdout)
    assert not (folder / "splitted_model").exists()


def test_rm_of_the_only_copy_needs_an_option(folder: Path) -> None:
    invoke("pull", folder, "--sequential")
    before = contents(folder)
    with pytest.raises(SplitError, match="may be the only copy"):
        invoke("rm", folder, "--yes")
    assert contents(folder) == before
    invoke("rm", folder, "--yes", "--only-copy")
    assert not (folder / "splitted_model").exists()


def test_rm_of_one_of_several(folder: Path) -> None:
    for compression in ("8bit", "4bit"):
        invoke("pull", folder, "--compression", compression)
    for command in (["rm", "--yes"], ["verify"]):
        with pytest.raises(OptionError, match="has 2 split directories"):
            invoke(command[0], folder, *command[1:])
    invoke("verify", folder, "--compression", "8bit")
    invoke("rm", folder, "--compression", "8bit", "--yes")
    assert [entry["compression"] for entry in record("ls", folder)] == ["4bit"]


def test_rm_of_a_link_and_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    invoke("pull", folder)
    link = tmp_path / "link"
    link.symlink_to(folder / "splitted_model")
    with pytest.raises(SplitError, match="is a link to"):
        invoke("rm", link, "--yes")
    other = write_shards(tmp_path / "other", cut(llama_tensors(), 2))
    with pytest.raises(CheckpointNotFoundError, match="no known split of"):
        invoke("rm", other, "--yes")
    assert (folder / "splitted_model" / "split.json").exists()


def test_rm_by_a_link_to_the_checkpoint_and_of_the_working_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    invoke("pull", folder)
    invoke("rm", f"{link}/", "--yes")
    assert contents(folder) == before
    invoke("pull", folder)
    monkeypatch.chdir(folder / "splitted_model")
    for name in (".", "../splitted_model/../splitted_model", f"{folder}/splitted_model/."):
        assert record("show", name)["splits"][0]["original_there"]
    invoke("rm", ".", "--yes")
    assert contents(folder) == before


def test_verify_of_rabbitllm_1_1_says_what_it_cannot_tell(tmp_path: Path) -> None:
    """Its folders have no list of tensors; this one lacks three."""
    golden = Path(__file__).parents[1] / "golden" / "rabbitllm-1.1.0-none-UNSOUND-3-tensors-missing"
    home = shutil.copytree(golden, tmp_path / "home")
    text = invoke("verify", home / "splitted_model").stdout
    assert "a load tells whether a tensor of the model is missing" in text


def test_layers_on_another_disk_by_a_link(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    disk = tmp_path / "disk"
    disk.mkdir()
    (folder / "splitted_model").symlink_to(disk)
    assert "is ready" in invoke("pull", folder).stdout
    invoke("verify", folder)
    with pytest.raises(SplitError, match="is a link to"):
        invoke("rm", folder, "--yes")
    assert (disk / "split.json").exists()
    assert contents(folder) == before


def test_the_commands_that_ls_proposes_can_be_copied(folder: Path, tmp_path: Path) -> None:
    spaced = folder.rename(tmp_path / "a hare")
    invoke("pull", spaced)
    (spaced / "splitted_model" / "lm_head.safetensors").unlink()
    assert f"see `rabbitllm verify '{spaced}/splitted_model'`" in invoke("ls", spaced).stdout

    def stop(step: Step) -> None:
        if step.kind == "unlink" and step.path.parent == spaced:
            raise KeyboardInterrupt

    with observe_steps(stop), pytest.raises(KeyboardInterrupt):
        convert(spaced, tmp_path / "out", sequential=True)
    command = f"rabbitllm convert 'PATH/TO/a hare' -o {tmp_path}/out --outtype auto"
    assert f"to resume: {command}\n" in invoke("ls", tmp_path / "out").stdout


def test_the_command_that_resumes_a_split_in_another_folder(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(Call(str(folder), str(out), compression="8bit", sequential=False), 2)
    assert f"to resume: rabbitllm pull PATH/TO/hare --compression 8bit --dir {out}\n" in invoke("ls", out).stdout
    invoke("pull", folder, "--compression", "8bit", "--dir", out)
    assert record("ls", out)[0]["state"] == "whole"


def test_rm_of_a_missing_file_is_refused(folder: Path) -> None:
    invoke("pull", folder)
    before = contents(folder)
    for command in (["rm", "--yes"], ["verify"]):
        with pytest.raises(CheckpointNotFoundError, match=r"There is no folder .*, and it is not a repository id"):
            invoke(command[0], folder / "other.safetensors", *command[1:])
    assert contents(folder) == before


def test_unknown_models_are_refused(hub_environment: HubEnvironment, repository: Path) -> None:
    invoke("pull", REPO)
    for command in ("rm", "verify"):
        with pytest.raises(CheckpointNotFoundError, match=f"Did you mean {REPO}"):
            invoke(command, "org/rabit")
    for command in ("pull", "show", "plan", "inspect"):
        with pytest.raises(CheckpointNotFoundError, match=f"Did you mean {REPO}"):
            invoke(command, "org/rabit")


def test_picture_of_the_disk_needs_a_split(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "disk.svg"
    invoke("pull", folder, "--plot", picture)
    assert "complete" in invoke("show", folder).stdout
    assert "MB on the disk" in picture.read_text()
    picture.unlink()
    invoke("pull", folder, "--plot", picture)
    assert not picture.exists()


def test_the_split_of_another_model_in_a_folder_is_left_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    other = build_checkpoint(tmp_path / "models" / "fox", "llama", shards=3, seed=1)
    invoke("pull", folder, "--sequential", "--dir", out)
    before = contents(out)
    for words in (("rm", other, "--yes", "--only-copy"), ("verify", other), ("verify", other, "--repair")):
        with pytest.raises(SplitMismatchError, match=r"was split from hare; requested was .*fox"):
            invoke(*words, "--dir", out)
    assert record("show", other, "--dir", out)["splits"] == []
    assert contents(out) == before
    invoke("rm", folder, "--yes", "--only-copy", "--dir", out)
    assert not out.joinpath("splitted_model").exists()
