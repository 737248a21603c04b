"""flashtrain: long-context training on block-sparse and dense flash attention."""
