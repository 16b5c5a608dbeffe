"""`rabbitllm bench`: measures how fast a model generates on this machine, and how the time is divided."""
