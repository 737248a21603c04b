"""Where tokens come from: corpora, tokenizers, prepared token files, packing, and the order of training."""
