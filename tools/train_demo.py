"""Train the bundled demonstration model from scratch: ``python -m tools.train_demo --out DIR``.

``rabbitllm.demo.tasks`` makes the text, the tokenizer is trained on that text, the model is a small Qwen3.
At the end the held-out problems are answered in bf16 and with the weights rounded to 8bit and 4bit, and the scores
are written to ``score.json`` in the folder of the checkpoint.  The checkpoint is saved in several shards, so that
it can be split.

The bundled model answers problems, and is trained with rounded weights at the end, so that it hardly shows the cost
of rounding.  ``--size larger`` makes a model of 26 million parameters that shows it: with the same tokenizer, weights
that are never rounded during training, half of its training text prose (``tools.demo_prose``), and rows that are
multiples of 256, the blocks of other formats.

A run with the same seed, number of threads and library versions is repeatable, except with ``--minutes``,
because the learning rate then follows the clock.  This script does not use the streaming engine: it rounds the
weights in memory by the rule of the splitter, which keeps the score independent of the code that it checks.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional as bnb
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rabbitllm.demo.models import BundledModel
from rabbitllm.demo.tasks import KINDS, Problem, exact_match, facts, held_out
from tools.demo_prose import held_out_prose, training_prose
from tools.demo_training import text_of, training_stream

VOCABULARY = 1024


@dataclass(frozen=True)
class Shape:
    """The shape of a Qwen3; every row of a matrix is a whole number of 64-weight blocks."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int


@dataclass(frozen=True)
class TrainingPlan:
    """The hyperparameters of training."""

    steps: int
    minutes: float | None
    seed: int
    batch: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warm_up: float = 0.02
    # From this share of training on every other step uses 4bit weights, so that rounding costs the model little.
    rounded_from: float = 0.7
    # Windows of prose in each batch, and tokens in each of them.
    prose: int = 0
    window: int = 128
    # Whether products are computed in bfloat16, which is slower where the processor has no instructions for it.
    autocast: bool = True


BUNDLED, LARGER = "bundled", "larger"

SHAPES = {
    BUNDLED: Shape(hidden=192, intermediate=512, layers=8, heads=6, key_value_heads=3, head_dim=32),
    LARGER: Shape(hidden=512, intermediate=1536, layers=8, heads=8, key_value_heads=4, head_dim=64),
}


def plan_for(size: str, *, steps: int | None, minutes: float | None, seed: int) -> TrainingPlan:
    """The training plan for a size; `steps` None means 4,000 for the bundled model and 1,000 for the larger one."""
    if size == BUNDLED:
        return TrainingPlan(steps=steps or 4000, minutes=minutes, seed=seed)
    return TrainingPlan(
        steps=steps or 1000,
        minutes=minutes,
        seed=seed,
        batch=24,
        learning_rate=1.5e-3,
        warm_up=0.05,
        rounded_from=1.0,
        prose=6,
        autocast=False,
    )


UNLABELLED = -100


@dataclass(frozen=True)
class TrainingRows:
    """Rows of a batch that are computed together.

    Attributes:
        ids: (rows, width) int64, padded on the right.
        labels: the same shape: the id where a token is to be predicted, else -100.
        divisor: divisor of the summed loss.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    divisor: int


def batches(tokenizer: Any, plan: TrainingPlan) -> Iterator[list[TrainingRows]]:
    """Batches without end.

    Problems come in two parts of similar length (less padding). Only the answer and its end have labels. One example
    in eight starts with the end token, since some callers start every text with it. With prose, it is a separate part,
    all of whose tokens have labels, with the same weight as all problems.
    """
    prose = _windows(tokenizer, plan) if plan.prose else None
    stream = training_stream(plan.seed)
    end = tokenizer.eos_token_id
    while True:
        problems = list(islice(stream, plan.batch))
        questions = tokenizer([problem.prompt for problem in problems])["input_ids"]
        answers = tokenizer([f" {problem.answer}" for problem in problems])["input_ids"]
        rows = []
        for index, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            question = [end, *question] if index % 8 == 0 else question
            rows.append(([*question, *answer, end], [*[UNLABELLED] * len(question), *answer, end]))
        rows.sort(key=lambda row: len(row[0]))
        tokens = sum(label != UNLABELLED for _, labels in rows for label in labels)
        if prose is None:
            half = plan.batch // 2
            yield [_padded(part, tokenizer.pad_token_id, tokens) for part in (rows[:half], rows[half:])]
        else:
            windows = [next(prose) for _ in range(plan.prose)]
            yield [
                _padded(rows, tokenizer.pad_token_id, 2 * tokens),
                _padded([(ids, ids) for ids in windows], tokenizer.pad_token_id, 2 * plan.prose * (plan.window - 1)),
            ]


def _windows(tokenizer: Any, plan: TrainingPlan) -> Iterator[list[int]]:
    """Windows of the prose without end, each once before any is repeated, in an order that depends on the seed."""
    ids = tokenizer(training_prose(), verbose=False)["input_ids"]
    order = random.Random(f"prose {plan.seed}")
    while True:
        first = order.randrange(plan.window)
        begins = list(range(first, len(ids) - plan.window, plan.window))
        order.shuffle(begins)
        for begin in begins:
            yield ids[begin : begin + plan.window]


def _padded(rows: Sequence[tuple[list[int], list[int]]], pad: int, divisor: int) -> TrainingRows:
    """Rows padded on the right, where a causal model does not see them."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [UNLABELLED] * (width - len(row)) for _, row in rows])
    return TrainingRows(ids, labels, divisor)


END, PAD = "<|end|>", "<|pad|>"
HELD_OUT_PROBLEMS = 400
HELD_OUT_SEED = 0
# A second, larger set shows that the first was not a lucky draw; it holds nearly every held-out fact.
WIDER_PROBLEMS = 880
WIDER_SEED = 1
PROSE_WINDOWS = 64
SHARD_BYTES = 700_000
LIBRARIES = ("torch", "transformers", "tokenizers", "bitsandbytes")
PRECISIONS = ("bf16", "8bit", "4bit")

# Tensors of fewer dimensions or elements than this stay bf16 in a split checkpoint.
SMALLEST_ROUNDED = 4096

# A question stands alone: the model was trained without earlier turns, so the template leaves them out.
CHAT_TEMPLATE = (
    "{%- for message in messages if message['role'] == 'user' -%}"
    "{%- if loop.last -%}{{ 'Q: ' + message['content'] + '\\nA:' }}{%- endif -%}"
    "{%- endfor -%}"
)


@dataclass(frozen=True)
class HeldOutScore:
    """The score of one precision on the held-out problems; the loss is nats per answer token, end included."""

    exact_match: float
    right: int
    loss: float
    by_kind: dict[str, float]


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE that keeps every digit separate, trained on facts and a sample of the training stream."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\d| ?\p{L}+:?|\n| ?[^\s\p{L}\d]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [*map(text_of, facts(kept_back=False))]
    texts += [*map(text_of, islice(training_stream(seed), 5000))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Qwen3ForCausalLM:
    """The untrained model, in float32."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def answer_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy over the labelled tokens; logits are computed only for those."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    logits = model.lm_head(hidden[wanted != UNLABELLED])
    return torch.nn.functional.cross_entropy(logits.float(), wanted[wanted != UNLABELLED], reduction="sum")


def rounded(weight: torch.Tensor, precision: str) -> torch.Tensor:
    """``weight`` rounded to ``precision`` and dequantized, by the rule for split checkpoints."""
    if precision == "bf16" or weight.dim() < 2 or weight.numel() < SMALLEST_ROUNDED:
        return weight
    stored = weight.detach().to(torch.bfloat16).contiguous()
    if precision == "8bit":
        packed, state = bnb.quantize_blockwise(stored, blocksize=2048)
        restored: torch.Tensor = bnb.dequantize_blockwise(packed, state)
        return restored.to(weight.dtype)
    packed, state = bnb.quantize_4bit(stored, blocksize=64, quant_type="nf4")
    restored = bnb.dequantize_4bit(packed, state)
    return restored.to(weight.dtype)


@contextmanager
def rounded_weights(model: torch.nn.Module, precision: str) -> Iterator[None]:
    """The model with rounded weights inside the block, and its original weights after it.

    A gradient taken inside is that of the rounded weights and is applied to the original ones: straight through.
    """
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, data in kept:
        parameter.data = rounded(data, precision)
    try:
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    plan: TrainingPlan,
    say: Callable[[str], None],
    now_and_then: Callable[[], None],
) -> float:
    """Train ``model`` in place and return the duration in seconds; ``now_and_then`` is called every 100 steps."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98), fused=True)
    source = batches(tokenizer, plan)
    start = time.monotonic()
    step, progress = 0, 0.0
    model.train()
    # Backward, fused attention is several times slower than the plain one for rows this short.
    model.set_attn_implementation("eager")
    while progress < 1.0:
        rate = plan.learning_rate * min(1.0, progress / plan.warm_up) * (0.5 + 0.5 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        precision = "4bit" if progress > plan.rounded_from and step % 2 else "bf16"
        total = 0.0
        with rounded_weights(model, precision), torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast):
            for part in next(source):
                loss = answer_loss(model, part.ids, part.labels) / part.divisor
                torch.autograd.backward(loss)
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        elapsed = time.monotonic() - start
        progress = max(step / plan.steps, elapsed / (60 * plan.minutes) if plan.minutes else 0.0)
        if step % 100 == 0:
            say(f"step {step} {100 * progress:.1f}% {elapsed:.0f}s loss {total:.4f} {precision}")
            now_and_then()
    model.set_attn_implementation("sdpa")
    return time.monotonic() - start


@torch.inference_mode()
def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], precision: str
) -> HeldOutScore:
    """Score a bf16 model with its weights rounded to ``precision``."""
    model.eval()
    total, tokens = 0.0, 0
    with rounded_weights(model, precision):
        answers = BundledModel().answers(model, tokenizer, problems)
        for problem in problems:
            question = tokenizer(problem.prompt)["input_ids"]
            answer = [*tokenizer(f" {problem.answer}")["input_ids"], tokenizer.eos_token_id]
            ids = torch.tensor([question + answer])
            labels = torch.tensor([[UNLABELLED] * len(question) + answer])
            total += float(answer_loss(model, ids, labels))
            tokens += len(answer)
    hits = [exact_match(text, problem) for text, problem in zip(answers, problems, strict=True)]
    by_kind = {
        kind: sum(hit for hit, problem in zip(hits, problems, strict=True) if problem.kind == kind)
        / sum(problem.kind == kind for problem in problems)
        for kind in KINDS
    }
    return HeldOutScore(sum(hits) / len(hits), sum(hits), total / tokens, by_kind)


def scores(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> dict[str, Any]:
    """Scores in every precision on ``held_out(count, seed)``."""
    problems = held_out(count, seed)
    by_precision = {name: asdict(evaluate(model, tokenizer, problems, name)) for name in PRECISIONS}
    return {"problems": count, "seed": seed, **by_precision}


@torch.inference_mode()
def prose_loss(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, precision: str, window: int) -> float:
    """Nats per token of held-out prose."""
    every = tokenizer(held_out_prose(), verbose=False)["input_ids"]
    ids = torch.tensor(every[: PROSE_WINDOWS * window]).view(-1, window)
    with rounded_weights(model, precision):
        losses = [answer_loss(model, ids[begin : begin + 8], ids[begin : begin + 8]) for begin in range(0, len(ids), 8)]
    return float(torch.stack(losses).sum()) / (len(ids) * (window - 1))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint as bfloat16, in world-readable shards, replacing an earlier one."""
    aside = folder.with_name(folder.name + ".new")
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(aside, max_shard_size=SHARD_BYTES)
    tokenizer.save_pretrained(aside)
    for path in aside.iterdir():
        path.chmod(0o644)
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)


def main() -> None:
    """Train, save to ``OUT/model``, score, and write ``OUT/score.json``."""
    parser = argparse.ArgumentParser(description="Train the bundled demonstration model, or its larger sister.")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets model/ and score.json")
    parser.add_argument("--size", choices=sorted(SHAPES), default=BUNDLED)
    parser.add_argument("--steps", type=int, help="by default 4,000, or 1,000 of the larger one")
    parser.add_argument("--minutes", type=float, help="stop by this time; the learning rate then follows the clock")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    plan = plan_for(arguments.size, steps=arguments.steps, minutes=arguments.minutes, seed=arguments.seed)
    tokenizer = build_tokenizer(plan.seed)
    model = build_model(tokenizer, SHAPES[arguments.size])
    folder = arguments.out / "model"
    seconds = train(
        model,
        tokenizer,
        plan,
        lambda line: print(line, flush=True),
        lambda: save(model, tokenizer, folder),
    )
    save(model, tokenizer, folder)
    # Scored from the files, so that the numbers are those of the shipped model.
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    record = {
        **scores(model, tokenizer, HELD_OUT_PROBLEMS, HELD_OUT_SEED),
        "wider": scores(model, tokenizer, WIDER_PROBLEMS, WIDER_SEED),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weight_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "training": {**asdict(plan), "threads": arguments.threads, "seconds": round(seconds)},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
    }
    if plan.prose:
        record["prose"] = {name: prose_loss(model, tokenizer, name, plan.window) for name in PRECISIONS}
    (arguments.out / "score.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name in PRECISIONS:
        print(f"{name}: {record[name]['right']} of {HELD_OUT_PROBLEMS} right, loss {record[name]['loss']:.5f}")


if __name__ == "__main__":
    main()
