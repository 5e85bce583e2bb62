"""One file per sub-command: the only place that combines the rooms."""
