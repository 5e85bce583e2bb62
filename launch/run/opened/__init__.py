"""Opens a run: its preset, its folder, its config and its record."""
