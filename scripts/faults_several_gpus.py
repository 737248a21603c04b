"""The faults in what several GPUs do together that `planted_faults` plants: in attention to a sequence that they share,
in the steps that they take together, and in what each of them gets of the data."""

from __future__ import annotations

from faults import Fault

# Files in flashtrain.
SHARDS, PLAN, PARTIAL, RING, HEADS, OP = (
    f"parallel/{name}.py" for name in ("shards", "plan", "partial", "ring", "heads", "op")
)
TASK, AVERAGING = "training/task.py", "training/averaging.py"
REPLICAS, PROCESSES, CONTEXT = (f"training/distributed/{name}.py" for name in ("replicas", "processes", "context"))
IMAGES, WITH_RECALL = "data/images.py", "data/with_recall.py"

# Tests in tests: of attention, of whole runs, of what each process gets.
TOGETHER, ONE = "parallel/test_context_parallel.py", "parallel/test_one_process.py"
EVERY = f"{TOGETHER}::test_every_mask_gives_what_one_process_gives"
SEES = f"{ONE}::test_all_ranks_together_see_what_the_mask_shows"
RUN = "training/distributed/test_equal.py::test_several_processes_give_the_losses_and_weights_of_one"
SHARES = "training/distributed/test_shares.py"

FAULTS = [
    # Which tokens a rank holds, and what its queries see of the keys at hand.
    Fault(
        "shards: two neighbouring chunks",
        SHARDS,
        "firsts = rank * length, (2 * size - 1 - rank) * length",
        "firsts = 2 * rank * length, (2 * rank + 1) * length",
        (f"{ONE}::test_shards_and_their_positions_belong_together",),
    ),
    Fault(
        "ring: keys expected from the other side",
        PLAN,
        "source = (rank - step) % size",
        "source = (rank + step) % size",
        (EVERY,),
    ),
    Fault("ring: a chunk of keys has no end", PLAN, ".clamp(0, chunk) for first", ".clamp(min=0) for first", (SEES,)),
    Fault("ring: late blocks taken for early ones", PLAN, "a_chunk + place, -1", "place, -1", (SEES,)),
    Fault(
        "ring: blocks are cut",
        PLAN,
        "if chunk % block:",
        "if False:",
        (f"{TOGETHER}::test_chunks_that_cut_the_blocks_of_a_layout_are_refused",),
    ),
    # Sums over parts, and what goes round.
    Fault(
        "ring: sums in the dtype of the inputs",
        PARTIAL,
        "return torch.promote_types(dtype, torch.float32)",
        "return dtype",
        (f"{ONE}::test_many_ranks_round_to_bfloat16_no_more_often_than_one",),
    ),
    Fault(
        "ring: -inf minus -inf",
        PARTIAL,
        'finite = both.masked_fill(both == float("-inf"), 0.0)',
        "finite = both",
        (EVERY,),
    ),
    Fault("ring: lse of the last part alone", PARTIAL, "lse.copy_(both)", "lse.copy_(part_lse)", (EVERY,)),
    Fault("ring: delta left out", PARTIAL, "(dout @ v.mT - delta[..., None])", "(dout @ v.mT)", (EVERY,)),
    Fault(
        "ring: sums of dk and dv lost on the way",
        RING,
        "            sums = arrive_sums()  # of",
        "            sums = torch.zeros_like(arrive_sums())  # of",
        (EVERY,),
    ),
    Fault("ring: dq of the last keys alone", RING, "dq[:, :, rows] += grads[0]", "dq[:, :, rows] = grads[0]", (EVERY,)),
    # Heads in place of tokens.
    Fault(
        "heads: key heads repeated in another order",
        HEADS,
        "x.repeat_interleave(size // num_kv_heads, dim=1)",
        "x.repeat(1, size // num_kv_heads, 1, 1)",
        (f"{TOGETHER}::test_key_heads_may_be_fewer_than_query_heads_and_than_ranks",),
    ),
    Fault(
        "heads: all ranks take the first one's layout",
        HEADS,
        "starts = layout.starts[rank * rows : (rank + 1) * rows + 1]",
        "starts = layout.starts[: rows + 1]",
        (EVERY,),
    ),
    Fault(
        "heads: gradients stay where they are",
        OP,
        "return torch.ops.flashtrain.exchange(grad, ctx.group), None",
        "return grad, None",
        (EVERY,),
    ),
    # Steps that several processes take together.
    Fault(
        "steps: the same dropout in every process",
        TASK,
        "first, part = processes.share[0] * count, (processes.part,) if processes.context > 1 else ()",
        "first, part = 0 * count, (processes.part,) if processes.context > 1 else ()",
        (f"{RUN}[ddp_with_dropout]",),
    ),
    Fault(
        "steps: targets of shared sequences counted twice",
        TASK,
        "own = sum(batch.num_targets for batch in micro_batches) if processes.part == 0 else 0",
        "own = sum(batch.num_targets for batch in micro_batches)",
        (f"{RUN}[ulysses]",),
    ),
    Fault(
        "steps: gradients averaged, not summed",
        REPLICAS,
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        (f"{RUN}[fsdp_with_dropout]",),
    ),
    Fault(
        "steps: averaged weights beside old ones",
        AVERAGING,
        "        put_away(self.model)\n",
        "",
        (f"{RUN}[fsdp_with_dropout]",),
    ),
    Fault(
        "steps: positions of the first part for all",
        CONTEXT,
        "positions = positions_of(seq_len, self.part, self.parts).expand(rows, -1)",
        "positions = positions_of(seq_len, 0, self.parts).expand(rows, -1)",
        (f"{RUN}[ring_over_blocks]",),
    ),
    # What each process gets of the data.
    Fault(
        "shares: repeated held-out batches count",
        PROCESSES,
        "yield given[min(share, len(given) - 1)], share < len(given)",
        "yield given[min(share, len(given) - 1)], True",
        (f"{SHARES}::test_each_held_out_batch_counts_once_and_all_processes_have_equally_many",),
    ),
    Fault(
        "shares: images of a step overlap",
        IMAGES,
        "return step * self.images_per_step + self.rank * self.share_of_step",
        "return step * self.images_per_step + self.rank",
        (f"{SHARES}::test_images_and_labelled_sequences_are_shared_the_same_way",),
    ),
    Fault(
        "shares: the same recall tasks in every process",
        WITH_RECALL,
        "enumerate(batches, self.rank * len(batches))",
        "enumerate(batches)",
        (f"{SHARES}::test_the_shares_of_a_step_are_the_step_of_one_process",),
    ),
]
