"""Predicting hidden pixels: nothing of them leaks, and the answer stands at the right place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtrain.attention import attention
from flashtrain.config.schema import ClassifierConfig, ModelConfig, PretrainConfig
from flashtrain.models.classifier import Classifier
from flashtrain.models.masked_pixels import MaskedPixels

SIDE = 8
CLASSIFIER = ClassifierConfig(
    num_classes=2, pooling="max", positions="rope2d", token_order="rows", tile=(2, 4), dense_classes=0,
    dense_weight=1.0, proximity=(),
)  # fmt: skip
PRETRAIN = PretrainConfig(share=0.5, unit="pixel", square=8, loss="cross_entropy", levels=16)
MODEL = ModelConfig(
    name="small", num_layers=2, num_heads=2, hidden_size=16, num_kv_heads=None, head_dim=None, mlp_size=None,
    positions="none", rope_theta=1e4, norm="layernorm", norm_eps=1e-5, activation="gelu", qk_norm=False, bias=True,
    tie_embeddings=False, dropout=0.0, init_std=0.2, tokenizer="bytes", lr=1e-3, batch_tokens=1024,
)  # fmt: skip


def attend(q, k, v, plan):
    return attention(q, k, v, plan, backend="standard")


def model(**changes) -> MaskedPixels:
    torch.manual_seed(0)
    made = MaskedPixels(MODEL, replace(CLASSIFIER, **changes), PRETRAIN, attend, seq_len=SIDE**2)
    return made.double()


def images() -> torch.Tensor:
    return torch.randint(0, 256, (2, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


PLACES = torch.tensor([[0, 9, 13, 40], [2, 9, 50, 63]])


def changed(pixels: torch.Tensor, image: int, place: int) -> torch.Tensor:
    other = pixels.clone()
    other[image].view(-1)[place] = 255 - other[image].view(-1)[place]
    return other


@pytest.mark.parametrize("order", ["rows", "tiles"])
@pytest.mark.parametrize("positions", ["rope2d", "learned", "sinusoidal"])
def test_no_answer_depends_on_a_hidden_pixel_and_every_one_on_a_seen_one(positions, order):
    net, pixels = model(positions=positions, token_order=order), images()
    answers = net(pixels, None, PLACES)
    for image, row in enumerate(PLACES):
        for place in row.tolist():
            assert torch.equal(net(changed(pixels, image, place), None, PLACES), answers)
    seen = net(changed(pixels, 0, 20), None, PLACES)
    assert ((seen - answers)[0].abs().sum(-1) > 0).all() and torch.equal(seen[1], answers[1])


def test_no_gradient_flows_to_the_embedding_of_levels_from_an_image_that_is_hidden_whole():
    net = model(positions="learned")
    net(images(), None, torch.arange(SIDE**2).expand(2, -1)).sum().backward()
    assert not net.embedding.weight.grad.any() and net.hidden_pixel.grad.any()


def test_answers_stand_at_the_places_that_were_asked_for_in_either_order_of_the_tokens():
    rows, tiles = model(positions="rope2d"), model(positions="rope2d", token_order="tiles")
    torch.testing.assert_close(rows(images(), None, PLACES), tiles(images(), None, PLACES))
    turned = PLACES.flip(1)
    torch.testing.assert_close(rows(images(), None, turned), rows(images(), None, PLACES).flip(1))


def test_grey_levels_are_read_alike_as_bytes_and_as_numbers():
    net = model()
    torch.testing.assert_close(net(images(), None, PLACES), net(images().double() / 255, None, PLACES))


def test_its_weights_are_a_classifiers_and_two_parts_more():
    net = model(positions="learned")
    plain = Classifier(MODEL, replace(CLASSIFIER, positions="learned"), attend, seq_len=SIDE**2)
    assert {*net.state_dict()} - {*plain.state_dict()} == {"hidden_pixel", "pixel_head.weight"}
    assert {*plain.state_dict()} <= {*net.state_dict()}


def test_the_head_has_one_number_a_level_or_one_for_l1():
    assert model().pixel_head.out_features == 16
    assert (
        MaskedPixels(MODEL, CLASSIFIER, replace(PRETRAIN, loss="l1"), attend, seq_len=64).pixel_head.out_features == 1
    )
