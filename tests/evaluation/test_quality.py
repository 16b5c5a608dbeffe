"""`rabbitllm.quality`: which two models are meant, what comes of it, and what is refused."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import rabbitllm
import rabbitllm.demo
from rabbitllm import AutoModel, quality
from rabbitllm.demo.tasks import held_out
from rabbitllm.errors import OptionError, QualityError
from rabbitllm.evaluation.quality import bundled_text, is_bundled_tokenizer, scored_answers, text_of, windows
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import build_checkpoint, make_tokenizer, read_tensors
from tests.support.commands import invoke
from tests.support.splitting import names_in
from tests.support.tiny_models import one_thread, split  # noqa: F401  a fixture that applies by itself

FEW = {"device": "cpu", "tokens": 64, "window": 32}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "llama", shards=2)


def test_tied_embeddings_count_once(tmp_path: Path) -> None:
    """And all experts, wherever they are."""
    for family in ("qwen2", "qwen3_moe"):
        folder = build_checkpoint(tmp_path / family, family, tied=True)
        result = quality(folder, compression="4bit", max_memory={"cpu": 0}, **FEW)
        assert result.reference.nbytes == sum(tensor.nbytes for tensor in read_tensors(folder).values())
        assert result.model.nbytes == sum(
            tensor.nbytes for tensor in LayerStore(folder / "splitted_model.4bit").tensors.values()
        )


def test_against_the_same_model_uncompressed(checkpoint: Path) -> None:
    """Split where it was not, and nothing written for the reference."""
    result = quality(checkpoint, compression="4bit", **FEW)
    assert [name for name in names_in(checkpoint) if name.startswith("splitted")] == ["splitted_model.4bit"]
    assert (result.model.compression, result.reference.compression) == ("4bit", None)
    assert result.model.nbytes < result.reference.nbytes
    assert result.summary.divergence.mean > 0
    assert result.summary.positions == 64
    assert result.text == "the bundled text"
    again = quality(checkpoint, **FEW)  # the compression of the split that is here
    assert again.model == result.model
    assert again.summary == result.summary


def test_a_comparison_prints_as_the_command_does(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = quality(checkpoint, compression="4bit", **FEW)
    monkeypatch.setattr("rabbitllm.evaluation.quality.quality", lambda *arguments, **options: result)
    printed = invoke("quality", checkpoint).stdout
    assert str(result) == printed.rstrip("\n")
    assert "KL divergence" in printed
    assert result._repr_html_() == f"<pre>{html.escape(str(result))}</pre>"


def test_an_uncompressed_model_is_not_compared_with_itself(checkpoint: Path) -> None:
    for name in (checkpoint, split(checkpoint)):
        with pytest.raises(QualityError, match="the default comparison is with the uncompressed model") as refused:
            quality(name, **FEW)
        assert "compression=" in refused.value.remedy
    assert quality(checkpoint, checkpoint, **FEW).summary.divergence.largest == 0


@pytest.mark.long
def test_split_directories_find_their_original(checkpoint: Path) -> None:
    packed = split(checkpoint, "8bit")
    result = quality(packed, **FEW)
    assert result.reference.name == str(checkpoint)
    assert result.model.compression == "8bit"
    whole = split(checkpoint)
    assert quality(packed, **FEW).reference.name == str(whole)
    elsewhere = shutil.move(packed, checkpoint.parent / "alone" / packed.name) if _make(checkpoint) else packed
    with pytest.raises(QualityError, match="parent folder does not hold the uncompressed model"):
        quality(elsewhere, **FEW)
    assert quality(elsewhere, whole, **FEW).summary == result.summary


def _make(checkpoint: Path) -> bool:
    (checkpoint.parent / "alone").mkdir()
    return True


def test_a_split_directory_in_the_working_folder(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(split(checkpoint, "8bit"))
    assert quality(".", **FEW).reference.name == str(checkpoint)


def test_the_uncompressed_split_of_another_model_is_no_reference(checkpoint: Path, tmp_path: Path) -> None:
    other = build_checkpoint(tmp_path / "other", "llama", seed=1)
    out = {"layer_shards_saving_path": tmp_path / "out", "device": "cpu"}
    AutoModel.from_pretrained(other, **out)
    AutoModel.from_pretrained(checkpoint, compression="8bit", **out)
    with pytest.raises(QualityError, match="parent folder does not hold the uncompressed model"):
        quality(tmp_path / "out" / "splitted_model.8bit", **FEW)
    assert quality(tmp_path / "out" / "splitted_model", checkpoint, **FEW).summary.divergence.mean > 0.1


def test_missing_original_is_reported(tmp_path: Path, checkpoint: Path) -> None:
    spare = shutil.copytree(checkpoint, tmp_path / "spare")
    AutoModel.from_pretrained(checkpoint, compression="4bit", sequential_shard_processing=True, device="cpu")
    with pytest.raises(QualityError, match=r"The uncompressed model cannot be read\."):
        quality(checkpoint, **FEW)
    assert quality(checkpoint, spare, **FEW).summary.divergence.mean > 0


def test_loaded_models(checkpoint: Path) -> None:
    packed = AutoModel.from_pretrained(checkpoint, compression="4bit", device="cpu", dtype="float32")
    whole = AutoModel.from_pretrained(checkpoint, device="cpu", dtype="float32")
    result = quality(packed, whole, **FEW)
    assert result.summary == quality(checkpoint, compression="4bit", **FEW).summary
    assert result.model.compression == "4bit"
    with pytest.raises(OptionError, match="is required when"):
        quality(packed, **FEW)


def test_given_text(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("A hare is not a rabbit. " * 9, encoding="utf-8")
    result = quality(checkpoint, text=tmp_path / "own.txt", compression="none", **FEW)
    assert result.text == str(tmp_path / "own.txt")
    assert result.summary.divergence.largest == 0
    assert result.summary.agreement == 1


def test_different_vocabularies_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = json.loads(text)["model"]["vocab"]
    first, second = (json.dumps(token, ensure_ascii=False) for token in ("Q", "Z"))
    swapped = {"Q": vocabulary["Z"], "Z": vocabulary["Q"]}
    for name, token_id in ((first, swapped["Q"]), (second, swapped["Z"])):
        text = text.replace(f"{name}: {vocabulary[json.loads(name)]}", f"{name}: {token_id}")
    (other / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(QualityError, match="different vocabularies"):
        quality(checkpoint, other, compression="none", **FEW)
    untold = build_checkpoint(tmp_path / "untold", "llama", tokenizer=False)
    with pytest.raises(QualityError, match=f"(?s)has no tokenizer.*{re.escape(str(untold))}"):
        quality(untold, compression="none", **FEW)


def test_bundled_model(tmp_path: Path) -> None:
    """It answers, and its problems are what it is measured on."""
    folder = shutil.copytree(Path(rabbitllm.demo.__file__).parent / "model", tmp_path / "demo")
    result = quality(folder, compression="4bit", device="cpu", problems=12)
    assert result.text == "held-out problems"
    assert result.windows == result.problems == 12
    assert result.model.right == result.reference.right == 12
    assert result.summary.positions > 24
    assert 0 < result.summary.divergence.mean < 1e-3
    record = result.as_json()
    assert json.loads(json.dumps(record)) == record
    assert record["model"]["bytes"] < record["against"]["bytes"] / 3
    with pytest.raises(OptionError, match="problems=3 is not possible"):
        quality(folder, device="cpu", problems=3)
    text = tmp_path / "text.txt"
    text.write_text("Q: 3 + 4\nA: 7\n" * 20, encoding="utf-8")
    few: dict[str, Any] = {"device": "cpu", "tokens": 64, "window": 32, "text": text}
    on_text = quality(folder, compression="4bit", **few)
    assert (on_text.text, on_text.problems, on_text.model.right, on_text.reference.right) == (str(text), 0, None, None)
    with_problems = quality(folder, compression="4bit", **few, problems=4)
    assert (with_problems.problems, with_problems.model.right, with_problems.summary) == (4, 4, on_text.summary)


DEMO_MODEL = Path(rabbitllm.demo.__file__).parent / "model"
TEXT = "the hare and the rabbit ran on. " * 20


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def bundled() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def test_windows_with_bos_predict_every_token(tokenizer: Any) -> None:
    assert tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    texts = windows(tokenizer, TEXT, window=32, tokens=10_000)
    assert [token for text in texts for token in text.continuation] == ids
    assert {tuple(text.context) for text in texts} == {(tokenizer.bos_token_id,)}
    assert [text.index for text in texts] == list(range(len(texts)))
    assert {1 + len(text.continuation) for text in texts[:-1]} == {32}


def test_windows_without_bos_predict_all_but_the_first_token(bundled: Any) -> None:
    ids = bundled(TEXT)["input_ids"]
    texts = windows(bundled, TEXT, window=32, tokens=10_000)
    tokens = [token for text in texts for token in (*text.context, *text.continuation)]
    assert tokens == ids[: len(tokens)]
    assert len(ids) - len(tokens) < 2
    assert {len(text.context) for text in texts} == {1}


@pytest.mark.parametrize("tokens", [16, 31, 32, 100])
def test_predicted_tokens_are_limited(tokenizer: Any, tokens: int) -> None:
    texts = windows(tokenizer, TEXT, window=32, tokens=tokens)
    assert sum(len(text.continuation) for text in texts) == tokens


def test_an_unreadable_text_is_refused_before_the_split(checkpoint: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere\.txt cannot be read as text: No such file or directory\.\n"):
        quality(checkpoint, compression="4bit", text=checkpoint / "nowhere.txt", device="cpu")
    assert names_in(checkpoint, "splitted*") == []


def test_a_window_beyond_the_context_is_refused(checkpoint: Path) -> None:
    with pytest.raises(OptionError, match="A window of 257 tokens is too long; the model's context has 256"):
        quality(checkpoint, checkpoint, device="cpu", window=257)


def test_too_short_a_text_and_impossible_numbers_are_refused(tokenizer: Any) -> None:
    with pytest.raises(QualityError, match="has 0 tokens to predict; expected at least 16"):
        windows(tokenizer, "", window=32, tokens=100)
    with pytest.raises(QualityError, match="tokens to predict; expected at least 16"):
        windows(tokenizer, "the hare", window=32, tokens=100)
    for window, tokens in ((1, 100), (32, 15)):
        with pytest.raises(OptionError, match=f"window={window}, tokens={tokens}"):
            windows(tokenizer, TEXT, window=window, tokens=tokens)


def test_files_other_than_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere\.txt cannot be read as text: No such file or directory\.\n"):
        text_of(tmp_path / "nowhere.txt")
    (tmp_path / "other.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match=r"other\.txt cannot be read as text"):
        text_of(tmp_path / "other.txt")
    (tmp_path / "one.txt").write_text("héron", encoding="utf-8")
    assert text_of(tmp_path / "one.txt") == "héron"


def test_bundled_text_is_long_enough(tokenizer: Any) -> None:
    """Also for tokenizers whose tokens are longer."""
    words = len(bundled_text().split())
    assert words > 800
    assert sum(len(text.continuation) for text in windows(tokenizer, bundled_text(), window=256, tokens=4096)) > words


def test_answers_and_end_tokens_are_predicted(bundled: Any) -> None:
    problems = held_out(8)
    for scored, problem in zip(scored_answers(bundled, problems), problems, strict=True):
        assert bundled.decode(scored.context) == problem.prompt
        assert bundled.decode(scored.continuation[:-1]).strip() == problem.answer
        assert scored.continuation[-1] == bundled.eos_token_id
    assert is_bundled_tokenizer(bundled)


def test_bundled_tokenizer_is_recognised(tokenizer: Any) -> None:
    assert not is_bundled_tokenizer(tokenizer)
