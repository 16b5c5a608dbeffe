"""RabbitLLM: run language models that fit neither the GPU, nor RAM, nor (while they are prepared) the disk."""
