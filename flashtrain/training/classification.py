"""Classification of images: a label for each, and, where a dense target is there, a class for each pixel as well."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from flashtrain.attention import attention
from flashtrain.config import Config, format_size, to_dict
from flashtrain.config.schema import ClassifierConfig, ImagesConfig
from flashtrain.data.image_set import ImageSet, open_npz
from flashtrain.data.images import FreshPathfinder, ImageBatch, ImageSource, ImageSteps, StoredImages, held_out_batches
from flashtrain.data.order import WHOLE, Share
from flashtrain.data.pathfinder import PathfinderSpec, generate, prepare, spec_of
from flashtrain.data.release import open_release
from flashtrain.models.classifier import Classifier, check_sizes
from flashtrain.training.checkpoints import Identity
from flashtrain.training.curriculum import Progress, stage_config
from flashtrain.training.image_task import ImageTask
from flashtrain.training.pretraining import PretrainingTask, describe_pretraining, hiding_of
from flashtrain.training.protocol import FIXED_SET, GENERATOR, joined, said_of
from flashtrain.training.stream import step_loader


class ClassificationTask(ImageTask):
    """An encoder and its losses: cross entropy of the label, and of the pixels' classes times `dense_weight`."""

    FIGURES: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    def __init__(self, config: Config, classifier: ClassifierConfig) -> None:
        attend = functools.partial(attention, backend=config.attention.backend)
        super().__init__(config, Classifier(config.model, classifier, attend, seq_len=config.seq_len))
        self.head_size = classifier.dense_classes  # the label's head sees one vector an image
        self.dense_weight = classifier.dense_weight

    def loss_sum(self, batch: ImageBatch) -> Tensor:
        logits, dense = self.run_model(batch.images)
        total = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
        if dense is not None and batch.targets is not None:
            total = total + self.dense_weight * dense_loss_sum(dense, batch.targets)
        return total

    def measure(self, batch: ImageBatch) -> Tensor:
        """Cross entropy of the labels, and how many are right."""
        logits, _ = self.run_model(batch.images)
        loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
        return torch.stack([loss, (logits.argmax(-1) == batch.labels).sum().to(loss.dtype)])


def dense_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over the pixels that have a class: the mean over an image's, summed over images.

    logits: [batch, side, side, classes]; targets: uint8 [batch, side, side], 0 for no class, else 1 + the class.
    """
    has_class = targets > 0
    classes = targets.long() - 1
    losses = F.cross_entropy(logits.float().flatten(0, 2), classes.flatten(), ignore_index=-1, reduction="none")
    losses = losses.view(targets.shape).sum((1, 2))
    return (losses / has_class.sum((1, 2)).clamp(min=1)).sum()


class ClassificationWork:
    """What a run on images has of its own: the images and the classifier.

    Raises:
        ValueError: settings of the images that cannot be, or a seq_len that is not the number of their pixels.
    """

    def __init__(self, config: Config, run_config: Config | None = None, share: Share = WHOLE) -> None:
        assert config.classifier is not None and config.images is not None
        self.config, self.classifier, self.images = config, config.classifier, config.images
        self.run_config, self.share = run_config or config, share
        check_stages(config, self.run_config)
        self.hiding = hiding_of(config.pretrain, math.isqrt(config.seq_len))
        self.train: ImageSource
        self.val: StoredImages
        self.corpus: dict[str, Any]
        if config.images.source == "pathfinder":
            self._generate(pathfinder_spec(config.images))
        else:
            self._open()
        self.identity = Identity(
            vocab_size=self.classifier.num_classes,
            tokenizer="pixels",
            tokenizer_fingerprint="",
            corpus_fingerprint=corpus_fingerprint(_whole_corpus(self.corpus, self.run_config)),
        )
        self.task: ImageTask

    def build_task(self) -> ImageTask:
        config, pretrain = self.config, self.config.pretrain
        if pretrain is None:
            self.task = ClassificationTask(config, self.classifier)
        else:
            self.task = PretrainingTask(config, self.classifier, pretrain)
        return self.task

    def train_loader(self, first_step: int) -> DataLoader[list[ImageBatch]]:
        """Yields the micro-batches of step `first_step`, then of the next, without end."""
        steps = ImageSteps(
            self.train, self.config.sequences_per_step, self.config.sequences_per_micro_batch, self.config.seed,
            self.images.flips, self.images.brightness, self.hiding, self.share,
        )  # fmt: skip
        return step_loader(steps.batches, first_step, self.images.num_workers)

    def validate(self, last: bool) -> dict[str, float] | None:
        return self.task.validate(held_out_batches(self.val, self.config.sequences_per_micro_batch, self.hiding))

    def facts(self) -> dict[str, Any]:
        return {"parameters": {"total": self._num_parameters}, **self._protocol, "corpus": self.corpus}

    @property
    def _protocol(self) -> dict[str, Any]:
        """That of the run with all that its weights have seen; a resumed run need not find again what it began with."""
        config, found = self.run_config, self._own_protocol
        for earlier in (config.model.init_from, config.resume):
            found = joined(found, said_of(earlier, config.runs_dir))
        return found

    @property
    def _own_protocol(self) -> dict[str, Any]:
        pretrain = self.run_config.pretrain
        return {
            "protocol": GENERATOR if self.train.length is None else FIXED_SET,
            "dense_target": self.classifier.dense_classes > 0,
            "pretraining": None if pretrain is None else {"name": "masked_pixels", **dataclasses.asdict(pretrain)},
        }

    def banner(self) -> list[str]:
        config, side = self.config, math.isqrt(self.config.seq_len)
        amount = "fresh images without end" if self.train.length is None else f"{self.train.length:,} images"
        if config.pretrain is not None:
            target = f" without labels, {describe_pretraining(config.pretrain)}"
        elif self.classifier.dense_classes:
            target = f", dense target weighted {self.classifier.dense_weight:g}"
        else:
            target = ""
        own, whole = self._own_protocol, self._protocol
        mixed = [f"{key} {whole[key]}" for key in ("protocol", "dense_target") if whole[key] != own[key]]
        return [
            f"model {config.model.name}: {self._num_parameters / 1e6:.1f}M parameters, {side} x {side} pixels, "
            f"{format_size(config.seq_len)} tokens",
            f"data {self.corpus['name']}: {amount} to train on{target}, {self.val.length:,} held out",
            *([f"from the weights of {config.model.init_from} the result has {' and '.join(mixed)}"] if mixed else ()),
        ]

    def after_validation(self, step: int, show: Callable[[int, str, str], None]) -> None:
        pass

    def at_end(self, figures: dict[str, float]) -> dict[str, Any]:
        """The standard error of the accuracy."""
        accuracy = figures.get("val_accuracy")
        if accuracy is None:
            return {}
        return {"val_accuracy_error": math.sqrt(accuracy * (1 - accuracy) / self.val.length)}

    @property
    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.task.model.parameters())

    def _generate(self, spec: PathfinderSpec) -> None:
        """Take generated images, fresh ones or a packed set."""
        images, targets = self.images, self.classifier.dense_classes > 0
        self.corpus = {
            "source": "pathfinder",
            "name": images.preset,
            "spec": spec.as_dict(),
            "seed": images.seed,
            "train_images": images.train_images,
        }
        if images.train_images is None:
            self.train = FreshPathfinder(spec, images.seed, "train", targets and self.config.pretrain is None)
        else:
            self.train = self._packed(spec, "train", images.train_images, targets)
        self.val = self._packed(spec, "val", images.val_images, targets=False)

    def _open(self) -> None:
        """Take the training and the validation part of images from disk."""
        images = self.images
        found = images_from_disk(images, math.isqrt(self.config.seq_len), self.classifier.num_classes)
        check_side(self.config, found.side)
        if images.train_images is not None and images.train_images > found.train.length:
            raise ValueError(
                f"images.train_images={images.train_images}: the training part of {found.name} has "
                f"{found.train.length:,}; write that or fewer, or null for all"
            )
        self.train, self.val = _first(found.train, images.train_images), _first(found.val, images.val_images)
        self.corpus = disk_corpus(images, found.name, found.fingerprint, found.train.length)

    def _packed(self, spec: PathfinderSpec, split: str, count: int, targets: bool) -> StoredImages:
        packed = prepare(
            self.images.prepared_dir, spec, self.images.seed, split, count, targets=targets,
            workers=max(1, self.images.num_workers),
        )  # fmt: skip
        return StoredImages(packed.images, packed.labels, packed.targets)


def check_stages(config: Config, run_config: Config) -> None:
    """Look at what a run will train on before anything is made for it, and at all stages before the first step.

    Raises:
        ValueError: images that cannot be, or that the model or the pretraining cannot divide, naming the stage.
    """
    if run_config.curriculum is None:
        _check_work(config)
        return
    for number in range(len(run_config.curriculum.stages)):
        try:
            _check_work(stage_config(run_config, Progress(number)))
        except ValueError as error:
            raise ValueError(f"curriculum.stages[{number}]: {error}") from None


def _check_work(config: Config) -> None:
    assert config.classifier is not None and config.images is not None
    if config.images.source == "pathfinder":
        spec = pathfinder_spec(config.images)
        check_side(config, spec.side)
        with contextlib.suppress(ImportError):  # packed images are read without what makes them
            generate(spec, config.images.seed, "train", 0, 1)
    check_sizes(config.model, config.classifier, None, config.seq_len)
    hiding_of(config.pretrain, math.isqrt(config.seq_len))


def check_side(config: Config, side: int) -> None:
    """Raise ValueError unless the sequence has as many tokens as an image has pixels."""
    if config.seq_len != side**2:
        raise ValueError(
            f"seq_len={config.seq_len}: images of {side} x {side} have {side**2} pixels, one token each; "
            f"write seq_len={format_size(side**2)}"
        )


def images_from_disk(images: ImagesConfig, side: int, num_classes: int) -> ImageSet:
    """The set that `images` names: of the release the one of `side` pixels, unless `images.side` says otherwise.

    Raises:
        ValueError: it is not there, or not what it should be.
    """
    assert images.path is not None
    if images.source == "npz":
        return open_npz(images.path, num_classes)
    return open_release(images.path, images.side or side, images.difficulty, images.prepared_dir)


def disk_corpus(images: ImagesConfig, name: str, fingerprint: str, train_length: int) -> dict[str, Any]:
    """What a run on images from disk says of them, nothing of where they lie. `train_length`: of the training part."""
    count = train_length if images.train_images is None else images.train_images
    return {"source": images.source, "name": name, "fingerprint": fingerprint, "train_images": count}


def corpus_fingerprint(corpus: dict[str, Any]) -> str:
    """SHA-256 of a corpus' description."""
    return hashlib.sha256(json.dumps(corpus, sort_keys=True).encode()).hexdigest()


def _first(part: StoredImages, count: int | None) -> StoredImages:
    return StoredImages(part.images[:count], part.labels[:count])


def _whole_corpus(corpus: dict[str, Any], run_config: Config) -> dict[str, Any]:
    """What a run trains on in all its stages; those from disk are the same in each."""
    if run_config.curriculum is None or corpus["source"] != "pathfinder":
        return corpus
    whole = to_dict(run_config)
    images = {key: value for key, value in whole["images"].items() if key not in ("prepared_dir", "num_workers")}
    stages = [
        {key: value for key, value in stage.items() if key not in ("pretrain", "restart")}
        for stage in whole["curriculum"]["stages"]
    ]
    return {"images": images, "curriculum": {"stages": stages}}


def pathfinder_spec(images: ImagesConfig) -> PathfinderSpec:
    """The preset with the configured changes.

    Raises:
        ValueError: an unknown preset, or a value that cannot be.
    """
    changes = {
        "side": images.side,
        "contour_length": images.contour_length,
        "distractor_count": images.distractor_count,
        "distractor_length": images.distractor_length,
        "start_border": images.start_border,
        "seeding_flaw": images.seeding_flaw,
    }
    return spec_of(images.preset, **{key: value for key, value in changes.items() if value is not None})
