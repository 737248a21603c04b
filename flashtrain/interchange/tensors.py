"""The safetensors files of a Hugging Face folder: every name and shape is checked before a tensor is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashtrain.interchange.weights import Part

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Masks and angles that early versions of transformers stored beside the weights.
_NOT_WEIGHTS = re.compile(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$")
_FLOATS = ("F64", "F32", "F16", "BF16")


class Tensors:
    """The tensors of a folder by name.

    prefix: what all names but the head's begin with. Folders of a model without its head leave it out.

    Raises:
        ValueError: no such files, one of them cut short or missing, or numbers that are not floating point.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._place: dict[str, tuple[str, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files():
            handle = self._open[file] = _open_file(folder / file)
            for stored in handle.keys():  # noqa: SIM118 - it is no dict
                if not _NOT_WEIGHTS.search(stored):
                    self._add(stored, file, prefix)

    def _add(self, stored: str, file: str, prefix: str) -> None:
        name = stored if stored.startswith(prefix) or stored == "lm_head.weight" else prefix + stored
        if name in self._place:
            raise ValueError(f"{self.folder}: {stored} stands in {file} and in {self._place[name][0]}; keep one")
        piece = self._open[file].get_slice(stored)
        if piece.get_dtype() not in _FLOATS:
            raise ValueError(
                f"{self.folder / file}: {stored} has numbers of type {piece.get_dtype()}; only {', '.join(_FLOATS)} "
                "are read: save the model unquantized"
            )
        self._place[name] = (file, stored)
        self.shapes[name] = tuple(piece.get_shape())

    def _files(self) -> list[str]:
        """Names of the files that hold the weights."""
        index = self.folder / INDEX
        if (self.folder / SINGLE).is_file() and not index.is_file():
            return [SINGLE]
        if not index.is_file():
            other = " (pytorch_model.bin is not read: it can hold code)" if any(self.folder.glob("*.bin")) else ""
            raise ValueError(
                f"{self.folder}: neither {SINGLE} nor {INDEX} is in it{other}; save it with safe_serialization=True"
            )
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: no weight_map can be read ({error}); copy the file again") from error
        strange = [file for file in files if Path(file).name != file]
        if strange:
            raise ValueError(f"{index}: names {strange[0]!r}; its files lie beside it, in the same folder")
        missing = [file for file in files if not (self.folder / file).is_file()]
        if missing:
            raise ValueError(f"{self.folder}: {', '.join(missing)} of {INDEX} is missing; copy all files")
        return files

    def check(self, parts: Iterable[Part], tied: bool) -> None:
        """Hold names and shapes against what the model has.

        tied: the head is the embedding, and a copy of it is let pass if it is the same.

        Raises:
            ValueError: listing what is missing, left over, or of another shape.
        """
        wanted = {name: shape for part in parts for name, shape in part.source_shapes().items()}
        copies = {"lm_head.weight"} & {*self.shapes} - {*wanted} if tied else set()
        if copies:
            self._check_copy(next(part.sources[0] for part in parts if part.name == "token_embedding.weight"))
        self.hold_against(wanted, "config.json", copies)

    def hold_against(self, wanted: Mapping[str, tuple[int, ...]], config: str, ignored: Set[str] = frozenset()) -> None:
        """Hold names and shapes against `wanted`, which the file called `config` asks for.

        Raises:
            ValueError: as `check`.
        """
        problems = [
            *(f"{name} is missing" for name in wanted if name not in self.shapes),
            *(f"{name} is not part of such a model" for name in sorted({*self.shapes} - {*wanted} - ignored)),
            *(
                f"{name} is {list(self.shapes[name])} and {config} makes it {list(shape)}"
                for name, shape in wanted.items()
                if name in self.shapes and self.shapes[name] != shape
            ),
        ]
        if problems:
            more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"{self.folder}: the weights are not those of its {config}: {'; '.join(problems[:5])}{more}. "
                f"Copy {config} and all weights of one checkpoint"
            )

    def _check_copy(self, embedding: str) -> None:
        if embedding in self.shapes and not torch.equal(self.read(embedding), self.read("lm_head.weight")):
            raise ValueError(
                f"{self.folder}: config.json ties the head to the embedding, and lm_head.weight is another matrix; "
                "write tie_word_embeddings false there if the head is its own"
            )

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in its own dtype."""
        file, stored = self._place[name]
        return self._open[file].get_tensor(stored)

    @property
    def metadata(self) -> dict[str, str]:
        """What stands beside the weights, in the first of the files."""
        first = next(iter(self._open.values()))
        return first.metadata() or {}


def _open_file(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); copy it again") from error


def write(
    tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int, metadata: Mapping[str, str] | None = None
) -> None:
    """Write the tensors as one file, or as several with an index where they are more than `max_shard_bytes`.

    metadata: what stands beside them in each file.
    """
    beside = {"format": "pt", **(metadata or {})}
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata=beside)
        return
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata=beside)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
