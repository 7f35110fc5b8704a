"""Run by test_running.py in a process of its own, which is killed or joined with others.

Arguments: router, phi or both, capture store, output (of both: their folder), `name=value` options."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch

from sparsekv.trainers.phi import PhiConfig, train_phi
from sparsekv.trainers.router import RouterConfig, RouterRecipe, train_router
from sparsekv.trainers.work import Run

OPTIONS = {
    "router": {"scores": "mlp", "num_buckets": 12},
    "phi": {"batch_size": 8, "keys_per_step": 32, "width": 16},
}
RECIPES = {"router": (RouterRecipe(hidden_size=24, batch_size=16),), "phi": ()}
COMMON = {"max_steps": 60, "device": "cpu"}


def train(kind: str, capture: str, output: str, **options: object):
    config, work = {"router": (RouterConfig, train_router), "phi": (PhiConfig, train_phi)}[kind]
    return work(config(**{"capture": capture, "output": output, **COMMON, **OPTIONS[kind], **options}), *RECIPES[kind])


@contextlib.contextmanager
def stopped(method: str, when: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """A training of this process is stopped, as by Ctrl-C, where its run comes to a method (and, of its arguments,
    `when`); that it was is asserted."""
    own = getattr(Run, method)

    def comes(*args: object, **options: object) -> object:
        if when(*args):
            raise KeyboardInterrupt
        return own(*args, **options)

    try:
        with patch.object(Run, method, comes):
            yield
    except KeyboardInterrupt:
        return
    raise AssertionError(f"the training never came to {method}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, capture, output = sys.argv[1:4]
    options = {name: int(value) for name, value in (word.split("=") for word in sys.argv[4:])}
    for one in OPTIONS if kind == "both" else (kind,):
        train(one, capture, f"{output}/{one}" if kind == "both" else output, **options)
