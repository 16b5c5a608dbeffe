"""The front door: every argument, every source, and everything a transformers model can do."""

from __future__ import annotations

import html
import inspect
import json
import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from rabbitllm import AutoModel, batch, lazy_load, plan, quality, split_and_save_layers
from rabbitllm.auto_model import DELETING, ELSEWHERE, WITHOUT_EFFECT
from rabbitllm.engine.devices import _warn_of_no_cuda
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.streamed_model import StreamedModel
from rabbitllm.errors import (
    IncompleteSplitError,
    NotEnoughSpaceException,
    OptionError,
    UnknownArchitectureError,
    UnreadableFormatError,
)
from rabbitllm.models.convert import convert
from tests.support.builders import (
    SINGLE_NAME,
    build_checkpoint,
    cut,
    make_tokenizer,
    read_tensors,
    reference_logits,
    torch_files,
    write_torch,
)
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.meta_files import write_meta
from tests.support.one_thread import THREADS
from tests.support.splitting import contents
from tests.support.tiny_models import INPUT, NEW_TOKENS, assert_same, dequantized, plain_model, run, tiers
from tests.support.tiny_models import one_thread as one_thread

GOLDEN = Path(__file__).parent / "golden"

RABBITLLM_1_1 = {
    "device": None,
    "dtype": None,
    "max_seq_len": 512,
    "layer_shards_saving_path": None,
    "profiling_mode": False,
    "compression": None,
    "token": None,
    "hf_token": None,
    "prefetching": True,
    "prefetch_pin_memory": True,
    "delete_original": False,
    "attn_implementation": "auto",
    "persister": None,
    "show_layer_progress": True,
    "cache_layers": None,
    "use_gds": True,
    "kv_cache_dir": None,
    "offload_small_layers": False,
    "offload_small_layers_use_cpu_cache": True,
}
"""The keyword arguments of RabbitLLM 1.1.0 and their defaults; of `device`, "cuda:0" there, what it meant."""
ADDED = {
    "pretrained_model_name_or_path": None,
    "sequential_shard_processing": False,
    "revision": None,
    "cache_dir": None,
    "local_files_only": False,
    "max_memory": None,
    "max_disk": None,
    "verify_checksums": True,
    "fit_scales": False,
    "verify_source": False,
    "min_free_disk": "1GB",
    "shard_transfer": "auto",
    "trust_remote_code": False,
    "exact": False,
    "fast_bfloat16": False,
    "split": True,
    "hosts": None,
    "draft": None,
}
STREAM = {"device": "cpu", "max_memory": {"cpu": 0}, "show_layer_progress": False, "exact": True}
"""Arguments under which all that can be streamed is, and compression has the bits of the dequantized model."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "llama", shards=3)


@pytest.fixture
def plain(checkpoint: Path) -> Any:
    return plain_model(checkpoint)


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return AutoModel.from_pretrained(checkpoint, **STREAM)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("rabbitllm")]


# Arguments


def test_the_arguments_and_their_defaults() -> None:
    parameters = inspect.signature(AutoModel.from_pretrained).parameters
    by_position = {name: p.default for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    named = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert by_position.pop("path_or_repo_id") is None
    assert by_position == RABBITLLM_1_1
    assert named == ADDED


def test_defaults_are_accepted(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        model = AutoModel.from_pretrained(checkpoint, **(RABBITLLM_1_1 | ADDED | {"device": "cpu"}))
    assert not warnings_of(caplog)
    assert_same(run(model), reference_logits(checkpoint, INPUT, torch.float32))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("max_seq_len", 4096, "the model's own context length applies"),
        ("persister", object(), "always safetensors"),
        ("use_gds", False, "pinned memory"),
        ("kv_cache_dir", "/tmp/kv", "cache_implementation='offloaded'"),
        ("offload_small_layers_use_cpu_cache", False, "page cache"),
    ],
)
def test_arguments_without_effect_warn(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, name: str, value: object, why: str
) -> None:
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        model = AutoModel.from_pretrained(checkpoint, device="cpu", **{name: value})
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{name} has no effect: ")
    assert why in warning
    assert_same(run(model), reference_logits(checkpoint, INPUT, torch.float32))


def refused_argument(name: str) -> str:
    with pytest.raises(TypeError) as caught:
        AutoModel.from_pretrained("not looked for", **{name: 1})
    lead = f"from_pretrained() got an unexpected keyword argument {name!r}. "
    assert str(caught.value).startswith(lead)
    return str(caught.value).removeprefix(lead)


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("compresion", "compression"), ("max_mem", "max_memory"), ("hf_tokn", "hf_token")]
)
def test_unknown_argument_suggests_the_nearest(wrong: str, nearest: str) -> None:
    assert refused_argument(wrong) == f"Did you mean {nearest!r}?"


def test_arguments_of_other_libraries_name_ours() -> None:
    arguments = inspect.signature(AutoModel.from_pretrained).parameters
    assert not arguments.keys() & ELSEWHERE.keys()
    for name, sentence in ELSEWHERE.items():
        assert refused_argument(name) == sentence
        assert sentence.endswith(".")
        ours = {*re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", sentence)} - {"max_new_tokens"}
        assert ours <= arguments.keys(), sentence
    assert "compression='4bit'" in ELSEWHERE["load_in_4bit"]


def test_no_wrong_name_leads_to_a_deletion() -> None:
    """Also not a typing error in the option itself."""
    wrong = [*ELSEWHERE, *DELETING, "sequential", "delete", "quantisation_config", "original"]
    for name in [*wrong, *(name.replace("_", "") for name in wrong)]:
        if name not in DELETING:
            assert not any(option in refused_argument(name) for option in DELETING), name


def test_the_model_by_the_name_of_transformers(checkpoint: Path) -> None:
    model = AutoModel.from_pretrained(pretrained_model_name_or_path=checkpoint, device="cpu")
    assert_same(run(model), reference_logits(checkpoint, INPUT, torch.float32))
    with pytest.raises(TypeError, match="name one argument, and both are given"):
        AutoModel.from_pretrained(checkpoint, pretrained_model_name_or_path=checkpoint)


@pytest.mark.parametrize("nothing", [None, 5, ["a"]])
def test_no_model_is_said(nothing: Any) -> None:
    calls: tuple[Any, ...] = (AutoModel.from_pretrained, plan, lazy_load, quality, split_and_save_layers)
    for call in (*calls, lambda model: batch(model, [{"prompt": "a"}])):
        with pytest.raises(OptionError, match=re.escape(f"The model is {nothing!r}; expected the path")):
            call(nothing)
    with pytest.raises(OptionError, match="The model is None"):
        AutoModel.from_pretrained()
    with pytest.raises(OptionError, match="The model is 5; expected the path"):
        quality("name", 5)
    with pytest.raises(OptionError, match=r"The model is Linear\(.*; expected the path"):  # not loaded by this package
        batch(cast(Any, torch.nn.Linear(1, 1)), [{"prompt": "a"}])


def test_the_documentation_of_the_call_says_where_the_model_is_described() -> None:
    text = AutoModel.from_pretrained.__doc__ or ""
    assert f"`{StreamedModel.__module__}.{StreamedModel.__name__}`" in text
    assert "\n### model\n" in (Path(__file__).parent.parent / "docs/reference/api.md").read_text(encoding="utf-8")


def test_placement_and_profiler_are_tables_in_a_notebook(checkpoint: Path) -> None:
    model = AutoModel.from_pretrained(checkpoint, device="cpu", profiling_mode=True)
    run(model)
    for table in (model.placement, model.profiler):
        assert table._repr_html_() == f"<pre>{html.escape(str(table))}</pre>"
    assert str(model.profiler) == model.profiler.report()
    assert "compute" in str(model.profiler)


def test_it_is_not_constructed() -> None:
    with pytest.raises(OSError, match=r"call AutoModel\.from_pretrained"):
        AutoModel()


def test_the_default_device_falls_back_to_the_cpu(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _warn_of_no_cuda.cache_clear()
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        model = AutoModel.from_pretrained(checkpoint)
    assert warnings_of(caplog) == []  # no GPU was asked for
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        AutoModel.from_pretrained(checkpoint, device="cuda:0")
    assert warnings_of(caplog) == ["CUDA is not available on this machine; the model runs on the CPU."]
    assert model.device == torch.device("cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_in_every_spelling(checkpoint: Path, dtype: Any) -> None:
    model = AutoModel.from_pretrained(checkpoint, dtype=dtype, **STREAM)
    assert model.dtype == torch.bfloat16
    assert_same(run(model), reference_logits(checkpoint, INPUT, torch.bfloat16))


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_default_dtype_is_the_config_s(tmp_path: Path, dtype: Any) -> None:
    folder = build_checkpoint(tmp_path, "llama", dtype=torch.float16)
    assert AutoModel.from_pretrained(folder, dtype=dtype, **STREAM).dtype == torch.float16


@pytest.mark.parametrize("dtype", ["float", "int8", "nn", torch.int64])
def test_invalid_dtype_is_refused(checkpoint: Path, dtype: Any) -> None:
    name = str(dtype).removeprefix("torch.")
    if name == "float":  # torch knows it as another name of float32
        assert AutoModel.from_pretrained(checkpoint, dtype=dtype, **STREAM).dtype == torch.float32
        return
    with pytest.raises(OptionError, match=f"dtype='{name}' is not a floating-point dtype of torch"):
        AutoModel.from_pretrained(checkpoint, dtype=dtype, **STREAM)
    assert not (checkpoint / "splitted_model").exists(), "refused only after the split"


def test_unknown_attention_is_refused(checkpoint: Path) -> None:
    with pytest.raises(OptionError, match="attn_implementation='flush'"):
        AutoModel.from_pretrained(checkpoint, attn_implementation="flush", **STREAM)
    assert not (checkpoint / "splitted_model").exists(), "refused only after the split"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("sequential", [False, True])
def test_files_of_torch(tmp_path: Path, shards: int, sequential: bool) -> None:
    """The same logits as transformers' own, which reads those files too."""
    folder = build_checkpoint(tmp_path / "model", "llama", shards=shards, tied=shards == 1)
    tensors = read_tensors(folder)
    parts = {SINGLE_NAME: tensors} if shards == 1 else cut(tensors, shards)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    config = (folder / "config.json").read_bytes()
    write_torch(folder, torch_files(parts), index=shards > 1)
    (folder / "config.json").write_bytes(config)
    expected = reference_logits(folder, INPUT, torch.float32)
    model = AutoModel.from_pretrained(folder, sequential_shard_processing=sequential, **STREAM)
    assert_same(run(model), expected)
    assert len(list(folder.glob("*.bin"))) == (0 if sequential else shards)


def test_saving_path(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(checkpoint, layer_shards_saving_path=tmp_path / "elsewhere", **STREAM)
    assert not (checkpoint / "splitted_model").exists()
    assert (tmp_path / "elsewhere" / "splitted_model" / "model.layers.0.safetensors").exists()
    assert_same(run(model), reference_logits(checkpoint, INPUT, torch.float32))


def test_profiling_reports_the_split_and_the_passes(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModel.from_pretrained(checkpoint, profiling_mode=True, compression="8bit", **STREAM)
    split = capsys.readouterr().out.rstrip("\n")
    assert "quantize" in split
    assert "Bottleneck: " in split
    after_load = model.profiler.report()
    assert after_load.startswith(f"{split}\n\nLoad, by stage\n")
    assert after_load.endswith("\n\nPasses, by stage: nothing was recorded yet.")
    run(model)
    model.print_profile_summary()
    summary = capsys.readouterr().out
    load, _, passes = summary.removeprefix(split).partition("\n\nPasses, by stage\n")
    assert re.search(r"^plan +\d", load, re.MULTILINE)
    assert "Bottleneck: " in passes
    assert "dequantize" in passes
    again = AutoModel.from_pretrained(checkpoint, profiling_mode=True, compression="8bit", device="cpu")
    assert again.profiler.report().startswith("Load, by stage\n")
    before = {one["title"]: one for one in again.profiler.as_json()["before"]}
    loaded = before["Load, by stage"]["layers"]
    assert {placed.unit for placed in again.placement.units} <= loaded.keys()
    assert sum(totals["load"]["bytes"] for totals in loaded.values() if "load" in totals) == sum(
        placed.stored for placed in again.placement.units
    )


def test_prefetching_off(checkpoint: Path) -> None:
    model = AutoModel.from_pretrained(checkpoint, prefetching=False, **STREAM)
    run(model)
    loader = model.streamer.executors["cpu"].loader
    assert loader.loads == (1 + NEW_TOKENS) * sum(tier is Tier.STREAMED for tier in tiers(model).values())


def test_cached_layers(checkpoint: Path) -> None:
    model = AutoModel.from_pretrained(checkpoint, cache_layers=1, **STREAM)
    assert tiers(model)["model.layers.0"] is Tier.RESIDENT
    assert tiers(model)["model.layers.1"] is Tier.STREAMED
    assert_same(run(model), reference_logits(checkpoint, INPUT, torch.float32))


def test_small_layers_without_preference(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "llama", num_hidden_layers=8)
    room = {"cpu": 500_000}
    first = AutoModel.from_pretrained(folder, device="cpu", max_memory=room)
    evenly = AutoModel.from_pretrained(folder, device="cpu", max_memory=room, offload_small_layers=True)
    assert tiers(first)["lm_head"] is Tier.RESIDENT
    assert tiers(evenly) != tiers(first)
    assert_same(run(evenly), run(first))


def test_max_memory_in_the_form_of_accelerate(checkpoint: Path) -> None:
    model = AutoModel.from_pretrained(checkpoint, device="cpu", max_memory={"cpu": "1GiB"})
    assert model.placement.is_resident
    assert model.placement.budgets[0].nbytes == 1 << 30
    with pytest.raises(OptionError, match=r"max_memory\['cpu'\]='much' is not a size"):
        AutoModel.from_pretrained(checkpoint, device="cpu", max_memory={"cpu": "much"})
    with pytest.raises(OptionError, match="max_memory names the device 'disk'"):
        AutoModel.from_pretrained(checkpoint, device="cpu", max_memory={"disk": 1})


def test_max_disk_is_a_limit(checkpoint: Path) -> None:
    with pytest.raises(NotEnoughSpaceException):
        AutoModel.from_pretrained(checkpoint, max_disk="10KB", **STREAM)
    assert len(list(checkpoint.glob("model-*.safetensors"))) == 3
    assert_same(
        run(AutoModel.from_pretrained(checkpoint, max_disk="10MB", **STREAM)),
        reference_logits(checkpoint, INPUT, torch.float32),
    )


def test_min_free_disk_is_a_limit(checkpoint: Path) -> None:
    with pytest.raises(NotEnoughSpaceException, match="min_free_disk"):
        AutoModel.from_pretrained(checkpoint, min_free_disk="1000TB", **STREAM)
    with pytest.raises(OptionError, match="min_free_disk='some' is not a size"):
        AutoModel.from_pretrained(checkpoint, min_free_disk="some", **STREAM)
    assert not (checkpoint / "splitted_model").exists()
    assert_same(
        run(AutoModel.from_pretrained(checkpoint, min_free_disk=0, **STREAM)),
        reference_logits(checkpoint, INPUT, torch.float32),
    )


@pytest.mark.parametrize("delete_original", [False, True])
@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_routes(tmp_path: Path, sequential: bool, delete_original: bool, compression: str | None) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", shards=4)
    reference = folder
    if compression is not None:
        reference = dequantized(folder, tmp_path / "reference", compression, torch.float32)
    expected = reference_logits(reference, INPUT, torch.float32)
    options = {"sequential_shard_processing": sequential, "delete_original": delete_original}
    model = AutoModel.from_pretrained(folder, compression=compression, **options, **STREAM)
    assert_same(run(model), expected)
    remaining = len(list(folder.glob("model-*.safetensors")))
    assert remaining == (0 if sequential or delete_original else 4)
    again = AutoModel.from_pretrained(folder, compression=compression, **options, **STREAM)
    assert_same(run(again), expected)


# What comes back


def test_it_is_a_genuine_model_with_a_tokenizer_and_a_profiler(model: Any) -> None:
    assert isinstance(model, transformers.PreTrainedModel)
    assert isinstance(model, transformers.LlamaForCausalLM)
    ids = model.tokenizer("the and", return_tensors="pt")["input_ids"]
    assert model.tokenizer.decode(ids[0], skip_special_tokens=True) == "the and"
    assert not model.profiler.enabled
    assert model.unused_tensors == ()
    assert Tier.STREAMED in tiers(model).values()


def assert_generates_alike(model: Any, plain: Any, ids: torch.Tensor = INPUT, **options: Any) -> None:
    actual, expected = [], []
    for m, into in ((model, actual), (plain, expected)):
        torch.manual_seed(7)
        arguments = {"max_new_tokens": 10, "pad_token_id": 0, **options}
        into.append(m.generate(ids, **arguments))
    assert torch.equal(actual[0], expected[0])


@pytest.mark.parametrize(
    "way",
    [
        {"do_sample": False},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "temperature": 1.7, "top_k": 50, "top_p": 0.9},
        {"do_sample": True, "num_beams": 2},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": False, "prompt_lookup_num_tokens": 3},
        {"do_sample": False, "max_new_tokens": 40, "stop_strings": ["e"]},
    ],
    ids=lambda way: "-".join(way),
)
def test_ways_to_generate(model: Any, plain: Any, way: dict[str, Any]) -> None:
    ids = INPUT if "prompt_lookup_num_tokens" not in way else INPUT.repeat(1, 3)
    if "stop_strings" in way:
        way = way | {"tokenizer": model.tokenizer}
    assert_generates_alike(model, plain, ids, **way)


def test_sampling_differs_with_the_seed(model: Any) -> None:
    """Else the comparison of samples would prove nothing."""
    torch.manual_seed(1)
    first = model.generate(INPUT, max_new_tokens=20, do_sample=True)
    torch.manual_seed(2)
    second = model.generate(INPUT, max_new_tokens=20, do_sample=True)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "way", [{"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True}], ids=str
)
def test_batches_with_left_padding(model: Any, plain: Any, way: dict[str, Any]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    batch = tokenizer(["the", "the and in the on", "re the an"], return_tensors="pt", padding=True)
    mask = batch["attention_mask"]
    assert mask[:, 0].tolist() == [0, 1, 0]
    with torch.inference_mode():
        expected = plain(**batch).logits
        assert torch.equal(model(**batch).logits, expected)
    assert_generates_alike(model, plain, batch["input_ids"], attention_mask=mask, **way)


def test_scores_and_hidden_states(model: Any, plain: Any) -> None:
    options: Any = {
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
    }
    actual, expected = model.generate(INPUT, **options), plain.generate(INPUT, **options)
    assert all(torch.equal(a, b) for a, b in zip(actual.scores, expected.scores, strict=True))
    for a, b in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("streamed_assistant", [False, True])
def test_an_assistant(tmp_path: Path, model: Any, plain: Any, streamed_assistant: bool) -> None:
    small = build_checkpoint(tmp_path / "assistant", "llama", num_hidden_layers=1, seed=3)
    helper = AutoModel.from_pretrained(small, **STREAM) if streamed_assistant else plain_model(small)
    assert_generates_alike(model, plain, do_sample=False, assistant_model=helper)


def test_a_streamed_model_as_the_assistant_of_a_plain_one(tmp_path: Path, plain: Any) -> None:
    small = build_checkpoint(tmp_path / "assistant", "llama", num_hidden_layers=1, seed=3)
    expected = plain.generate(INPUT, max_new_tokens=10, do_sample=False)
    helper = AutoModel.from_pretrained(small, **STREAM)
    assert torch.equal(plain.generate(INPUT, max_new_tokens=10, do_sample=False, assistant_model=helper), expected)


@pytest.mark.parametrize("prompt", ["the and in", [{"role": "user", "content": "the?"}]], ids=["text", "chat"])
def test_pipeline(model: Any, plain: Any, prompt: Any) -> None:
    pipes = [transformers.pipeline("text-generation", model=m, tokenizer=model.tokenizer) for m in (model, plain)]
    actual, expected = (pipe(prompt, max_new_tokens=8, do_sample=False) for pipe in pipes)
    assert actual == expected
    assert pipes[0].device == torch.device("cpu")


def test_pipeline_of_batches(model: Any, plain: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    texts = ["the", "the and in the", "on re"]
    pipes = [transformers.pipeline("text-generation", model=m, tokenizer=tokenizer) for m in (model, plain)]
    actual, expected = (pipe(texts, max_new_tokens=6, do_sample=False, batch_size=3) for pipe in pipes)
    assert actual == expected


def test_text_streamer(model: Any, plain: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for m in (model, plain):
        streamer = transformers.TextStreamer(model.tokenizer)
        m.generate(INPUT, max_new_tokens=8, do_sample=False, streamer=streamer)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert len(shown[0]) > 10


def test_text_iterator_streamer(model: Any, plain: Any) -> None:
    tokenizer = model.tokenizer
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600)
    options = {"max_new_tokens": 8, "do_sample": False, "streamer": streamer}

    def generate() -> None:
        torch.set_num_threads(THREADS)
        model.generate(INPUT, **options)

    thread = threading.Thread(target=generate)
    thread.start()
    pieces = list(streamer)
    thread.join(600)
    tokens = plain.generate(INPUT, max_new_tokens=8, do_sample=False)[0, INPUT.shape[1] :]
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert len(pieces) > 1


def test_conversation_reuses_its_cache(model: Any, plain: Any) -> None:
    def converse(m: Any) -> list[torch.Tensor]:
        cache, ids, turns = transformers.DynamicCache(config=m.config), INPUT, []
        for question in (torch.tensor([[9, 14, 30]]), torch.tensor([[77, 5]])):
            ids = m.generate(
                torch.cat([ids, question], dim=1), past_key_values=cache, max_new_tokens=5, do_sample=False
            )
            turns.append(ids)
        return turns

    assert all(torch.equal(a, b) for a, b in zip(converse(model), converse(plain), strict=True))


# Where it comes from


def folders_below(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_split_directory_alone(tmp_path: Path, checkpoint: Path) -> None:
    expected = reference_logits(checkpoint, INPUT, torch.float32)
    AutoModel.from_pretrained(checkpoint, delete_original=True, **STREAM)
    alone = tmp_path / "moved" / "anything"
    alone.parent.mkdir()
    shutil.move(checkpoint / "splitted_model", alone)
    shutil.rmtree(checkpoint)
    before = folders_below(alone)
    model = AutoModel.from_pretrained(alone, **STREAM)
    assert_same(run(model), expected)
    assert model.tokenizer.chat_template == make_tokenizer().chat_template
    assert folders_below(alone) == before
    assert_same(run(AutoModel.from_pretrained(str(alone), compression=None, **STREAM)), expected)


def test_a_compressed_split_directory_says_how_it_is_compressed(tmp_path: Path, checkpoint: Path) -> None:
    expected = run(AutoModel.from_pretrained(checkpoint, compression="8bit", **STREAM))
    alone = tmp_path / "alone"
    shutil.move(checkpoint / "splitted_model.8bit", alone)
    assert_same(run(AutoModel.from_pretrained(alone, **STREAM)), expected)
    assert_same(run(AutoModel.from_pretrained(alone, compression="8bit", **STREAM)), expected)


def test_same_call_works_after_deleting_the_original(checkpoint: Path) -> None:
    expected = reference_logits(checkpoint, INPUT, torch.float32)
    for _ in range(3):
        model = AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, delete_original=True, **STREAM)
        assert_same(run(model), expected)
    assert not list(checkpoint.glob("model-*.safetensors"))


@pytest.fixture
def published(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> Path:
    """A repository acme/tiny on a hub."""
    return build_checkpoint(tmp_path / "hub" / "acme" / "tiny", "llama", shards=3)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_a_repository(
    tmp_path: Path, published: Path, local_hub: LocalHub, sequential: bool, compression: str | None
) -> None:
    reference = published
    if compression is not None:
        reference = dequantized(published, tmp_path / "reference", compression, torch.float32)
    expected = reference_logits(reference, INPUT, torch.float32)
    options: Any = {"sequential_shard_processing": sequential, "compression": compression, **STREAM}
    model = AutoModel.from_pretrained("acme/tiny", **options)
    assert_same(run(model), expected)
    assert model.tokenizer("the")["input_ids"] == make_tokenizer()("the")["input_ids"]
    weights = sum(path.stat().st_size for path in published.glob("*.safetensors"))
    # the range in which a header is looked for is about as long as a shard here
    assert weights <= local_hub.body_bytes(".safetensors") <= 2 * weights
    local_hub.forget_requests()
    assert_same(run(AutoModel.from_pretrained("acme/tiny", **options)), expected)
    assert local_hub.body_bytes(".safetensors") == 0


def test_a_revision(published: Path, local_hub: LocalHub, tmp_path: Path) -> None:
    other = build_checkpoint(tmp_path / "other", "llama", shards=2, seed=9)
    commit = local_hub.add_revision("acme/tiny", "v2", other)
    main = run(AutoModel.from_pretrained("acme/tiny", **STREAM))
    assert_same(main, reference_logits(published, INPUT, torch.float32))
    expected = reference_logits(other, INPUT, torch.float32)
    for revision in ("v2", commit):
        assert_same(run(AutoModel.from_pretrained("acme/tiny", revision=revision, **STREAM)), expected)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_repository_with_custom_code(published: Path, local_hub: LocalHub) -> None:
    expected = reference_logits(published, INPUT, torch.float32)
    content = json.loads((published / "config.json").read_text())
    content |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (published / "config.json").write_text(json.dumps(content))
    (published / "own.py").write_text(OWN_CODE)
    with pytest.raises(UnknownArchitectureError, match="trust_remote_code=True"):
        AutoModel.from_pretrained("acme/tiny", **STREAM)
    assert local_hub.body_bytes(".safetensors") == 0
    model = AutoModel.from_pretrained("acme/tiny", trust_remote_code=True, **STREAM)
    assert type(model).__name__ == "OwnForCausalLM"
    assert_same(run(model), expected)


@pytest.mark.parametrize("how", ["local_files_only", "HF_HUB_OFFLINE", "no connection but a commit"])
def test_offline_after_the_first_call(
    published: Path, local_hub: LocalHub, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    from huggingface_hub import constants

    expected = reference_logits(published, INPUT, torch.float32)
    commit = local_hub.commit("acme/tiny")
    AutoModel.from_pretrained("acme/tiny", sequential_shard_processing=True, **STREAM)
    local_hub.stop()
    options: dict[str, Any] = {"local_files_only": True}
    if how == "HF_HUB_OFFLINE":
        options = {}
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "no connection but a commit":
        options["revision"] = commit
    model = AutoModel.from_pretrained("acme/tiny", **options, **STREAM)
    assert_same(run(model), expected)
    assert model.tokenizer is not None


# Folders that RabbitLLM 1.1.0 made


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy, so that a test that writes changes nothing."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def expected_of(golden: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompt, greedy tokens, and the first logits of the last position, of plain transformers."""
    content = json.loads((golden / "expected.json").read_text())
    return (
        torch.tensor([content["prompt"]]),
        torch.tensor([content["greedy"]]),
        torch.tensor(content["last_logits_first8"]),
    )


LAST_BITS = 0.003
"""By how much logits of the golden model differ between processors, whose kernels round differently; measured 0.002."""


def assert_golden(model: Any, golden: Path) -> None:
    """The tokens are those of plain transformers here, and those recorded on another machine.

    Where two tokens are so close there that rounding decides, the recorded sequence ends the comparison.
    """
    prompt, tokens, logits = expected_of(golden)
    plain = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "model-2-shards", dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        assert torch.allclose(model(prompt).logits[0, -1, :8].float(), logits, rtol=0, atol=LAST_BITS)
        generated = model.generate(prompt, max_new_tokens=12, do_sample=False)
        assert torch.equal(generated, plain.generate(prompt, max_new_tokens=12, do_sample=False))
        scores = plain(tokens).logits[0, prompt.shape[1] - 1 : -1].float()
    recorded, actual = tokens[0, prompt.shape[1] :], generated[0, prompt.shape[1] :]
    differs = (recorded != actual).nonzero()
    if len(differs):
        step = int(differs[0])
        assert abs(float(scores[step, recorded[step]] - scores[step, actual[step]])) <= 2 * LAST_BITS


def checkpoint_of_golden(directory: Path, config: Path, target: Path) -> Path:
    """What bitsandbytes, asked directly, makes of a compressed split directory, as a checkpoint."""
    from bitsandbytes import functional

    target.mkdir()
    for path in config.glob("*.json"):
        if "index" not in path.name:
            shutil.copy(path, target)
    plain = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys = set(file.keys())
            for name in sorted(key for key in keys if ".4bit." not in key and ".8bit." not in key):
                tensor = file.get_tensor(name)
                if f"{name}.4bit.absmax" in keys:
                    parts = {
                        key.removeprefix(f"{name}.4bit."): file.get_tensor(key)
                        for key in keys
                        if f"{name}.4bit." in key
                    }
                    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
                    tensor = functional.dequantize_4bit(tensor, state).reshape(state.shape)
                elif f"{name}.8bit.absmax" in keys:
                    scales, code = file.get_tensor(f"{name}.8bit.absmax"), file.get_tensor(f"{name}.8bit.code")
                    state = functional.QuantState(scales, code=code, blocksize=2048, dtype=torch.bfloat16)
                    tensor = functional.dequantize_blockwise(tensor, state)
                plain[name] = tensor.clone()
    save_file(plain, target / SINGLE_NAME, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("budget", ["1GiB", 0])
def test_an_uncompressed_golden_folder(golden: Path, budget: Any) -> None:
    prompt, _, _ = expected_of(golden)
    model = AutoModel.from_pretrained(
        golden / "model-2-shards",
        layer_shards_saving_path=golden / "rabbitllm-1.1.0-none",
        device="cpu",
        max_memory={"cpu": budget},
    )
    assert (golden / "rabbitllm-1.1.0-none" / "splitted_model" / "model.layers.0.safetensors").read_bytes() == (
        GOLDEN / "rabbitllm-1.1.0-none" / "splitted_model" / "model.layers.0.safetensors"
    ).read_bytes()
    assert not (golden / "rabbitllm-1.1.0-none" / "splitted_model" / "split.json").exists()
    assert_same(run(model, prompt), reference_logits(golden / "model-2-shards", prompt, torch.bfloat16))
    assert_golden(model, golden)


@pytest.mark.parametrize("budget", ["1GiB", 0])
@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_a_compressed_golden_folder(golden: Path, tmp_path: Path, compression: str, budget: Any) -> None:
    prompt, tokens, _ = expected_of(golden)
    home = golden / f"rabbitllm-1.1.0-{compression}"
    model = AutoModel.from_pretrained(
        golden / "model-2-shards",
        layer_shards_saving_path=home,
        compression=compression,
        device="cpu",
        max_memory={"cpu": budget},
        exact=True,
    )
    directory = home / f"splitted_model.{compression}"
    reference = checkpoint_of_golden(directory, golden / "model-2-shards", tmp_path / "reference")
    assert_same(run(model, prompt), reference_logits(reference, prompt, torch.bfloat16))
    generated = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert generated.shape == tokens.shape
    if compression == "8bit":  # 4bit changes some of these random weights' tokens
        assert torch.equal(generated, tokens)


def test_a_golden_folder_in_the_folder_of_its_checkpoint(golden: Path) -> None:
    """Where RabbitLLM puts it by default."""
    home = golden / "model-2-shards"
    shutil.move(golden / "rabbitllm-1.1.0-none" / "splitted_model", home / "splitted_model")
    for shard in home.glob("model-*.safetensors"):
        shard.unlink()  # as delete_original=True leaves it
    assert_golden(AutoModel.from_pretrained(home, **STREAM), golden)


@pytest.mark.parametrize("shards", [2, 4])
def test_the_golden_checkpoints_split_again(golden: Path, shards: int) -> None:
    folder = golden / f"model-{shards}-shards"
    model = AutoModel.from_pretrained(folder, sequential_shard_processing=True, **STREAM)
    assert not list(folder.glob("model-*.safetensors"))
    assert_golden(model, golden)


def test_the_unsound_golden_folder_is_refused(golden: Path) -> None:
    with safe_open(GOLDEN / "model-4-shards" / "model-00001-of-00004.safetensors", "pt") as file:
        assert file.keys()
    home = golden / "rabbitllm-1.1.0-none-UNSOUND-3-tensors-missing"
    present = set()
    for path in (home / "splitted_model").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            present |= set(file.keys())
    index = json.loads((golden / "model-4-shards" / "model.safetensors.index.json").read_text())
    missing = sorted(set(index["weight_map"]) - present)
    assert len(missing) == 3
    with pytest.raises(IncompleteSplitError) as caught:
        AutoModel.from_pretrained(golden / "model-4-shards", layer_shards_saving_path=home, **STREAM)
    assert f"lacks 3 of the 27 tensors that Qwen2ForCausalLM needs: {', '.join(missing)}." in caught.value.problem
    assert "into another folder (--dir, layer_shards_saving_path" in caught.value.remedy
    assert len(list((golden / "model-4-shards").glob("model-*.safetensors"))) == 4


# Without a split


def write_unsplit(folder: Path, source: str) -> Path:
    """A checkpoint whose weights are one file, several, or files of torch.save."""
    build_checkpoint(folder, "llama", shards=1 if source == "one file" else 3)
    if source.startswith("torch"):
        tensors = read_tensors(folder)
        for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
            path.unlink()
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=source == "torch")
    return folder


@pytest.mark.parametrize("room", ["1GiB", 0])
@pytest.mark.parametrize("source", ["one file", "several", "torch", "torch from before 1.6"])
def test_no_files_are_written_without_a_split(tmp_path: Path, source: str, room: Any) -> None:
    folder = write_unsplit(tmp_path / "model", source)
    before = contents(tmp_path)
    model = AutoModel.from_pretrained(folder, split=False, **{**STREAM, "max_memory": {"cpu": room}})
    assert model.placement.is_resident == (room != 0)
    assert_same(run(model), reference_logits(folder, INPUT, torch.float32))
    assert contents(tmp_path) == before


def test_weights_at_odd_places_without_a_split(tmp_path: Path) -> None:
    """Of other writers a header may end anywhere, and kernels are particular about where weights begin."""
    folder = write_unsplit(tmp_path / "model", "one file")
    expected = reference_logits(folder, INPUT, torch.float32)
    path = folder / SINGLE_NAME
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    path.write_bytes((length + 3).to_bytes(8, "little") + raw[8 : 8 + length] + b"   " + raw[8 + length :])
    for room in ("1GiB", 0):
        model = AutoModel.from_pretrained(folder, split=False, **{**STREAM, "max_memory": {"cpu": room}})
        assert_same(run(model), expected)


def test_a_repository_without_a_split(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    served = build_checkpoint(tmp_path / "hub" / "acme/tiny", "llama", shards=3)
    model = AutoModel.from_pretrained("acme/tiny", split=False, **STREAM)
    assert_same(run(model), reference_logits(served, INPUT, torch.float32))
    assert list(hub_environment.cache.rglob("*.safetensors"))
    assert not list(hub_environment.home.rglob("split*"))


def test_unsupported_model_is_refused_before_fetching(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    served = build_checkpoint(tmp_path / "hub" / "acme/tiny", "llama", shards=3)
    (served / "config.json").write_text('{"model_type": "nobody_knows"}')
    with pytest.raises(UnknownArchitectureError):
        AutoModel.from_pretrained("acme/tiny", split=False, **STREAM)
    assert not [request for request in local_hub.requests if request.file.endswith(".safetensors")]


def test_existing_split_is_used(checkpoint: Path) -> None:
    AutoModel.from_pretrained(checkpoint, **STREAM)
    for shard in checkpoint.glob("model*.safetensors"):
        shard.unlink()
    model = AutoModel.from_pretrained(checkpoint, split=False, **STREAM)
    assert run(model).logits.shape[-1] == model.config.vocab_size


def test_options_that_need_a_split_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for option in ({"compression": "4bit"}, {"sequential_shard_processing": True}, {"delete_original": True}):
        with pytest.raises(OptionError, match="split=False does not split"):
            AutoModel.from_pretrained(checkpoint, split=False, **option, **STREAM)
    # two ranks of Meta's: a matrix is in pieces
    model = transformers.AutoModelForCausalLM.from_pretrained(build_checkpoint(tmp_path / "whole", "llama"))
    folder = write_meta(tmp_path / "meta", model, ranks=2)
    with pytest.raises(UnreadableFormatError, match="is a piece of a larger one") as refused:
        AutoModel.from_pretrained(folder, split=False, **STREAM)
    assert "Remove split=False" in refused.value.remedy


@pytest.mark.parametrize("room", ["1GiB", 0])
def test_transposed_tensors_without_a_split(tmp_path: Path, room: Any) -> None:
    folder = write_unsplit(tmp_path / "transposed", "torch")
    expected = reference_logits(folder, INPUT, torch.float32)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save({name: tensor.t().contiguous().t() for name, tensor in tensors.items()}, folder / "pytorch_model.bin")
    model = AutoModel.from_pretrained(folder, split=False, **{**STREAM, "max_memory": {"cpu": room}})
    assert_same(run(model), expected)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("compression", ["4bit"], r"compression=\['4bit'\] does not exist; expected 'auto'"),
        ("layer_shards_saving_path", 5, "layer_shards_saving_path is 5; expected a path"),
        ("cache_dir", 5, "cache_dir is 5; expected a path"),
        ("revision", 5, "revision is 5; expected str"),
        ("token", 5, "token is 5; expected str or bool"),
        ("hosts", "127.0.0.1:29500", "hosts is '127.0.0.1:29500'; expected Hosts"),
        ("cache_layers", "two", r"cache_layers is 'two'; expected int \| None"),
        ("cache_layers", -1, "cache_layers=-1 is not a number of layers"),
    ],
)
def test_values_of_wrong_types(name: str, value: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        AutoModel.from_pretrained("acme/tiny", **{name: value})


@pytest.mark.parametrize("value", ["no", "False", ["x"]])
@pytest.mark.parametrize(
    "function", [AutoModel.from_pretrained, batch, plan, quality, split_and_save_layers, lazy_load, convert]
)
def test_text_is_no_flag(tmp_path: Path, function: Any, value: Any) -> None:
    """Python takes it for true, which would delete shards."""
    arguments = inspect.signature(function).parameters
    flags = [name for name, argument in arguments.items() if isinstance(argument.default, bool)]
    for name in {*flags} - {*WITHOUT_EFFECT}:
        with pytest.raises(OptionError, match=rf"^{name}=.* is not a truth value"):
            function("acme/tiny", *[tmp_path / "out"] * (function is convert), **{name: value})
