"""Low-bit weights: formats, the arithmetic that runs on them, and the learner's forward through the same arithmetic."""

FORMATS = "lockstep.quant.formats"  # the folder of formats, each a file
