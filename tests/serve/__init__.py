"""Tests of `rabbitllm.serve`."""
