"""How far the sampler is from the learner and what the objective did about it, every step.

Sums are taken per token and micro-batch on the device (`tally_*`), added up over micro-batches and ranks (`Tally`), and
turned into figures once, on the host (`metrics`). Nothing here waits for the device before that.
"""

from lockstep.algorithms.diagnostics.clipping import tally_clipping
from lockstep.algorithms.diagnostics.mismatch import TAUS, tally_entropy, tally_mismatch
from lockstep.algorithms.diagnostics.pull import tally_kl
from lockstep.algorithms.diagnostics.reading import metrics
from lockstep.algorithms.diagnostics.routing import load_drift, tally_routing
from lockstep.algorithms.diagnostics.tally import Tally
from lockstep.algorithms.diagnostics.values import explained

__all__ = [
    "TAUS",
    "Tally",
    "explained",
    "load_drift",
    "metrics",
    "tally_clipping",
    "tally_entropy",
    "tally_kl",
    "tally_mismatch",
    "tally_routing",
]
