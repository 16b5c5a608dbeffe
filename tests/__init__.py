"""Tests of rabbitllm."""
