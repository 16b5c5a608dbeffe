"""Tests of `rabbitllm.server`."""
