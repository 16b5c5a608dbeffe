"""`rabbitllm serve`: one model behind an OpenAI-compatible HTTP interface; passes over its weights answer everybody."""
