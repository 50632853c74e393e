"""Weights go out: a model becomes a Hugging Face folder that transformers opens, on disk or on the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.models.decoder import CausalLM, DecoderModel
from engine.models.families import hugging_face_config
from engine.tokenization import HuggingFaceTokenizer


def save_pretrained(
    model: CausalLM, save_directory: str | Path, tokenizer: Any = None, max_shard_size: int | str = "5GB"
) -> None:
    """Write config.json, generation_config.json, safetensors (of `max_shard_size` at most) and tokenizer files.

    `tokenizer` is a HuggingFaceTokenizer or transformers' own; its EOS ids are written too. Raises ValueError, and
    writes nothing, for a model that no architecture of transformers can express, that has other weights than its
    config says (adapters that aren't merged), or that an engine has packed; and for a tokenizer without files.
    """
    from huggingface_hub import save_torch_state_dict

    if not isinstance(model, DecoderModel):
        raise ValueError(f"{type(model).__name__} can't be saved for transformers, only DecoderModel")
    if model.packed or getattr(model, "ranks", None) is not None:
        raise ValueError("the model's weights are packed for an engine, or divided: load it again to save it")
    config = hugging_face_config(model.config)
    with torch.device("meta"):
        expected = DecoderModel.from_config(model.config).state_dict().keys()
    state = model.state_dict()
    if odd := sorted(state.keys() ^ expected):
        raise ValueError(f"weights that are not those of {config['architectures'][0]}: {', '.join(odd[:5])}")
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    library_tokenizer = tokenizer.hf if isinstance(tokenizer, HuggingFaceTokenizer) else tokenizer
    if tokenizer is not None and not hasattr(library_tokenizer, "save_pretrained"):
        raise ValueError(f"{type(tokenizer).__name__} has no files that can be saved")
    generation = {**(model.generation_config or {}), **_token_ids(tokenizer)}
    config |= {key: value for key, value in generation.items() if key.endswith("_token_id")}
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, folder, max_shard_size=max_shard_size)
    _write_json(folder / "config.json", config | {"dtype": str(model.dtype).removeprefix("torch.")})
    _write_json(folder / "generation_config.json", generation)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors writes what its owner alone may read
    if tokenizer is not None:
        library_tokenizer.save_pretrained(folder)


def push_to_hub(
    model: CausalLM,
    repo_id: str,
    private: bool = False,
    commit_message: str = "Upload model",
    token: str | None = None,
    tokenizer: Any = None,
) -> str:
    """Save the model and upload it in one commit; returns the repository's URL.

    A repository that isn't there is made, `private` or not. `token` None takes the one of `hf auth login` or HF_TOKEN.
    Raises what `save_pretrained` does, before anything is uploaded, and the HfHubHTTPError of a hub that refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with TemporaryDirectory(prefix="push-to-hub-") as folder:
        save_pretrained(model, folder, tokenizer)
        repository = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message=commit_message)
    return repository.url


def _token_ids(tokenizer: Any) -> dict[str, Any]:
    """EOS (a list if there are several), BOS and pad ids as generation_config.json has them."""
    own = isinstance(tokenizer, HuggingFaceTokenizer)
    eos = sorted(tokenizer.eos_token_ids) if own else getattr(tokenizer, "eos_token_id", None)
    if isinstance(eos, list) and len(eos) < 2:
        eos = next(iter(eos), None)
    ids = {
        "eos_token_id": eos,
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "pad_token_id": getattr(tokenizer, "pad_token_id", None),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
