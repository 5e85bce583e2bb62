"""What is reported about a step: figures, alarms, texts."""
