"""The self-check of a version of transformers that is newer than the tested ones."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr

from rabbitllm.base.options import RunOptions
from rabbitllm.base.transformers_version import changed_part, installed_version, newer_than_tested
from rabbitllm.storage.durable import ScratchFolder
from rabbitllm.version import TRANSFORMERS

logger = logging.getLogger(__name__)


_is_checked = False


def check_transformers() -> None:
    """Check the installed transformers if it is newer than the tested versions, and warn once.

    Raises:
        MissingPackageError: it has changed a part that RabbitLLM uses.
    """
    global _is_checked
    if _is_checked:
        return
    _is_checked = True  # not later: the model of the check is loaded, too
    if not newer_than_tested():
        return
    try:
        try_transformers()
    except BaseException:
        _is_checked = False
        raise
    logger.warning(
        "transformers %s is newer than the tested versions (%s to %s). A small model works; others may not.",
        installed_version(),
        *TRANSFORMERS,
    )


def try_transformers() -> None:
    """Load a tiny model with routed experts from its checkpoint, and compare it with transformers' own.

    Raises:
        MissingPackageError: it cannot be loaded, or has other logits, tokens or layers of its KV cache.
    """
    try:
        _try()
    except Exception as error:  # a part that has changed may raise any error
        raise changed_part(error) from error


def _try() -> None:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, DynamicLayer, Gemma3TextConfig, Qwen3MoeConfig

    from rabbitllm.checkpoints.local import LocalCheckpoint
    from rabbitllm.engine.load import load_model
    from rabbitllm.engine.transformers_api import DynamicSlidingWindowLayer
    from rabbitllm.store.layer_store import UnsplitStore

    kinds = Gemma3TextConfig(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    layers = DynamicCache(config=kinds).layers
    if [type(layer) for layer in layers] != [DynamicLayer, DynamicSlidingWindowLayer]:
        raise TypeError(f"a KV cache has layers of the types {', '.join(type(layer).__name__ for layer in layers)}")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "head_dim": 8}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    config = Qwen3MoeConfig(**sizes, **counts, num_experts_per_tok=2, max_position_embeddings=32)
    ids = torch.arange(8, device="cpu")[None]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), ScratchFolder() as folder:
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with redirect_stderr(io.StringIO()):  # a progress bar
            reference.save_pretrained(folder)
        model = load_model(UnsplitStore(LocalCheckpoint(folder)), RunOptions(device="cpu", show_progress=False))
        if not torch.allclose(model(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-5):
            raise ValueError("a loaded model has other logits than transformers' own")
        tokens = [m.generate(ids, max_new_tokens=4, do_sample=False).tolist() for m in (model, reference)]
        if tokens[0] != tokens[1]:
            raise ValueError("a loaded model generates other tokens than transformers' own")
