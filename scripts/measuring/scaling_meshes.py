"""How GPUs share the work of a training step, as benchmark_scaling.py names it."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMS = "1, ddp:N, fsdp:N, context:N:METHOD[:ddp], DxC[:METHOD]"
_CONTEXT = re.compile(r"(?:context:(\d+)|(\d+)x(\d+))(?::(ring|ulysses))?(?::(ddp|fsdp))?")


@dataclass(frozen=True)
class Mesh:
    """`devices` GPUs, `context` of which share each sequence by `method`.

    Attributes:
        text: as it is written on the command line.
        strategy: ddp or fsdp, see `trainer.strategy`.
    """

    text: str
    devices: int
    context: int = 1
    strategy: str = "ddp"
    method: str = "ring"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Raises ValueError: it is none of FORMS."""
        if text == "1":
            return cls(text, 1)
        if (data := re.fullmatch(r"(ddp|fsdp):(\d+)", text)) is not None and int(data[2]) > 1:
            return cls(text, int(data[2]), strategy=data[1])
        found = _CONTEXT.fullmatch(text)
        if found is not None:
            shares, context = (1, int(found[1])) if found[1] else (int(found[2]), int(found[3]))
            if shares >= 1 and context > 1:
                return cls(text, shares * context, context, found[5] or "fsdp", found[4] or "ring")
        raise ValueError(f"{text!r} is no mesh; write one of {FORMS}, with N of 2 or more")

    @property
    def shares(self) -> int:
        """Sequences of a step: each group of `context` GPUs has one."""
        return self.devices // self.context

    @property
    def scaling(self) -> str:
        """What is compared with one GPU that trains on one sequence a step."""
        if self.devices == 1:
            return "one GPU"
        if self.shares == 1:
            return f"strong: one sequence on {self.devices} GPUs"
        return f"weak: {self.shares} sequences on {self.devices} GPUs"

    def overrides(self, seq_len: int) -> list[str]:
        """Of the configuration: a sequence for each share in a step, one at a time."""
        return [
            f"trainer.devices={self.devices}",
            f"trainer.strategy={self.strategy}",
            f"trainer.context={self.context}",
            f"trainer.context_method={self.method}",
            f"trainer.batch_tokens={self.shares * seq_len}",
            f"trainer.micro_batch_tokens={seq_len // self.context}",
        ]


def usual(gpus: int) -> list[Mesh]:
    """What there is to compare on a machine with so many GPUs: powers of two, data x context of equal size last."""
    found = ["1"]
    for n in (2, 4, 8):
        found += [f"ddp:{n}", f"fsdp:{n}", f"context:{n}:ring", f"context:{n}:ulysses"]
        found += {4: ["2x2"], 8: ["2x4", "4x2"]}.get(n, [])
    return [mesh for mesh in map(Mesh.parse, found) if mesh.devices <= gpus]


def heads_fit(mesh: Mesh, num_heads: int) -> bool:
    """Whether GPUs that exchange heads can share them."""
    return mesh.method == "ring" or num_heads % mesh.context == 0


def meshes(text: str) -> list[Mesh]:
    """Several, with commas between them. Raises ValueError."""
    return [Mesh.parse(each) for each in text.split(",") if each]


def as_dict(mesh: Mesh) -> dict[str, object]:
    """What a row says of it."""
    names = ("devices", "context", "strategy", "method")
    found = {"mesh": mesh.text, **{name: getattr(mesh, name) for name in names}, "scaling": mesh.scaling}
    if mesh.context == 1:
        found["method"] = None
    return found | {"sequences": mesh.shares}
