"""Whether any pass could ever answer a request."""

from __future__ import annotations

from typing import Any

from rabbitllm.base.terminal import size
from rabbitllm.errors import OptionError
from rabbitllm.generation.answer import context_of
from rabbitllm.generation.cache_memory import CacheMemory
from rabbitllm.generation.request import Request


def check_answerable(request: Request, model: Any, memory: CacheMemory) -> None:
    """
    Args:
        request: what is asked for.
        model: that is asked.
        memory: for its KV cache.

    Raises:
        OptionError: the prompt is empty or no token is to be generated; the request is longer than the model's
            context; the prompt has a token that is not in the vocabulary; or its KV cache needs more memory than
            there is.
    """
    tokens = len(request.prompt)
    if not tokens or request.max_new_tokens < 1:
        raise OptionError("An empty prompt, or no token to generate.", "Give at least one of each.")
    known = model.get_input_embeddings().num_embeddings
    if not all(0 <= token < known for token in request.prompt):
        raise OptionError(f"The prompt has a token that the model does not know; it has {known:,}.")
    context = context_of(model)
    if context is not None and tokens + request.max_new_tokens > context:
        raise OptionError(
            f"The prompt has {tokens:,} tokens and {request.max_new_tokens:,} may follow; the model's context is "
            f"{context:,}.",
            "Shorten the prompt, or ask for fewer tokens.",
        )
    needed = memory.bytes_for(tokens + 1)
    if needed > memory.limit:
        raise OptionError(
            f"The prompt's KV cache needs {size(needed)}; {size(memory.limit)} may be used.",
            "Shorten the prompt, or give the server more memory for it.",
        )
