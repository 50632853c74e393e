"""GGUF files: written by the gguf library, read here, checked against it and against transformers."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.models.gguf import GGUFCheckpoint, gguf_tokenizer
from engine.models.loader import load_generation_defaults, load_model

QUANTISABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ARCHITECTURE = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}

Change = Callable[[gguf.GGUFWriter], None]


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order of llama.cpp's converter for the llama architecture (its LlamaModel.permute)."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, reference: Any, kind: str = "F32", change: Change = lambda writer: None) -> Path:
    """The model of transformers as a GGUF file, its matrices in that quantisation."""
    config = reference.config
    family = config.model_type
    names = gguf.get_tensor_name_map(ARCHITECTURE[family], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if family == "llama":
        writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = interleave(tensor, heads)
        stored = gguf.GGMLQuantizationType[kind if tensor.dim() == 2 else "F32"]
        data = gguf.quantize(tensor.contiguous().numpy(), stored)
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        writer.add_tensor(written, data, raw_dtype=stored)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_differ_by(model: Any, reference: Any) -> float:
    ids = torch.randint(3, reference.config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return float((model(ids) - reference(ids).logits).abs().max())


@pytest.fixture(scope="module")
def tiny(tiny_reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid file, to be broken."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_reference("llama", num_hidden_layers=1))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_logits_of_the_model_that_was_written(
    family: str, changes: dict[str, Any], tiny_reference: Any, tmp_path: Path
) -> None:
    reference = tiny_reference(family, **changes)
    model = load_model(write_gguf(tmp_path / "model.gguf", reference), dtype="float32")
    assert logits_differ_by(model, reference) < 1e-4
    assert model.max_seq_len == 256


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_of_transformers_reading_the_file(family: str, tiny_reference: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "model.gguf", tiny_reference(family), "Q8_0")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    assert logits_differ_by(load_model(tmp_path / "model.gguf", dtype="float32"), reference) < 1e-4


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_quantised_tensors_are_dequantised_as_the_library_does(kind: str, tiny_reference: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_reference("qwen2"), kind)
    checkpoint = GGUFCheckpoint(path)
    assert compare_with_library(path, checkpoint) == len(checkpoint.shapes)
    assert load_model(path).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants(kind: str, tiny_reference: Any, tmp_path: Path) -> None:
    """The library can't write these, so their blocks are random bytes, which is as good to compare readers."""
    reference = tiny_reference("qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    stored = gguf.GGMLQuantizationType[kind]

    def randomised(writer: gguf.GGUFWriter) -> None:
        rows = np.random.default_rng(0).integers(0, 60, gguf.quant_shape_to_byte_shape((256, 256), stored), np.uint8)
        writer.tensors[-1]["blk.0.ffn_down.weight"].dtype = stored
        writer.tensors[-1]["blk.0.ffn_down.weight"].nbytes = rows.nbytes
        writer.tensors[-1]["blk.0.ffn_down.weight"].tensor = rows

    path = write_gguf(tmp_path / "model.gguf", reference, change=randomised)
    checkpoint = GGUFCheckpoint(path)
    assert compare_with_library(path, checkpoint) == len(checkpoint.shapes)
    assert torch.isfinite(checkpoint.read("model.layers.0.mlp.down_proj.weight")).all()


def compare_with_library(path: Path, checkpoint: GGUFCheckpoint) -> int:
    """How many tensors equal what the library's own reader gives; none differ."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 4)
    library = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, shape in checkpoint.shapes.items():
        tensor = library[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        np.testing.assert_array_equal(checkpoint.read(name).numpy(), expected)
    return len(library)


def test_llama3_rope_scaling_is_recovered_from_its_divisors(tiny_reference: Any, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    reference = tiny_reference("llama", rope_parameters=scaling, head_dim=32)
    plain = 1.0 / 500000.0 ** (torch.arange(0, 32, 2) / 32)
    divisors = plain / reference.model.rotary_emb.inv_freq
    assert divisors.max() > 2

    def add(values: torch.Tensor) -> Change:
        return lambda writer: writer.add_tensor("rope_freqs.weight", values.numpy())

    model = load_model(write_gguf(tmp_path / "a.gguf", reference, change=add(divisors)), dtype="float32")
    assert logits_differ_by(model, reference) < 1e-4
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not the rope scaling of Llama 3"):
        load_model(write_gguf(tmp_path / "b.gguf", reference, change=add(divisors.sqrt())))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight has shape \[3\], expected \[16\]"):
        load_model(write_gguf(tmp_path / "c.gguf", reference, change=add(divisors[:3].clone())))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_in_the_metadata(kind: str, tiny_reference: Any, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    reference = tiny_reference("qwen2", rope_parameters=rope)
    path = write_gguf(tmp_path / "model.gguf", reference, change=add)
    assert logits_differ_by(load_model(path, dtype="float32"), reference) < 1e-4


def test_sliding_window_in_the_metadata(tiny_reference: Any, tmp_path: Path) -> None:
    reference = tiny_reference("llama")
    path = write_gguf(tmp_path / "model.gguf", reference, change=lambda writer: writer.add_sliding_window(7))
    windowed = tiny_reference("mistral", sliding_window=7)
    windowed.load_state_dict(reference.state_dict())
    assert logits_differ_by(load_model(path, dtype="float32"), windowed) < 1e-4


def test_every_end_of_turn_token_ends(tiny: Path) -> None:
    assert load_generation_defaults(tiny) == {"eos_token_ids": [2, 5]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_expert_count(8), "mixture-of-experts"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope scaling 'longrope' is not supported"),
        (lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32)), r"'blk\.0\.attn_sinks\.weight'"),
        (lambda w: w.add_tensor("blk.7.attn_q.weight", np.zeros((2, 2), np.float32)), r"unexpected: model\.layers\.7"),
        (lambda w: w.tensors[-1].pop("blk.0.attn_v.weight"), r"missing: model\.layers\.0\.self_attn\.v_proj\.weight"),
        (lambda w: w.tensors[-1].pop("token_embd.weight"), r"token_embd\.weight is missing"),
        (lambda w: w.kv_data[-1].pop("llama.embedding_length"), r"llama\.embedding_length is None, expected int"),
        (lambda w: set_value(w, "llama.embedding_length", 2**31), r"llama\.embedding_length is 2147483648"),
        (lambda w: set_value(w, "llama.block_count", 10**9), "1000000000 layers, but only"),
        (lambda w: set_value(w, "llama.context_length", 2**30), "lower it with max_seq_len"),
        (lambda w: set_value(w, "llama.feed_forward_length", 80), "wrong shape"),
        (lambda w: set_value(w, "llama.rope.dimension_count", 8), r"llama\.rope\.dimension_count 8"),
        (lambda w: set_value(w, "llama.attention.head_count", 0), "num_attention_heads|num_heads|zero"),
        (lambda w: set_value(w, "general.architecture", "gemma9"), r"'gemma9' is not supported; known: llama"),
        (
            lambda w: set_array(w, "general.architecture", ["llama"]),
            r"general\.architecture is \['llama'\], expected str",
        ),
        (lambda w: set_array(w, "tokenizer.ggml.eos_token_id", [1, 2]), r"eos_token_id is \[1, 2\], expected int"),
    ],
)
def test_what_a_file_can_get_wrong_is_named(change: Change, message: str, tiny_reference: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_reference("llama", num_hidden_layers=1), change=change)
    with pytest.raises(ValueError, match=message):
        load_model(path)


def set_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[-1][key].value = value


def set_array(writer: gguf.GGUFWriter, key: str, values: list[Any]) -> None:
    writer.kv_data[-1].pop(key, None)
    writer.add_array(key, values)


def assert_refused_cheaply(path: Path, message: str = "") -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            load_model(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_truncated_anywhere(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 23, 24, 25, *range(30, len(whole), len(whole) // 40), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        assert_refused_cheaply(cut, "truncated|not a GGUF file")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file, it starts with b'GGML'"),
        (4, struct.pack("<I", 1), "GGUF version 1"),
        (4, struct.pack(">I", 3), "GGUF version 50331648"),
        (8, struct.pack("<Q", 2**62), "claims 4611686018427387904 tensors"),
        (16, struct.pack("<Q", 2**62), "claims 4611686018427387904 metadata entries"),
        (24, struct.pack("<Q", 2**63), "claims a string of 9223372036854775808 bytes"),
        (24, struct.pack("<Q", 2**20), "truncated"),
    ],
)
def test_lying_counts(offset: int, value: bytes, message: str, tiny: Path, tmp_path: Path) -> None:
    content = bytearray(tiny.read_bytes())
    content[offset : offset + len(value)] = value
    path = tmp_path / "lying.gguf"
    path.write_bytes(content)
    assert_refused_cheaply(path, message)


def test_lying_arrays_and_shapes(tiny: Path, tmp_path: Path) -> None:
    content = tiny.read_bytes()
    path = tmp_path / "lying.gguf"
    array = content.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    path.write_bytes(content[:array] + struct.pack("<Q", 2**50) + content[array + 8 :])
    assert_refused_cheaply(path, "claims an array of")
    dims = content.index(b"token_embd.weight") + len(b"token_embd.weight")
    path.write_bytes(content[:dims] + struct.pack("<I", 2**31) + content[dims + 4 :])
    assert_refused_cheaply(path, "claims 2147483648 dimensions")
    path.write_bytes(content[: dims + 4] + struct.pack("<QQ", 2**60, 2**60) + content[dims + 20 :])
    assert_refused_cheaply(path, "truncated or broken, tensor 'token_embd.weight' ends at byte")
    path.write_bytes(content[: dims + 20] + struct.pack("<I", 999) + content[dims + 24 :])
    assert_refused_cheaply(path, "'token_embd.weight' has the unknown type 999")
    path.write_bytes(content[: dims + 24] + struct.pack("<Q", 2**63) + content[dims + 32 :])
    assert_refused_cheaply(path, "ends at byte")
    key = content.index(b"llama.block_count")
    path.write_bytes(content[:key] + b"llama.block_coun\xff" + content[key + 17 :])
    assert_refused_cheaply(path, "not UTF-8")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_header_is_refused_or_harmless(data: st.DataObject, tiny: Path, tmp_path: Path) -> None:
    content = bytearray(tiny.read_bytes())
    header = content.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header))
        content[position] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        load_model(path, max_seq_len=16)
    except ValueError as error:
        assert str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 << 20


def test_demo_model(smollm2: Path, smollm2_gguf: Path) -> None:
    """The folder made from the GGUF file holds the library's own dequantisation of it, in bf16."""
    from safetensors import safe_open

    library = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    stored = safe_open(smollm2 / "model.safetensors", "pt")
    assert len(stored.keys()) == len(library)
    for ours, theirs, heads in (
        ("model.embed_tokens.weight", "token_embd.weight", None),
        ("model.norm.weight", "output_norm.weight", None),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", None),
        ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight", None),
        ("model.layers.7.self_attn.q_proj.weight", "blk.7.attn_q.weight", 9),
        ("model.layers.7.self_attn.k_proj.weight", "blk.7.attn_k.weight", 3),
    ):
        tensor, weight = library[theirs], stored.get_tensor(ours)
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).to(torch.bfloat16)
        assert torch.equal(interleave(weight, heads) if heads else weight, expected), ours


def test_demo_model_opens_in_transformers_and_answers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    assert output[-1] == model.generation_config.eos_token_id[0] == tokenizer.eos_token_id == 2
    answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_tokenizer_of_the_demo_model(smollm2_gguf: Path) -> None:
    """Its vocabulary's merges and types are in the file; ids are checked by spelling them with its tokens."""
    tokenizer = gguf_tokenizer(smollm2_gguf)
    tokens = gguf.GGUFReader(smollm2_gguf).fields["tokenizer.ggml.tokens"].contents()
    assert len(tokenizer) == len(tokens) == 49152

    def spelled(text: str) -> list[str]:
        return [tokens[i] for i in tokenizer.encode(text)]

    assert spelled("Hello world") == ["Hello", "Ġworld"]
    assert spelled("a   42") == ["a", "ĠĠĠ", "4", "2"]  # digits alone: the spaces before them stay together
    assert spelled("<|im_start|>user\n") == ["<|im_start|>", "user", "Ċ"]
    text = "naïve café, 北京 🦈\n\tx = 3.14  # don't"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template is not None


def test_pre_tokenizer_that_cannot_be_rebuilt(tiny_reference: Any, tmp_path: Path) -> None:
    reference = tiny_reference("llama", num_hidden_layers=1)
    path = write_gguf(tmp_path / "model.gguf", reference, change=lambda writer: writer.add_tokenizer_pre("dagger"))
    with pytest.raises(ValueError, match="pre-tokenizer 'dagger' is not supported"):
        gguf_tokenizer(path)
