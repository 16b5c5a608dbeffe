"""Tests of `rabbitllm bench`."""
