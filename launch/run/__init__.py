"""One run on this host: from a preset and a folder to the supervised processes and the summary."""
