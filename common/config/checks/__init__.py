"""What a config may not ask for although each of its values is valid."""
