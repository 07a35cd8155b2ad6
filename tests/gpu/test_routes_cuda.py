"""On a GPU: routes are recorded without a wait, also inside a CUDA graph, and arrive on the host over a side stream."""

from __future__ import annotations

import pytest
import torch

from engine_support import ask, engine_core, finish, prompt
from lockstep.models.routes import Recording, RouteMemory
from lockstep.models.routing import Routers
from mixtures import obeying, own_routes, qwen3, sets

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROUTERS = Routers(layers=("a", "b"), modules=("a.gate", "b.gate"), num_experts=8, top_k=2)


def test_answers_bring_the_experts_they_were_computed_with() -> None:
    module = qwen3().cuda()
    requests = [ask(f"r{i}", prompt(n, seed=n), 20, temperature=1.0, seed=i) for i, n in enumerate((3, 17, 40, 40))]
    done = finish(engine_core(module, record=True), requests)
    view, _ = obeying(module.cpu())
    for request in requests:
        routes = done[request.uid].routes
        assert routes is not None
        assert routes.ids.device.type == "cpu"
        own = sets(own_routes(view, [*request.tokens, *done[request.uid].tokens])[:-1])
        assert (sets(routes.ids) == own).all(-1).float().mean() > 0.98  # kernels round differently


def test_a_step_is_recorded_inside_a_cuda_graph() -> None:
    device = torch.device("cuda")
    memory = RouteMemory(ROUTERS, 16, device)
    slots, live = torch.tensor([3, 5], device=device), torch.zeros(2, 2, dtype=torch.int64, device=device)

    def step() -> None:
        recording = Recording(memory, slots)
        for number in range(ROUTERS.num_layers):
            recording.choose(number, live + number, live.float())
        recording.write()

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    slots.copy_(torch.tensor([7, 9], device=device))
    live.copy_(torch.tensor([[1, 2], [3, 4]], device=device))
    graph.replay()
    readout = memory.read(slots)
    assert readout.arrived(wait=True)
    assert readout.ids.tolist() == [[[1, 2], [2, 3]], [[3, 4], [4, 5]]]


def test_the_host_waits_for_nothing_while_a_step_is_recorded_and_read_out() -> None:
    device = torch.device("cuda")
    memory = RouteMemory(ROUTERS, 16, device)
    slots, live = torch.tensor([3, 5], device=device), torch.tensor([[1, 2], [3, 4]], device=device)
    memory.read(slots)  # the pinned memory it needs is kept for the next time
    torch.cuda.set_sync_debug_mode("error")
    try:
        recording = Recording(memory, slots)
        assert not recording.decides
        for number in range(ROUTERS.num_layers):
            recording.note(number, live + number)
        recording.write()
        readout = memory.read(slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert readout.arrived(wait=True)
    assert readout.ids.tolist() == [[[1, 2], [2, 3]], [[3, 4], [4, 5]]]
