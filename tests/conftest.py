"""Settings for all tests."""

import torch

# Tiny tensors: a second thread costs more in waiting for a busy core than it computes.
torch.set_num_threads(1)
