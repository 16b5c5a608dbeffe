"""Checkpoints that are published quantized: kept as they are, and bit for bit what transformers computes with them."""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from safetensors.torch import save_file

import rabbitllm
from rabbitllm import AutoModel
from rabbitllm.base.options import RunOptions
from rabbitllm.engine import _published_conversions
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.load_plan import make_load_plan
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.units import UnitSource
from rabbitllm.errors import IncompleteSplitError, MissingPackageError, OptionError
from rabbitllm.quant import _vectors, bfloat_products
from rabbitllm.store.layer_store import LayerStore
from tests.engine.test_fake_gpu import decoding_waits, load_on, run_on
from tests.support import quantized, splitting
from tests.support.builders import SINGLE_NAME, build_checkpoint, read_tensors, reference_logits
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.hybrid_families import HYBRIDS
from tests.support.quick_measuring import quick_measuring  # noqa: F401  a fixture that applies by itself
from tests.support.tiny_models import ALL, INPUT, assert_same, load, run, split, tiers

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
pytestmark = pytest.mark.skipif(VERSION < (5, 21), reason="its quantizers are others")

Build = Callable[[Path], Path]

PUBLISHED: dict[str, Build] = {
    "fp8-llama": lambda folder: quantized.build_fp8(folder, "llama", shards=3),
    "fp8-qwen3_moe": lambda folder: quantized.build_fp8(folder, "qwen3_moe", shards=3, tied=True),
    "fp8-deepseek_v3": lambda folder: quantized.build_fp8(folder, "deepseek_v3", shards=3),
    "fp8-static-mistral": lambda folder: quantized.build_fp8_static(folder, "mistral", shards=3),
    "fp8-static-qwen3_moe": lambda folder: quantized.build_fp8_static(folder, "qwen3_moe", shards=3),
    "fp8-table-qwen4_exp": lambda folder: quantized.build_fp8_table(folder, HYBRIDS["qwen4_exp"], shards=3),
    "mxfp8-qwen2": lambda folder: quantized.build_mxfp8(folder, "qwen2", shards=3),
    "mxfp4-gpt_oss": lambda folder: quantized.build_mxfp4(folder, shards=3),
    "fp4-fp8-deepseek_v4": lambda folder: quantized.build_deepseek_fp4(folder, HYBRIDS["deepseek_v4"], shards=3),
    "4bit-llama-nf4-nested": lambda folder: quantized.build_bitsandbytes(
        folder, "llama", 4, shards=3, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "4bit-qwen3_moe-fp4": lambda folder: quantized.build_bitsandbytes(folder, "qwen3_moe", 4, shards=3),
    "4bit-qwen3-bfloat16-storage": lambda folder: quantized.build_bitsandbytes(
        folder,
        "qwen3",
        4,
        shards=3,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    ),
    "4bit-gpt2": lambda folder: quantized.build_bitsandbytes(folder, "gpt2", 4, shards=2),
    "8bit-llama": lambda folder: quantized.build_bitsandbytes(folder, "llama", 8, shards=3),
    "8bit-qwen2-float16": lambda folder: quantized.build_bitsandbytes(
        folder, "qwen2", 8, shards=2, dtype=torch.float16, llm_int8_threshold=0.0
    ),
}
COMPRESSED = {
    f"{scheme}-{family}": lambda folder, family=family, scheme=scheme: quantized.build_compressed_tensors(
        folder, HYBRIDS[family] if family == "gemma4" else family, scheme, shards=3
    )
    for scheme, family in (
        ("W4A16", "llama"),
        ("W4A16", "qwen3_moe"),
        ("W4A16", "gemma4"),  # its last layers have the keys and values of others
        ("W8A16", "qwen3"),
        ("W8A8", "llama"),
        ("FP8-dynamic", "llama"),
        ("FP8-static", "qwen2"),
        ("NVFP4", "qwen3"),
        ("NVFP4A16", "llama"),
        ("MXFP4A16", "llama"),
        ("MXFP8A16", "llama"),
    )
}
"""Of a package that need not be installed."""
LATER = ("NVFP4A16-llama", "MXFP4A16-llama", "MXFP8A16-llama")
HYBRID = ("fp8-table-qwen4_exp", "fp4-fp8-deepseek_v4")
SHORT = ("fp8-qwen3_moe", "fp8-static-qwen3_moe", *HYBRID, "mxfp4-gpt_oss", "4bit-llama-nf4-nested", "8bit-llama")
"""One of each; the others take the same ways."""
MODELS = [pytest.param(PUBLISHED[n], id=n, marks=() if n in SHORT else pytest.mark.long) for n in PUBLISHED]
FEW = [pytest.param(PUBLISHED[name], id=name) for name in SHORT if name not in HYBRID]


def expected_of(folder: Path) -> Any:
    return reference_logits(folder, INPUT, "auto")  # type: ignore[arg-type]


def take_out(folder: Path, *gone: str, **other: torch.Tensor) -> None:
    """Rewrite a checkpoint of one shard without some tensors, or with others in their place."""
    tensors = {name: tensor for name, tensor in read_tensors(folder).items() if not name.endswith(gone or ("-",))}
    save_file(tensors | other, folder / SINGLE_NAME, metadata={"format": "pt"})


@pytest.mark.parametrize("build", MODELS)
def test_results_equal_transformers(tmp_path: Path, build: Build) -> None:
    folder = build(tmp_path / "model")
    expected = expected_of(folder)
    unsplit = AutoModel.from_pretrained(
        folder, split=False, device="cpu", max_memory={"cpu": 0}, exact=True, show_layer_progress=False
    )
    assert_same(run(unsplit), expected)
    assert not list(folder.glob("splitted*"))

    directory = split(folder)
    resident = load(directory)
    assert resident.placement.is_resident
    assert_same(run(resident), expected)
    streamed = load(directory, 0)
    assert Tier.STREAMED in tiers(streamed).values()
    assert_same(run(streamed), expected)
    half = load(directory, sum(placed.stored for placed in resident.placement.units) // 2)
    assert_same(run(half), expected)


@pytest.mark.parametrize("build", MODELS)
def test_results_with_the_settings_of_commands(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not exact, and with the kernel for bfloat16. Routers may send a position to other experts, so the median counts;
    and nothing is said of weights that are no codes."""
    folder = build(tmp_path / "model")
    expected = expected_of(folder).logits.double()
    monkeypatch.setattr(bfloat_products, "max_rows", lambda: bfloat_products.ALL_ROWS if _vectors.lanes() else 0)
    directory = split(folder)
    with caplog.at_level(logging.WARNING, "bitsandbytes"):
        model = load(directory, exact=False, fast_bfloat16=None)
        off = (run(model).logits.double() - expected).norm(dim=-1)
    assert off.median() < 0.1 * expected.norm(dim=-1).median()
    assert "not initialized" not in caplog.text


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
@pytest.mark.parametrize(
    "build",
    [pytest.param(build, id=name, marks=[pytest.mark.long] * (name in LATER)) for name, build in COMPRESSED.items()],
)
def test_results_equal_transformers_with_compressed_tensors(tmp_path: Path, build: Build) -> None:
    """It decompresses in its first pass, and rounds activations where the scheme says so."""
    folder = build(tmp_path / "model")
    directory = split(folder)
    expected = expected_of(folder)
    assert_same(run(load(directory)), expected)
    assert_same(run(load(directory, 0)), expected)


def test_fp8_experts_in_one_tensor(tmp_path: Path) -> None:
    """transformers drops their scales unless it has a GPU for FP8; the reference is the model that they stand for."""
    folder = quantized.build_fp8_fused(tmp_path / "model", tmp_path / "plain", shards=3)
    expected = expected_of(tmp_path / "plain")
    directory = split(folder)
    for budget in (ALL, 60_000, 0):
        model = load(directory, budget)
        assert_same(run(model), expected)
        assert not model.unused_tensors or all(name.endswith("activation_scale") for name in model.unused_tensors)
    assert {placed.tier for placed in model.placement.experts} == {Tier.ROUTED}


def test_fp8_experts_in_one_tensor_without_scales(tmp_path: Path) -> None:
    folder = quantized.build_fp8_fused(tmp_path / "model", tmp_path / "plain")
    take_out(folder, "layers.1.mlp.experts.down_proj_scale_inv")
    with pytest.raises(IncompleteSplitError, match=r"experts without scales"):
        load(split(folder))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in ("fp8-qwen3_moe", "W4A16-llama")))
        for name in (*PUBLISHED, *COMPRESSED)
        if name.startswith(("fp8", "mxfp", "W", "FP8")) and name != "W4A16-qwen3_moe"
    ],
)
def test_another_dtype_than_the_published_one(tmp_path: Path, name: str) -> None:
    """Also of the tensors that are not quantized. transformers leaves experts of integers in bfloat16."""
    if name in COMPRESSED and find_spec("compressed_tensors") is None:
        pytest.skip("compressed-tensors is not installed")
    if name in PUBLISHED and not name.startswith("mxfp4") and VERSION < (5, 24):
        pytest.skip("transformers itself leaves tensors that are not quantized in bfloat16")
    folder = (PUBLISHED | COMPRESSED)[name](tmp_path / "model")
    directory = split(folder)
    for dtype in (torch.float32, torch.float16):
        expected = reference_logits(folder, INPUT, dtype)
        for budget in (ALL, 0):
            assert_same(run(load(directory, budget, dtype=str(dtype).removeprefix("torch."))), expected)


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
@pytest.mark.parametrize("scheme", ["INT8", "FP8_BLOCK"])
def test_experts_that_transformers_does_not_decompress(tmp_path: Path, scheme: str) -> None:
    """It raises while it loads them. The reference is the model of codes times scales, in the dtype of the scales."""
    folder = quantized.build_compressed_tensors(tmp_path / "model", "qwen3_moe", scheme, shards=3)
    stored = read_tensors(folder)
    plain = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale")}
    for name in [name for name in plain if f"{name}_scale" in stored]:
        codes, scales = plain[name], stored[f"{name}_scale"]
        if scheme == "FP8_BLOCK":
            scales = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
        plain[name] = codes.to(scales.dtype) * scales
    reference = build_checkpoint(tmp_path / "reference", "qwen3_moe", dtype=torch.bfloat16)
    save_file(plain, reference / SINGLE_NAME, metadata={"format": "pt"})
    expected = expected_of(reference)
    directory = splitting.split(folder, sequential=True)
    for budget in (ALL, 60_000, 0):
        assert_same(run(load(directory, budget)), expected)


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
@pytest.mark.parametrize(
    "scheme", ["NVFP4A16", *(pytest.param(s, marks=pytest.mark.long) for s in ("MXFP8A16", "W4A16-asymmetric"))]
)
def test_experts_that_transformers_decompresses_wrongly(tmp_path: Path, scheme: str) -> None:
    """It drops the global scales of NVFP4 experts without an error."""
    built = {"moe_intermediate_size": 64}
    folder = quantized.build_compressed_tensors(tmp_path / "model", "qwen3_moe", scheme, shards=3, **built)
    expected = expected_of(quantized.decompressed(tmp_path / "plain", folder, scheme, "qwen3_moe", **built))
    directory = splitting.split(folder, sequential=True)
    for budget in (ALL, 60_000, 0):
        assert_same(run(load(directory, budget)), expected)


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
def test_several_schemes_in_a_model(tmp_path: Path) -> None:
    folder = quantized.build_mixed(tmp_path / "model", "llama", shards=3, intermediate_size=96)
    expected = expected_of(folder)
    directory = split(folder)
    for budget in (ALL, 0):
        assert_same(run(load(directory, budget)), expected)


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
def test_experts_of_kimi(tmp_path: Path) -> None:
    """transformers cannot load it; the reference is the model of the decompressed matrices."""
    folder = quantized.build_kimi(tmp_path / "model", tmp_path / "plain", shards=3)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "plain", dtype="auto").eval()
    with torch.no_grad():
        expected = plain(INPUT, use_cache=False).logits
    directory = split(folder)
    for budget in (ALL, 60_000, 0):
        model = load(directory, budget)
        assert torch.equal(model(INPUT, use_cache=False).logits, expected)


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_experts_of_which_some_are_not_quantized_are_refused(tmp_path: Path, form: str) -> None:
    """transformers cannot load them, either; what is wrong is said, and not only what a conversion raises."""
    folder, plain = tmp_path / "model", tmp_path / "plain"
    if form == "awq":
        quantized.build_awq(folder, "qwen3_moe", plain)
    else:
        quantized.build_fp8(folder, "qwen3_moe")
    of_expert = "model.layers.1.mlp.experts.0.down_proj."
    stored = {name: tensor for name, tensor in read_tensors(folder).items() if not name.startswith(of_expert)}
    stored[f"{of_expert}weight"] = torch.zeros(64, 80, dtype=torch.float16)
    save_file(stored, folder / SINGLE_NAME, metadata={"format": "pt"})
    others = {"awq": "down_proj.qweight, .*", "fp8": "down_proj.weight, down_proj.weight_scale_inv"}[form]
    message = f"Expert 0 has down_proj.weight; expert 1 has {others}; expected the same of all"
    with pytest.raises(IncompleteSplitError, match=message):
        load(split(folder))


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("layers.1.mlp.experts.2.up_proj.weight_global_scale", "belong to 3 or 4 experts"),
        ("layers.1.mlp.up_proj.weight_global_scale", "missing for .*: weight_global_scale"),
    ],
)
def test_codes_of_nvfp4_without_the_scale_of_their_matrix(tmp_path: Path, gone: str, message: str) -> None:
    family = "qwen3_moe" if "experts" in gone else "llama"
    settings = {"moe_intermediate_size": 64} if "experts" in gone else {"intermediate_size": 96}
    folder = quantized.build_compressed_tensors(tmp_path / "model", family, "NVFP4A16", **settings)
    take_out(folder, gone)
    with pytest.raises(IncompleteSplitError, match=message):
        load(split(folder))


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("layers.1.mlp.up_proj.weight_scale", "missing for .*: weight_scale"),
        ("layers.1.mlp.experts.2.up_proj.weight_scale", "belong to 3 or 4 experts"),
    ],
)
def test_packed_codes_without_a_part(tmp_path: Path, gone: str, message: str) -> None:
    family = "qwen3_moe" if "experts" in gone else "llama"
    folder = quantized.build_compressed_tensors(tmp_path / "model", family, "W4A16")
    take_out(folder, gone)
    with pytest.raises(IncompleteSplitError, match=message):
        load(split(folder))


@pytest.mark.parametrize("build", FEW)
def test_split_has_the_published_bytes(tmp_path: Path, build: Build) -> None:
    """Every tensor in its own dtype, a layer's codes and scales in one file; the same bytes on either route."""
    folder, other = build(tmp_path / "model"), build(tmp_path / "other")
    published = read_tensors(folder)
    directory = splitting.split(folder, sequential=False)
    store = LayerStore(directory)
    assert store.tensors.keys() == published.keys()
    for name, tensor in published.items():
        (part,) = store.tensors[name].parts
        stored = store.mapped(part.file).tensor(part)
        assert stored.dtype == tensor.dtype
        assert torch.equal(stored.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
    layers = {name: ".".join(name.split(".")[:3]) for name in published if ".layers." in name}
    assert all(store.tensors[name].parts[0].file == f"{layer}.safetensors" for name, layer in layers.items())
    in_order = splitting.split(other, sequential=True)
    assert not list(other.glob("*.safetensors"))
    assert splitting.layer_files(in_order) == splitting.layer_files(directory)


@pytest.mark.parametrize("build", FEW)
def test_device_with_its_own_memory(tmp_path: Path, build: Build) -> None:
    folder = build(tmp_path / "model")
    expected = expected_of(folder)
    assert_same(run_on([FakeGpu(0), FakeGpu(1)], split(folder), 40_000), expected)


DEQUANTIZING: dict[str, Build] = {
    **{name: build for name, build in {**PUBLISHED, **COMPRESSED}.items() if "bit-" not in name and name not in HYBRID},
    "awq": lambda folder: quantized.build_awq(folder, "llama", folder.parent / "plain"),
    "gptq": lambda folder: quantized.build_gptq(folder, "qwen3", folder.parent / "plain"),
    "modelopt-nvfp4": lambda folder: quantized.build_modelopt(folder, "llama", "NVFP4", folder.parent / "plain"),
    "modelopt-fp8": lambda folder: quantized.build_modelopt(folder, "llama", "FP8_PB_WO", folder.parent / "plain"),
}
"""All of which a device makes plain matrices."""


@pytest.mark.parametrize("name", DEQUANTIZING)
def test_device_dequantizes_some_rows_at_a_time(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits, and no more memory than was planned: of a large model each matrix is gigabytes in float32."""
    if name in COMPRESSED:
        pytest.importorskip("compressed_tensors")
    directory = split(DEQUANTIZING[name](tmp_path / "model"))
    expected, gpu = run_on([FakeGpu(0)], directory), FakeGpu(0, capacity=ALL)
    bind, bound = UnitSource.bind, list[int]()

    def measured(source: UnitSource, *args: Any) -> Any:
        gpu.peak = before = gpu.used
        result = bind(source, *args)
        assert gpu.peak - before <= source.scratch_bytes + 128  # numbers that are copied to suit kernels of the CPU
        bound.append(source.scratch_bytes)
        return result

    monkeypatch.setattr(UnitSource, "bind", measured)
    monkeypatch.setattr(_published_conversions, "AT_ONCE", 1 << 10)
    with watched(), torch.inference_mode():  # a pass is enough: each takes thousands of steps
        model = load_on([gpu], directory)
        logits = model(INPUT.to(model.device)).logits
    assert torch.equal(logits.cpu(), expected.logits.cpu())
    assert max(bound) > 24 << 10 or name == "mxfp4-gpt_oss"  # of a run, besides the matrices; only experts are codes


@pytest.mark.parametrize("name", ["awq", "modelopt-nvfp4", "mxfp4-gpt_oss", "fp8-qwen3_moe"])
def test_host_does_not_wait_for_each_matrix(tmp_path: Path, name: str) -> None:
    directory, gpu = split(DEQUANTIZING[name](tmp_path / "model")), FakeGpu(0)
    with watched():
        model = load_on([gpu], directory)
        waits = decoding_waits(model, gpu)
    mixtures = model.config.num_hidden_layers if name.endswith(("moe", "oss")) else 0
    assert waits - Counter({"_local_scalar_dense": 1}) == {  # of logits in float16
        "a copy to the host": 1 + mixtures,
        "a copy from ordinary memory": 1,  # of the row of the token
    }


@pytest.mark.parametrize("name", ["4bit-llama-nf4-nested", "8bit-llama"])
def test_resident_codes_are_used_in_place(tmp_path: Path, name: str) -> None:
    folder = PUBLISHED[name](tmp_path / "model")
    model = load(split(folder))
    store = LayerStore(split(folder))
    projection = model.model.layers[1].mlp.up_proj
    stored = store.tensors["model.layers.1.mlp.up_proj.weight"]
    run(model)
    assert type(projection).__name__ in ("Linear4bit", "Linear8bitLt")
    assert projection.weight.data.nbytes == stored.nbytes
    assert sum(placed.stored for placed in model.placement.units) == sum(t.nbytes for t in store.tensors.values())


@pytest.mark.parametrize("name", ["4bit-llama-nf4-nested", "8bit-llama"])
def test_streamed_codes_are_freed(tmp_path: Path, name: str) -> None:
    """bitsandbytes' modules keep the scales, and at 8bit the codes, of the last forward in a state of their own."""
    model = load(split(PUBLISHED[name](tmp_path / "model")), 0)
    run(model)
    for module in model.model.layers[1].modules():
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            held = [value for value in gc.get_referents(module.__dict__) if isinstance(value, torch.Tensor)]
            state = getattr(module, "state", None)
            assert not held
            assert getattr(module, "quant_state", None) is None
            assert state is None or (state.CB is None and state.SCB is None)


@pytest.mark.parametrize("bits", [4, 8])
def test_threads_may_be_in_a_module_at_once(tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a product of a thread is computed, another thread calls the same module, and is done first."""
    model = load(split(quantized.build_bitsandbytes(tmp_path / "model", "llama", bits)))
    module, x = model.model.layers[0].mlp.up_proj, torch.rand(1, 3, 64).bfloat16()
    with torch.inference_mode():
        expected = module(x)
    results = list[torch.Tensor]()

    def call() -> None:
        with torch.inference_mode():
            results.append(module(x))

    name = "matmul" if bits == 8 else "matmul_4bit"
    ordinary, threads = getattr(bitsandbytes, name), [threading.Thread(target=call)]

    def interrupted(*args: Any, **named: Any) -> Any:
        if threads:
            thread = threads.pop()
            thread.start()
            thread.join()
        return ordinary(*args, **named)

    monkeypatch.setattr(bitsandbytes, name, interrupted)
    call()
    call()
    assert [torch.equal(result, expected) for result in results] == [True] * 3


@pytest.mark.parametrize("training", [True, False])
def test_gradients_go_through_products_at_8bit(tmp_path: Path, training: bool) -> None:
    model = load(split(quantized.build_bitsandbytes(tmp_path / "model", "llama", 8)))
    module, x = model.model.layers[0].mlp.up_proj.train(training), torch.rand(1, 3, 64).bfloat16().requires_grad_()
    module(x).sum().backward()
    weight = module.weight.CB.float() * module.weight.SCB[:, None] / 127
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 0].float(), weight.sum(0), rtol=0.05, atol=0.05)


def test_dequantizing_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = quantized.build_fp8(tmp_path / "model", "llama")
    directory = split(folder)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        model = load(directory, 0)
        run(model)
    messages = [record.message for record in caplog.records if "dequantized" in record.message]
    assert messages == [
        f"The weights in {directory} are fp8. On cpu each layer is dequantized to bfloat16 for each use; the files "
        "stay unchanged."
    ]
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not hasattr(model.config, "quantization_config")  # as transformers leaves a model that it dequantized


def test_bitsandbytes_model_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = quantized.build_bitsandbytes(tmp_path / "model", "llama", 4)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        model = load(split(folder))
    assert "dequantized" not in caplog.text
    assert model.is_loaded_in_4bit
    assert model.is_quantized
    assert model.config.quantization_config.load_in_4bit


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
@pytest.mark.parametrize("sequential", [True, False])
def test_compression_of_quantized_weights_is_refused(tmp_path: Path, compression: str, sequential: bool) -> None:
    folder = quantized.build_fp8(tmp_path / "model", "llama", shards=2)
    before = splitting.contents(folder)
    with pytest.raises(OptionError) as refused:
        AutoModel.from_pretrained(folder, device="cpu", compression=compression, sequential_shard_processing=sequential)
    assert "are already quantized (fp8)" in refused.value.problem
    assert f"compression={compression!r}" in refused.value.problem
    assert "Remove compression" in refused.value.remedy
    assert splitting.contents(folder) == before


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_matrices_of_partial_blocks(tmp_path: Path, family: str) -> None:
    """As DeepSeek-V3 is; transformers itself dequantizes none of them."""
    folder = quantized.build_fp8(tmp_path / "model", family, block=24)
    published = read_tensors(folder)
    plain = build_checkpoint(tmp_path / "plain", family, dtype=torch.bfloat16)
    for name, tensor in published.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = published[f"{name}_scale_inv"].repeat_interleave(24, 0).repeat_interleave(24, 1)
            rows, columns = tensor.shape
            published[name] = (tensor.float() * scale[:rows, :columns]).bfloat16()
    kept = {name: tensor for name, tensor in published.items() if not name.endswith("_scale_inv")}
    save_file(kept, plain / SINGLE_NAME, metadata={"format": "pt"})
    assert_same(run(load(split(folder), 0)), reference_logits(plain, INPUT, torch.bfloat16))


def test_codes_without_scales(tmp_path: Path) -> None:
    folder = quantized.build_fp8(tmp_path / "model", "llama")
    take_out(folder, "layers.1.mlp.up_proj.weight_scale_inv")
    with pytest.raises(IncompleteSplitError) as refused:
        load(split(folder))
    assert "model.layers.1.mlp.up_proj.weight contains codes (F8_E4M3) and has no scales" in refused.value.problem
    assert "download it again" in refused.value.remedy


def test_codes_of_an_expert_without_scales(tmp_path: Path) -> None:
    folder = quantized.build_fp8(tmp_path / "model", "qwen3_moe")
    take_out(folder, "layers.1.mlp.experts.2.down_proj.weight_scale_inv")
    with pytest.raises(IncompleteSplitError, match=r"model.layers.1.mlp.experts.down_proj"):
        load(split(folder))


def test_transformers_does_not_say_that_it_dequantizes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As it would of MXFP4 on a CPU, once a process."""
    name = "transformers.quantizers.quantizer_mxfp4"
    transformers.utils.logging.get_logger(name).warning_once.__func__.cache_clear()
    logging.getLogger(name).addHandler(caplog.handler)
    try:
        load(split(quantized.build_mxfp4(tmp_path / "model")), exact=False)
    finally:
        logging.getLogger(name).removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.name == name] == []


def test_scales_without_codes(tmp_path: Path) -> None:
    folder = quantized.build_mxfp4(tmp_path / "model")
    take_out(folder, "layers.1.mlp.experts.down_proj_blocks")
    with pytest.raises(IncompleteSplitError, match=r"model.layers.1.mlp.experts.down_proj"):
        load(split(folder))


@pytest.mark.parametrize(("compute", "nbytes"), [(torch.bfloat16, 2), (torch.float16, 4), (torch.float32, 6)], ids=str)
def test_gpu_keeps_memory_for_the_matrix_that_bitsandbytes_dequantizes(
    tmp_path: Path, compute: torch.dtype, nbytes: int
) -> None:
    folder = quantized.build_bitsandbytes(
        tmp_path / "model", "llama", 4, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
    )
    directory, gpu = split(folder), FakeGpu(0)
    limits = {gpu.name: 10_000_000, "cpu": 1_000_000}
    for device, taken in ((gpu, nbytes * 64 * 128), (CpuDevice(), 0)):
        plan = make_load_plan(LayerStore(directory), RunOptions(max_memory=limits), directory, [device])
        assert plan.placement.limits == {device.name: limits[device.name] - taken}


@pytest.mark.parametrize(("family", "bits"), [("llama", 8), ("gpt2", 4)])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_plain_weights_of_bitsandbytes_get_the_wanted_dtype(
    tmp_path: Path, family: str, bits: int, dtype: str | None
) -> None:
    """float16 on a GPU without bfloat16. Otherwise norms would be in bfloat16, and their biases would not."""
    options = {"bnb_4bit_compute_dtype": torch.bfloat16} if bits == 4 else {}
    folder = quantized.build_bitsandbytes(tmp_path / "model", family, bits, **options)
    expected, directory = expected_of(folder).logits.double(), split(folder)
    wanted = torch.float16 if dtype is None else torch.float32
    for budget in (0, ALL):
        with watched(), torch.inference_mode():
            model = load_on([FakeGpu(0, has_bf16=False)], directory, budget, dtype=dtype)
            weights = [tensor for name, tensor in model.named_parameters() if name.endswith("weight")]
            plain = {weight.dtype for weight in weights if weight.is_floating_point()}
            assert budget == 0 or plain == {wanted}  # that of codes which are not in memory is not known
            computed = {module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype")}
            logits = model(INPUT.to(model.device)).logits.cpu()
        assert logits.dtype == wanted
        assert float((logits.double() - expected).norm()) < 0.1 * float(expected.norm())
        assert computed == ({wanted} if bits == 4 else set())


@pytest.mark.parametrize("gone", ["absmax", "quant_map", "quant_state.bitsandbytes__nf4"])
def test_codes_of_bitsandbytes_without_a_part(tmp_path: Path, gone: str) -> None:
    folder = quantized.build_bitsandbytes(tmp_path / "model", "llama", 4, bnb_4bit_quant_type="nf4")
    take_out(folder, f"layers.1.mlp.up_proj.weight.{gone}")
    with pytest.raises(IncompleteSplitError, match=rf"model.layers.1.mlp.up_proj.weight: weight\.{gone}"):
        load(split(folder))


def test_plain_weights_where_the_config_says_codes(tmp_path: Path) -> None:
    folder = quantized.build_bitsandbytes(tmp_path / "model", "llama", 4)
    name = "model.layers.1.mlp.up_proj.weight"
    take_out(folder, name, *(f"{name}.{part}" for part in ("absmax", "quant_map", "quant_state.bitsandbytes__fp4")))
    take_out(folder, **{name: torch.zeros(128, 64, dtype=torch.bfloat16)})
    with pytest.raises(IncompleteSplitError, match="is plain BF16; by the model's config it is quantized"):
        load(split(folder))


def test_codes_of_another_size(tmp_path: Path) -> None:
    folder = quantized.build_bitsandbytes(tmp_path / "model", "llama", 4)
    take_out(folder, **{"model.layers.1.mlp.up_proj.weight": torch.zeros(96, 1, dtype=torch.uint8)})
    with pytest.raises(
        IncompleteSplitError, match=r"up_proj.weight have shape \(96, 1\); the config needs \(128, 64\)"
    ):
        load(split(folder))


@pytest.mark.skipif(find_spec("compressed_tensors") is not None, reason="it is installed")
def test_missing_package_is_named(tmp_path: Path) -> None:
    folder = quantized.build_compressed_tensors(tmp_path / "model", "llama", "W4A16", packed=False)
    before = splitting.contents(folder)
    with pytest.raises(MissingPackageError) as refused:
        AutoModel.from_pretrained(folder, device="cpu")
    assert "(compressed-tensors)" in refused.value.problem
    assert "pip install compressed-tensors" in refused.value.problem
    assert splitting.contents(folder) == before


@pytest.mark.parametrize("build", FEW)
def test_plan_of_quantized_weights(tmp_path: Path, build: Build) -> None:
    folder = build(tmp_path / "model")
    plan = rabbitllm.plan(folder, device="cpu", max_memory={"cpu": 0})
    assert plan.anatomy is not None
    method = plan.anatomy.quantized
    assert method is not None
    as_it_is, *compressed = plan.outlooks
    assert as_it_is.obstacle is None
    assert any(route.fits for route in as_it_is.routes)
    assert {outlook.obstacle for outlook in compressed} == {f"the weights are already quantized ({method})"}
    first, *further = plan.generations
    assert first.obstacle is None
    assert first.token_seconds is not None
    assert [generation.obstacle for generation in further] == [outlook.obstacle for outlook in compressed]
    loaded = load(split(folder), 0)
    assert sum(held.stored_bytes for held in first.placed) == sum(p.counted for p in loaded.placement.units)
    assert first.read_bytes == loaded.placement.streamed_bytes + sum(expert.read_bytes for expert in first.experts)


@pytest.mark.parametrize("name", ["fp8-qwen3_moe", "mxfp4-gpt_oss"])
def test_experts_are_streamed_by_routing(tmp_path: Path, name: str) -> None:
    """An expert is made of its own codes and scales; those that no token is routed to are not read."""
    model = load(split(PUBLISHED[name](tmp_path / "model")), 0, profiling=True)
    run(model)
    assert {placed.tier for placed in model.placement.experts} == {Tier.ROUTED}
    (pool,) = model.streamer.pools.values()
    for source in pool.sources:
        stored = [leaf.parts for leaf in source.leaves.values()]
        assert source.expert_bytes == sum(part.nbytes for parts in stored for part in parts)
        assert source.expert_bytes < source.ready_bytes // source.experts
