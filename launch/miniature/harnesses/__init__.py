"""Task files of lm-eval and Inspect for the miniature's problems (docs/serve.md). Neither is imported by Tandem."""
