"""How many devices train together, and what they cannot do together."""

from __future__ import annotations

from collections.abc import Iterator

from flashtrain.config.schema import Config, ModelConfig, TrainerConfig


def broken_device_rules(config: Config) -> Iterator[str]:
    """One line for each rule that a run on several devices breaks."""
    trainer = config.trainer
    devices, context = trainer.devices, trainer.context
    if min(devices, context, config.seq_len) < 1:  # told already
        return
    if devices % context:
        yield (
            f"trainer.context={context}: must divide trainer.devices={devices}, such as "
            f"{max(n for n in range(1, devices + 1) if devices % n == 0 and n <= context)}"
        )
        return
    yield from _shares(config)
    if context > 1:
        yield from _context(config)
    if devices == 1:
        return
    if trainer.cuda_graph is True:
        yield f"trainer.cuda_graph=true with trainer.devices={devices}: is for one device; write false"
    if trainer.shard is not None:
        yield from _shard(trainer, trainer.shard)
    if trainer.strategy == "fsdp":
        yield from _fsdp(config)


def _shares(config: Config) -> Iterator[str]:
    sequences, shares = config.sequences_per_step, config.data_shares
    if sequences % shares:
        who = f"trainer.devices={config.trainer.devices}"
        who += f" in groups of trainer.context={config.trainer.context}" if config.trainer.context > 1 else ""
        yield (
            f"trainer.batch_tokens={config.trainer.batch_tokens}: gives {sequences} sequences of seq_len="
            f"{config.seq_len} a step, which {who} cannot share evenly; write trainer.batch_tokens="
            f"{-(-sequences // shares) * shares * config.seq_len}"
        )


def _context(config: Config) -> Iterator[str]:
    context, key = config.trainer.context, f"trainer.context={config.trainer.context}"
    if config.task != "language":
        yield f"{key}: sequences are shared in task=language alone; write trainer.context=1"
        return
    if config.seq_len % (2 * context):
        yield f"seq_len={config.seq_len} with {key}: it must be a multiple of twice as many, {2 * context}"
    schedule = config.schedule
    if schedule.length_steps and config.seq_len % (2 * context) == 0:
        shortest = config.seq_len
        while shortest % 2 == 0 and shortest // 2 >= schedule.first_length:
            shortest //= 2
        if shortest % (2 * context):
            yield (
                f"schedule.first_length={schedule.first_length} with {key}: pieces of {shortest} tokens cannot be "
                f"shared; write {2 * context} or more"
            )
    if config.trainer.context_method == "ulysses":
        yield from _heads(config.model, context)


def _heads(model: ModelConfig, context: int) -> Iterator[str]:
    kv_heads = model.num_heads if model.num_kv_heads is None else model.num_kv_heads
    if model.num_heads % context or kv_heads % context:
        yield (
            f"trainer.context_method=ulysses with trainer.context={context}: needs model.num_heads={model.num_heads} "
            f"and model.num_kv_heads={kv_heads} to be multiples of it; write trainer.context_method=ring"
        )


def _shard(trainer: TrainerConfig, shard: int) -> Iterator[str]:
    key = f"trainer.shard={shard}"
    if trainer.strategy != "fsdp":
        yield f"{key} with trainer.strategy=ddp: is for models that are divided; write trainer=fsdp, or null"
    elif shard < 2:
        yield f"{key}: would divide nothing; write trainer.strategy=ddp, or null to divide among all devices"
    elif trainer.devices % shard:
        yield (
            f"{key}: must divide trainer.devices={trainer.devices}, such as "
            f"{max((n for n in range(2, shard) if trainer.devices % n == 0), default=trainer.devices)}"
        )


def _fsdp(config: Config) -> Iterator[str]:
    if config.optimizer.name == "muon":
        yield "trainer.strategy=fsdp with optimizer=muon: it needs whole matrices; write trainer=ddp or optimizer=adamw"
    if config.task != "language":
        yield "trainer.strategy=fsdp: is for task=language; write trainer.strategy=ddp"
