"""An interrupt at any line of entering, stepping and leaving leaves the model as it was; so does another thread."""

from __future__ import annotations

import copy
import gc
import linecache
import sys
import threading
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts

import sparsekv.runtime
from sparsekv.runtime import process
from sparsekv.runtime.fused import ROTATION
from sparsekv.runtime.hf.attach import Attachment, RunOptions
from sparsekv.runtime.hf.storage import Growing, _unlock, page_locked
from sparsekv.runtime.process import NOW
from sparsekv.util.errors import SparseKVError

RUNTIME = Path(sparsekv.runtime.__file__).parent
EVERY = pytest.mark.parametrize(("first", "every"), [
    (1, 11), *(pytest.param(first, 4, marks=pytest.mark.slow) for first in (1, 2, 3, 4))])
"""The first line that is interrupted, and lines from one to the next; the slow cases together are all lines."""
GREEDY = {"max_new_tokens": 4, "do_sample": False}


class Interrupt(BaseException):
    """As Ctrl-C."""


class Interrupting:
    """Raises at the n-th line of the runtime's own code that this thread comes to, once; `whole`: no line was the
    n-th."""

    def __init__(self, number: int):
        self.left, self.where = number, ""

    @property
    def whole(self) -> bool:
        return self.left > 0

    def __enter__(self) -> Interrupting:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(str(RUNTIME)) and self.whole else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        # no interrupt comes between the end of a block and the release of its lock, though a tracer does; and nobody
        # can guard a function's first line but who calls it
        lock = "with " in (text := linecache.getline(frame.f_code.co_filename, frame.f_lineno)) and text.endswith((
            "lock:\n", "_GATE:\n"))
        first = frame.f_code is Attachment.__exit__.__code__ and frame.f_lineno <= frame.f_code.co_firstlineno + 1
        if event == "line" and not lock and not first:
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise Interrupt(self.where)
        return self._line


def state_of(model: Any) -> tuple[Any, ...]:
    modules = list(model.modules())
    return ({k: v for k, v in model.__dict__.items() if k in ("forward", "generate")},
            model.config._attn_implementation,
            [list(m._forward_pre_hooks) for m in modules], [list(m._forward_pre_hooks_with_kwargs) for m in modules],
            [m.__dict__.get("layer_idx") for m in modules], ["forward" in m.__dict__ for m in modules],
            process.attached(model), NOW.plan)


def attached(model: Any) -> Attachment:
    router, phi = artifacts(model)
    return attach(model, router=router, phi=phi, token_budget=0.2, decode_window=16)


def enter_and_generate(attachment: Attachment) -> None:
    with attachment:
        attachment.model.generate(prompt(30), **GREEDY)


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(make_model())


@EVERY
def test_at_any_line_of_entering_and_leaving(model: Any, first: int, every: int) -> None:
    before, number, seen = state_of(model), first - every, set()
    attachment = attach(model, selector="topk", token_budget=8)
    while True:
        number += every
        try:
            with Interrupting(number) as interrupting:
                with attachment:
                    pass
        except Interrupt:
            pass
        finally:
            sys.settrace(None)
        assert state_of(model) == before, interrupting.where
        if interrupting.whole:
            break
        seen.add(interrupting.where.partition(":")[0])
    assert number > 60 and {"attach.py", "attached.py", "model_pass.py"} <= seen
    thread = threading.Thread(target=enter_and_generate, args=(attachment,), daemon=True)
    thread.start()  # and it can be entered again: no lock is held
    thread.join(60)
    assert not thread.is_alive() and attachment.report()["sparse_calls"] > 0 and state_of(model) == before


@EVERY
@torch.no_grad()
def test_at_any_line_of_a_step(model: Any, first: int, every: int) -> None:
    before, ids = state_of(model), prompt(60)
    plain = model.generate(ids, **GREEDY)
    with attached(model) as attachment:
        filled = attachment.prefill(ids[:, :50])
        for t in range(50, 52):
            model(ids[:, t:t + 1], past_key_values=filled, use_cache=True)
        inside, wanted = state_of(model), model(ids[:, 52:53], past_key_values=filled.fork(), use_cache=True).logits
        number, seen = first - every, set()
        while True:
            number += every
            try:
                with Interrupting(number) as interrupting:
                    attachment.step(ids[:, 52:53], filled)
            except Interrupt:
                pass
            finally:
                sys.settrace(None)
            seen.add(interrupting.where.partition(":")[0])
            assert state_of(model)[:-1] == inside[:-1], interrupting.where
            if interrupting.whole:
                break
            filled.crop(52)
        assert {"runner.py", "plan.py", "model_pass.py", "forward.py"} <= seen
        filled.crop(52)
        torch.testing.assert_close(attachment.step(ids[:, 52:53], filled), wanted, rtol=1e-4, atol=1e-4)
    assert state_of(model) == before
    assert torch.equal(model.generate(ids, **GREEDY), plain)
    thread = threading.Thread(target=enter_and_generate, args=(attachment,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_plain_generate_of_another_thread_stays_what_it_is(implementation: str) -> None:
    """One thread attaches, decodes and leaves, over and over; what another began before is not touched."""
    model = copy.deepcopy(make_model())
    model.set_attn_implementation(implementation)
    ids = prompt(40, 2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    how = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    wanted, found, failed, stop = model.generate(ids, **how), [], [], threading.Event()

    def plain() -> None:
        try:
            for _ in range(3):
                found.append(model.generate(ids, **how))
        except BaseException as error:
            failed.append(error)
        finally:
            stop.set()

    thread = threading.Thread(target=plain)
    thread.start()
    while not stop.is_set():
        with attach(model, selector="topk", token_budget=1.0, dense_layers=()):
            stop.wait(0.005)
    thread.join()
    assert not failed and len(found) == 3
    assert all(torch.equal(x, wanted) for x in found)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_pass_that_another_thread_began_is_the_models_own(model: Any, leaves: bool) -> None:
    """Its mask is of the model's own attention, and so are its layers, while the model is attached to and after."""
    ids, inside, go, found = prompt(30, 2), threading.Event(), threading.Event(), []
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits

    def held(*_: Any) -> None:
        inside.set()
        go.wait(30)

    def plain() -> None:
        with torch.no_grad():
            found.append(model(ids, attention_mask=mask).logits)

    hook = model.model.layers[0].register_forward_hook(held)
    thread = threading.Thread(target=plain)
    thread.start()
    assert inside.wait(30)
    hook.remove()
    with attach(model, selector="topk", token_budget=8) as attachment:
        assert torch.isfinite(model(ids, attention_mask=mask).logits).all()
        if not leaves:
            go.set()
            thread.join(30)
    go.set()
    thread.join(30)
    assert torch.equal(found[0], wanted) and attachment.report()["sparse_calls"] == 0


def test_no_function_of_transformers_stays_replaced(model: Any) -> None:
    space = sys.modules[type(model).__module__].__dict__
    own = dict(space)
    other = copy.deepcopy(model)
    with attach(model, selector="topk", token_budget=8):
        with attach(other, selector="topk", token_budget=8):
            inside = [name for name, x in space.items() if own[name] is not x]
        assert inside == [ROTATION] == [name for name, x in space.items() if own[name] is not x]
    assert all(own[name] is x for name, x in space.items())


def test_how_steps_run_is_said_once() -> None:
    with pytest.raises(AttributeError):
        RunOptions().replays = False  # type: ignore[misc]


class Locks:
    """CUDA's locking of memory, which remembers what is locked; `full`: it locks nothing."""

    def __init__(self, full: bool = False):
        self.full, self.held, self.most = full, set(), 0
        self.cudaError = SimpleNamespace(success=0)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.full:
            return 2
        self.held.add(address)
        self.most += 1
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.held.remove(address)


class Working(Interrupting):
    """Not in a finalizer, where Python prints an error and goes on."""

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return None if frame.f_code is _unlock.__code__ else super()._call(frame, event, arg)


@pytest.mark.parametrize("lines", [(900,), pytest.param((200, 900, 2500, 10**6), marks=pytest.mark.slow)])
def test_an_interrupt_leaves_no_memory_locked(monkeypatch, lines: tuple[int, ...]) -> None:
    """At any line of locking, and at lines all over an answer over keys in CPU memory."""
    locks = Locks()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: locks)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def interrupted(work: Any, number: int) -> bool:
        stop = Working(number)
        try:
            with stop:
                work()
        except Interrupt:
            pass
        gc.collect()
        assert not locks.held, f"left after line {number}, {stop.where}"
        return not stop.whole

    gc.collect()
    gc.freeze()  # so that the collections above look at what is new alone
    try:
        assert sum(interrupted(lambda: page_locked((3, 5), torch.float32), n) for n in range(1, 30)) > 5
        monkeypatch.setattr(Growing, "empty", lambda self, shape, like: page_locked(shape, like.dtype))
        model, ids = make_model(), prompt(60)
        router, phi = artifacts(model)

        def answer() -> None:
            with attach(model, router=router, phi=phi, token_budget=10, placement="offload") as attachment:
                attachment.generate(ids, max_new_tokens=4, eos_token_id=[])

        assert [interrupted(answer, n) for n in lines] == [n < 10**6 for n in lines] and locks.most > 4
    finally:
        gc.unfreeze()


def test_memory_that_cannot_be_locked_is_a_sentence(monkeypatch) -> None:
    locks = Locks(full=True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: locks)
    with pytest.raises(SparseKVError, match="GB of CPU memory could not be locked"):
        page_locked((3, 5), torch.float32)
    gc.collect()
