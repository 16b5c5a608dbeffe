"""Tests of `rabbitllm.generation`."""
