"""The torch engine: a model that is decoded token by token."""
