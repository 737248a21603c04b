"""One sequence shared by several processes: which tokens each of them holds, and attention over all of them.

parallel = ContextParallel(group)
plan = parallel.lower(Causal(), batch, seq_len, device)     # seq_len of the whole sequence; once a step
out = parallel(q, k, v, plan)                               # q, k, v and out: this rank's tokens, as `shard` cuts
"""

from flashtrain.parallel.context import METHODS, ContextParallel
from flashtrain.parallel.shards import positions_of, shard, unshard

__all__ = ["METHODS", "ContextParallel", "positions_of", "shard", "unshard"]
