"""The engine's view of a model: the same class and weights; paged attention, fused forwards, low bits, told routers."""

from __future__ import annotations

from transformers import PreTrainedModel

from lockstep.models import paged
from lockstep.models.few_rows import speed_up_few_rows
from lockstep.models.fused import fuse, lay_together
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.releasable import Releasable
from lockstep.models.routing import Routers, install_routing
from lockstep.models.twins import twin


def engine_view(
    module: PreTrainedModel,
    *,
    share: bool,
    low_bit: LowBitWeights | None = None,
    routers: Routers | None = None,
    memory: Releasable | None = None,
) -> PreTrainedModel:
    """With `share` the weights of both are the same memory, and are moved within it once; otherwise the view has its
    own, in `memory` if that is to be given back at times. `low_bit` takes the place of the model's matrices. `routers`
    do what a step tells them."""
    if share:
        lay_together(module)
    view = twin(module, paged.NAME, share=share, replaced=low_bit.encoded if low_bit is not None else ())
    if low_bit is not None:
        low_bit.run_by_engine(view, share=share)
    if not share:
        lay_together(view)
        if memory is not None:  # all that an update brings; before `fuse`, which keeps the weights' addresses
            memory.adopt(view.state_dict(keep_vars=True).values())
    fuse(view)
    speed_up_few_rows(view)
    if routers is not None:  # after `fuse`: what binds a router to its call is around the layer's forward
        install_routing(view, routers)
    return view
