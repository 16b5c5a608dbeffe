"""The rehearsal's parts against known bytes and the real clients, and all of it on a tiny model."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from benchmarks.lib import generated
from benchmarks.lib.generated import Content, digests
from benchmarks.lib.models import MODELS, QWEN3_8_FLASH_NEXT, qwen4_exp
from benchmarks.lib.published import Checkpoint, Model, checkpoint, max_disk
from benchmarks.split import kaggle as kaggle_72b
from benchmarks.split import rehearsal, spot_check
from benchmarks.split.hub import GeneratedHub, HubProcess, Sent, files_of
from benchmarks.split.rehearsal import Sample, SeriesSampler, thinned
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.schemes import is_compressible
from tests.support.hub_fixtures import HubEnvironment, _forget_connections_and_listings, point_at
from tests.support.splitting import split

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc")

BIG, TINY = MODELS["qwen2.5-72b"], MODELS["tiny"]
CODER, TINY_MOE = MODELS["coder-next"], MODELS["tiny-moe"]


@pytest.fixture(scope="module")
def content() -> Content:
    return Content()


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return checkpoint(TINY, 1)


def whole(content: Content, made: Checkpoint, number: int) -> bytes:
    shard = made.shards[number]
    return b"".join(content.of_file(shard, 0, shard.size))


def test_the_published_checkpoint() -> None:
    made = checkpoint(BIG, 1)
    index = made.index()
    assert len(made.shards) == 37
    assert index["metadata"] == {"total_size": 145_412_407_296}  # as the published index says
    assert len(index["weight_map"]) == 963
    assert index["weight_map"]["model.embed_tokens.weight"] == "model-00001-of-00037.safetensors"
    assert index["weight_map"]["lm_head.weight"] == "model-00037-of-00037.safetensors"
    assert max(shard.size for shard in made.shards) < 4 * 1000**3 + 100_000
    assert max_disk(BIG, made) == 45 << 30


@pytest.mark.long
def test_the_published_checkpoint_of_experts() -> None:
    """Sizes and digests as the repository of Qwen3-Coder-Next on the hub has them."""
    made = checkpoint(CODER, 1)
    index = made.index()
    assert len(made.shards) == 40
    assert index["metadata"] == {"total_size": 159_348_782_592}
    assert len(index["weight_map"]) == 74_391
    assert sum(".experts." in name for name in index["weight_map"]) == 48 * 512 * 3
    assert made.shards[0].size == 3_999_619_288
    assert made.nbytes == 159_358_031_480
    assert {index["weight_map"][name] for name in ("lm_head.weight", "model.norm.weight")} == {made.shards[-1].name}
    assert max_disk(CODER, made) == CODER.max_disk
    published = {
        "config.json": (1178, "a7b8098d3b05777f12bb5677a26bf1240a1bb09def1b06b29e6be86cae2e84f8"),
        "generation_config.json": (214, "37a3c1ef63516ca489c575f0db1c0405ddc0c3dbaca9ed987344c966c37aeef5"),
    }
    files = files_of(made, Content(), dict.fromkeys((shard.name for shard in made.shards), ""))
    assert {name: (files[name].size, files[name].sha256) for name in published} == published
    assert files["model.safetensors.index.json"].size == 6_759_619


@pytest.mark.parametrize("model", [CODER, TINY_MOE], ids=["published", "tiny"])
def test_names_and_shapes_of_experts_are_those_that_transformers_saves(model: Model) -> None:
    """Few experts and both kinds of layers; the modules have their experts fused, what is saved has not."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = {**model.config, "num_experts": 3, "num_hidden_layers": 4}
    with torch.device("meta"):
        real = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**config))
    saved = revert_weight_conversion(real, real.state_dict())
    ours = {tensor.name: tensor.shape for tensor in model.tensors(config)}
    assert ours == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert len(ours) == 3 * (7 + 16) + 6 + 16 + 3


def test_names_and_shapes_with_n_grams_are_those_that_transformers_saves() -> None:
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = {**QWEN3_8_FLASH_NEXT, "num_experts": 11, "num_hidden_layers": 4}
    with torch.device("meta"):
        real = transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**config))
    saved = revert_weight_conversion(real, real.state_dict())
    ours = {tensor.name: tensor.shape for tensor in qwen4_exp(config)}
    assert ours == {name: tuple(tensor.shape) for name, tensor in saved.items()}


@pytest.mark.parametrize("model", [BIG, CODER, TINY, TINY_MOE], ids=["72b", "coder-next", "tiny", "tiny-moe"])
def test_what_is_quantized_is_what_the_package_quantizes(model: Model) -> None:
    for tensor in model.tensors({**model.config, "num_hidden_layers": 4}):
        spec = TensorSpec(tensor.name, "BF16", tensor.shape, "shard", 0, tensor.nbytes)
        assert is_compressible(spec) is tensor.is_quantized, tensor


@pytest.mark.parametrize("model", [BIG, TINY], ids=["published", "tiny"])
def test_names_and_shapes_are_those_of_transformers(model: Model) -> None:
    import torch
    import transformers

    made = checkpoint(model, 1 / 80)  # one layer
    config = transformers.Qwen2Config(**made.config)
    with torch.device("meta"):
        real = transformers.Qwen2ForCausalLM(config).state_dict()
    ours = {placed.tensor.name: placed.tensor.shape for shard in made.shards for placed in shard.tensors}
    assert ours == {name: tuple(tensor.shape) for name, tensor in real.items()}


@pytest.mark.parametrize(("model", "scale"), [(BIG, 0.05), (CODER, 4 / 48)], ids=["72b", "coder-next"])
@pytest.mark.long
def test_a_part_has_fewer_layers_and_the_same_shapes(model: Model, scale: float) -> None:
    full, part = checkpoint(model, 1), checkpoint(model, scale)
    assert part.config["num_hidden_layers"] == part.layers == 4
    assert part.shards[0].header == full.shards[0].header
    shapes = {placed.tensor for shard in full.shards for placed in shard.tensors}
    assert {placed.tensor for shard in part.shards for placed in shard.tensors} < shapes
    assert checkpoint(model, 0.001).layers == 1
    left_out = full.nbytes_4bit - part.nbytes_4bit
    assert max_disk(model, part) == model.max_disk - left_out


def test_a_shard_is_a_safetensors_file(content: Content, tiny: Checkpoint, tmp_path: Path) -> None:
    from safetensors import safe_open

    for number, shard in enumerate(tiny.shards):
        path = tmp_path / shard.name
        path.write_bytes(whole(content, tiny, number))
        assert path.stat().st_size == shard.size
        with safe_open(path, framework="pt") as opened:
            assert set(opened.keys()) == {placed.tensor.name for placed in shard.tensors}
            for placed in shard.tensors:
                held = opened.get_tensor(placed.tensor.name)
                assert held.shape == placed.tensor.shape
                assert 0.01 < held.float().std() < 0.03
                expected = content.of_tensor(shard, placed, 3, 5)
                assert struct.pack("<5H", *(held.view(-1)[3:8].view(dtype=_uint16()).tolist())) == expected


def _uint16() -> object:
    import torch

    return torch.uint16


def test_any_range_is_a_part_of_the_whole(content: Content) -> None:
    end = len(content.block)
    wrapped = bytes(content.block[-10:]) + bytes(content.block[:10])
    for position in (end - 10, 3 * end - 10):
        assert b"".join(content.pieces(position, 20)) == wrapped
        assert b"".join(content.pieces(position, 20, most=3)) == wrapped
    assert b"".join(content.pieces(5, 0)) == b""
    shard = checkpoint(TINY, 1).shards[1]
    full = b"".join(content.of_file(shard, 0, shard.size))
    for start, stop in ((0, 8), (5, len(shard.header)), (len(shard.header) - 1, len(shard.header) + 7), (7000, 9001)):
        assert b"".join(content.of_file(shard, start, stop, most=1000)) == full[start:stop]


def test_no_two_tensors_begin_alike(content: Content) -> None:
    places = [
        (shard.position + placed.offset - len(shard.header)) % len(content.block)
        for shard in checkpoint(BIG, 1).shards
        for placed in shard.tensors
    ]
    assert len(set(places)) == len(places)


def test_digests_are_worked_out_once(
    content: Content, tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tmp_path / "digests.json"
    first = digests(tiny, content, known, threads=2)
    expected = {s.name: hashlib.sha256(whole(content, tiny, n)).hexdigest() for n, s in enumerate(tiny.shards)}
    assert first.of == expected
    assert first.hashed == tiny.nbytes
    again = digests(tiny, content, known)
    assert (again.of, again.hashed) == (expected, 0)
    part = checkpoint(TINY, 0.5)
    assert part.shards[0].name != tiny.shards[0].name
    shared = digests(part, content, known)  # its first shard has the bytes of the other's
    assert shared.of[part.shards[0].name] == expected[tiny.shards[0].name]
    assert shared.hashed < part.nbytes - part.shards[0].size + 1
    monkeypatch.setattr(generated, "DIGESTS_FORMAT", generated.DIGESTS_FORMAT + 1)
    assert digests(tiny, content, known).hashed == tiny.nbytes


@pytest.fixture
def hub(content: Content, tiny: Checkpoint, tmp_path: Path) -> Iterator[GeneratedHub]:
    found = digests(tiny, content, tmp_path / "digests.json")
    made = GeneratedHub(tiny, content, found.of)
    with made:
        yield made


@pytest.fixture
def client(hub: GeneratedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubEnvironment]:
    yield point_at(hub.url, tmp_path / "hf-home", monkeypatch)
    _forget_connections_and_listings()


def test_the_real_client_downloads_it(
    hub: GeneratedHub, client: HubEnvironment, content: Content, tiny: Checkpoint
) -> None:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(tiny.model.repository, files_metadata=True)
    assert info.sha == hub.commit(hub.repository)
    assert info.siblings is not None
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings}
    digests_told = {s.rfilename: s.lfs.sha256 for s in info.siblings if s.lfs is not None}
    folder = Path(snapshot_download(tiny.model.repository))
    assert folder.name == info.sha
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == sizes
    for number, shard in enumerate(tiny.shards):
        data = (folder / shard.name).read_bytes()
        assert data == whole(content, tiny, number)
        assert hashlib.sha256(data).hexdigest() == digests_told[shard.name] == (folder / shard.name).resolve().name
    assert json.loads((folder / "config.json").read_text()) == tiny.config


def test_our_own_fetching_and_what_is_counted(
    hub: GeneratedHub, client: HubEnvironment, content: Content, tiny: Checkpoint, tmp_path: Path
) -> None:
    from rabbitllm.checkpoints.hub import HubAccess, HubCheckpoint, open_repository

    repository = open_repository(tiny.model.repository, HubAccess(), tmp_path / "staging")
    opened = HubCheckpoint(repository)
    shard, data = tiny.shards[1], whole(content, tiny, 1)
    metadata = opened.metadata(shard.name)
    assert metadata is not None
    assert [(t.name, t.offset, t.nbytes) for t in metadata.header.tensors] == [
        (placed.tensor.name, placed.offset, placed.tensor.nbytes) for placed in shard.tensors
    ]
    looked_at = quiet(hub)
    assert looked_at.sent == 0
    assert looked_at.probed == 256 << 10
    assert b"".join(map(bytes, opened.stream(shard.name))) == data
    assert quiet(hub) == Sent(shard.size, 0, looked_at.probed)
    part = repository.staged(shard.name)
    part.parent.mkdir()
    part.write_bytes(data[:500_000])
    assert opened.acquire(shard.name).read_bytes() == data
    assert quiet(hub) == Sent(2 * shard.size - 500_000, shard.size - 500_000, looked_at.probed)
    assert quiet(hub).new == shard.size


def quiet(hub: GeneratedHub) -> Sent:
    """The counters once the last answer has been counted, which comes after it has arrived."""
    while hub.sent.open:
        pass
    return hub.sent


def test_a_hub_in_a_process_ends_with_its_context(tiny: Checkpoint, tmp_path: Path) -> None:
    with HubProcess(tiny, 1, tmp_path) as hub:
        connection = http.client.HTTPConnection(urlsplit(hub.url).netloc)
        connection.request("GET", f"/api/models/{tiny.model.repository}")
        assert json.loads(connection.getresponse().read())["sha"] == hub.commit
        assert hub.digests["hashed"] == tiny.nbytes
        assert hub.quiet() == Sent()
    with pytest.raises(ConnectionError):
        http.client.HTTPConnection(urlsplit(hub.url).netloc).connect()
    assert [path.name for path in tmp_path.iterdir()] == ["kaggle-72b-digests.json"]


def test_moments_are_spread_and_repeatable() -> None:
    found = rehearsal.moments(1000, 5, 7)
    assert found == rehearsal.moments(1000, 5, 7) != rehearsal.moments(1000, 5, 8)
    assert [at // 200 for at in found] == [0, 1, 2, 3, 4]
    assert rehearsal.moments(1000, 0, 7) == []


def sample(seconds: float, layers: int, staged: int = 0, other: int = 0) -> Sample:
    return Sample(seconds, layers + staged, other, staged)


def test_what_a_kill_cost_in_time() -> None:
    mib = 1 << 20
    samples = [sample(0, 0), sample(1, 5 * mib), sample(2, 5 * mib, 9 * mib), sample(3, 5 * mib), sample(4, 6 * mib)]
    assert rehearsal._grown_at(samples, 1.5) == 4
    assert rehearsal._grown_at(samples, 4.5) == 4  # never again: the end


def test_samples_of_a_folder_and_a_part_of_it(tmp_path: Path) -> None:
    part = tmp_path / "one" / "part"
    part.mkdir(parents=True)
    (tmp_path / "two").mkdir()
    (part / "file").write_bytes(bytes([1]) * 40960)
    (tmp_path / "two" / "file").write_bytes(bytes([1]) * 8192)
    with SeriesSampler(tmp_path / "one", tmp_path / "two", part) as sampler:
        pass
    assert len(sampler.samples) >= 2  # one at each end, and on a busy machine more in between
    assert {(s.splits, s.home, s.staged, s.anonymous) for s in sampler.samples} == {(40960, 8192, 40960, 0)}


def test_a_thinned_curve_keeps_its_peak() -> None:
    samples = [sample(number, 1000 - abs(number - 77)) for number in range(200)]
    kept = thinned(samples, 10)
    assert len(kept) == 10
    assert max(s.disk for s in kept) == 1000
    assert thinned(samples[:5], 10) == samples[:5]


@pytest.fixture
def layers(content: Content, tiny: Checkpoint, tmp_path: Path) -> Path:
    """Layer files at 4bit, made from a folder."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for number, shard in enumerate(tiny.shards):
        (folder / shard.name).write_bytes(whole(content, tiny, number))
    (folder / "model.safetensors.index.json").write_text(json.dumps(tiny.index()))
    (folder / "config.json").write_text(json.dumps(tiny.config))
    return split(folder, tmp_path / "splits", compression="4bit")


def damage(path: Path, name: str) -> None:
    """Change the last byte of a stored tensor."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        end = 8 + length + json.loads(file.read(length))[name]["data_offsets"][1]
        file.seek(end - 1)
        byte = file.read(1)[0]
        file.seek(end - 1)
        file.write(bytes([byte ^ 1]))


def test_layer_files_compared_with_bitsandbytes(layers: Path, content: Content, tiny: Checkpoint) -> None:
    found = spot_check.check(tiny, content, layers, 0)
    assert found.wrong == ()
    assert found.tensors == 51
    assert found.nbytes > tiny.nbytes / 2
    layer = layers / "model.layers.1.safetensors"
    damage(layer, "model.layers.1.mlp.up_proj.weight")
    damage(layer, "model.layers.1.mlp.gate_proj.weight.4bit.absmax")
    damage(layer, "model.layers.1.mlp.down_proj.weight.4bit.quant_map")
    damage(layer, "model.layers.1.self_attn.k_proj.bias")
    (layers / "model.norm.safetensors").unlink()
    wrong = spot_check.check(tiny, content, layers, 0).wrong
    assert len(wrong) == 5
    for name in ("up_proj.weight", "gate_proj.weight", "down_proj.weight", "k_proj.bias", "model.norm.weight"):
        assert any(name in line for line in wrong), name
    assert spot_check.named(("a",) * 7) == "a; a; a; a; a; and 2 more"


def test_many_small_matrices_are_sampled_more_thinly() -> None:
    assert spot_check.piece_elements(963) == spot_check.piece_elements(1) == (1 << 20) // 2
    assert spot_check.piece_elements(10_000) == (1 << 30) // 10_000 // 2 // 64 * 64
    assert spot_check.piece_elements(74_391) == (16 << 10) // 2


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def parse(*arguments: str) -> SimpleNamespace:
        return kaggle_72b.parse(["--work-dir", str(tmp_path), *arguments])  # type: ignore[return-value]

    tried = parse("--model", "tiny")
    assert tried.results == tmp_path / "results" / "kaggle-tiny"
    assert parse("--scale", "0.0125", "--max-disk", "1GiB").max_disk == 1 << 30
    for wrong, said in (
        (("--modes", "file,carrier-pigeon"), "carrier-pigeon"),
        (("--scale", "0"), "--scale"),
        (("--scale", "2"), "--scale"),
        (("--kills", "-1"), "--kills"),
        (("--rate", "0"), "--rate"),
    ):
        with pytest.raises(SystemExit, match=said):
            parse(*wrong)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50 * 10**9))
    with pytest.raises(SystemExit, match=r"50\.3 GB must be free .*\(48\.3 GB of it for the split\); 50\.0 GB are"):
        parse()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=51 * 10**9))
    assert parse().results.parts[-3:] == ("benchmarks", "results", "kaggle-72b")


@pytest.mark.long
def test_a_split_that_fails_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny", "--modes", "stream", "--max-disk", "1MB", "--work-dir", str(tmp_path)]
    assert kaggle_72b.main(arguments) == 1
    assert "NotEnoughSpaceException" in capsys.readouterr().err
    assert not list(tmp_path.glob("kaggle-tiny-*"))


@pytest.mark.long
def test_a_tiny_rehearsal(tmp_path: Path) -> None:
    """Killed in the middle of the first shard; the long test has kills after some are used up."""
    arguments = ["--model", "tiny", "--modes", "stream", "--kills", "1", "--seed", "1", "--rate", "6"]
    folders = ["--work-dir", str(tmp_path / "w"), "--results", str(tmp_path / "r" / "tiny")]
    assert kaggle_72b.main([*arguments, *folders]) == 0
    found = json.loads((tmp_path / "r" / "tiny-stream.json").read_text())
    assert all(found["checks"].values())
    assert len(found["checks"]) == 4
    (kill,) = found["rehearsal"]["kills"]
    assert kill["planned"] <= kill["sent"] < found["checkpoint"]["bytes"]
    assert 0 < kill["again"] <= kill["sent"]
    assert kill["lost_seconds"] > 0
    assert kill["used_shards"] == 0
    assert found["rehearsal"]["sent"] == found["checkpoint"]["bytes"] + found["rehearsal"]["again"]
    assert found["rehearsal"]["cpu_seconds"] > 0
    assert 0 < found["layer_files"]["bytes"] <= found["peaks"]["split_directory"] <= found["setting"]["max_disk"]
    assert found["peaks"]["fetched_shards"] == 0
    assert 50 << 20 < found["peaks"]["anonymous"] < found["peaks"]["resident"]
    for suffix in (".json", ".md", ".svg"):
        assert str(tmp_path) not in (tmp_path / "r" / f"tiny-stream{suffix}").read_text()
    assert {path.name for path in (tmp_path / "w").iterdir()} == {"kaggle-72b-digests.json"}


@pytest.mark.long
def test_a_tiny_rehearsal_of_experts(tmp_path: Path) -> None:
    """Both kinds of layers, shards as files, to its end and through the model."""
    arguments = ["--model", "tiny-moe", "--modes", "file", "--kills", "0", "--forward"]
    folders = ["--work-dir", str(tmp_path / "w"), "--results", str(tmp_path / "r" / "moe")]
    assert kaggle_72b.main([*arguments, *folders]) == 0
    found = json.loads((tmp_path / "r" / "moe-file.json").read_text())
    assert all(found["checks"].values())
    assert len(found["checks"]) == 5
    assert found["compared"]["tensors"] == 3 * (7 + 7 + 48) + (6 + 7 + 48) + 3


@pytest.mark.long
def test_one_layer_of_the_published_shapes(tmp_path: Path) -> None:
    """7 GB through each mode (and what a kill of a stream costs), below 7 GB of disk."""
    arguments = ["--scale", "0.0125", "--kills", "2", "--max-disk", "6GiB", "--forward"]
    folders = ["--work-dir", str(tmp_path / "w"), "--results", str(tmp_path / "r" / "one")]
    assert kaggle_72b.main([*arguments, *folders]) == 0
    made = {mode: json.loads((tmp_path / "r" / f"one-{mode}.json").read_text()) for mode in ("file", "stream")}
    for mode, found in made.items():
        assert all(found["checks"].values())
        assert found["checkpoint"]["layers"] == 1
        assert found["peaks"]["split_directory"] <= 6 << 30
        assert found["peaks"]["anonymous"] < 1 << 30
        assert (found["peaks"]["fetched_shards"] > 3 * 10**9) is (mode == "file")
        assert [kill["used_shards"] for kill in found["rehearsal"]["kills"]] == [0, 1]
    assert made["file"]["rehearsal"]["again"] < made["stream"]["rehearsal"]["again"]
    assert "yes: the layer files have the checksums of those of 'file'" in made["stream"]["notes"]


@pytest.mark.long
def test_two_layers_of_the_published_experts(tmp_path: Path) -> None:
    """8 GB in 3,103 tensors through each mode, killed twice."""
    arguments = ["--model", "coder-next", "--scale", "0.05", "--kills", "2"]
    folders = ["--work-dir", str(tmp_path / "w"), "--results", str(tmp_path / "r" / "two")]
    assert kaggle_72b.main([*arguments, *folders]) == 0
    made = {mode: json.loads((tmp_path / "r" / f"two-{mode}.json").read_text()) for mode in ("file", "stream")}
    for mode, found in made.items():
        assert all(found["checks"].values())
        assert found["checkpoint"]["layers"] == 2
        assert found["compared"]["tensors"] == 2 * 1550 + 3
        assert found["peaks"]["anonymous"] < 1 << 30
        assert (found["peaks"]["fetched_shards"] > 3 * 10**9) is (mode == "file")
    assert "yes: the layer files have the checksums of those of 'file'" in made["stream"]["notes"]
