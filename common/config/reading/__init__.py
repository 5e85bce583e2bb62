"""From YAML and overrides to a config, and back."""
