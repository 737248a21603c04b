"""The typed form of everything under conf/. What each key means, its unit and its default stand in the YAML, above it.

`Size` takes 16k, `Duration` takes 8m. `Literal` lists what a key may be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

Size = Annotated[int, "size"]
Duration = Annotated[float, "duration"]
# The names in flashtrain.data.pathfinder.PRESETS.
PathfinderPreset = Literal[
    "lra32", "lra64", "lra128", "lra256", "documented32", "documented64", "documented128", "documented256"
]  # fmt: skip


@dataclass(frozen=True)
class RopeScalingConfig:
    rule: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    factor: float = 1.0
    original_seq_len: Size | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    name: str
    num_layers: int
    num_heads: int
    hidden_size: int
    num_kv_heads: int | None
    head_dim: int | None
    mlp_size: int | None
    positions: Literal["learned", "rope", "none"]
    rope_theta: float
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    activation: Literal["gelu", "swiglu"]
    qk_norm: bool
    bias: bool
    tie_embeddings: bool
    dropout: float
    init_std: float
    tokenizer: str
    lr: float
    batch_tokens: Size
    init_from: str | None = None
    vocab_size: int | None = None
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    position_extension: Literal["duplicate", "interpolate", "extrapolate"] | None = None


@dataclass(frozen=True)
class LayoutConfig:
    name: Literal[
        "dense",
        "local_global",
        "window_sinks",
        "dilated",
        "butterfly",
        "bigbird",
        "strided",
        "fixed",
        "random_blocks",
        "tiles_2d",
        "from_mask",
    ]
    block: Literal[64, 128, "128x64"] | None = None
    window: int | None = None
    global_blocks: int | None = None
    dilation: int | None = None
    after: int | None = None
    sinks: int | None = None
    max_stride: int | None = None
    random: int | None = None
    density: float | None = None
    seed: int | None = None
    per_head: bool | None = None
    stride: int | None = None
    summary: int | None = None
    reach: int | None = None
    path: str | None = None


@dataclass(frozen=True)
class AttentionConfig:
    backend: Literal["auto", "hopper", "portable", "sdpa", "standard"]
    window: Size | None
    layout: LayoutConfig | None = None
    alternate_with: tuple[LayoutConfig, ...] = ()
    dense_every: int | None = None

    @property
    def layouts(self) -> tuple[LayoutConfig, ...]:
        """The layouts that the layers take in turn, each with its block; none where all layers are dense."""
        if self.layout is None:
            return ()
        block = self.layout.block or 128
        return tuple(replace(each, block=each.block or block) for each in (self.layout, *self.alternate_with))


@dataclass(frozen=True)
class DataConfig:
    source: Literal["python", "text", "jsonl", "parquet", "hub"]
    path: str | None
    name: str | None
    subset: str | None
    split: str
    text_key: str
    tokenizer: str | None
    prepared_dir: str
    val_fraction: float
    packing: Literal["concat", "whole"]
    document_borders: bool
    min_document_tokens: Size
    num_workers: int
    recall_share: float = 0.0


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "muon"]
    lr: float
    matrix_lr: float | None
    momentum: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    ema_decay: float | None
    state: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class ClassifierConfig:
    num_classes: int
    pooling: Literal["mean", "max", "marker"]
    positions: Literal["learned", "sinusoidal", "rope", "rope2d", "none"]
    token_order: Literal["rows", "tiles"]
    tile: tuple[int, int]
    dense_classes: int
    dense_weight: float
    proximity: tuple[float, ...]


@dataclass(frozen=True)
class ImagesConfig:
    source: Literal["pathfinder", "release", "npz"]
    path: str | None
    difficulty: Literal["curv_baseline", "curv_contour_length_9", "curv_contour_length_14"]
    preset: PathfinderPreset
    side: int | None
    contour_length: int | None
    distractor_count: int | None
    distractor_length: int | None
    start_border: int | None
    seeding_flaw: bool | None
    seed: int
    train_images: Size | None
    val_images: Size
    flips: bool
    brightness: tuple[float, float]
    prepared_dir: str
    num_workers: int


@dataclass(frozen=True)
class SequencesConfig:
    source: Literal["listops", "text", "retrieval", "grey_images"]
    path: str | None
    seed: int
    train_sequences: Size | None
    val_sequences: Size
    test_sequences: Size | None
    prepared_dir: str
    num_workers: int


@dataclass(frozen=True)
class PretrainConfig:
    share: float
    unit: Literal["pixel", "square"]
    square: int
    loss: Literal["cross_entropy", "l1"]
    levels: int


@dataclass(frozen=True)
class RestartConfig:
    after: Size
    below: float = 0.6
    attempts: int = 4


@dataclass(frozen=True)
class StageConfig:
    max_steps: Size
    gate: float | None = None
    restart: RestartConfig | None = None
    pretrain: bool = False
    preset: PathfinderPreset | None = None
    side: int | None = None
    contour_length: int | None = None
    distractor_count: int | None = None
    distractor_length: int | None = None
    start_border: int | None = None

    @property
    def images(self) -> dict[str, str | int]:
        """What the stage changes of `images`, by key."""
        names = ("preset", "side", "contour_length", "distractor_count", "distractor_length", "start_border")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class CurriculumConfig:
    stages: tuple[StageConfig, ...]


@dataclass(frozen=True)
class ScheduleConfig:
    name: Literal["cosine", "wsd", "constant"]
    warmup_steps: Size
    decay_fraction: float
    min_lr_ratio: float
    length_steps: Size = 0
    first_length: Size = 1024


@dataclass(frozen=True)
class MemoryConfig:
    checkpointing: Literal["auto", "none", "selective", "full"]
    loss_chunk_tokens: Size
    offload: Literal["auto", True, False] = "auto"
    mlp_chunk_tokens: Size | None = None
    loss: Literal["auto", "chunked", "liger"] = "auto"


@dataclass(frozen=True)
class PlanConfig:
    only: bool = False
    gpu: Literal[
        "b200", "h200", "h100", "a100-80gb", "a100-40gb", "l40s", "a6000", "rtx4090", "rtx3090", "l4"
    ] | None = None  # fmt: skip


@dataclass(frozen=True)
class TrainerConfig:
    max_steps: Size
    max_time: Duration | None
    batch_tokens: Size
    micro_batch_tokens: Size
    accelerator: Literal["auto", "cpu", "cuda"]
    devices: int
    precision: Literal["auto", "32-true", "bf16-mixed", "bf16-true"]
    compile: Literal["auto", True, False]
    deterministic: bool
    log_every_n_steps: Size
    val_every_n_steps: Size
    val_tokens: Size
    checkpoint_every_n_steps: Size
    keep_checkpoints: int
    sample_tokens: Size
    peak_tflops: float | None
    cuda_graph: Literal["auto", True, False] = "auto"
    val_by_position: bool = False
    val_recall: bool = False
    strategy: Literal["ddp", "fsdp"] = "ddp"
    shard: int | None = None
    checkpoint_format: Literal["single", "sharded"] = "single"
    context: int = 1
    context_method: Literal["ring", "ulysses"] = "ring"
    timeout: Duration = 40.0


@dataclass(frozen=True)
class LoggerConfig:
    name: Literal["wandb", "tensorboard", "csv"]
    project: str
    mode: Literal["auto", "online", "offline"]
    group: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Config:
    seq_len: Size
    seed: int
    run_id: str | None
    resume: str | None
    runs_dir: str
    task: Literal["language", "classification"]
    model: ModelConfig
    attention: AttentionConfig
    data: DataConfig
    classifier: ClassifierConfig | None
    images: ImagesConfig | None
    curriculum: CurriculumConfig | None
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    memory: MemoryConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    pretrain: PretrainConfig | None = None
    plan: PlanConfig = PlanConfig()
    sequences: SequencesConfig | None = None

    @property
    def tokenizer(self) -> str:
        """The tokenizer's name: the data's where it names one, else the model's."""
        return self.data.tokenizer or self.model.tokenizer

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimiser step: `trainer.batch_tokens`, but at least one sequence."""
        return max(1, self.trainer.batch_tokens // self.seq_len)

    @property
    def data_shares(self) -> int:
        """Parts that the sequences of a step are divided into: devices, or groups of them that share each sequence."""
        return max(1, self.trainer.devices // self.trainer.context)

    @property
    def sequences_per_micro_batch(self) -> int:
        """The largest divisor of a share's sequences that keeps within `trainer.micro_batch_tokens` a device."""
        most = max(1, self.trainer.micro_batch_tokens * self.trainer.context // self.seq_len)
        share = max(1, self.sequences_per_step // self.data_shares)
        return max(n for n in range(1, min(most, share) + 1) if share % n == 0)
