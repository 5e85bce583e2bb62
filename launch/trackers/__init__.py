"""Sends metrics to other tools: Weights & Biases and TensorBoard, each from a process of its own."""
