"""The vLLM engine: a vLLM in processes of its own. The package vllm itself is imported only there."""
