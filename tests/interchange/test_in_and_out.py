"""Models go in and out with the same logits."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from flashtrain.attention import Causal
from flashtrain.config.hugging_face import model_config, read_architecture
from flashtrain.data.tokenizers import ByteTokenizer, Gpt2Tokenizer, load_tokenizer
from flashtrain.interchange import load, read, save
from flashtrain.interchange.tokenizer_files import write_tokenizer
from flashtrain.interchange.weights import parts
from flashtrain.models.cache import Cache

from .conftest import KINDS, VOCAB, transformers


def load_theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def step(logits, parameters, tokens):
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.optim.SGD(parameters, lr=0.5).step()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_on_both_ways_and_after_a_training_step_on_both_sides(make_theirs, tmp_path, tokens, kind):
    theirs = make_theirs(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = read(tmp_path / "theirs")
    model = ours.model
    with torch.no_grad():
        before = theirs(tokens).logits
        assert (model.logits(model(tokens)) - before).abs().max() < 1e-4
    step(theirs(tokens).logits, theirs.parameters(), tokens)
    step(model.logits(model(tokens)), model.parameters(), tokens)
    save(model, ours.tokenizer, tmp_path / "ours", window=ours.window)
    back = load_theirs(tmp_path / "ours")
    assert type(back) is type(theirs)
    with torch.no_grad():
        after = theirs(tokens).logits
        assert (after - before).abs().max() > 1e-2
        assert (model.logits(model(tokens)) - after).abs().max() < 1e-4
        assert (back(tokens).logits - after).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "known", "way"),
    [
        ("gpt2", 64, "model.position_extension=duplicate"),
        ("llama", 64, "model.rope_scaling.rule=linear"),
        ("llama stretched", 256, "model.rope_scaling.rule=linear"),
    ],
)
def test_more_tokens_than_the_positions_reach_are_refused_with_the_ways_to_extend(make_folder, kind, known, way):
    model, _ = load(make_folder(kind))
    tokens, cache = torch.ones(1, known + 1, dtype=torch.int64), Cache(2, 2 * known)
    with torch.no_grad():
        assert model(tokens[:, 1:]).shape == (1, known, 32)
        with pytest.raises(ValueError, match=f"a sequence of {known + 1} tokens .* {known}: .*{way}"):
            model(tokens)
        model.read(tokens[:, 1:], cache)
        with pytest.raises(ValueError, match=f"a sequence of {known + 1} tokens .* {known}: .*{way}"):
            model.read(tokens[:, :1], cache)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_comes_back_bit_for_bit(make_folder, tmp_path, kind):
    folder = make_folder(kind)
    loaded = read(folder)
    save(loaded.model, None, tmp_path / "ours", window=loaded.window)
    one, other = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "ours"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("size", [(12, 12, 768), (24, 16, 1024), (36, 20, 1280), (48, 25, 1600)])
def test_all_sizes_of_gpt2_have_the_names_and_shapes_of_transformers(tmp_path, size):
    layers, heads, width = size
    config = transformers.GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
    config.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    ours = {}
    for part in parts(model_config(architecture, "gpt2", "gpt2"), "gpt2", 50_257, architecture.max_positions):
        ours |= part.source_shapes()
    with torch.device("meta"):
        theirs = transformers.GPT2LMHeadModel(config)
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}


def test_names_without_prefix_and_with_stored_masks_are_read_as_the_first_gpt2_checkpoints_have_them(
    make_theirs, tmp_path, tokens
):
    theirs = make_theirs("gpt2")
    theirs.transformer.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    from safetensors.torch import save_file

    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    save_file(load_file(file) | masks, file)
    model, _ = load(tmp_path / "theirs")
    with torch.no_grad():
        assert (model.logits(model(tokens)) - theirs(tokens).logits).abs().max() < 1e-4


def test_weights_in_several_files_are_read_and_written(make_folder, tmp_path):
    one, several = make_folder("llama"), make_folder("llama", name="several", shard="20KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    weights = load(one)[0].state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load(several)[0].state_dict().items())
    save(load(one)[0], None, tmp_path / "ours", max_shard_bytes=20_000, window=None)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    theirs = load_theirs(tmp_path / "ours").state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in load_theirs(one).state_dict().items())


def test_a_tied_head_stays_the_embedding(make_folder, tmp_path):
    model, _ = load(make_folder("gpt2"))
    assert model.head_weight is model.token_embedding.weight
    save(model, None, tmp_path / "ours", window=None)
    theirs = load_theirs(tmp_path / "ours")
    assert theirs.lm_head.weight is theirs.transformer.wte.weight


def test_loaded_weights_train_and_leave_the_file_alone(make_folder, tokens):
    folder = make_folder("gpt2")
    before = (folder / "model.safetensors").read_bytes()
    model, _ = load(folder)
    step(model.logits(model(tokens)), model.parameters(), tokens)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not torch.equal(load(folder)[0].head_weight, model.head_weight)


def test_attention_is_causal_and_windowed_unless_another_mask_is_given(make_folder, tokens):
    model, _ = load(make_folder("mistral"))
    changed = tokens.clone()
    changed[:, 3] = (tokens[:, 3] + 1) % VOCAB
    with torch.no_grad():
        away = (model(tokens) - model(changed)).abs().amax((0, 2)) > 0
        assert not away[:3].any()
        assert away[3:10].all()
        assert not away[3 + 2 * 6 + 1 :].any()  # two layers of a window of 7
        assert ((model(tokens, Causal()) - model(changed, Causal())).abs().amax((0, 2)) > 0)[3:].all()


def test_a_padded_vocabulary_keeps_its_rows_and_its_tokenizer(make_folder, tmp_path, tokens):
    folder = make_folder("gpt2", vocab_size=320)
    write_tokenizer(ByteTokenizer(), folder, 64)
    model, tokenizer = load(folder)
    assert (model.vocab_size, tokenizer.vocab_size) == (320, 257)
    save(model, tokenizer, tmp_path / "ours", window=None)
    theirs, again = load_theirs(tmp_path / "ours"), load(tmp_path / "ours")
    assert theirs.config.vocab_size == again[0].vocab_size == 320
    with torch.no_grad():
        assert (theirs(tokens).logits - model.logits(model(tokens))).abs().max() < 1e-4
    assert again[1].fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("own", [ByteTokenizer(), Gpt2Tokenizer()], ids=lambda own: own.name)
def test_our_tokenizers_give_the_same_ids_in_transformers_and_read_back(tmp_path, own):
    write_tokenizer(own, tmp_path, 64)
    text = "The 3 dogs' café: x = [1.5, 2]\n\tif  a_b != 'naïve': 東京 \U0001f642 \x00\x7f"
    ids = own.encode(text).tolist()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text, add_special_tokens=False).input_ids == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == own.eod
    back = load_tokenizer(str(tmp_path))
    assert (back.encode(text).tolist(), back.eod, back.vocab_size) == (ids, own.eod, own.vocab_size)


def test_16_bit_weights_are_written_and_read_as_float32(make_folder, tmp_path):
    model, _ = load(make_folder("llama"))
    save(model, None, tmp_path / "half", dtype="bfloat16", window=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    again, _ = load(tmp_path / "half")
    assert again.head_weight.dtype == torch.float32
    assert torch.equal(again.head_weight, model.head_weight.to(torch.bfloat16).float())


def test_both_generations_of_config_json_say_the_same(make_folder):
    folder = make_folder("llama 3", rope_theta=5000.0)
    newer = read_architecture(folder)
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(raw))
    assert read_architecture(folder) == newer
    assert newer.shape["rope_theta"] == 5000.0


def test_a_failed_save_leaves_nothing(make_folder, tmp_path, monkeypatch):
    model, _ = load(make_folder("gpt2"))

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("flashtrain.interchange.saving.write", full)
    with pytest.raises(OSError, match="no space"):
        save(model, None, tmp_path / "ours", window=None)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_folder_with_something_in_it_is_not_overwritten(make_folder, tmp_path):
    folder = make_folder("gpt2")
    with pytest.raises(ValueError, match="is not an empty folder"):
        save(load(folder)[0], None, folder, window=None)
