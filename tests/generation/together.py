"""Generations of a model by themselves, and the same in passes that they share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rabbitllm.generation.model_runner import ModelRunner

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
    found = model.generate(
        prompt.to(model.device),
        attention_mask=torch.ones_like(prompt).to(model.device),
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    return Text(found.sequences[0], torch.cat(found.logits))


def alone(model: Any, given: Sequence[torch.Tensor], **options: Any) -> list[Text]:
    """One after the other."""
    return [generated(model, prompt, **_chunks(number), **options) for number, prompt in enumerate(given)]


def together(
    model: Any,
    given: Sequence[torch.Tensor],
    before_pass: Callable[[ModelRunner, int], None] = lambda runner, number: None,
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
    found: dict[int, Text] = {}

    def work(number: int) -> Callable[[], None]:
        def generate() -> None:
            found[number] = generated(model, given[number], **_chunks(number), **options)

        return generate

    try:
        coroutines = [runner.coroutines.add(work(number)) for number in range(len(given) - 1)]
        count = 0
        while runner.coroutines.active:
            if count == LATE:
                coroutines.append(runner.coroutines.add(work(len(given) - 1)))
            before_pass(runner, count)
            runner.run(runner.coroutines.active)
            count += 1
    finally:
        runner.coroutines.close()
    for coroutine in coroutines:
        if coroutine.error is not None:
            raise coroutine.error
    return [found[number] for number in range(len(given))]


def _chunks(number: int) -> dict[str, Any]:
    return {"prefill_chunk_size": CHUNK} if number % 2 else {}


def assert_alike(got: Sequence[Text], expected: Sequence[Text], tolerance: float = 1e-4) -> None:
    """Logits that differ by no more than rounding, and the same tokens, up to a place where rounding decides."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.tokens.shape == other.tokens.shape
        prompt, steps = len(other.tokens) - len(other.logits), len(other.logits)
        differs = (one.tokens[prompt:] != other.tokens[prompt:]).nonzero()
        if len(differs):
            steps = int(differs[0]) + 1
            mine, its = (text.tokens[prompt + steps - 1] for text in (one, other))
            scores = other.logits[steps - 1].double()
            assert float(scores[its] - scores[mine]) <= 2 * tolerance * (1 + float(scores.abs().max()))
        torch.testing.assert_close(one.logits[:steps], other.logits[:steps], rtol=tolerance, atol=tolerance)
        assert torch.equal(one.tokens[:prompt], other.tokens[:prompt])


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
