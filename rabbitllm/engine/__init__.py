"""From layer files to logits: a genuine transformers model whose weights are streamed. Never imports the splitter."""
