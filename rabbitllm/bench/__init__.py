"""`rabbitllm bench`: how fast a model generates here, and where the time goes."""
