"""Metrics for other tools to show: Weights & Biases and TensorBoard, each from a process of its own."""
