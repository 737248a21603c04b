"""Models in and out, and our attention in other people's code.

    model, tokenizer = load("runs/<run_id>")           # or a checkpoint, or a Hugging Face folder
    save(model, tokenizer, "folder", window=None)      # for AutoModelForCausalLM.from_pretrained

`transformers_attention` is `attn_implementation="flashtrain"`; `flash_attn` has FlashAttention's function signatures.
Needs neither Hydra nor Lightning.
"""

from flashtrain.interchange.loading import Loaded, load, read
from flashtrain.interchange.saving import save

__all__ = ["Loaded", "load", "read", "save"]
