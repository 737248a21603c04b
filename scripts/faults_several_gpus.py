"""The faults in what several GPUs do together that `planted_faults` plants: in attention to a sequence that they share,
in the steps that they take together, and in what each of them gets of the data."""

from __future__ import annotations

from faults import Fault

# Files in flashtrain.
SHARDS, PLAN, PARTIAL, RING, HEADS, OP = (
    f"parallel/{name}.py" for name in ("shards", "plan", "partial", "ring", "heads", "op")
)
TASK, AVERAGING = "training/task.py", "training/averaging.py"
REPLICAS, PROCESSES, CONTEXT, STRATEGY, WRITING = (
    f"training/distributed/{name}.py" for name in ("replicas", "processes", "context", "strategy", "writing")
)
CHECKPOINTS, PARTS_READ, MESH = "training/checkpoints.py", "interchange/shards.py", "training/forecast/mesh.py"
IMAGES, WITH_RECALL = "data/images.py", "data/with_recall.py"

# Tests in tests: of attention, of whole runs, of what each process gets.
TOGETHER, ONE = "parallel/test_context_parallel.py", "parallel/test_one_process.py"
EVERY = f"{TOGETHER}::test_every_mask_gives_what_one_process_gives"
SEES = f"{ONE}::test_all_ranks_together_see_what_the_mask_shows"
RUN = "training/distributed/test_equal.py::test_several_processes_give_the_losses_and_weights_of_one"
SHARES, PARTS = "training/distributed/test_shares.py", "training/distributed/test_checkpoints.py"

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
    Fault("ring: dq of the last keys alone", RING, "piece.queries] += dq", "piece.queries] = dq", (EVERY,)),
    Fault(
        "ring: own keys' second half of heads left out",
        RING,
        "_add(own_sums, queries.gradients(own, kv, second_half), second_half)",
        "pass",
        (EVERY,),
    ),
    Fault("ring: half of the heads with all heads' lists", RING, "return 0 if differ else", "return", (EVERY,)),
    Fault("ring: sums that came home not taken", RING, "own_sums += arrive_sums()", "arrive_sums()", (EVERY,)),
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
    Fault(
        "groups: gradients of one group alone",
        REPLICAS,
        "self._repeated.set_requires_all_reduce(last)",
        "self._repeated.set_requires_all_reduce(False)",
        (f"{RUN}[fsdp_in_groups]",),
    ),
    Fault(
        "groups: the model divided among all",
        REPLICAS,
        "self.shards = divided_by or processes.size",
        "self.shards = processes.size",
        ("training/distributed/test_checkpoints.py::test_groups_hold_the_model_each_and_write_it_once",),
    ),
    Fault(
        "groups: sums of gradients as large as the model",
        MESH,
        "_model_bytes(case) / case.shards\n",
        "_model_bytes(case)\n",
        (f"{SHARES}::test_a_forecast_for_groups_lies_between_those_that_divide_the_model_among_all_and_not_at_all",),
    ),
    # Checkpoints in parts.
    Fault(
        "parts: the first process writes all",
        STRATEGY,
        "if self.sharded and is_divided",
        "if False and is_divided",
        (f"{PARTS}::test_a_checkpoint_in_parts_is_the_single_file_bit_for_bit",),
    ),
    Fault(
        "parts: moments begin anew",
        STRATEGY,
        "states = self._filled(states, self._folder)",
        "states = []",
        (f"{PARTS}::test_from_parts_as_many_processes_go_on_bit_for_bit",),
    ),
    Fault(
        "parts: the mean of the weights takes the newest ones",
        WRITING,
        "divided[place] = tensor\n",
        'divided[place] = checkpoint["state_dict"].get(place.replace("average", "model", 1), tensor)\n',
        (f"{PARTS}::test_a_checkpoint_in_parts_is_the_single_file_bit_for_bit",),
    ),
    Fault(
        "parts: named before all are there",
        WRITING,
        "    divided: dict[str, Tensor] = {}\n",
        '    divided: dict[str, Tensor] = {}\n    folder = folder.with_suffix(".ckpt")\n',
        (
            "training/distributed/test_starting.py::test_a_process_that_is_killed_while_it_writes_is_named_and_the_last_"
            "checkpoint_is_whole",
        ),
    ),
    Fault(
        "parts: a part that was cut short is not missed",
        PARTS_READ,
        "        _check(folder / name, size)\n",
        "        pass\n",
        (f"{PARTS}::test_a_part_that_is_missing_or_cut_short_is_named_and_the_checkpoint_before_is_taken",),
    ),
    Fault(
        "parts: an index may name any function",
        PARTS_READ,
        "_Index(file).load()",
        "pickle.load(file)",
        (f"{PARTS}::test_a_part_with_other_bytes_is_named_and_an_index_runs_no_code",),
    ),
    Fault(
        "parts: what a killed run left stays",
        CHECKPOINTS,
        "                self._clear()\n            trainer",
        "            trainer",
        (f"{PARTS}::test_old_checkpoints_in_parts_go_and_what_a_killed_run_left_goes_too",),
    ),
    Fault(
        "parts: a folder does not give way",
        CHECKPOINTS,
        "        path.rename(before)\n",
        "",
        (f"{PARTS}::test_a_checkpoint_in_parts_gives_way_to_another_of_its_step",),
    ),
    Fault(
        "signals: the same one twice ends the process at once",
        "training/preemption.py",
        "elif now - since > _ONE_SIGNAL:",
        "else:",
        (
            "training/distributed/test_starting.py::test_a_signal_that_comes_twice_at_once_counts_once_and_a_later_one_ends_the_process",
        ),
    ),
    Fault(
        "sweeps: a job that is started again is a new run",
        "sweep.py",
        'if (job / "config.yaml").exists():',
        "if False:",
        ("training/distributed/test_starting.py::test_a_job_that_a_launcher_starts_once_more_goes_on_with_its_run",),
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
    Fault(
        "shares: recall tasks by the row of a micro-batch",
        WITH_RECALL,
        "(self.seed, step, row))",
        "(self.seed, step, row - first))",
        ("data/test_with_recall.py::test_a_step_has_the_same_tasks_however_it_is_cut_and_shared",),
    ),
    # Slurm.
    Fault(
        "slurm: processes meet at the job's first machine",
        "training/distributed/slurm.py",
        '_first_node(environment["SLURM_STEP_NODELIST"])',
        '_first_node(environment["SLURM_NODELIST"])',
        ("training/distributed/test_slurm.py::test_where_processes_meet_is_the_first_machine_of_their_srun",),
    ),
    Fault(
        "slurm: a job that is started again is a new run",
        "config/composed.py",
        "if again and _has_begun(raw):",
        "if False:",
        (
            "training/distributed/test_slurm.py::test_a_job_that_slurm_stops_and_starts_again_is_one_run_like_one_that_was_not_stopped",
        ),
    ),
]
