"""What is rehearsed is compiled and not run; what is run after it compiles nothing more."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from engine_support import ask, engine_core, finish, prompt, small  # noqa: E402
from lockstep.models.kernels.rehearsal import rehearse  # noqa: E402
from lockstep.models.selfcheck import self_check  # noqa: E402
from lockstep.rollout.burst import Kind  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@triton.jit
def _one_more(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + 1)


@triton.jit
def _broken(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), tl.zeros([SIZE + 1], tl.int64))


def one_more(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _one_more[(1,)](x, y, len(x))
    return y


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were asked for and not found in the memory of this process."""
    names: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: names.append(src.name))
    _one_more.device_caches.clear()
    _broken.device_caches.clear()
    return names


def test_a_rehearsed_kernel_is_compiled_once_and_not_run(compilations: list[str]) -> None:
    seen: list[Tensor] = []
    x = torch.full((32,), 6, device=CUDA)
    rehearse(lambda: [seen.append(one_more(x)) for _ in range(50)], CUDA)
    assert compilations == ["_one_more"]
    assert not any(y.any() for y in seen)  # neither written nor left as it was found
    assert one_more(x).tolist() == [7] * 32
    assert compilations == ["_one_more"]


def test_what_others_launch_meanwhile_is_run(compilations: list[str]) -> None:
    found: list[int] = []
    other = threading.Thread(target=lambda: found.extend(one_more(torch.full((32,), 6, device=CUDA)).tolist()))

    def work() -> None:
        other.start()
        other.join()

    rehearse(work, CUDA)
    assert found == [7] * 32


def test_what_does_not_compile_says_so_when_it_is_run(compilations: list[str]) -> None:
    x = torch.zeros(32, dtype=torch.int64, device=CUDA)

    def work() -> None:
        for _ in range(3):
            _broken[(1,)](x, 32)
            time.sleep(0.5)  # it has failed before it is asked for again

    rehearse(work, CUDA)
    with pytest.raises(triton.CompilationError):
        _broken[(1,)](x, 32)


def test_whoever_fails_in_a_rehearsal_leaves_it(compilations: list[str]) -> None:
    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        rehearse(work, CUDA)
    assert one_more(torch.full((32,), 6, device=CUDA)).tolist() == [7] * 32


@pytest.mark.parametrize("experts", [0, 4])
def test_whatever_a_start_compiles_its_rehearsals_do(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[str] = []

    def listener(*, src: Any, **_: Any) -> None:
        if not threading.current_thread().name.startswith("compile"):
            late.append(src.name)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    forget()
    module = small(experts=experts).to(CUDA, torch.bfloat16)
    self_check(module)
    core = engine_core(module, max_seqs=24)
    assert late == []
    assert finish(core, [ask("0", prompt(40, 0), 8, temperature=1.0, seed=0)])


def test_a_capture_among_answers_writes_to_nobodys_slots() -> None:
    """Experts are recorded, and keys and values stored, where the first answer's are."""
    core = engine_core(small(experts=4).to(CUDA, torch.bfloat16), record=True, max_seqs=4)
    assert finish(core, [ask("0", prompt(40, 0), 8, temperature=1.0, seed=0)])
    burst = core.runner.burst
    assert burst is not None
    assert burst.routes is not None

    def written() -> list[Tensor]:
        idle = burst.cache.page_size
        kept = burst.cache.keys[:, :-1], burst.cache.values[:, :-1], burst.routes.ids[:, :-idle]
        return [tensor.clone() for tensor in kept]

    before = written()
    assert all(tensor.any() for tensor in before)
    burst._capture([Kind(4, truncated=True)])
    assert all(torch.equal(a, b) for a, b in zip(before, written(), strict=True))


def forget() -> None:
    """Nothing is compiled any more."""
    import gc

    from triton.runtime.jit import JITFunction

    for kernel in gc.get_objects():
        if issubclass(type(kernel), JITFunction):  # to ask an object for its class may run code
            kernel.device_caches.clear()
