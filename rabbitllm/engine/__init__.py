"""From layer files to logits: a genuine transformers model whose weights are streamed. Never imports the splitter."""

__all__ = [
    "devices",
    "expert_finding",
    "expert_source",
    "experts",
    "forwards",
    "free_memory",
    "heads",
    "load",
    "load_plan",
    "pass_line",
    "placement",
    "prefetch",
    "published_codes",
    "skeleton",
    "span_reader",
    "streamed_model",
    "transformers_api",
    "transformers_check",
    "units",
    "weight_tensors",
]
