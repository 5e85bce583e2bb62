"""The miniature with a tool: products that the model can't work out, and a calculator that can."""
