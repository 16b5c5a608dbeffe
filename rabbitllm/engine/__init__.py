"""From layer files to logits: a genuine transformers model whose weights come and go. Never imports the splitter."""
