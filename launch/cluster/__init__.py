"""What a cluster's scheduler is given: scripts, manifests and task files, rendered from templates that people read."""
