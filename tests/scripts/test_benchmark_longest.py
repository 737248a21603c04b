"""The longest sequence is found by few tries, told with its proof, and gone on with where a call was cut short."""

from __future__ import annotations

import json

import benchmark_longest
import pytest
import torch
from measuring import longest, training
from measuring.longest import MODELS, OURS, Tries, Windowed, config_of, grid, guess

from tests.scripts.conftest import check_facts

LENGTHS = grid(1024, 2**21)


def _search(limit: int, begin: int) -> tuple[int | None, list[int]]:
    """Try until it is found, on a device of 140 GiB on which `limit` tokens fit."""
    tries, tried = Tries({}, frozenset()), []
    while (length := tries.next(LENGTHS, begin, 140.0)) is not None:
        tried.append(length)
        fits, fails = dict(tries.fits), set(tries.fails)
        if length <= limit:
            fits[length] = 2.0 + 138.0 * length / limit
        else:
            fails.add(length)
        tries = Tries(fits, frozenset(fails))
    return tries.longest, tried


@pytest.mark.parametrize("limit", [1024, 1500, 5120, 200_000, 1_600_000, 2**21])
@pytest.mark.parametrize("begin", [1, 4096, 230_000, 2**22])
def test_the_longest_is_found_wherever_the_search_begins(limit, begin):
    found, tried = _search(limit, begin)
    assert found == max(n for n in LENGTHS if n <= limit)
    assert len(tried) == len(set(tried)) <= 12
    assert found == LENGTHS[-1] or LENGTHS[LENGTHS.index(found) + 1] in tried


def test_a_good_guess_takes_two_tries():
    assert _search(200_000, 229_000) == (196_608, [196_608, 229_376])


def test_where_nothing_fits_there_is_no_longest():
    assert _search(100, 4096)[0] is None


def test_lengths_are_powers_of_two_and_three_steps_between():
    assert grid(32, 64) == [32, 40, 48, 56, 64]


def test_the_search_begins_where_models_were_measured_to_end_on_140_gib():
    bytes_ = 139.8 * 2**30
    assert 200_000 < guess("gpt2", "nanogpt", bytes_, []) < 240_000  # 81 GiB at 128k
    assert 90_000 < guess("gpt2", "huggingface", bytes_, []) < 115_000  # 87 GiB at 64k
    assert guess("gpt2", "ours", bytes_, []) > 2**20 > guess("gpt_1.3b", "ours", bytes_, [])


def test_the_models_have_the_sizes_they_are_called_by_and_ours_names_its_memory_setting():
    config = config_of("gpt_1.3b", "ours", 2048, [], dry_run=False)
    sizes = (config.model.num_layers, config.model.num_heads, config.model.hidden_size)
    assert sizes == MODELS["gpt_1.3b"] == (24, 16, 2048)
    assert (config.memory.checkpointing, config.sequences_per_step) == ("selective", 1)
    assert config_of("gpt2", "standard", 2048, [], dry_run=False).attention.backend == "standard"


def test_a_search_is_a_report_with_its_longest(dry_run):
    code, result = dry_run(benchmark_longest.main, "--implementations", "ours")
    assert code == 0
    check_facts(result)
    assert [(row["seq_len"], row["how"], row["failed"]) for row in result["rows"]] == [
        (32, "window", None), (40, "window", None),
    ]  # fmt: skip
    (found,) = result["longest"]
    assert (found["model"], found["implementation"], found["seq_len"]) == ("gpt2", "ours", 40)


def _row(seq_len: int, failed: str | None = None, **changes: object) -> dict[str, object]:
    row = {"model": "gpt2", "implementation": "ours", "seq_len": seq_len, "how": "window", "failed": failed}
    return row | ({"peak_gib": seq_len / 1000, "seconds": 1.0} if failed is None else {}) | changes


def test_a_later_call_tries_again_what_failed_for_another_reason_alone(dry_run, tmp_path, monkeypatch):
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"rows": [_row(32), _row(40, "took longer than 9 s")]}))
    tried = []

    def row(command, limit):
        tried.append(command[command.index("--ladder") + 1])
        return {"failed": "out of memory"}

    monkeypatch.setattr(benchmark_longest, "row_in_process", row)
    code, result = dry_run(benchmark_longest.main, "--implementations", "ours", "--also", str(earlier))
    assert (code, tried) == (0, ["40"])
    (found,) = result["longest"]
    assert (found["seq_len"], found["out_of_memory_at"], found["failed"]) == (32, 40, None)


def test_a_crash_ends_the_search_of_that_model_and_is_told(dry_run, monkeypatch):
    monkeypatch.setattr(benchmark_longest, "row_in_process", lambda command, limit: {"failed": "ended with -9: lost"})
    code, result = dry_run(benchmark_longest.main, "--implementations", "ours")
    assert code == 1
    assert [row["failed"] for row in result["rows"]] == ["ended with -9: lost"]


def test_confirmed_are_lengths_of_different_models_first_and_none_twice():
    rows = [
        _row(2048),
        _row(1024, implementation="ours_full"),
        _row(1024, model="gpt_1.3b"),
        _row(4096, "out of memory"),
    ]
    names = [(row["model"], row["seq_len"]) for row in benchmark_longest.to_confirm(rows, 2)]
    assert sorted(names) == [("gpt2", 1024), ("gpt_1.3b", 1024)]
    rows.append(_row(1024, model="gpt_1.3b", how="confirmed"))
    assert [row["model"] for row in benchmark_longest.to_confirm(rows, 2)] == ["gpt2"]
    assert benchmark_longest.to_confirm(rows, 0) == []


@pytest.mark.parametrize(("always", "seen"), [(True, [128, 128]), (False, [128, 400])])
def test_a_try_sees_a_window_and_a_confirmation_all_that_came_before(always, seen):
    """Of the last of 400 tokens, in both steps."""
    config = config_of("gpt2", "ours", 400, ["attention.backend=sdpa"], dry_run=True)
    found = []

    class Look(Windowed):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            plan = module.masks.lower(1, 400, torch.device("cpu"))
            found.append(min(400, plan.limits.left + 1) if plan.limits.left >= 0 else 400)

    how = next(iter(longest.candidates(config.memory)))
    steps = longest.SecondStep(torch.device("cpu"))
    loss = training.train_ours(config, torch.device("cpu"), steps, 320, how, [Look(always)])
    assert found == seen
    assert loss == pytest.approx(torch.tensor(320.0).log().item(), rel=0.05)


def test_a_name_that_is_unknown_says_what_there_is(capsys):
    with pytest.raises(SystemExit):
        benchmark_longest.parse(["--implementations", "megatron"])
    assert ", ".join(OURS) in capsys.readouterr().err
