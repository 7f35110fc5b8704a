"""A training that diverges stops and says where; an option that could only diverge is refused."""

from __future__ import annotations

import pytest
import torch
from test_running import Toy, fit_toy
from training_child import train

from sparsekv.trainers import phi
from sparsekv.trainers.fit import check_checkpoint
from sparsekv.util.errors import SparseKVError


class Diverging(Toy):
    """From a step on the loss of the second of three heads is `value`; or its weights are, and the loss is not."""

    def __init__(self, at: int, value: float, weights: bool = False):
        super().__init__()
        self.at, self.value, self.of_weights = at, value, weights

    def losses(self, draw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = super().losses(draw)
        if int(draw["number"]) >= self.at and not self.of_weights:
            found["loss"] = torch.where(torch.tensor([False, True, False]), self.value, found["loss"])
        if int(draw["number"]) == self.at and self.of_weights:
            self.place.data[1] = self.value
        return found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_diverged_loss_stops_training(tmp_path, value: float) -> None:
    said = (rf"toy: the loss is {value} at step 73 of 120 in layer\.head 0\.1; the last good checkpoint is "
            r"'.*toy\.ckpt', of step 70; train anew .* lower --lr")
    with pytest.raises(SparseKVError, match=said):
        fit_toy(Diverging(72, value), tmp_path, heads=["0.0", "0.1", "0.2"])
    check_checkpoint(tmp_path / "checkpoints" / "toy.ckpt")
    held = torch.load(tmp_path / "checkpoints" / "toy.ckpt", weights_only=True)
    assert all(t.isfinite().all() for t in held["state_dict"].values())


def test_diverged_weights_stop_training_before_their_checkpoint(tmp_path) -> None:
    task = Diverging(2, float("nan"), weights=True)
    with pytest.raises(SparseKVError, match=r"weights are NaN or infinite at step 3 of 120 in heads 1; no check"):
        fit_toy(task, tmp_path)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), 1e30, 0.0, -1e-3])
@pytest.mark.parametrize("kind", ["router", "phi"])
def test_learning_rates_that_could_only_diverge_are_refused(store, tmp_path, kind: str, lr: float) -> None:
    with pytest.raises(SparseKVError, match=r"--lr must be (above 0 and up to 10|a finite number), found"):
        train(kind, str(store), str(tmp_path / "a"), lr=lr)
    with pytest.raises(SparseKVError, match=r"--output-weight must be a finite number from 0 on, found nan"):
        train("phi", str(store), str(tmp_path / "a"), output_weight=float("nan"))
    assert not (tmp_path / "a").exists()


def test_maps_that_help_no_head_are_said(store, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(phi, "choose_gates", lambda card: torch.zeros(3, 4))
    train("phi", str(store), str(tmp_path / "a"), max_steps=2)
    assert "the maps of none of the 12 heads lower the error" in " ".join(capsys.readouterr().err.split())
