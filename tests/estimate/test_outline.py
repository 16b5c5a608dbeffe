"""Models of which an outline is known: the tensors are the published ones, and the estimates are those of a plan."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import CpuDevice, Device
from rabbitllm.engine.load_plan import make_load_plan
from rabbitllm.engine.skeleton import model_class
from rabbitllm.estimate.machine import Machine
from rabbitllm.estimate.outline import Outline, Published, outline_of, published
from rabbitllm.estimate.predict import predict_outline, stretched
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.splitter.plan import PlannedFiles
from tests.estimate.test_predict import known_rates, machine_of, predict  # noqa: F401  round figures
from tests.splitter.test_plan import planned
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.quick_measuring import quick_measuring  # noqa: F401  another one
from tests.support.tiny_models import one_thread  # noqa: F401  one more
from tools.outlined_model import entry_of, tensors_in

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v3"]
FURTHER_HEADS = ("num_nextn_predict", "mtp_num_hidden")
DECODER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)")
LAYERS = 4
MANY = {"num_hidden_layers": LAYERS}


def tiny(folder: Path, family: str, **settings: Any) -> tuple[Path, Outline]:
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "gpt_oss" else {}
    built = build_checkpoint(folder / family, family, dtype=torch.bfloat16, **MANY, **types, **settings)
    return built, outline_of(entry_of(json.loads((built / "config.json").read_text()), tensors_in(built)))


def times_of(outline: Outline, name: str) -> int:
    """How often the whole model has a tensor of the sample, by its name."""
    match = DECODER.match(name)
    return outline.times(f"layers.{match[1]}") if match else 1


def all_of(outline: Outline) -> Counter[tuple[str, tuple[int, ...], str]]:
    """The tensors of the whole model, without the numbers of layers."""
    counts: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    for tensor in outline.stored:
        name = DECODER.sub("", tensor.name)
        counts[name, tensor.shape, tensor.dtype] += times_of(outline, tensor.name)
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_an_outline_has_each_kind_of_layer_once_and_all_tensors(tmp_path: Path, family: str) -> None:
    folder, outline = tiny(tmp_path, family)
    saved: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    for tensor in read_header(folder / "model.safetensors").tensors:
        saved[DECODER.sub("", tensor.name), tensor.shape, tensor.dtype] += 1
    assert all_of(outline) == saved
    assert len(outline.layers) == LAYERS
    assert outline.sample["num_hidden_layers"] == len(set(outline.layers)) < LAYERS


@pytest.mark.parametrize("compression", [None, "8bit", "4bit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_files_have_the_planned_sizes(tmp_path: Path, family: str, compression: str | None) -> None:
    folder, outline = tiny(tmp_path, family)
    files = planned(folder, compression)
    stored = sum(tensor.nbytes for tensor in files.tensors.values())
    # bytes that belong to no tensor: a header a file, and the rest of its last block
    more = outline.output_bytes(compression) - stored
    assert 0 < more < 3 * 4096 * (LAYERS + 3) + 400 * len(files.tensors)
    assert outline.checkpoint_bytes == sum(
        tensor.nbytes for tensor in read_header(folder / "model.safetensors").tensors
    )


@pytest.mark.usefixtures("known_rates")
@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("room", [0, 400_000, 1 << 34])
def test_an_outline_has_the_estimate_of_its_model(
    tmp_path: Path, room: int, family: str, compression: str | None
) -> None:
    folder, outline = tiny(tmp_path, family)
    machine = machine_of(folder, RunOptions(device="cpu", max_memory={"cpu": room}))
    of_model = predict(compression, planned(folder, compression), folder, machine)
    (tmp_path / "work").mkdir()
    plan, of_outline = predict_outline(outline, compression, folder, machine, tmp_path / "work")
    real = make_load_plan(planned(folder, compression), machine.options, folder, machine.devices).placement
    assert plan.placement == real
    for name in ("placed", "experts", "read_bytes"):
        assert getattr(of_outline, name) == getattr(of_model, name)
    assert of_outline.token_seconds == pytest.approx(of_model.token_seconds, rel=5e-3)
    assert of_outline.first_token_seconds is None


def test_two_gpus_get_the_units_of_the_plan(tmp_path: Path) -> None:
    folder, outline = tiny(tmp_path, "qwen3_moe")
    gpus: list[Device] = [FakeGpu(0), FakeGpu(1)]
    options = RunOptions(max_memory={**{gpu.name: 200_000 for gpu in gpus}, "cpu": 300_000})
    machine = machine_of(folder, options, *gpus)
    (tmp_path / "work").mkdir()
    drawn, _ = predict_outline(outline, None, folder, machine, tmp_path / "work")
    assert drawn.placement == make_load_plan(planned(folder, None), machine.options, folder, gpus).placement
    assert {placed.device for placed in drawn.placement.units} == {"fake:0", "fake:1"}


@pytest.mark.parametrize("model", published(), ids=lambda model: model.repository)
def test_published_figures_are_those_of_the_model_class(model: Published) -> None:
    """Every parameter, and every buffer that is saved, in a model of that config on the meta device.

    Of the heads that predict further tokens some checkpoints have tensors, and the class has none.
    """
    plain = {key: value for key, value in model.outline.config.items() if key != "quantization_config"}
    config = transformers.AutoConfig.for_model(**copy.deepcopy(plain))
    with torch.device("meta"):
        skeleton = model_class(config)(config)
    parameters = {id(tensor): tensor for tensor in skeleton.parameters()}.values()
    saved = skeleton.state_dict().keys()
    buffers = sum(tensor.numel() for name, tensor in skeleton.named_buffers() if name in saved)
    assert sum(tensor.numel() for tensor in parameters) + buffers == model.parameters
    further = re.compile(rf"(model\.(language_model\.)?layers\.{len(model.outline.layers)}|mtp)\.")
    used = [tensor for tensor in model.outline.stored if not further.match(tensor.name)]
    elements = sum(math.prod(tensor.shape) * times_of(model.outline, tensor.name) for tensor in used)
    assert model.quantized or elements == model.parameters
    assert len(model.outline.layers) == config.get_text_config().num_hidden_layers
    assert 0 < model.largest_shard_bytes <= model.outline.checkpoint_bytes * 1.01


@pytest.mark.parametrize("model", published(), ids=lambda model: model.repository)
def test_the_engine_takes_the_sample_of_a_published_model(tmp_path: Path, model: Published) -> None:
    """Quantized as it is published: nothing is missing, and nothing left over but a layer that is known for that."""
    if model.quantized == "compressed-tensors" and find_spec("compressed_tensors") is None:
        pytest.skip("compressed-tensors is not installed")
    (tmp_path / "config.json").write_text(json.dumps(model.outline.sample))
    files = PlannedFiles(model.outline.plans[None], tmp_path / "split")
    drawn = make_load_plan(files, RunOptions(device="cpu", max_memory={"cpu": 1 << 45}), tmp_path, [CpuDevice()])
    layers = len(model.outline.layers)
    unused = [name for name in drawn.weights.unused if not name.endswith("activation_scale")]
    assert all(f".layers.{layers}." in name or name.startswith("mtp.") for name in unused)
    text = model.outline.config.get("text_config", model.outline.config)
    assert bool(unused) == any(text.get(f"{key}_layers") for key in FURTHER_HEADS)


def test_published_sizes() -> None:
    """Of whole repositories, as their listings and indexes say."""
    sizes = {model.repository: model.outline.checkpoint_bytes for model in published()}
    assert sizes["Qwen/Qwen2.5-72B-Instruct"] == 145_412_407_296
    assert sizes["Qwen/Qwen3-Coder-Next"] == 159_348_782_592
    assert sizes["deepseek-ai/DeepSeek-V3"] == pytest.approx(688_586_727_753, rel=1e-4)
    assert sizes["Qwen/Qwen3.6-35B-A3B"] == 71_903_645_408
    assert sizes["google/gemma-4-31B-it"] == 62_546_177_752
    assert sizes["zai-org/GLM-5.1"] == 1_507_728_316_928
    assert sizes["deepseek-ai/DeepSeek-V4-Flash"] == 159_609_485_896
    assert sizes["Qwen/Qwen3.8-Flash-Next"] == 359_999_963_128
    assert sizes["google/gemma-4-26B-A4B-it"] == 51_611_872_412
    assert sizes["moonshotai/Kimi-K2.6"] == pytest.approx(595e9, rel=1e-3)  # as the page of its files says
    assert sizes["zai-org/GLM-5.3-Flash"] == pytest.approx(642e9, rel=2e-3)  # as others who converted it say


@pytest.mark.parametrize(
    "model", [model for model in published() if "text_config" in model.outline.config], ids=lambda m: m.repository
)
def test_layers_of_an_encoder_are_not_multiplied(tmp_path: Path, model: Published) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model.outline.sample))
    files = PlannedFiles(model.outline.plans[None], tmp_path / "split")
    machine = Machine([CpuDevice()], RunOptions(device="cpu", max_memory={"cpu": 1 << 45}))
    sample = make_load_plan(files, machine.options, tmp_path, machine.devices)
    plan = stretched(sample, model.outline.layers, machine)
    decoder = [name for name in plan.sources if re.fullmatch(r"model\.language_model\.layers\.\d+", name)]
    assert len(decoder) == len(model.outline.layers)
    outside = [name for name in plan.sources if name not in decoder and ".ngram_embedding" not in name]
    assert outside == [name for name in sample.sources if "language_model.layers." not in name]
