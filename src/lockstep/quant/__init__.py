"""Low-bit weights: formats, the arithmetic that runs on them, and the learner's forward through the same arithmetic."""
