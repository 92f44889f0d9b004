"""Mixup and CutMix: what is mixed, in which share, and that labels say the same."""

from __future__ import annotations

import pytest
import torch

from tests.factories import train_settings
from tests.train.engine.learners import X, Y, trainer, weights
from train.data.feeds.batches import Batch
from train.seeding import make_generator
from train.settings import TrainSettings
from train.transforms.augmentations import MixParams, sample_mix


def settings(**more: float) -> TrainSettings:
    return train_settings(more)


@pytest.mark.parametrize("step", range(20))
def test_cutmix_box_area_is_partner_weight(step: int) -> None:
    mix = sample_mix(8, 10, 12, settings(cutmix_alpha=1.0).data, make_generator("cut", step))
    assert sorted(mix.partner_indices.tolist()) == list(range(8))
    images, others = torch.zeros(8, 3, 10, 12), torch.ones(8, 3, 10, 12)
    mixed = mix.apply(images, others)
    assert float(mixed.mean()) == pytest.approx(1 - mix.own_weight, abs=1e-6)
    assert set(mixed.unique().tolist()) <= {0.0, 1.0}
    assert float(images.sum()) == 0


def test_mixup_interpolates_two_images() -> None:
    mix = sample_mix(8, 4, 4, settings(mixup_alpha=0.4).data, make_generator("up"))
    assert mix.cut_box is None
    mixed = mix.apply(torch.zeros(8, 3, 4, 4), torch.ones(8, 3, 4, 4))
    assert torch.allclose(mixed, torch.full_like(mixed, 1 - mix.own_weight))


def test_mixup_and_cutmix_alternate_with_new_weights() -> None:
    drawn = [
        sample_mix(4, 8, 8, settings(mixup_alpha=0.2, cutmix_alpha=1.0).data, make_generator("both", step))
        for step in range(200)
    ]
    assert 60 < sum(one.cut_box is None for one in drawn) < 140
    assert len({one.own_weight for one in drawn}) > 100
    assert all(0 <= one.own_weight <= 1 for one in drawn)


def test_mixed_loss_weights_both_labels() -> None:
    one, mix = trainer(label_smoothing=0.1), MixParams(torch.arange(12).flip(0), 0.7)
    other = Y[mix.partner_indices]
    images = mix.apply(X[:, :, None, None], X[mix.partner_indices][:, :, None, None])[:, :, 0, 0]
    soft = 0.7 * torch.nn.functional.one_hot(Y, 3) + 0.3 * torch.nn.functional.one_hot(other, 3)
    expected = torch.nn.functional.cross_entropy(one.state.model(images), soft, label_smoothing=0.1)
    before = weights(one).clone()
    loss = one.train_step(Batch(((images[:5], Y[:5]), (images[5:], Y[5:])), 12, (other[:5], other[5:]), 0.7))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert not torch.equal(weights(one), before)
