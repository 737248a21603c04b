"""The faults in models, in what they write and in what is read of them that `planted_faults` plants."""

from __future__ import annotations

from faults import Fault

# Files in flashtrain.
CACHE, DECODING, GRAPHED = "models/cache.py", "models/decoding.py", "models/graphed.py"

# Tests in tests.
TOKENS = "models/test_decoding.py::test_steps_of_fixed_shapes_write_the_same_tokens"
WINDOWS = "models/test_decoding.py::test_windows_of_each_layer_hold_at_fixed_shapes"
KEYS = "models/test_decoding.py::test_a_token_sees_its_keys_and_nothing_of_what_lies_behind_them"

FAULTS = [
    Fault("fixed step: a token does not see itself", DECODING, "1 - first), dim=1)", "-first), dim=1)", (TOKENS, KEYS)),
    Fault("fixed step: a key too many", DECODING, "1 - first), dim=1)", "2 - first), dim=1)", (KEYS,)),
    Fault(
        "fixed step: no window",
        DECODING,
        "torch.stack((-left - first,",
        "torch.stack((-first - 2**40,",
        (WINDOWS, KEYS),
    ),
    Fault(
        "fixed step: one window for all layers",
        GRAPHED,
        "[plan.left for plan in plans]",
        "[plans[0].left] * len(plans)",
        (WINDOWS,),
    ),
    Fault(
        "fixed step: pieces count alike",
        DECODING,
        "lses.softmax(dim=0)",
        "lses.clamp(-1, 1).softmax(dim=0)",
        (TOKENS, KEYS),
    ),
    Fault(
        "fixed step: always at the first position",
        GRAPHED,
        "self._position.fill_(self.cache.length)",
        "self._position.fill_(1)",
        (TOKENS,),
    ),
    Fault(
        "fixed step: memory that is not written yet",
        CACHE,
        "v.new_zeros(shape)",
        "v.new_empty(shape)",
        ("models/test_decoding.py::test_memory_that_holds_anything_harms_no_token",),
    ),
    Fault(
        "fixed step: a window on both sides",
        GRAPHED,
        "and p.right == 0 for p",
        "for p",
        ("models/test_decoding.py::test_a_layer_that_is_not_causal_or_has_a_block_layout_keeps_its_own_way",),
    ),
]
