"""The faults in attention that `planted_faults` plants: what is replaced by what, and which tests must see it."""

from __future__ import annotations

from dataclasses import dataclass

# Files in flashtrain.
LISTS, PLAN, LAYOUT = (f"attention/{name}.py" for name in ("lists", "plan", "block_layout"))
TILES, LAUNCH = "attention/portable/tiles.py", "attention/portable/launch.py"
FORWARD, BACKWARD, DKDV, DQ = (f"attention/portable/{name}.py" for name in ("forward", "backward", "dkdv", "dq"))

# Tests in tests: of masks and numbers, then of block layouts.
CLOSED, ACCURACY, MEMORY = (f"attention/test_{name}.py" for name in ("closed_form", "accuracy", "memory_layouts"))
CAUSAL = f"{CLOSED}::test_causal_rows_average_the_keys_so_far"
BLIND = f"{CLOSED}::test_queries_that_see_nothing_give_zero_and_no_gradient"
GROUPS = f"{CLOSED}::test_query_head_h_reads_key_head_h_over_the_group"
MASKS = f"{ACCURACY}::test_masks_and_their_conjunctions_are_right"
DTYPES = f"{ACCURACY}::test_every_dtype_is_within_twice_the_error_of_plain_pytorch"
OFFSETS = f"{MEMORY}::test_offsets_beyond_32_bits_reach_the_right_element"
HOLD = "attention/test_lists.py::test_lists_hold_the_visible_blocks_full_ones_first_and_their_transpose"
SHARE = "attention/test_lists.py::test_one_layout_and_mask_share_a_plan_and_no_others_do"
SPARSE = "attention/test_block_sparse.py"
KNOWN = f"{SPARSE}::test_a_layout_with_an_empty_row_and_an_empty_column_gives_known_numbers[portable]"
JOINED = f"{SPARSE}::test_layouts_join_windows_and_documents"
GROUPED = f"{SPARSE}::test_grouped_query_heads_each_walk_their_own_list[per_head-(6, 2)]"
SMALL_TILES = f"{SPARSE}::test_blocks_of_every_size_are_walked_in_tiles_of_any_size[small-128]"


@dataclass(frozen=True)
class Fault:
    """Replace `right` by `wrong` in a file of flashtrain; each of `tests`, by file and function, must then turn red."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = [
    # Which keys a query sees.
    Fault(
        "causal aligned at the start",
        TILES,
        "shift = num_cols - num_rows",
        "shift = 0",
        (f"{CLOSED}::test_with_more_keys_than_queries_causal_is_aligned_at_the_end",),
    ),
    Fault(
        "no mask on the last block", TILES, "hi_min // BLOCK_COLS, end", "tl.cdiv(hi_min, BLOCK_COLS), end", (CAUSAL,)
    ),
    Fault("no mask on the first block", TILES, "tl.cdiv(lo_max, BLOCK_COLS)", "lo_max // BLOCK_COLS", (MASKS,)),
    Fault("partial blocks on the right left out", TILES, "- begin) + (end - full_end)", "- begin)", (CAUSAL,)),
    Fault("empty rows count as full", TILES, "tl.where(real, 0, num_cols)", "num_cols", (MASKS,)),
    Fault("hi is inclusive", TILES, "(col < hi[:, None])", "(col <= hi[:, None])", (CAUSAL,)),
    Fault(
        "left and right not exchanged",
        DKDV,
        "right, left, BLOCK_N, BLOCK_M",
        "left, right, BLOCK_N, BLOCK_M",
        (CAUSAL, f"{JOINED}[causal_window]"),
    ),
    Fault("no mask in dkdv", DKDV, "p = tl.where(tiles.between(lo, hi, first, BLOCK_M), p, 0.0)", "p = p", (CAUSAL,)),
    Fault(
        "one row of documents for the batch",
        LAUNCH,
        "table.stride(0) if table.shape[0] > 1 else 0",
        "0",
        (f"{ACCURACY}::test_each_row_of_a_batch_has_its_own_documents",),
    ),
    # What is read, and where.
    Fault(
        "padding of head_dim is read",
        TILES,
        "num_rows) & (dim < HEAD_DIM), other",
        "num_rows), other",
        (f"{ACCURACY}::test_any_head_dim_from_16_to_256_is_right",),
    ),
    Fault(
        "rows past the end are read",
        TILES,
        "row + row < num_rows, other",
        "row + row < num_rows + BLOCK, other",
        (CAUSAL,),
    ),
    Fault(
        "row offsets in 32 bits", TILES, "base + first_row.to(tl.int64) *", "base + first_row *", (f"{OFFSETS}[rows]",)
    ),
    Fault(
        "head offsets in 32 bits",
        TILES,
        "head.to(tl.int64) * stride_head",
        "head * stride_head",
        (f"{OFFSETS}[heads]",),
    ),
    Fault("batch offsets in 32 bits", TILES, "ptr + batch.to(tl.int64) *", "ptr + batch *", (f"{OFFSETS}[batch]",)),
    Fault(
        "a tile may pass 32 bits",
        LAUNCH,
        "reach < _INT32_LIMIT",
        "True",
        (f"{MEMORY}::test_a_tensor_whose_tile_passes_32_bits_is_copied_and_no_other",),
    ),
    Fault(
        "last odd heads left out",
        TILES,
        "tl.minimum(heads_together, num_heads - first_head)",
        "heads_together",
        (f"{ACCURACY}::test_the_order_in_which_heads_are_visited_changes_no_bit",),
    ),
    Fault(
        "strides of dout taken from q",
        DQ,
        "*dout.stride()",
        "*q.stride()",
        (f"{MEMORY}::test_the_gradient_that_comes_back_may_have_any_strides",),
    ),
    # Grouped heads.
    Fault(
        "wrong key head of a group",
        FORWARD,
        "batch, head // group, k",
        "batch, head % (num_heads // group), k",
        (f"{ACCURACY}::test_grouped_query_heads_read_their_key_head_and_sum_its_gradients",),
    ),
    Fault("group of heads not summed", DKDV, "range(num_blocks * GROUP)", "range(num_blocks)", (GROUPS,)),
    # The running softmax and its gradient.
    Fault("output not rescaled", FORWARD, "acc * rescale[:, None]", "acc", (DTYPES,)),
    Fault("sum of weights not rescaled", FORWARD, "l * rescale + tl.sum(p, 1)", "l + tl.sum(p, 1)", (DTYPES,)),
    Fault("-inf minus -inf", FORWARD, "0.0, m_new) if MASKED else m_new", "m_new, m_new)", (BLIND,)),
    Fault("0 / 0 in empty rows", FORWARD, "tl.where(l == 0, 1.0, l)", "l", (BLIND,)),
    Fault("lse half in base 2", FORWARD, "tl.log2(total) * LN_2", "tl.log2(total)", (CAUSAL,)),
    Fault("lse not in base 2 backward", LAUNCH, "-math.log2(math.e)", "-1.0", (CAUSAL,)),
    Fault("dk not scaled", DKDV, "dk * scale", "dk", (DTYPES,)),
    Fault("gradient of lse ignored", BACKWARD, "if dlse_ptr is not None:", "if False:", (DTYPES,)),
    Fault("delta left out of dq", DQ, "p * (dp - delta[:, None])", "p * dp", (CAUSAL,)),
    Fault(
        "negative scale ignored",
        BACKWARD,
        "dq if sign == 1.0 else dq * sign",
        "dq",
        (f"{ACCURACY}::test_any_scale_is_right",),
    ),
    # What the lists of a block layout hold.
    Fault(
        "lists: blocks with one visible pair left out",
        LISTS,
        "pairs == 0, 2 * num_lists",
        "pairs <= 1, 2 * num_lists",
        (HOLD,),
    ),
    Fault(
        "lists: full and partial mixed up",
        LISTS,
        "pairs != layout.block_q * layout.block_k",
        "pairs == layout.block_q * layout.block_k",
        (HOLD, f"{JOINED}[window]"),
    ),
    Fault(
        "lists: full_ends off by one",
        LISTS,
        "full_ends, order[",
        "full_ends + 1, order[",
        (HOLD, f"{JOINED}[window]"),
    ),
    Fault(
        "lists: the tail of a sequence taken as full",
        LISTS,
        "pairs != layout.block_q * layout.block_k",
        "pairs != layout.block_q * (layout.seq_k - layout.block_k * blocks[1]).clamp(max=layout.block_k)",
        (HOLD,),
    ),
    Fault("lists: k_lists are no transpose", PLAN, "k_lists=lists.k_lists", "k_lists=lists.q_lists", (HOLD, KNOWN)),
    Fault(
        "lists: pairs of all heads counted as one head's",
        LISTS,
        ".sum(dtype=torch.float64) / owners",
        ".sum(dtype=torch.float64) / batches",
        (HOLD,),
    ),
    Fault(
        "lists: the host waits for the device",
        LAYOUT,
        ", output_size=len(self.blocks)",
        "",
        ("attention/test_lists.py::test_lists_are_built_without_waiting_for_the_device",),
    ),
    # Which plan a layout gets.
    Fault(
        "plans: found by documents alone",
        PLAN,
        "key = (left, right, documents, device)",
        "key = (documents, device)",
        (SHARE,),
    ),
    Fault(
        "plans: found without the documents",
        PLAN,
        "key = (left, right, documents, device)",
        "key = (left, right, device)",
        (SHARE,),
    ),
    Fault(
        "plans: layouts compared by value",
        LAYOUT,
        "__eq__ = object.__eq__\n    __hash__ = object.__hash__",
        "pass",
        (SHARE, "attention/test_layouts.py::test_a_layout_equals_only_itself_and_joins_other_masks"),
    ),
    # The walk over the lists.
    Fault(
        "walk: the first full entry dropped",
        TILES,
        "tl.load(lists + number), tl.load(",
        "tl.load(lists + number) + 1, tl.load(",
        (KNOWN,),
    ),
    Fault(
        "walk: partial blocks left unmasked",
        TILES,
        "tl.load(lists + (num_lists + 1) + number), end",
        "end, end",
        (f"{JOINED}[window]",),
    ),
    Fault(
        "walk: lists and rows of different blocks",
        TILES,
        "return block * LISTED + rank % TILES * BLOCK, block",
        "return rank * BLOCK, block",
        (KNOWN,),
    ),
    Fault(
        "walk: every tile of a block is its first",
        TILES,
        "col = block * LISTED + i % TILES * BLOCK",
        "col = block * LISTED",
        (SMALL_TILES,),
    ),
    Fault(
        "walk: a group takes its first head's list",
        DKDV,
        "number + member * lists_head",
        "number",
        (GROUPED,),
    ),
    Fault("walk: heads share a list", LISTS, "lists_a_head if heads > 1 else 0,\n    )", "0,\n    )", (GROUPED,)),
    Fault(
        "walk: batch rows share a list",
        LISTS,
        "heads * lists_a_head if batches > 1 else 0",
        "0",
        (f"{JOINED}[documents_of_each_row]",),
    ),
    # Around the Hopper kernels.
    Fault(
        "a part past the last column written",
        "attention/hopper/around.py",
        "if COLUMNS < HEAD_DIM:",
        "if COLUMNS % WIDTH:",
        ("attention/test_hopper_around.py::test_dq_comes_in_order_and_nothing_beyond_it_is_written",),
    ),
]
