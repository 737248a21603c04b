"""Combinations that cannot work, found before anything heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashtrain.config.curriculum_rules import broken_curriculum_rules
from flashtrain.config.layout_rules import broken_layout_rules
from flashtrain.config.schema import Config, DataConfig, ImagesConfig, ModelConfig

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def broken_rules(config: Config) -> Iterator[str]:
    """One line for each rule that `config` breaks: key, value, and what to write instead."""
    yield from _positive(config)
    yield from _model(config.model)
    yield from _data(config.data)
    yield from _training(config)
    yield from broken_layout_rules(config)
    yield from _classification(config)
    if config.task == "classification":
        yield from broken_curriculum_rules(config)


def _positive(config: Config) -> Iterator[str]:
    values = {
        "seq_len": config.seq_len,
        "model.num_layers": config.model.num_layers,
        "model.num_heads": config.model.num_heads,
        "model.hidden_size": config.model.hidden_size,
        "optimizer.lr": config.optimizer.lr,
        "memory.loss_chunk_tokens": config.memory.loss_chunk_tokens,
        "trainer.max_steps": config.trainer.max_steps,
        "trainer.devices": config.trainer.devices,
        "trainer.log_every_n_steps": config.trainer.log_every_n_steps,
        "trainer.val_every_n_steps": config.trainer.val_every_n_steps,
        "trainer.checkpoint_every_n_steps": config.trainer.checkpoint_every_n_steps,
        "trainer.keep_checkpoints": config.trainer.keep_checkpoints,
    }
    for key, value in values.items():
        if value <= 0:
            yield f"{key}={value}: must be above 0"
    fractions = {
        "model.dropout": config.model.dropout,
        "schedule.decay_fraction": config.schedule.decay_fraction,
        "schedule.min_lr_ratio": config.schedule.min_lr_ratio,
        "data.val_fraction": config.data.val_fraction,
    }
    for key, value in fractions.items():
        if not 0 <= value <= 1:
            yield f"{key}={value}: must lie between 0 and 1"


def _model(model: ModelConfig) -> Iterator[str]:
    if model.num_heads <= 0 or model.hidden_size <= 0:
        return
    if model.head_dim is None and model.hidden_size % model.num_heads:
        yield (
            f"model.hidden_size={model.hidden_size}: must be a multiple of model.num_heads={model.num_heads}, "
            "or give model.head_dim"
        )
    kv_heads = model.num_heads if model.num_kv_heads is None else model.num_kv_heads
    if kv_heads <= 0 or model.num_heads % kv_heads:
        yield f"model.num_kv_heads={kv_heads}: must divide model.num_heads={model.num_heads}"
    if model.head_dim is None and model.hidden_size % model.num_heads:
        return
    head_dim = model.head_dim or model.hidden_size // model.num_heads
    if model.positions == "rope" and head_dim % 2:
        yield f"model.head_dim={head_dim}: rotary positions need an even one; change it or model.positions"


def _data(data: DataConfig) -> Iterator[str]:
    if data.source in ("text", "jsonl", "parquet") and data.path is None:
        yield f"data.path=null: data={data.source} reads files; give data.path=file, folder or glob"
    if data.source == "hub" and data.name is None:
        yield "data.name=null: data=hub needs the data set's name, such as data.name=org/set"


def _training(config: Config) -> Iterator[str]:
    trainer = config.trainer
    for key, run_id in (("run_id", config.run_id), ("resume", config.resume)):
        if run_id is not None and not _RUN_ID.fullmatch(run_id):
            yield f"{key}={run_id!r}: letters, digits, '.', '_' and '-', with at most one '/' between two such names"
    if config.run_id is not None and config.resume is not None:
        yield f"run_id={config.run_id!r} with resume={config.resume!r}: a resumed run keeps its id; leave run_id out"
    if trainer.devices > 1:
        yield f"trainer.devices={trainer.devices}: only one device can be trained on so far; write 1"
    if config.optimizer.name == "muon" and not (config.optimizer.matrix_lr or 0) > 0:
        yield f"optimizer.matrix_lr={config.optimizer.matrix_lr}: muon needs a rate above 0, such as 0.02"
    if config.optimizer.ema_decay is not None and not 0 < config.optimizer.ema_decay < 1:
        yield f"optimizer.ema_decay={config.optimizer.ema_decay}: must lie between 0 and 1, such as 0.999, or be null"
    if not 0 <= config.optimizer.momentum < 1:
        yield f"optimizer.momentum={config.optimizer.momentum}: must be at least 0 and below 1"
    if config.optimizer.clip_norm is not None and config.optimizer.clip_norm <= 0:
        yield f"optimizer.clip_norm={config.optimizer.clip_norm}: must be above 0, or null for no clipping"


def _classification(config: Config) -> Iterator[str]:
    sections = {"classifier": config.classifier, "images": config.images}
    if config.task == "language":
        for key, section in {**sections, "curriculum": config.curriculum, "pretrain": config.pretrain}.items():
            if section is not None:
                yield f"{key}: a section for task=classification, and task=language; write task=classification"
        return
    for key, section in sections.items():
        if section is None:
            yield f"{key}=null: task=classification needs it; write {key}=pathfinder, or experiment=pathfinder32"
    if config.attention.window is not None:
        yield f"attention.window={config.attention.window}: for language models; write attention.window=null"
    if config.images is not None:
        low, high = config.images.brightness
        if not 0 < low <= high:
            yield f"images.brightness=[{low}, {high}]: two factors above 0, the smaller first, such as [0.7,1.0]"
        for name in ("train_images", "val_images"):
            count = getattr(config.images, name)
            if count is not None and count < 1:
                yield f"images.{name}={count}: must be at least 1"
        yield from _images_from_disk(config.images, 0 if config.classifier is None else config.classifier.dense_classes)
    if config.classifier is not None and config.classifier.dense_classes not in (0, 3):
        yield f"classifier.dense_classes={config.classifier.dense_classes}: Pathfinder has 3 (0, 1 or 2 discs), or 0"


def _images_from_disk(images: ImagesConfig, dense_classes: int) -> Iterator[str]:
    source = images.source
    if source == "pathfinder":
        if images.path is not None:
            yield f"images.path={images.path}: images.source=pathfinder reads none; take images=release or images=npz"
        return
    if images.path is None:
        what = "the folder of the release" if source == "release" else "an .npz file with images and labels"
        yield f"images.path=null: images.source={source} reads from disk; give images.path={what}"
    if dense_classes:
        yield (
            f"classifier.dense_classes={dense_classes}: images.source={source} has labels and no classes of pixels; "
            "write classifier.dense_classes=0"
        )
    instead = "images.difficulty chooses the set" if source == "release" else "the file has what it has"
    for key in ("contour_length", "distractor_count", "distractor_length", "start_border", "seeding_flaw"):
        value = getattr(images, key)
        if value is not None:
            yield f"images.{key}={value}: is for generated images, and images.source={source}: {instead}; write null"
