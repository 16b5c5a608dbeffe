"""A model made ready: what is on the disk before and after, from folders and from a local hub."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download
from rich.console import Console

from rabbitllm.auto_model import LoadRequest
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import gguf_label
from rabbitllm.errors import IncompleteSplitError, NotEnoughSpaceException, OptionError, UnknownArchitectureError
from rabbitllm.models.library import WHOLE, below
from rabbitllm.models.library_report import put_entries, put_shown
from rabbitllm.models.pull import (
    Pulled,
    Shards,
    dry_run,
    dry_run_record,
    next_command,
    pull,
    pulled_record,
    show_dry_run,
    show_pulled,
)
from rabbitllm.models.show import show
from rabbitllm.store import locations
from tests.support.builders import build_checkpoint
from tests.support.commands import invoke
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.load_requests import asked
from tests.support.local_hub import LocalHub
from tests.support.peak import Peak
from tests.support.splitting import Call, Counter, contents, interrupted, layer_files
from tests.support.ticks import observe_ticks

REPO = "org/rabbit"
SHARDS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "hare", "llama", shards=SHARDS)


@pytest.fixture
def repository(tmp_path: Path, hub_environment: HubEnvironment) -> Path:
    return build_checkpoint(tmp_path / "hub" / REPO, "llama", shards=SHARDS)


def shards_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*-of-*"))


def wished(name: str | Path, **options: Any) -> LoadRequest:
    return asked(name, **{"compression": "4bit", "device": "cpu", **options})


def test_folder_keeps_its_shards(folder: Path) -> None:
    before = contents(folder)
    pulled = pull(wished(folder))
    assert {name: data for name, data in contents(folder).items() if not name.startswith("splitted_model")} == before
    assert (pulled.shards, pulled.shards_at, pulled.before) == (Shards.KEPT, folder, False)
    assert (pulled.entry.state, pulled.entry.folder, pulled.config_folder) == (
        WHOLE,
        folder / "splitted_model.4bit",
        folder / "splitted_model.4bit",
    )
    assert pulled.peak_disk_bytes >= sum(map(len, layer_files(pulled.entry.folder).values())) / 2
    again = pull(wished(folder))
    assert (again.before, again.entry, again.peak_disk_bytes) == (True, pulled.entry, 0)


@pytest.mark.parametrize(
    ("options", "shards"),
    [({"sequential": True}, Shards.DELETED), ({"delete_original": True}, Shards.DELETED)],
)
def test_folder_loses_its_shards_only_on_request(folder: Path, options: dict[str, object], shards: Shards) -> None:
    pulled = pull(wished(folder, **options))
    assert pulled.shards is shards
    assert shards_in(folder) == []


def test_fetched_shards_are_not_kept(repository: Path, hub_environment: HubEnvironment) -> None:
    pulled = pull(wished(REPO))
    assert (pulled.shards, pulled.shards_at) == (Shards.FETCHED, None)
    assert shards_in(hub_environment.home) == []
    assert layer_files(pulled.entry.folder) == layer_files(Call(str(repository), compression="4bit").make())


@pytest.mark.parametrize("keeps", [False, True])
def test_files_that_a_power_cut_left_empty_are_downloaded_again(
    repository: Path, hub_environment: HubEnvironment, keeps: bool
) -> None:
    """huggingface_hub gives a file its name before its bytes are on the disk."""
    if keeps:  # shards too
        wish = wished(REPO, keep_shards=True)
    else:
        wish = wished(REPO)
        hf_hub_download(REPO, "model-00002-of-00004.safetensors")
    folder = pull(wish).entry.folder
    whole = contents(folder)
    blobs = [path for path in hub_environment.cache.rglob("blobs/*") if path.is_file()]
    assert len(blobs) >= 5 + keeps * SHARDS
    for number, blob in enumerate(sorted(blobs)):
        os.truncate(blob, blob.stat().st_size // 2 * (number % 2))
    shutil.rmtree(folder)
    assert contents(pull(wish).entry.folder) == whole


def test_cached_shards_are_kept(repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    names = shards_in(repository)
    cached = names[1]
    path = Path(hf_hub_download(REPO, cached))
    data = path.read_bytes()
    before = local_hub.downloads(cached)
    pulled = pull(wished(REPO))
    assert local_hub.downloads(cached) == before
    assert path.read_bytes() == data
    assert shards_in(hub_environment.home) == [cached]
    assert (pulled.shards, pulled.shards_at) == (Shards.PARTLY, path.parent)


def test_peak_is_that_of_one_shard_at_a_time(repository: Path, hub_environment: HubEnvironment) -> None:
    wish = wished(REPO, shard_transfer="file")
    told = dry_run(wish)
    assert told.route is not None
    peak = Peak(hub_environment.home)
    with observe_ticks(Counter(peak.look)):
        pulled = pull(wish)
    assert peak.most <= told.route.disk_bytes
    checkpoint = sum((repository / name).stat().st_size for name in shards_in(repository))
    assert peak.most < pulled.entry.nbytes + checkpoint


def test_shards_are_kept_on_request(repository: Path, hub_environment: HubEnvironment) -> None:
    pulled = pull(wished(REPO, keep_shards=True))
    assert pulled.shards is Shards.KEPT
    assert pulled.shards_at is not None
    assert shards_in(pulled.shards_at) == shards_in(repository)


def test_cache_loses_shards_only_on_request(repository: Path, hub_environment: HubEnvironment) -> None:
    cached = shards_in(repository)[0]
    hf_hub_download(REPO, cached)
    assert pull(wished(REPO, sequential=True)).shards is Shards.FETCHED
    assert shards_in(hub_environment.home) == []


def test_interrupted_pull_is_resumed(repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    first = shards_in(repository)[0]
    split_folder = interrupted(Call(REPO, compression="4bit"), 2)
    outcome = dry_run(wished(REPO))
    assert (outcome.estimate.state, outcome.estimate.shards_used, outcome.fits) == ("unfinished", 2, True)
    fetched = local_hub.downloads(first)
    assert pull(wished(REPO)).entry.folder == split_folder
    assert local_hub.downloads(first) == fetched


def test_pull_of_a_split_directory(folder: Path) -> None:
    split_folder = pull(wished(folder)).entry.folder
    pulled = pull(wished(split_folder, compression=None))
    assert (pulled.before, pulled.shards, pulled.entry.folder) == (True, None, split_folder)


def test_damaged_split_is_not_ready(folder: Path) -> None:
    pulled = pull(asked(folder))
    (pulled.entry.folder / "lm_head.safetensors").unlink()
    with pytest.raises(IncompleteSplitError, match=r"is damaged: lm_head\.safetensors is missing") as error:
        pull(asked(folder))
    assert "--repair" in error.value.remedy


def test_unknown_model_is_refused_before_the_split(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    with pytest.raises(UnknownArchitectureError):
        pull(wished(folder))
    assert not (folder / "splitted_model.4bit").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequential": True, "keep_shards": True}, "keep_shards"),
        ({"compression": "3bit"}, "does not exist"),
        ({"max_disk": "much"}, "is not a size"),
        ({"shard_transfer": "pigeon"}, "does not exist"),
        ({"shard_transfer": "stream", "keep_shards": True}, "shard_transfer='stream'"),
        ({"max_memory": {"gpu": 1}}, "names the device"),
    ],
)
def test_contradicting_options(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        pull(wished(folder, **options))


# Told beforehand


@pytest.mark.parametrize("options", [{}, {"sequential": True}])
def test_dry_run_agrees_with_the_split(folder: Path, options: dict[str, object]) -> None:
    before = contents(folder)
    outcome = dry_run(wished(folder, **options))
    assert outcome.fits
    assert outcome.route is not None
    need = outcome.route.created_bytes
    short = dry_run(wished(folder, max_disk=need - 1, **options))
    assert contents(folder) == before
    assert not short.fits
    assert dry_run_record(short)["lacking"]["need_bytes"] == need
    with pytest.raises(NotEnoughSpaceException):
        pull(wished(folder, max_disk=need - 1, **options))
    pulled = pull(wished(folder, max_disk=need, **options))
    assert dry_run(wished(folder, **options)).fits
    assert pulled.entry.state == WHOLE


@pytest.mark.parametrize(
    ("options", "routes"),
    [
        ({}, {"sequential_ahead", "sequential_file", "sequential_stream"}),
        ({"shard_transfer": "stream"}, {"sequential_stream"}),
        ({"shard_transfer": "file"}, {"sequential_ahead", "sequential_file"}),
        ({"sequential": True}, {"sequential_ahead", "sequential_file", "sequential_stream"}),
        ({"keep_shards": True}, {"standard"}),
    ],
)
def test_routes_of_a_repository(
    repository: Path, hub_environment: HubEnvironment, options: dict[str, object], routes: set[str]
) -> None:
    assert {route.name for route in dry_run(wished(REPO, **options)).routes} == routes


def test_kept_shards_count_as_disk_use(repository: Path, hub_environment: HubEnvironment) -> None:
    for name in shards_in(repository):
        hf_hub_download(REPO, name)
    keeps, frees = dry_run(wished(REPO)).route, dry_run(wished(REPO, sequential=True)).route
    assert keeps is not None
    assert frees is not None
    assert keeps.disk_bytes > frees.disk_bytes


# What is said


def test_records(folder: Path) -> None:
    record = json.loads(json.dumps(pulled_record(pull(wished(folder)))))
    assert (record["already_whole"], record["original"], record["state"]) == (False, "kept", WHOLE)
    assert record["bytes"] > 0
    assert json.loads(json.dumps(dry_run_record(dry_run(wished(folder)))))["fits"] is True


def test_next_command_names_the_same_split(folder: Path, tmp_path: Path) -> None:
    wish = wished(folder, folder=tmp_path / "my layers", access=HubAccess("v1"))
    pulled: Pulled = pull(wished(folder, folder=tmp_path / "my layers"))
    assert next_command(pulled, wish) == (
        f"rabbitllm run {folder} --compression 4bit --dir '{tmp_path}/my layers' --revision v1 \"What is a rabbit?\""
    )


@pytest.mark.parametrize("is_remote", [False, True])
def test_plan_and_pull_name_a_model_without_a_tokenizer(
    tmp_path: Path, hub_environment: HubEnvironment, *, is_remote: bool
) -> None:
    folder = build_checkpoint(tmp_path / "hub" / REPO, "qwen2", shards=SHARDS, tokenizer=False)
    name = REPO if is_remote else str(folder)
    says = "no tokenizer: only token ids work, no texts; put the model's tokenizer.json"
    for command in ("plan", "pull --dry-run"):
        answer = invoke(*command.split(), name)
        assert says in " ".join(answer.output.split()), command
    pulled = pull(wished(name))
    output = io.StringIO()
    show_pulled(pulled, wished(name), Console(file=output, width=400))
    assert f"{says} and tokenizer_config.json beside its weights in {pulled.entry.folder}" in output.getvalue()
    assert "rabbitllm run" not in output.getvalue()
    with pytest.raises(OptionError, match="This model has no tokenizer"):
        invoke("run", name, "a")
    build_checkpoint(tmp_path / "whole", "qwen2")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (pulled.entry.folder / file).write_bytes((tmp_path / "whole" / file).read_bytes())
    invoke("run", name, "a", "--max-new-tokens", "1")


def test_default_folder_is_under_home(repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    entry = pull(wished(REPO)).entry
    commit = local_hub.commit(REPO)
    assert entry.folder == locations.home() / "models--org--rabbit" / commit / "splitted_model.4bit"
    assert (entry.commit, entry.name) == (commit, REPO)


@pytest.mark.parametrize(("name", "number", "label"), [("a-q4_k_m", None, "GGUF Q8_0"), ("b", 15, "GGUF Q4_K_M")])
def test_gguf_file_is_called_by_its_type_and_may_stay_unsplit(
    tmp_path: Path, name: str, number: int | None, label: str
) -> None:
    """Its metadata tell the type; the name of the file does where nothing else is known."""

    def changed(writer: Any) -> None:
        writer.kv_data[0]["general.file_type"].value = number or 7

    file = write_gguf(tmp_path / f"{name}.gguf", changed=changed)
    write_gguf(tmp_path / "other.gguf", seed=1)
    request, printed = wished(file, compression=None), io.StringIO()
    console = Console(file=printed, width=400, highlight=False)
    show_dry_run(dry_run(request), request, console)
    pulled = pull(request)
    show_pulled(pulled, request, console)
    pull(wished(tmp_path / "other.gguf", compression=None))
    put_entries(below(tmp_path), console)
    put_shown(show(str(file)), console)
    text = printed.getvalue()
    assert f"{file}, {label}\n" in text
    assert f"{file}, {label}, is ready\n" in text
    assert text.count(f"rabbitllm run {file} --no-split; it needs no more disk than the GGUF file\n") == 2
    assert re.search(rf"^{file.name} +{label} ", text, re.MULTILINE)
    assert re.search(r"^other\.gguf +GGUF ", text, re.MULTILINE)
    assert label in [one["gguf"] for one in json.loads(invoke("ls", tmp_path, "--json").stdout)]
    assert re.search(rf"^published in +{label}$", text, re.MULTILINE)
    assert "uncompressed" not in text
    invoke("run", file, "--no-split", "--max-new-tokens", "1", "a")


def test_files_tell_the_type_by_their_names() -> None:
    for names, label in (
        (["x/Qwen-UD-Q4_K_XL-00001-of-00002.gguf", "x/Qwen-UD-Q4_K_XL-00002-of-00002.gguf"], "GGUF Q4_K_XL"),
        (["m.iq2_xxs.gguf"], "GGUF IQ2_XXS"),
        (["gpt-oss-20b-mxfp4.gguf"], "GGUF MXFP4"),
        (["m-F16.GGUF"], "GGUF F16"),
        (["qwen2.gguf"], "GGUF"),
        (["sha256-12"], "GGUF"),
        (["model-f16.safetensors"], None),
    ):
        assert gguf_label(names) == label
