"""Stages, their restart rule, and pretraining: combinations that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from flashtrain.config.schema import Config, PretrainConfig, StageConfig


def broken_curriculum_rules(config: Config) -> Iterator[str]:
    """One line for each rule that a run on images breaks: key, value, and what to write instead."""
    if config.pretrain is not None:
        yield from _pretrain(config.pretrain)
    if config.curriculum is None:
        return
    stages = config.curriculum.stages
    if not stages:
        yield "curriculum.stages=[]: name at least one stage, or write '~curriculum'"
    for number, stage in enumerate(stages):
        key = f"curriculum.stages[{number}]"
        if stage.max_steps < 1:
            yield f"{key}.max_steps={stage.max_steps}: must be at least 1"
        if stage.gate is not None and not 0 < stage.gate <= 1:
            yield f"{key}.gate={stage.gate}: an accuracy above 0, at most 1"
        yield from _restart(key, stage, config)
        if stage.restart is not None and (number > 0 or config.model.init_from is not None):
            yield from _restart_of_given_weights(key, config)
        yield from _stage_of_pretraining(key, stage, config)
    if config.pretrain is not None and stages and not any(stage.pretrain for stage in stages):
        yield (
            "pretrain: no stage of the curriculum pretrains; give one pretrain: true, take curriculum=masked_pixels, "
            "or leave pretrain out"
        )
    yield from _fixed_images(config, stages)


def _pretrain(pretrain: PretrainConfig) -> Iterator[str]:
    if not 0 < pretrain.share < 1:
        yield f"pretrain.share={pretrain.share}: must lie between 0 and 1, such as 0.5"
    if pretrain.square < 1:
        yield f"pretrain.square={pretrain.square}: pixels, at least 1"
    if not 2 <= pretrain.levels <= 256:
        yield f"pretrain.levels={pretrain.levels}: an image has 256 grey levels; write 2 to 256"


def _stage_of_pretraining(key: str, stage: StageConfig, config: Config) -> Iterator[str]:
    if not stage.pretrain:
        return
    if config.pretrain is None:
        yield f"{key}.pretrain=true: what is hidden is not said; write pretrain=masked_pixels"
    for name in ("gate", "restart"):
        if getattr(stage, name) is not None:
            yield f"{key}.{name}: pretraining has no accuracy; leave it out, and the stage takes its max_steps"


def _restart(key: str, stage: StageConfig, config: Config) -> Iterator[str]:
    rule = stage.restart
    if rule is None:
        return
    if not 0 < rule.below <= 1:
        yield f"{key}.restart.below={rule.below}: an accuracy above 0, at most 1, such as 0.6"
    if stage.gate is not None and rule.below > stage.gate:
        yield f"{key}.restart.below={rule.below}: a stage is over at its gate={stage.gate}; write that or less"
    most = min(stage.max_steps, config.trainer.max_steps)
    if not 1 <= rule.after <= most:
        yield f"{key}.restart.after={rule.after}: steps of the stage, which has {most} at most; write 1 to {most}"
    if rule.attempts < 2:
        yield f"{key}.restart.attempts={rule.attempts}: with the first one, so at least 2; or leave restart out"


def _restart_of_given_weights(key: str, config: Config) -> Iterator[str]:
    """Weights of the stage before, or of another run, are the same for every seed, so something else must differ."""
    images = config.images
    if images is None or images.train_images is not None or images.source != "pathfinder":
        return
    if not images.flips and images.brightness == (1.0, 1.0) and config.model.dropout == 0:
        yield (
            f"{key}.restart: the stage begins with given weights, and here another seed changes nothing else; "
            "write images.flips=true, or leave restart out"
        )


def _fixed_images(config: Config, stages: tuple[StageConfig, ...]) -> Iterator[str]:
    """What cannot follow stages with images of their own."""
    named = {name for stage in stages for name in stage.images}
    if config.classifier is not None and config.classifier.positions == "learned" and named & {"preset", "side"}:
        yield (
            "classifier.positions=learned: a table of one image size cannot follow a curriculum; take rope2d, or run "
            "the stages one by one with model.init_from"
        )
    if config.images is not None and config.images.source != "pathfinder" and named:
        yield (
            f"images.source={config.images.source}: a curriculum that names {', '.join(sorted(named))} generates its "
            "images; write images.source=pathfinder"
        )
