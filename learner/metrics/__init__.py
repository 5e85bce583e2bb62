"""What a step is told to be like: figures, alarms, texts."""
