"""llm-distill: drafts of a toy target, trained here; what it says of them is what the engine finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import distill as distillation
from engine.batch_engine import ContinuousBatchingEngine
from engine.distill import Costs, Shape, distill, hold_out, main, make_draft, read_shard, tokens_a_step
from engine.generation import batch_generate_requests
from engine.models.loader import load_model
from engine.models.publisher import save_pretrained
from engine.schemas import GenerationRequest
from engine.tokenization import load_tokenizer
from tests.engine.made_tokenizers import byte_level_tokenizer
from tests.engine.oracle import tiny_model

OPTIONS: dict[str, Any] = {
    "conversations": 128,
    "answer": 40,
    "steps": 160,
    "batch_size": 8,
    "learning_rate": 5e-3,
    "seed": 0,
}
IDS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token depends on the last one above all, and leaves little to chance."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = byte_level_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_seq_len=256)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(1 if parameter.dim() == 1 else 0.3)
        model.lm_head.weight.mul_(2.7)
    save_pretrained(model, folder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, distill(str(target), folder, shapes=[(32, 1)], **OPTIONS)


def history(report: dict[str, Any], shape: str = "32x1") -> list[dict[str, float]]:
    points: list[dict[str, float]] = report["drafts"][shape]["history"]
    return points


def test_a_draft_learns_its_target(trained: tuple[Path, dict[str, Any]]) -> None:
    points = history(trained[1])
    assert points[-1]["acceptance"] > max(0.75, points[0]["acceptance"] + 0.1)
    assert points[-1]["tokens_a_step_at_gamma_4"] > 2.5
    assert json.loads((trained[0] / "training" / "report.json").read_text()) == trained[1]


def tokens_a_step_in_an_engine(target: Path, folder: Path) -> float:
    """Over the conversations that were held out, with gamma 4."""
    conversations = hold_out([c for file in folder.glob("training/*.safetensors") for c in read_shard(file)])[1]
    assert 0 < len(conversations) <= distillation.JUDGED
    requests = [
        GenerationRequest(
            prompt_ids=c.tokens[: c.prompt_len].tolist(),
            max_new_tokens=OPTIONS["answer"],
            temperature=c.temperature,
            seed=c.seed,
        )
        for c in conversations
    ]
    options: dict[str, Any] = {"max_batch_size": 1, "speculation": "draft", "gamma": 4}
    engine = ContinuousBatchingEngine(
        load_model(target), load_tokenizer(target), draft_model=load_model(folder), **options
    )
    results = batch_generate_requests(engine, requests)
    for conversation, result in zip(conversations, results, strict=True):
        ids = conversation.tokens[conversation.prompt_len :].tolist()
        assert result.token_ids == ids[: len(result.token_ids)] and len(ids) - len(result.token_ids) in (0, 1)
    tokens = sum(len(c.tokens) - c.prompt_len - 1 for c in conversations)
    steps = tokens - engine.speculation_stats().accepted
    return tokens / steps


def test_the_engine_accepts_as_often_as_reported(target: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    expected = history(trained[1])[-1]["tokens_a_step_at_gamma_4"]
    assert tokens_a_step_in_an_engine(target, trained[0]) == pytest.approx(expected, abs=1e-3)


def test_a_draft_that_reads_states(target: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """What is expected of it takes for granted that a state is read every few tokens."""
    shutil.copytree(trained[0] / "training", tmp_path / "training", ignore=shutil.ignore_patterns("*.pt", "*.json"))
    report = distill(str(target), tmp_path, shapes=[Shape(32, 1, True)], **OPTIONS | {"steps": 80})
    points = history(report, "32x1+state")
    assert points[-1]["acceptance"] > 0.6
    found = tokens_a_step_in_an_engine(target, tmp_path)
    assert found == pytest.approx(points[-1]["tokens_a_step_at_gamma_4"], rel=0.1)
    draft = load_model(tmp_path)
    assert draft.target_hidden_size == 32
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        assert (opened(IDS).logits - draft(IDS)).abs().max() < 1e-4  # where no state is read it is an ordinary decoder


def test_a_packed_draft_proposes_what_it_has_learned_alone(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    model.config.draft_vocabulary = (3, 5, 60)
    save_pretrained(model, tmp_path)
    loaded = load_model(tmp_path)
    with torch.inference_mode():
        whole = loaded(IDS)
        loaded.pack()
        part = loaded(IDS)
    assert torch.allclose(part[..., [3, 5, 60]], whole[..., [3, 5, 60]], atol=1e-4)
    assert torch.isneginf(part).sum() == part.numel() * (1 - 3 / part.shape[-1])
    config = json.loads((tmp_path / "config.json").read_text())
    for key, wrong in (("draft_vocabulary", [3, 64]), ("draft_vocabulary", 3), ("target_hidden_size", -1)):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: wrong}))
        with pytest.raises(ValueError, match=key):
            load_model(tmp_path)


def test_the_folder_is_one_of_transformers(trained: tuple[Path, dict[str, Any]]) -> None:
    opened = AutoModelForCausalLM.from_pretrained(trained[0])
    with torch.inference_mode():
        assert (opened(IDS).logits - load_model(trained[0])(IDS)).abs().max() < 1e-4
    text = "the quick brown fox"
    assert AutoTokenizer.from_pretrained(trained[0])(text).input_ids == load_tokenizer(trained[0]).encode(text)


def test_an_interrupted_run_gives_the_same_draft(
    target: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first token on: a second run of a seed is the first."""
    said: list[str] = []

    def write(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(tqdm, "write", write)
    with pytest.raises(KeyboardInterrupt):
        distill(str(target), tmp_path, shapes=[(32, 1)], **OPTIONS)
    stopped = load_model(tmp_path).state_dict()
    report = distill(str(target), tmp_path, shapes=[(32, 1)], **OPTIONS)
    whole, again = load_model(trained[0]).state_dict(), load_model(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert not all(torch.equal(tensor, again[name]) for name, tensor in stopped.items())
    assert len(said) == len(history(report)) == len(history(trained[1]))
    assert [p["acceptance"] for p in history(report)] == [p["acceptance"] for p in history(trained[1])]


def test_another_plan_in_the_same_folder_is_refused(
    target: Path, trained: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="begun with seed 0, not 1"):
        distill(str(target), trained[0], **OPTIONS | {"seed": 1})


def test_a_plan_that_made_nothing_holds_nobody(target: Path, tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "plan.json").write_text(json.dumps({"seed": 5}))
    report = distill(str(target), tmp_path, shapes=[(32, 1)], **OPTIONS | {"conversations": 8, "answer": 4, "steps": 1})
    assert report["chosen"] == "32x1"
    # the same target by another name
    (tmp_path / "same").symlink_to(target)
    options = OPTIONS | {"conversations": 8, "answer": 4, "steps": 1}
    assert distill(str(tmp_path / "same"), tmp_path, shapes=[(32, 1)], **options) == report


def test_what_is_there_is_not_written_over(target: Path, tmp_path: Path) -> None:
    own, other, file = tmp_path / "own", tmp_path / "other", tmp_path / "file"
    for folder in (own, other):
        shutil.copytree(target, folder)
    file.touch()
    before = [path.read_bytes() for path in sorted(own.iterdir())]
    for output, message in (
        (own, "is the target's own folder"),
        (other, "has a model that this didn't make"),
        (file, "is not a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(str(own), output, shapes=[(32, 1)], **OPTIONS)
    assert [path.read_bytes() for path in sorted(own.iterdir())] == before


@pytest.mark.parametrize("count", (2, 5, 40))
def test_few_questions_are_enough(count: int, target: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"conversations": 60, "answer": 4, "steps": 1}
    distill(str(target), tmp_path, prompts=[f"the fox {i}" for i in range(count)], shapes=[(32, 1)], **options)
    learned, judged = hold_out(read_shard(next(tmp_path.glob("training/*.safetensors"))))
    sides = [{tuple(c.tokens[: c.prompt_len].tolist()) for c in side} for side in (learned, judged)]
    assert not sides[0] & sides[1] and len(sides[1]) == max(len(sides[0] | sides[1]) // 16, 1)


def test_the_fastest_shape_is_chosen_and_training_ends_when_nothing_is_gained(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def costs(_: object, config: Any) -> Costs:
        return Costs(1.0, 1.0, 0.1 if config.num_layers == 1 else 2.0)

    monkeypatch.setattr(distillation, "measure", costs)
    options = OPTIONS | {"conversations": 64, "answer": 8, "learning_rate": 1e-9}
    report = distill(str(target), tmp_path, shapes=[(32, 2), (32, 1)], **options)
    assert report["chosen"] == "32x1"
    assert load_model(tmp_path).num_layers == 1
    assert history(report, "32x2") == history(report, "32x2")[:1]
    looks = 1 + distillation.PATIENCE
    assert history(report)[-1]["step"] == looks * (OPTIONS["steps"] // 20) + OPTIONS["steps"] // 4


def test_questions_from_a_file(target: Path, tmp_path: Path) -> None:
    questions, output = tmp_path / "questions.txt", tmp_path / "draft"
    questions.write_text("\n".join(f"the fox {i}\n" for i in range(40)))
    arguments = ["--model", str(target), "--output", str(output), "--prompts", str(questions), "--steps", "4"]
    arguments += ["--conversations", "40", "--answer", "8", "--shapes", "32x1"]
    assert main(arguments) == 0
    tokenizer = load_tokenizer(target)
    prompts = {
        tokenizer.decode(c.tokens[: c.prompt_len].tolist()) for c in read_shard(*output.glob("training/*.safe*"))
    }
    assert prompts <= {f"user: the fox {i}\nassistant:" for i in range(40)} and len(prompts) > 10


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["--model", "nowhere/nothing"], "nowhere/nothing: no such file or folder"),
        (["--prompts", "missing.txt"], "missing.txt"),
        (["--prompts", "empty.txt"], "empty.txt has no line with text"),
        (["--prompts", "latin.txt"], "latin.txt is not UTF-8"),
        (["--prompts", "one.txt"], "two different ones are needed"),
        (["--answer", "256"], "answer 256 leaves no room for a prompt in the context of 256"),
        (["--shapes", "64x1"], "64x1 is not within the target's 32x2"),
        (["--conversations", "1"], "all conversations begin with the same prompt"),
    ],
    ids=str,
)
def test_errors_name_what_is_wrong(
    changes: list[str],
    reason: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n")
    Path("latin.txt").write_bytes("Fran\xe7ois".encode("latin-1"))
    Path("one.txt").write_text("again\nagain\n")
    assert main(["--model", str(target), "--output", "draft", "--answer", "4", *changes]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(target), "--output", str(tmp_path), "--device", "cuda"]) == 2
    assert "device cuda: torch finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--steps 0", "'0' is not a whole number above 0"),
        ("--shapes 64xx2", "'64xx2' is not HIDDENxLAYERS or HIDDENxLAYERS+state"),
        ("--conversations x", "'x' is not a whole number above 0"),
        ("--learning-rate nan", "'nan' is not between 0 and 1"),
        ("--learning-rate 2", "'2' is not between 0 and 1"),
        ("--seed 1180591620717411303424", "is not a whole number of up to 18 digits"),
    ],
)
def test_options_that_are_no_numbers(option: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--model", "m", "--output", "o", *option.split()])
    said = capsys.readouterr().err
    assert error.value.code == 2 and option.split()[0] in said and reason in said


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"qk_norm": True, "head_dim": 16}], ids=str)
def test_a_draft_as_large_as_its_target_is_the_target(changes: dict[str, Any]) -> None:
    target = tiny_model(tie_word_embeddings=True, **changes)
    for parameter in target.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    with torch.inference_mode():
        assert (make_draft(target, 32, 2)(IDS) - target(IDS)).abs().max() < 1e-4


def test_a_narrow_draft_keeps_what_the_embedding_says() -> None:
    """An embedding that lies in half of the directions is not changed by the projection: its scalar products are."""
    target = tiny_model(tie_word_embeddings=True)
    with torch.no_grad():
        target.model.embed_tokens.weight[:, 16:] = 0
    whole, narrow = (m.model.embed_tokens.weight for m in (target, make_draft(target, 16, 1)))
    assert torch.allclose(whole @ whole.T, narrow @ narrow.T, atol=1e-4)


def test_tokens_a_step_and_speed_up() -> None:
    right = [np.array([[True, *pattern]], dtype=bool) for pattern in ([1, 1, 0, 1, 0, 0], [0, 0])]
    assert tokens_a_step(right, 1) == 8 / (4 + 2)  # 1 1 | 0 | 1 0 | 0, and 0 | 0
    assert tokens_a_step(right, 2) == 8 / (3 + 2)
    assert Costs(1.0, 1.0, 0.0).speed_up(right) == (8 / 5, distillation.MAX_GAMMA)
    assert Costs(1.0, 1.0, 0.5).speed_up(right) == Costs(1.0, 5.0, 0.0).speed_up(right) == (8 / 6 / 1.5, 1)
