"""`rabbitllm run` as a user meets it: a prompt in, the answer and nothing else on stdout."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import Result

from rabbitllm.errors import OptionError
from rabbitllm.generation.request import AnswerPenalties
from tests.chat.talkers import talker_folder
from tests.support.builders import build_checkpoint
from tests.support.commands import invoke
from tests.support.demo_models import DEMO
from tests.support.hub_fixtures import HubEnvironment
from tests.support.screen import Screen, run_on_terminal
from tests.support.splitting import names_in
from tests.support.thinking_models import ANSWER, QUESTION, REASONING_TOKENS, THOUGHT, channel_thinker, thinker
from tests.support.tiny_models import one_thread, plain_model, split  # noqa: F401  a fixture that applies by itself

PROMPT = "the rabbit and the hare"
SHORT = ["--device", "cpu", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_checkpoint(tmp_path_factory.mktemp("run") / "model", "llama", shards=2)
    split(folder)
    return folder


def run(*arguments: str, code: int = 0) -> Result:
    return invoke("run", *arguments, code=code)


def expected(folder: Path, text: str, tokens: int = 8, *, begins: bool = True) -> str:
    """What transformers says, with the token that begins a text in front or not."""
    model = plain_model(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=begins)["input_ids"]
    output = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    answer: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return answer


def test_the_answer_alone_is_on_stdout(checkpoint: Path) -> None:
    result = run(str(checkpoint), PROMPT, "--raw", *SHORT)
    assert result.stdout.rstrip("\n") == expected(checkpoint, PROMPT).rstrip("\n")
    assert "stopped after 8 tokens" in result.stderr


def test_chat_template_is_used(checkpoint: Path) -> None:
    output = run(str(checkpoint), PROMPT, "--system", "Be brief.", *SHORT, "--json")
    text = f"system: Be brief.\nuser: {PROMPT}\nassistant:"
    assert json.loads(output.stdout)["text"] == expected(checkpoint, text, begins=False)


def test_one_json_object(checkpoint: Path) -> None:
    result = run(str(checkpoint), PROMPT, "--raw", *SHORT, "--json", "--compression", "none")
    record: dict[str, Any] = json.loads(result.stdout)
    assert set(record) == {
        *(
            "model",
            "text",
            "reasoning",
            "reasoning_tokens",
            "tokens",
            "prompt_tokens",
            "new_tokens",
            "finish",
            "load_seconds",
            "first_token_seconds",
        ),
        *("seconds", "tokens_per_second", "device", "dtype", "compression", "folder"),
    }
    assert (record["text"], record["finish"], record["new_tokens"]) == (expected(checkpoint, PROMPT), "length", 8)
    assert record["folder"] == str(checkpoint / "splitted_model")
    assert result.stderr == ""


def test_statistics_are_on_stderr(checkpoint: Path) -> None:
    streamed = ["--max-memory", "cpu=0", "--verbose", "--draft", "none"]
    result = run(str(checkpoint), PROMPT, "--raw", *SHORT, *streamed)
    assert result.stdout.rstrip("\n") == expected(checkpoint, PROMPT).rstrip("\n")
    for fact in ("load", "prompt", "first token", "answer", "each token"):
        assert re.search(rf"^{fact} +\S", result.stderr, re.MULTILINE), fact
    pattern = r"^each token +[\d.]+ s: .*computing \d+%.*, [\d.,]+ (MB|bytes) read"
    assert re.search(pattern, result.stderr, re.MULTILINE)
    assert "dequantizing" not in result.stderr
    packed = run(str(checkpoint), PROMPT, "--raw", *SHORT, *streamed, "--compression", "4bit")
    assert "dequantizing" in packed.stderr
    assert "drafts" not in packed.stderr
    drafted = run(str(checkpoint), PROMPT, "--raw", *SHORT, *streamed[:3])
    assert drafted.stdout == result.stdout
    proposed = r"(: ngram proposed no token, in| by ngram, right( \d+%)+( …)? by depth,)"
    pattern = rf"^drafts +[\d.]+ tokens a pass{proposed} \d+% of the time$"
    assert re.search(pattern, drafted.stderr, re.MULTILINE)


def test_an_answer_fits_its_schema(checkpoint: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": ["hare", "rabbit"]}, "minItems": 3, "maxItems": 3}')
    long = ["--device", "cpu", "--max-new-tokens", "80", "--temperature", "1.5"]
    result = run(str(checkpoint), PROMPT, *long, "--schema", str(schema), "--stats")
    assert {*json.loads(result.stdout)} <= {"hare", "rabbit"}
    assert re.search(r"^grammar +\d\d forced tokens without a pass$", result.stderr, re.MULTILINE)
    schema.write_text('{"not": {}}')
    with pytest.raises(OptionError, match=r'Unimplemented keys: \["not"\]'):
        run(str(checkpoint), PROMPT, *long, "--schema", str(schema))


def test_a_draft_model(checkpoint: Path, tmp_path: Path) -> None:
    result = run(str(checkpoint), PROMPT, "--raw", *SHORT, "--draft", str(checkpoint))
    assert result.stdout.rstrip("\n") == expected(checkpoint, PROMPT).rstrip("\n")
    limit = ["--max-memory", "cpu=0.42MB"]
    own = run(str(checkpoint), PROMPT, "--raw", *SHORT, *limit, "--draft", "self")
    assert own.stdout.rstrip("\n") == expected(checkpoint, PROMPT).rstrip("\n")
    with pytest.raises(OptionError, match="all weights of this model fit in memory"):
        run(str(checkpoint), PROMPT, "--raw", *SHORT, "--draft", "self")
    ngram = run(str(checkpoint), PROMPT, "--raw", *SHORT, "--draft", "NGram", "--stats")
    assert ngram.stdout == result.stdout
    assert re.search("tokens a pass(: | by )ngram", ngram.stderr)
    # a draft without a split gets one beside the model's, where the user put that
    small = build_checkpoint(tmp_path / "small", "llama", num_hidden_layers=1)
    placed = run(str(checkpoint), PROMPT, "--raw", *SHORT, "--dir", str(tmp_path / "here"), "--draft", str(small))
    assert placed.stdout == result.stdout
    assert [path.name for path in small.glob("splitted*")] == []
    # one for each: of earlier versions, which had one in `draft` itself, of another name, of the same name elsewhere
    drafts = tmp_path / "here" / "draft"
    (split_folder,) = drafts.glob("small-*/splitted_model")
    split_folder.rename(drafts / "splitted_model")
    for draft, folders in ((small, 0), (tmp_path / "smaller", 1), (tmp_path / "elsewhere" / "smaller", 2), (small, 2)):
        if not draft.exists():
            build_checkpoint(draft, "llama", num_hidden_layers=1, seed=folders)
        again = run(str(checkpoint), PROMPT, "--raw", *SHORT, "--dir", str(tmp_path / "here"), "--draft", str(draft))
        assert (again.stdout, len([*drafts.glob("small*-*/splitted_model")])) == (result.stdout, folders)
    other = talker_folder(tmp_path / "other", "llama")
    with pytest.raises(OptionError, match="another vocabulary"):
        run(str(checkpoint), PROMPT, "--raw", *SHORT, "--draft", str(other))


RECOMMENDED = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "top_k": 20}


@pytest.fixture(scope="module")
def recommending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_checkpoint(tmp_path_factory.mktemp("run") / "model", "llama")
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    split(folder)
    return folder


def sampled(folder: Path, text: str, **options: Any) -> str:
    """What transformers says with a seed of 3."""
    model = plain_model(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    if penalties := options.pop("penalties", None):
        options["logits_processor"] = [AnswerPenalties(ids.shape[1], *penalties)]
    torch.manual_seed(3)
    output = model.generate(ids, max_new_tokens=8, **options)
    answer: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return answer.rstrip("\n")


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        ([], {}, "temperature 1.5, top_p 0.95, top_k 20, from the model"),
        (["--temperature", "2.5"], {"temperature": 2.5}, "temperature 2.5, top_p 0.95, top_k 20"),
        (
            ["--top-k", "0", "--min-p", "0.01", "--repeat-penalty", "1.5"],
            {"top_k": 0, "min_p": 0.01, "repetition_penalty": 1.5},
            "temperature 1.5, top_p 0.95, top_k 0, min_p 0.01, repetition_penalty 1.5",
        ),
        (["--temperature", "0"], {"do_sample": False}, "greedy"),
        (
            ["--temperature", "0", "--logit-bias", "9=50", "--logit-bias", "7=-100"],
            {"do_sample": False, "sequence_bias": [[[9], 50.0], [[7], -100.0]]},
            "greedy",
        ),
        (
            ["--presence-penalty", "1.5", "--frequency-penalty", "-0.5"],
            {"penalties": (1.5, -0.5)},
            "temperature 1.5, top_p 0.95, top_k 20, presence_penalty 1.5, frequency_penalty -0.5",
        ),
    ],
)
def test_sampling_is_the_models_but_for_the_options(
    recommending: Path, options: list[str], settings: dict[str, Any], said: str
) -> None:
    result = run(str(recommending), PROMPT, "--raw", *SHORT, "--seed", "3", "--stats", *options)
    assert result.stdout.rstrip("\n") == sampled(recommending, PROMPT, **settings)
    assert re.search(rf"^sampling +{said}$", result.stderr, re.MULTILINE), result.stderr


def test_least_tokens_and_ends_that_are_ignored(checkpoint: Path) -> None:
    """With a model that wants to end at once."""
    end = json.loads((checkpoint / "config.json").read_text())["eos_token_id"]
    ending = ["--temperature", "0", "--logit-bias", f"{end}=100", "--raw", "--json"]
    counts = [
        json.loads(run(str(checkpoint), PROMPT, *SHORT, *ending, *options).stdout)["new_tokens"]
        for options in ([], ["--min-tokens", "3"], ["--ignore-eos"])
    ]
    assert counts == [1, 4, 8]


def test_sampled_answers_differ_without_a_seed(recommending: Path) -> None:
    torch.manual_seed(3)
    texts = {run(str(recommending), PROMPT, "--raw", *SHORT).stdout for _ in range(4)}
    assert len(texts) > 1


def test_an_answer_ends_before_a_stop_text(checkpoint: Path) -> None:
    whole = expected(checkpoint, PROMPT)
    stop = whole[3:5]
    result = run(str(checkpoint), PROMPT, "--raw", *SHORT, "--stop", "not there", "--stop", stop)
    assert result.stdout.rstrip("\n") == whole[: whole.index(stop)].rstrip("\n")


def test_the_context_limits_prompt_and_answer(checkpoint: Path) -> None:
    arguments = [str(checkpoint), PROMPT, "--raw", "--device", "cpu"]
    tokens = len(AutoTokenizer.from_pretrained(checkpoint)(PROMPT)["input_ids"])
    result = run(*arguments, "--context", str(tokens + 3), "--stats")
    assert "stopped after 3 tokens, where the context of" in result.stderr
    with pytest.raises(OptionError, match=f"The prompt has {tokens} tokens; the context is limited to {tokens - 1}."):
        run(*arguments, "--context", str(tokens - 1))


def test_the_words_of_a_prompt_are_joined(checkpoint: Path) -> None:
    whole = run(str(checkpoint), PROMPT, "--raw", *SHORT)
    assert run(str(checkpoint), *PROMPT.split(), "--raw", *SHORT).stdout == whole.stdout
    assert run(str(checkpoint), "the", *SHORT, "rabbit", "and", "--raw", "the", "hare").stdout == whole.stdout


def test_empty_answer_is_reported(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT)["input_ids"]
    model = plain_model(folder)
    first = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    settings = folder / "generation_config.json"
    generation_config = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({**generation_config, "eos_token_id": first}))
    tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(first)})
    tokenizer.save_pretrained(folder)
    result = run(str(folder), PROMPT, "--raw", "--no-split", *SHORT)
    assert result.stdout.strip() == ""
    assert "the answer is empty" in result.stderr
    assert "chat template" in result.stderr


def test_existing_split_gives_the_compression(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    split(folder, "4bit")
    arguments = [str(folder), PROMPT, "--raw", *SHORT, "--json"]
    assert json.loads(run(*arguments).stdout)["compression"] == "4bit"
    split(folder, "8bit")
    assert json.loads(run(*arguments).stdout)["compression"] == "8bit"
    assert json.loads(run(*arguments, "--compression", "4bit").stdout)["compression"] == "4bit"
    assert not (folder / "splitted_model").exists()


@pytest.mark.parametrize("name_type", ["split directory", "file", "no split"])
def test_names_of_models(checkpoint: Path, tmp_path: Path, name_type: str) -> None:
    folder = checkpoint
    names = {"split directory": checkpoint / "splitted_model", "file": next(checkpoint.glob("*-of-*"))}
    options = []
    if name_type == "no split":
        folder = build_checkpoint(tmp_path / "model", "llama", shards=2)
        options = ["--no-split"]
    result = run(str(names.get(name_type, folder)), PROMPT, "--raw", *SHORT, *options)
    assert result.stdout.rstrip("\n") == expected(folder, PROMPT).rstrip("\n")
    if name_type == "no split":
        assert "splitted_model" not in names_in(folder)


def test_a_model_that_is_not_split_is_split_first(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    folder = build_checkpoint(tmp_path / "hub" / "org/rabbit", "llama", shards=3)
    result = run("hf://org/rabbit", PROMPT, "--raw", *SHORT)
    assert result.stdout.rstrip("\n") == expected(folder, PROMPT).rstrip("\n")
    assert len([line for line in result.stderr.splitlines() if line.startswith("split into ")]) == 1
    assert not list(hub_environment.home.rglob("*-of-*"))
    again = run("org/rabbit", PROMPT, "--raw", *SHORT)
    assert (again.stdout, "split " in again.stderr) == (result.stdout, False)


def test_an_interrupt_ends_it_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question, options = "Sort from low to high: 31 5 77 2", ["--dir", str(tmp_path), "--device", "cpu"]
    complete = run(str(DEMO), question, *options).stdout
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("rabbitllm.display.answer_printer.AnswerPrinter.write", lambda printer, piece: write(piece))
    result = run(str(DEMO), question, *options, code=130)
    assert "interrupted after" in result.stderr
    text = "".join(pieces).rstrip("\n")
    assert text
    assert complete.startswith(text)
    assert len(text) < len(complete.strip())


def test_no_prompt_is_a_wrong_call(checkpoint: Path) -> None:
    result = run(str(checkpoint), code=2)
    assert "There is no prompt" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["--min-p", "2"], "min_p=2.0 is out of range"),
        (["--repeat-penalty", "0"], "repetition_penalty=0.0 is out of range"),
        (["--repeat-penalty", "1e-300"], "repetition_penalty=1e-300 is out of range"),
        (["--presence-penalty", "3"], "presence_penalty=3.0 is out of range"),
        (["--logit-bias", "9=500"], "--logit-bias: expected biases from -100 to 100, found 500"),
        (["--logit-bias", "9"], "--logit-bias: could not convert"),
        (["--logit-bias", "999999=1"], "logit_bias has the token 999999; the vocabulary has"),
        (["--raw", "--system", "x"], "a system prompt is not possible"),
        (["--compression", "3bit"], "does not exist"),
        (["--max-memory", "much"], "names no device"),
        (["--max-new-tokens", "9999"], "the model's context has"),
    ],
)
def test_wrong_options(checkpoint: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run(str(checkpoint), PROMPT, *SHORT, *arguments)


@pytest.mark.long
def test_piped_text_precedes_the_prompt(tmp_path: Path) -> None:
    """A process of its own: only there is stdin a pipe."""
    command = [sys.executable, "-m", "rabbitllm", "run", str(DEMO), "What is 3 + 4?", "--dir", str(tmp_path)]
    process = subprocess.run(
        [*command, "--device", "cpu", "--json", "--raw"], input="some text\n", capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    record = json.loads(process.stdout)
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    assert record["prompt_tokens"] == len(tokenizer("some text\n\nWhat is 3 + 4?")["input_ids"])
    assert (tmp_path / "splitted_model" / "split.json").exists()


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("how", ["interrupt", "reader gone"])
def test_a_process_that_is_stopped(checkpoint: Path, how: str) -> None:
    command = [sys.executable, "-m", "rabbitllm", "run", str(checkpoint), PROMPT, "--raw", "--max-new-tokens", "200"]
    process = subprocess.Popen(
        [*command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
        assert process.returncode == 130
    else:
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 141
        assert b"Traceback" not in errors
        assert b"Exception" not in errors


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinker(tmp_path_factory.mktemp("thinking") / "model")


def test_thoughts_are_not_on_stdout(thinking: Path, tmp_path: Path) -> None:
    result = run(str(thinking), QUESTION, "--device", "cpu", "--verbose")
    assert result.stdout == ANSWER + "\n"
    assert f"5 tokens, {REASONING_TOKENS} of them thoughts in" in result.stderr
    channels = channel_thinker(tmp_path / "model")
    assert run(str(channels), QUESTION, "--device", "cpu").stdout == ANSWER + "\n"
    record = json.loads(run(str(thinking), QUESTION, "--device", "cpu", "--json").stdout)
    assert (record["text"], record["reasoning"]) == (ANSWER, THOUGHT)
    assert (record["new_tokens"], record["reasoning_tokens"]) == (5, REASONING_TOKENS)


def test_thinking_is_turned_off(thinking: Path) -> None:
    record = json.loads(run(str(thinking), QUESTION, "--device", "cpu", "--no-thinking", "--json").stdout)
    assert (record["text"], record["reasoning"], record["new_tokens"]) == (ANSWER, "", 2)
    with pytest.raises(OptionError, match="An effort of thinking cannot be set"):
        run(str(thinking), QUESTION, "--device", "cpu", "--effort", "low")
    with pytest.raises(OptionError, match="--raw uses no chat template"):
        run(str(thinking), QUESTION, "--device", "cpu", "--raw", "--no-thinking")


def test_a_limit_that_thoughts_alone_reached_says_so(thinking: Path) -> None:
    result = run(str(thinking), QUESTION, "--device", "cpu", "--max-new-tokens", "3")
    assert result.stdout == ""
    note = "ended after 3 tokens, all of them thoughts: raise --max-new-tokens, or use --no-thinking"
    assert note in " ".join(result.stderr.split())


@pytest.mark.skipif(os.name == "nt", reason="there are no such terminals there")
def test_thoughts_leave_their_time_on_a_terminal(thinking: Path) -> None:
    split(thinking)
    command = [sys.executable, "-m", "rabbitllm", "run", str(thinking), QUESTION, "--device", "cpu"]
    output = run_on_terminal(command, 80, {**os.environ, "TERM": "xterm"})
    behind_the_spinner = output.rpartition("\x1b[2K")[2]
    assert Screen(80).feed(behind_the_spinner).shown == ["(thought for 1 s)", ANSWER]
