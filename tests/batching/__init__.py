"""Tests of `rabbitllm.batching`."""
