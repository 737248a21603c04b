"""What is wrong with a folder is named, with the fix, and nothing is half loaded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashtrain.data.tokenizers import Gpt2Tokenizer
from flashtrain.interchange import load, save
from flashtrain.interchange.tokenizer_files import write_tokenizer


def change(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def change_weights(folder, edit):
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file)


def test_missing_tensors_are_listed(make_folder):
    folder = make_folder("llama")
    change_weights(folder, lambda weights: [weights.pop(f"model.layers.1.mlp.{n}_proj.weight") for n in ("up", "down")])
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is missing; .*down_proj\.weight is missing"):
        load(folder)


def test_extra_tensors_are_listed(make_folder):
    folder = make_folder("gpt2")
    change_weights(folder, lambda weights: weights.update(adapter=torch.zeros(3)))
    with pytest.raises(ValueError, match=r"adapter is not part of such a model.*Copy config\.json and all weights"):
        load(folder)


def test_another_shape_is_named_with_both_sizes(make_folder):
    folder = make_folder("llama")
    change(folder, intermediate_size=64)
    with pytest.raises(ValueError, match=r"gate_proj\.weight is \[48, 32\] and config\.json makes it \[64, 32\]"):
        load(folder)


def test_a_truncated_file_is_named(make_folder):
    folder = make_folder("gpt2")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file .*copy it again"):
        load(folder)


def test_a_missing_file_of_several_is_named(make_folder):
    folder = make_folder("llama", shard="20KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"{gone.name} of model.safetensors.index.json is missing"):
        load(folder)


def test_an_index_does_not_lead_out_of_the_folder(make_folder):
    folder = make_folder("llama", shard="20KB")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(ValueError, match="its files lie beside it"):
        load(folder)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(make_folder):
    folder = make_folder("gpt2")
    change_weights(folder, lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"].clone()}))
    load(folder)  # a copy is let pass
    change_weights(folder, lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings false"):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "keys", "told"),
    [
        ("gpt2", {"model_type": "bert"}, "model_type='bert' is not read; there are gpt2, llama"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu' is not read; it can be 'gelu_new'"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function='gelu' is not read"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"n_head": "four"}, "n_head='four': expected a whole number"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not read"),
        ("llama", {"attention_bias": True}, "attention_bias=True with mlp_bias=False is not read"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type='dynamic' is not read"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' needs low_freq_factor, high"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}},
            "attention_factor=1.0 is not read",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor below 1"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with sliding_attention"),
        ("starcoder2", {"use_bias": False}, "use_bias=False"),
    ],
)
def test_another_architecture_is_named_with_what_is_read(make_folder, kind, keys, told):
    folder = make_folder(kind)
    change(folder, **keys)
    with pytest.raises(ValueError, match=told.replace("[", r"\[")):
        load(folder)


def test_whole_number_weights_are_refused(make_folder):
    folder = make_folder("gpt2")
    name = "transformer.h.0.mlp.c_fc.weight"
    change_weights(folder, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(ValueError, match=r"numbers of type I8.*unquantized"):
        load(folder)


def test_a_pickle_is_not_read(make_folder):
    folder = make_folder("gpt2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not read"):
        load(folder)


def test_a_tokenizer_of_more_ids_than_rows_is_refused(make_folder):
    folder = make_folder("gpt2")
    write_tokenizer(Gpt2Tokenizer(), folder, 64)
    with pytest.raises(ValueError, match=r"the embedding has 259 rows and tokenizer .* 50257 ids"):
        load(folder)


def test_a_path_with_nothing_to_load_says_what_could_be_there(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give runs/<run_id>"):
        load(tmp_path / "nobody")
    with pytest.raises(ValueError, match=r"has neither checkpoints/ nor a config\.json"):
        load(tmp_path)
    (tmp_path / "step.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        load(tmp_path / "step.ckpt")


def test_parts_that_no_architecture_has_together_are_named(make_folder, tmp_path):
    model, _ = load(make_folder("llama"))
    model.config = replace(model.config, positions="none")
    with pytest.raises(ValueError, match=r"no architecture of transformers.*positions=none, norm=rmsnorm"):
        save(model, None, tmp_path / "ours", window=None)
    assert not (tmp_path / "ours").exists()
