"""`rabbitllm quality`: what compression costs in answer quality, told from next-token distributions."""
