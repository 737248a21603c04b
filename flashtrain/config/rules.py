"""Combinations that cannot work, found before anything heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashtrain.config.curriculum_rules import broken_curriculum_rules
from flashtrain.config.device_rules import broken_device_rules
from flashtrain.config.layout_rules import broken_layout_rules
from flashtrain.config.ranges import broken_ranges
from flashtrain.config.schema import Config, DataConfig, ImagesConfig, ModelConfig, SequencesConfig

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def broken_rules(config: Config) -> Iterator[str]:
    """One line for each rule that `config` breaks: key, value, and what to write instead."""
    yield from broken_ranges(config)
    yield from _model(config.model)
    yield from _data(config.data)
    yield from _training(config)
    yield from _memory(config)
    yield from _length(config)
    yield from broken_layout_rules(config)
    yield from broken_device_rules(config)
    yield from _classification(config)
    if config.task == "classification":
        yield from broken_curriculum_rules(config)


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
    if model.vocab_size is not None and model.vocab_size <= 0:
        yield f"model.vocab_size={model.vocab_size}: must be above 0, or null for the tokenizer's"
    yield from _rope_scaling(model)
    yield from _position_extension(model)


def _rope_scaling(model: ModelConfig) -> Iterator[str]:
    scaling, key = model.rope_scaling, "model.rope_scaling"
    if scaling.rule == "none":
        return
    if model.positions != "rope":
        yield f"{key}.rule={scaling.rule} with model.positions={model.positions}: is for rotary positions; write none"
    if scaling.factor < 1:
        yield f"{key}.factor={scaling.factor}: positions are stretched, never squeezed; write 1 or more"
    if scaling.rule in ("yarn", "llama3") and not (scaling.original_seq_len or 0) > 0:
        yield (
            f"{key}.original_seq_len={scaling.original_seq_len}: {scaling.rule} needs the length trained before, such "
            "as 8k"
        )
    if scaling.rule == "yarn" and not 0 < scaling.beta_slow < scaling.beta_fast:
        yield f"{key}.beta_slow={scaling.beta_slow}: must lie above 0 and below {key}.beta_fast={scaling.beta_fast}"
    if scaling.rule == "llama3" and not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        yield (
            f"{key}.low_freq_factor={scaling.low_freq_factor}: must lie above 0 and below "
            f"{key}.high_freq_factor={scaling.high_freq_factor}"
        )


def _position_extension(model: ModelConfig) -> Iterator[str]:
    how, key = model.position_extension, f"model.position_extension={model.position_extension}"
    if how is None:
        return
    if model.init_from is None:
        yield f"{key}: is for weights of a shorter run; give model.init_from, or write null"
    if how == "extrapolate" and model.positions != "rope":
        yield f"{key} with model.positions={model.positions}: is for rotary positions; write duplicate or interpolate"
    if how != "extrapolate" and model.positions != "learned":
        yield (
            f"{key} with model.positions={model.positions}: is for learned positions; rotary ones take "
            "model.rope_scaling.rule, or extrapolate"
        )
    if how == "extrapolate" and model.rope_scaling.rule != "none":
        yield f"{key} with model.rope_scaling.rule={model.rope_scaling.rule}: choose one of the two; write null"


def _data(data: DataConfig) -> Iterator[str]:
    if data.source in ("text", "jsonl", "parquet") and data.path is None:
        yield f"data.path=null: data={data.source} reads files; give data.path=file, folder or glob"
    if data.source == "hub" and data.name is None:
        yield "data.name=null: data=hub needs the data set's name, such as data.name=org/set"


def _training(config: Config) -> Iterator[str]:
    for key, run_id in (("run_id", config.run_id), ("resume", config.resume)):
        if run_id is not None and not _RUN_ID.fullmatch(run_id):
            yield f"{key}={run_id!r}: letters, digits, '.', '_' and '-', with at most one '/' between two such names"
    if config.run_id is not None and config.resume is not None:
        yield f"run_id={config.run_id!r} with resume={config.resume!r}: a resumed run keeps its id; leave run_id out"
    if config.optimizer.name == "muon" and not (config.optimizer.matrix_lr or 0) > 0:
        yield f"optimizer.matrix_lr={config.optimizer.matrix_lr}: muon needs a rate above 0, such as 0.02"
    if config.optimizer.ema_decay is not None and not 0 < config.optimizer.ema_decay < 1:
        yield f"optimizer.ema_decay={config.optimizer.ema_decay}: must lie between 0 and 1, such as 0.999, or be null"
    if config.optimizer.clip_norm is not None and config.optimizer.clip_norm <= 0:
        yield f"optimizer.clip_norm={config.optimizer.clip_norm}: must be above 0, or null for no clipping"


def _length(config: Config) -> Iterator[str]:
    schedule = config.schedule
    if config.data.recall_share and config.seq_len < 4:
        yield f"data.recall_share={config.data.recall_share}: seq_len={config.seq_len} has no room for a task; write 0"
    if config.trainer.val_by_position and config.task != "language":
        yield "trainer.val_by_position=true: is for task=language; write false"
    if config.trainer.val_recall and config.task != "language":
        yield "trainer.val_recall=true: is for task=language; write false"
    elif config.trainer.val_recall and config.seq_len < 4:
        yield f"trainer.val_recall=true: seq_len={config.seq_len} has no room for a task; write false"
    if schedule.length_steps and config.task != "language":
        yield f"schedule.length_steps={schedule.length_steps}: is for task=language; write 0"
    elif schedule.length_steps and schedule.first_length < 1:
        yield f"schedule.first_length={schedule.first_length}: a piece has at least one token; write 1k"
    elif schedule.length_steps and (schedule.first_length * 2 > config.seq_len or config.seq_len % 2):
        yield (
            f"schedule.first_length={schedule.first_length} with schedule.length_steps={schedule.length_steps}: half "
            f"of seq_len={config.seq_len} is shorter, or no whole number; write less, or schedule.length_steps=0"
        )


def _memory(config: Config) -> Iterator[str]:
    memory, optimizer = config.memory, config.optimizer
    if optimizer.state == "bfloat16" and optimizer.name != "adamw":
        yield f"optimizer.state=bfloat16 with optimizer={optimizer.name}: is for adamw; write optimizer.state=float32"
    elif optimizer.state == "bfloat16" and max(optimizer.betas) > 0.99:
        yield (
            f"optimizer.betas={list(optimizer.betas)} with optimizer.state=bfloat16: 8 bits cannot follow so slow a "
            "mean; write betas up to 0.99, or optimizer.state=float32"
        )
    if memory.offload is True and memory.checkpointing == "none":
        yield (
            "memory.offload=true with memory.checkpointing=none: what waits in host memory are the inputs of blocks "
            "that are computed again; write memory.checkpointing=selective or full"
        )
    if memory.loss == "liger" and config.trainer.accelerator == "cpu":
        yield "memory.loss=liger with trainer.accelerator=cpu: it needs an NVIDIA GPU; write memory.loss=chunked"


def _classification(config: Config) -> Iterator[str]:
    sections = {"classifier": config.classifier, "images": config.images}
    if config.task == "language":
        others = {"sequences": config.sequences, "curriculum": config.curriculum, "pretrain": config.pretrain}
        for key, section in {**sections, **others}.items():
            if section is not None:
                yield f"{key}: a section for task=classification, and task=language; write task=classification"
        return
    if config.sequences is not None:
        yield from _sequences(config, config.sequences)
        del sections["images"]
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


def _sequences(config: Config, sequences: SequencesConfig) -> Iterator[str]:
    for key in ("images", "curriculum", "pretrain"):
        if getattr(config, key) is not None:
            yield f"{key}: is for images, and sequences.source={sequences.source}; write one of the two sections"
    if sequences.path is None and sequences.source != "listops":
        yield (
            f"sequences.path=null: sequences.source={sequences.source} reads files; give the folder that data/lra.md "
            "describes"
        )
    for name in ("train_sequences", "val_sequences", "test_sequences"):
        count = getattr(sequences, name)
        if count is not None and count < 1:
            yield f"sequences.{name}={count}: must be at least 1"


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
