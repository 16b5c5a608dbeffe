"""The class that a config names is the class that is loaded: base models, encoders, classifiers, resident and streamed.

Their checkpoints are split sequentially, and the outputs are those of plain transformers bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rabbitllm import AutoModel
from rabbitllm.errors import OptionError, RabbitLLMError, UnknownArchitectureError
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import Request
from rabbitllm.generation.session import Session, answer
from tests.support.builders import build_checkpoint, make_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CLASSES = (
    *("LlamaModel", "LlamaForSequenceClassification", "LlamaForTokenClassification", "Qwen3Model"),
    *("Qwen3ForSequenceClassification", "GPT2ForSequenceClassification", "GPT2Model"),
    *("BertModel", "BertForSequenceClassification", "BertForMaskedLM", "BertForTokenClassification"),
    *("RobertaModel", "RobertaForSequenceClassification", "XLMRobertaModel", "DistilBertModel", "MPNetModel"),
    *("ModernBertModel", "T5EncoderModel"),
)
IDS = torch.tensor([[1, 40, 81, 7, 200, 33, 160, 5, 92, 11, 64]])


def build(folder: Path, name: str, *, tied: bool) -> Path:
    cls = getattr(transformers, name)
    config = cls.config_class(**SMALL, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = cls(config)
    for parameter in model.parameters():  # norms and biases too, so that none of them can be mixed up
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, max_shard_size="100KB")
    make_tokenizer().save_pretrained(folder)
    return folder


def first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0]
    return tensor


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_outputs_equal_those_of_the_named_class(tmp_path: Path, name: str, tied: bool) -> None:
    folder = build(tmp_path / "model", name, tied=tied)
    plain = getattr(transformers, name).from_pretrained(folder).eval()
    for parameter in plain.parameters():  # it computes on the mapped file, where some lie on odd addresses
        parameter.data = parameter.data.clone()
    with torch.inference_mode():
        expected = first(plain(IDS))
    shards = len(list(folder.glob("*.safetensors")))
    assert shards > 2
    for budget in ("1GiB", 200_000, 0):
        model = AutoModel.from_pretrained(
            folder,
            sequential_shard_processing=True,
            device="cpu",
            max_memory={"cpu": budget},
            show_layer_progress=False,
        )
        assert type(model).__name__ == name
        assert not model.unused_tensors
        with torch.inference_mode():
            assert torch.equal(first(model(IDS)), expected)
    assert not list(folder.glob("*.safetensors"))
    assert len(list((folder / "splitted_model").glob("*.safetensors"))) < 20


def test_text_is_refused_by_a_model_without_a_head(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "LlamaModel", tied=True)
    model = AutoModel.from_pretrained(folder, device="cpu", show_layer_progress=False)
    for call in (
        lambda: answer(model, Request((1, 2), 4), lambda text: None),
        lambda: Session(model),
        lambda: Batch(model),
    ):
        with pytest.raises(OptionError, match=r"LlamaModel.*does not generate text"):
            call()


def test_unknown_class_is_not_replaced_by_a_causal_model(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "architectures": ["LlamaForRewards"]}))
    with pytest.raises(UnknownArchitectureError, match="no class 'LlamaForRewards'"):
        AutoModel.from_pretrained(folder, device="cpu")
    # a name of old that means the causal model is no obstacle
    (folder / "config.json").write_text(json.dumps({**content, "architectures": ["LLaMAForCausalLM"]}))
    model = AutoModel.from_pretrained(folder, device="cpu", show_layer_progress=False)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_unstreamable_model_is_refused_before_its_split(tmp_path: Path) -> None:
    """RWKV rescales its own weights, so all of them must stay in memory."""
    config = transformers.RwkvConfig(vocab_size=272, hidden_size=64, num_hidden_layers=3, context_length=64)
    torch.manual_seed(0)
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="100KB")
    before = sorted((tmp_path / "model").rglob("*"))
    with pytest.raises(RabbitLLMError, match="rescales its weights in place"):
        AutoModel.from_pretrained(
            tmp_path / "model", sequential_shard_processing=True, device="cpu", max_memory={"cpu": 0}
        )
    assert sorted((tmp_path / "model").rglob("*")) == before
