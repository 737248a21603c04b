"""Runs go out to transformers and come in from it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashtrain.config import ConfigError, build
from flashtrain.config.from_folder import with_folder
from flashtrain.data.tokenizers import ByteTokenizer, Gpt2Tokenizer
from flashtrain.interchange import load, read, save
from flashtrain.interchange.tokenizer_files import write_tokenizer
from flashtrain.training.memory import plan
from flashtrain.training.run import run
from tests.training.conftest import changed, make_config, overrides, summary, text_folder  # noqa: F401 - fixtures

from .conftest import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
STILL = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1", "trainer.sample_tokens=0")


@pytest.fixture
def their_folder(make_folder):
    """A folder of transformers with the byte tokenizer; more rows than ids."""

    def make(kind, **changes):
        folder = make_folder(kind, **changes)
        write_tokenizer(ByteTokenizer(), folder, 64)
        return folder

    return make


@pytest.fixture
def command(overrides):  # noqa: F811
    """The configuration of a command line with model.init_from, as train.py makes it."""

    def make(folder, *changes):
        arguments = [f"model.init_from={folder}", *changes]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            composed = compose("config", changed(overrides, *arguments))
        return build(with_folder(OmegaConf.to_container(composed, resolve=True), arguments))

    return make


class TestOut:
    @pytest.mark.parametrize(
        ("changes", "kind"),
        [
            ((), "Qwen3ForCausalLM"),
            (("model=gpt2", "model.tokenizer=bytes"), "GPT2LMHeadModel"),
            (("model=gpt2_rope", "model.tokenizer=bytes", "model.bias=false"), "Starcoder2ForCausalLM"),
            (("model.qk_norm=false", "attention.window=9", "optimizer.ema_decay=0.5"), "MistralForCausalLM"),
            (("model.qk_norm=false", "model.bias=true", "model.vocab_size=320"), "LlamaForCausalLM"),
            (("model.qk_norm=false", "model.rope_scaling.rule=ntk", "model.rope_scaling.factor=4"), "LlamaForCausalLM"),
        ],
    )
    def test_an_exported_run_has_its_logits_and_tokenizer_in_transformers(self, make_config, tmp_path, changes, kind):  # noqa: F811
        import export

        assert run(make_config("run_id=first", "trainer.max_steps=3", "model.init_std=0.4", *changes), []) == 0
        folder = tmp_path / "runs" / "first"
        assert export.main([str(folder), "--out", str(tmp_path / "out")]) == 0
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert type(theirs).__name__ == kind
        model, own = load(folder)
        text = "alpha beta gamma delta"
        tokens = torch.tensor([own.encode(text).tolist()])
        assert tokenizer(text, return_tensors="pt").input_ids.tolist() == tokens.tolist()
        with torch.no_grad():
            assert (theirs(tokens).logits - model.logits(model(tokens))).abs().max() < 1e-4
        assert theirs.generation_config.eos_token_id == own.eod
        assert len(theirs.generate(tokens, max_new_tokens=4, do_sample=False)[0]) <= len(tokens[0]) + 4

    def test_a_run_a_checkpoint_and_the_exported_folder_load_as_the_same_model(self, make_config, tmp_path):  # noqa: F811
        import export

        assert run(make_config("run_id=first", "trainer.max_steps=4"), []) == 0
        folder = tmp_path / "runs" / "first"
        export.main([str(folder), "--out", str(tmp_path / "out")])
        models = [load(path)[0] for path in (folder, folder / "checkpoints" / "step-00000004.ckpt", tmp_path / "out")]
        weights = [model.state_dict() for model in models]
        assert all(torch.equal(w[name], tensor) for w in weights for name, tensor in weights[0].items())

    def test_the_running_mean_is_taken_where_a_run_kept_one(self, make_config, tmp_path):  # noqa: F811
        assert run(make_config("run_id=first", "trainer.max_steps=4", "optimizer.ema_decay=0.9"), []) == 0
        folder = tmp_path / "runs" / "first"
        checkpoint = torch.load(folder / "checkpoints" / "step-00000004.ckpt", weights_only=True)
        name = "token_embedding.weight"
        assert torch.equal(load(folder)[0].head_weight, checkpoint["average"][name])
        assert not torch.equal(checkpoint["average"][name], checkpoint["state_dict"][f"model.{name}"])

    def test_loading_needs_neither_hydra_nor_lightning(self, make_config, tmp_path):  # noqa: F811
        assert run(make_config("run_id=first", "trainer.max_steps=1"), []) == 0
        code = (
            "import sys\n"
            "for name in ('hydra', 'omegaconf', 'lightning', 'lightning.pytorch', 'wandb', 'transformers'):\n"
            "    sys.modules[name] = None\n"
            "import torch\n"
            "from flashtrain.interchange import load\n"
            f"model, tokenizer = load({str(tmp_path / 'runs' / 'first')!r})\n"
            "print(tuple(model.logits(model(torch.tensor([tokenizer.encode('abc').tolist()]))).shape))\n"
        )
        told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert told.stdout.strip() == "(1, 3, 257)"

    def test_a_run_whose_tokenizer_has_become_another_is_refused(self, command, their_folder, tmp_path):
        folder = their_folder("llama")
        assert run(command(folder, "run_id=first", *STILL), []) == 0
        file = folder / "tokenizer.json"
        file.write_text(file.read_text().replace('"!": 33', '"!": 34').replace('"\\"": 34', '"\\"": 33'))
        with pytest.raises(ValueError, match="is not the one that the run was trained with"):
            load(tmp_path / "runs" / "first")

    def test_block_layouts_are_refused_and_the_way_out_is_told(self, make_config, tmp_path, capsys):  # noqa: F811
        import export

        sparse = ("attention=block_sparse", "attention.layout.name=window_sinks", "seq_len=256")
        assert run(make_config("run_id=first", "trainer.max_steps=1", *sparse), []) == 0
        folder = tmp_path / "runs" / "first"
        with pytest.raises(SystemExit):
            export.main([str(folder), "--out", str(tmp_path / "out")])
        assert "trained with block layouts" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        with pytest.raises(ValueError, match="hand it one plan for each layer"):
            load(folder)[0](torch.zeros(1, 4, dtype=torch.int64))


class TestIn:
    @pytest.mark.parametrize("kind", ["gpt2", "llama 3", "mistral"])
    def test_a_run_takes_shape_weights_tokenizer_and_window_from_the_folder(
        self, command, their_folder, kind, tmp_path
    ):
        folder = their_folder(kind)
        assert run(command(folder, "run_id=first", *STILL), []) == 0
        theirs, ours = read(folder), read(tmp_path / "runs" / "first")
        assert (ours.window, ours.model.vocab_size) == (theirs.window, 259)
        assert ours.tokenizer.name == str(folder)
        wanted = theirs.model.state_dict()
        if kind == "gpt2":  # as many rows as the run has positions
            wanted["position_embedding.weight"] = wanted["position_embedding.weight"][:32]
        got = ours.model.state_dict()
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
        tokens = torch.randint(250, (1, 32), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert torch.equal(ours.model(tokens), theirs.model(tokens))

    def test_training_goes_on_from_there_and_out_again(self, command, their_folder, tmp_path):
        import export

        folder = their_folder("llama")
        changes = ("trainer.max_steps=12", "optimizer.lr=1e-2", "schedule.warmup_steps=0")
        assert run(command(folder, "run_id=first", *changes), []) == 0
        told = summary(tmp_path / "runs" / "first")
        assert told["init_from"] == str(folder)
        assert told["model"] == folder.name
        assert told["val_loss"] < 5.0  # that of new weights over 259 rows is 5.6
        assert export.main([str(tmp_path / "runs" / "first"), "--out", str(tmp_path / "out")]) == 0
        assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 259

    def test_keys_that_contradict_the_folder_are_listed_and_those_that_agree_pass(self, command, their_folder):
        folder = their_folder("llama")
        assert command(folder, "model.num_layers=2").model.num_layers == 2
        with pytest.raises(ConfigError) as told:
            command(folder, "model.num_layers=3", "model.norm=layernorm", "model.bias=false")
        assert [line.split(":")[0] for line in told.value.problems] == ["model.num_layers=3", "model.norm=layernorm"]
        with pytest.raises(ConfigError, match=r"model\.num_layers=2: .* has 3"):
            command(their_folder("gpt2", n_layer=3, name="deep"), "model=gpt2", "model.num_layers=2")

    def test_rotary_angles_may_be_stretched_and_the_rest_of_the_folders_rule_stays(self, command, their_folder):
        folder, key = their_folder("llama 3"), "model.rope_scaling"
        there = command(folder).model.rope_scaling
        assert (there.rule, there.factor, there.original_seq_len) == ("llama3", 8.0, 24)
        assert command(folder, f"{key}.factor=16").model.rope_scaling == replace(there, factor=16.0)
        other = command(folder, f"{key}.rule=yarn", f"{key}.factor=4", f"{key}.original_seq_len=64").model.rope_scaling
        assert (other.rule, other.factor, other.original_seq_len) == ("yarn", 4.0, 64)

    def test_a_position_table_grows_on_the_way_in_and_goes_out_longer(self, command, their_folder, tmp_path):
        longer = (
            "seq_len=128",
            "model.position_extension=duplicate",
            "trainer.batch_tokens=128",
            "data.val_fraction=0.5",
        )
        assert run(command(their_folder("gpt2"), "run_id=first", *longer, *STILL), []) == 0
        table = load(tmp_path / "runs" / "first")[0].position_embedding.weight
        assert torch.equal(table[:64], table[64:])
        save(*load(tmp_path / "runs" / "first"), tmp_path / "out", window=None)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["n_positions"] == 128

    def test_the_forecast_counts_the_padding_of_the_vocabulary(self, make_config):  # noqa: F811
        assert plan(make_config("model.vocab_size=320")).case.vocab_size == 320
        assert plan(make_config()).case.vocab_size == 257

    def test_a_length_beyond_the_position_table_is_refused_before_anything_starts(self, command, their_folder):
        with pytest.raises(ConfigError, match=r"seq_len=128: the position table of .* has 64 rows; write seq_len=64"):
            command(their_folder("gpt2"), "seq_len=128")

    def test_another_architecture_is_refused_before_anything_starts(self, command, their_folder):
        folder = their_folder("llama")
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"silu"', '"relu"'))
        with pytest.raises(ConfigError, match="hidden_act='relu' is not read"):
            command(folder)

    def test_another_vocabulary_is_refused(self, command, their_folder, tmp_path):
        folder = their_folder("llama", vocab_size=50_300)
        assert run(command(folder, "run_id=first", "model.tokenizer=gpt2"), []) == 1
        assert "its tokenizer gives other ids than 'gpt2'" in (tmp_path / "runs" / "first" / "train.log").read_text()
        small = their_folder("llama", name="small")
        for file in small.glob("tokenizer*"):
            file.unlink()
        assert run(command(small, "run_id=second", "model.tokenizer=gpt2"), []) == 1
        assert (
            "model.vocab_size=259: tokenizer 'gpt2' has 50257 ids"
            in (tmp_path / "runs" / "second" / "train.log").read_text()
        )

    def test_the_vocabulary_of_another_run_is_refused_too_though_it_is_as_large(self, command, their_folder, tmp_path):
        one, other = their_folder("llama"), their_folder("llama", name="other")
        file = other / "tokenizer.json"
        file.write_text(file.read_text().replace('"a": 97', '"a": 98').replace('"b": 98', '"b": 97'))
        assert run(command(one, "run_id=first", *STILL), []) == 0
        # The shape of the folder, the weights of the run, and `how` to read.
        for name, how, code in (("second", other, 1), ("third", "bytes", 0), ("fourth", one, 0)):
            config = command(one, f"run_id={name}", f"model.tokenizer={how}", *STILL)
            config = replace(config, model=replace(config.model, init_from="first"))
            assert run(config, []) == code
        told = (tmp_path / "runs" / "second" / "train.log").read_text()
        assert f"was trained with tokenizer {str(one)!r}, which gives other ids than {str(other)!r}" in told
        assert f"write model.tokenizer={one}" in told

    def test_the_same_vocabulary_under_another_name_passes(self, command, make_folder):
        folder = make_folder("llama", vocab_size=50_300)
        write_tokenizer(Gpt2Tokenizer(), folder, 64)
        assert run(command(folder, "run_id=first", "model.tokenizer=gpt2", *STILL), []) == 0

    def test_a_damaged_folder_stops_the_run_naming_it(self, command, their_folder, tmp_path):
        folder = their_folder("llama")
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        assert run(command(folder, "run_id=first"), []) == 1
        assert "not a whole safetensors file" in (tmp_path / "runs" / "first" / "train.log").read_text()

    def test_the_front_door_takes_the_folder(self, their_folder, overrides, tmp_path):  # noqa: F811
        folder = their_folder("llama")
        own = [text for text in overrides if not text.startswith("model.")]
        arguments = changed(own, f"model.init_from={folder}", "run_id=first", "trainer.max_steps=1")
        subprocess.run([sys.executable, "train.py", *arguments], cwd=ROOT, check=True, capture_output=True)
        assert summary(tmp_path / "runs" / "first")["model"] == folder.name
