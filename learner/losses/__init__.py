"""The pure functions of tensors that objectives are made of."""
