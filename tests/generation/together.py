"""Generations of a model by themselves, and the same in passes that they share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rabbitllm.generation._model_runner import ModelRunner

LENGTHS = (5, 17, 26, 9)
"""Tokens of the prompts; the longer ones are longer than any window of the tests."""
NEW_TOKENS = 7
CHUNK = 6
"""Tokens of a prompt in one pass, for every second prompt."""
LATE = 2
"""Passes before the last prompt comes."""


@dataclass(frozen=True)
class Text:
    """What a generation made.

    Attributes:
        tokens: (tokens,), the prompt's too.
        logits: of each step, (steps, vocabulary).
    """

    tokens: torch.Tensor
    logits: torch.Tensor


def prompts(lengths: Sequence[int] = LENGTHS, vocabulary: int = 270, seed: int = 0) -> list[torch.Tensor]:
    """Random ids, (1, length) each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (1, length), generator=generator) for length in lengths]


def generated(model: Any, prompt: torch.Tensor, new_tokens: int = NEW_TOKENS, **options: Any) -> Text:
    """Greedily, and as many as asked for."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new_tokens, **options}
    output = model.generate(
        prompt.to(model.device),
        attention_mask=torch.ones_like(prompt).to(model.device),
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    return Text(output.sequences[0], torch.cat(output.logits))


def alone(model: Any, prompts: Sequence[torch.Tensor], **options: Any) -> list[Text]:
    """One after the other."""
    return [generated(model, prompt, **_chunks(index), **options) for index, prompt in enumerate(prompts)]


def together(
    model: Any,
    prompts: Sequence[torch.Tensor],
    before_pass: Callable[[ModelRunner, int], None] = lambda runner, index: None,
    *,
    exact: bool = False,
    packing: bool = True,
    **options: Any,
) -> list[Text]:
    """The same in passes that they share; the last one comes when the others have begun to generate.

    Args:
        before_pass: is given the runner, and the number of the next one.
    """
    runner = ModelRunner(model, exact=exact, packing=packing)
    texts: dict[int, Text] = {}

    def work(index: int) -> Callable[[], None]:
        def generate() -> None:
            texts[index] = generated(model, prompts[index], **_chunks(index), **options)

        return generate

    try:
        coroutines = [runner.coroutines.add(work(index)) for index in range(len(prompts) - 1)]
        count = 0
        while runner.coroutines.active:
            if count == LATE:
                coroutines.append(runner.coroutines.add(work(len(prompts) - 1)))
            before_pass(runner, count)
            runner.run(runner.coroutines.active)
            count += 1
    finally:
        runner.coroutines.close()
    for coroutine in coroutines:
        if coroutine.error is not None:
            raise coroutine.error
    return [texts[index] for index in range(len(prompts))]


def _chunks(index: int) -> dict[str, Any]:
    return {"prefill_chunk_size": CHUNK} if index % 2 else {}


def assert_alike(texts: Sequence[Text], expected: Sequence[Text], tolerance: float = 1e-4) -> None:
    """Logits that differ by no more than rounding, and the same tokens, up to a place where rounding decides."""
    assert len(texts) == len(expected)
    for text, reference in zip(texts, expected, strict=True):
        assert text.tokens.shape == reference.tokens.shape
        prompt, steps = len(reference.tokens) - len(reference.logits), len(reference.logits)
        differs = (text.tokens[prompt:] != reference.tokens[prompt:]).nonzero()
        if len(differs):
            steps = int(differs[0]) + 1
            mine, its = (text.tokens[prompt + steps - 1] for text in (text, reference))
            scores = reference.logits[steps - 1].double()
            assert float(scores[its] - scores[mine]) <= 2 * tolerance * (1 + float(scores.abs().max()))
        torch.testing.assert_close(text.logits[:steps], reference.logits[:steps], rtol=tolerance, atol=tolerance)
        assert torch.equal(text.tokens[:prompt], reference.tokens[:prompt])


@contextlib.contextmanager
def forwards(model: Any) -> Iterator[list[int]]:
    """How many rows each forward of the model had."""
    rows: list[int] = []

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()
