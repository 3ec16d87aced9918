"""`bloomery export` and `bloomery import`, as they are typed."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gguf import GGUFWriter
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from bloomery.cli import main
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.tokenizer import importers
from bloomery.tokenizer.chat_template import Renderer
from bloomery.weights import export, gguf, hf, llmc
from bloomery.weights.hf import Lineage
from bloomery.weights.opened import GGUF_SUFFIX
from bloomery.weights.safetensors import save_sharded
from tests.core.made import manifest
from tests.model.made import SHAPES, lively, random_ids, scores
from tests.tokenizer.made import small
from tests.tokenizer.test_importers import small_file

import safetensors.torch
import torch

SAID = Lineage(tokenizer=small().hash, template=None, shards="5" * 64)


def saved(folder: Path, config: ModelConfig, padding: int = 0, **changes: Any) -> Transformer:
    model = lively(ModelConfig(**(config.model_dump() | changes)), 0, small().vocab_size + padding)
    hf.save(folder, model, Renderer(small()), SAID)
    return model


def told(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([*map(str, words)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_is_exported_in_the_number_format_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    model = saved(tmp_path / "model", SHAPES[0])
    facts = told(capsys, "export", tmp_path / "model", tmp_path / "out", "--dtype", dtype)
    assert (facts["architecture"], facts["number_format"]) == ("LlamaForCausalLM", dtype)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert other.dtype == getattr(torch, dtype)
    for name, weight in other.state_dict().items():
        assert weight.dtype == getattr(torch, dtype), name
    assert torch.equal(other.model.embed_tokens.weight, model.embed.weight.to(getattr(torch, dtype)))
    assert "is not empty" in refused(capsys, "export", tmp_path / "model", tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["folder", "file.gguf"])
def test_an_imported_folder_has_the_number_format_and_the_words_of_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, dtype: str
) -> None:
    saved(tmp_path / "model", SHAPES[0])
    form = "gguf" if source.endswith(GGUF_SUFFIX) else "hf"
    told(capsys, "export", tmp_path / "model", tmp_path / source, "--format", form, "--dtype", dtype)
    facts = told(capsys, "import", tmp_path / source, tmp_path / "out")
    assert facts["number_format"] == dtype
    weights = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    assert hf.load(tmp_path / "out").tokenizer.to_json() == hf.load(tmp_path / source).tokenizer.to_json()


@pytest.mark.parametrize("shape", [SHAPES[0], llmc.shape(24, 2, 3, 40)], ids=["rmsnorm", "layernorm with biases"])
def test_norms_without_weights_are_exported_with_weights_of_one_and_biases_of_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: ModelConfig
) -> None:
    model = saved(tmp_path / "model", shape, norm_affine=False)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["BloomeryForCausalLM"]
    told(capsys, "export", tmp_path / "model", tmp_path / "out")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids = random_ids(2, 30, 0, small().vocab_size)
    with torch.no_grad():
        assert float((other(ids).logits - scores(model, ids)).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("form", "dtype"), [("hf", "bfloat16"), ("gguf", "q8_0"), ("gguf", "q4_0"), ("llmc", "float32")]
)
@pytest.mark.parametrize("case", ["Llama", "fused", "without weights of norms", "quantized"])
def test_weights_that_stay_in_their_files_are_exported_as_those_of_a_loaded_model(
    tmp_path: Path, case: str, form: Any, dtype: Any
) -> None:
    if (form == "llmc") != (case == "fused") and form != "hf":
        pytest.skip("llm.c has only GPT-2, and here only that")
    shape = llmc.shape(32, 2, 4, 40) if case == "fused" else SHAPES[0]
    saved(tmp_path / "model", shape, **({"norm_affine": False} if case == "without weights of norms" else {}))
    source = tmp_path / "model"
    if case == "quantized":
        export.write(hf.load(source), source := tmp_path / "source.gguf", "gguf", "q8_0")
    left = hf.streamed(source)
    assert all(weight.is_meta for weight in left.model.parameters())
    assert left.weights.keys() == hf.load(source).weights.keys()
    (tmp_path / "loaded").mkdir()
    (tmp_path / "left").mkdir()
    name = "out.gguf" if form == "gguf" else "out"
    for folder, model in (("loaded", hf.load(source)), ("left", left)):
        export.write(model, tmp_path / folder / name, form, dtype)
    files = [path for path in (tmp_path / "loaded").rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert file.read_bytes() == (tmp_path / "left" / file.relative_to(tmp_path / "loaded")).read_bytes(), file


def test_what_no_other_program_has_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "model", SHAPES[0], position_embedding="none")
    said = refused(capsys, "export", tmp_path / "model", tmp_path / "out")
    assert "transformers has no such model: position_embedding='none' is nothing that LlamaForCausalLM has" in said
    assert "llm.c has only GPT-2" in refused(capsys, "export", tmp_path / "model", tmp_path / "out", "--format", "llmc")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_llm_c_comes_in_and_goes_out_with_the_same_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: Any
) -> None:
    tokenizer = importers.load(small_file(tmp_path), "qwen2")
    rows = tokenizer.document_id + 1
    first = lively(llmc.shape(24, 2, 3, 40), 0, rows)
    llmc.write(tmp_path / "model.bin", first, dtype)
    tokenizer.save(tmp_path)
    into = tmp_path / "ours"
    facts = told(capsys, "import", tmp_path / "model.bin", into, "--tokenizer", tmp_path / "tokenizer.json")
    assert (facts["architecture"], facts["vocab_size"]) == ("GPT2LMHeadModel", tokenizer.vocab_size)
    ids = random_ids(2, 30, 0, rows)
    with torch.no_grad():
        for weight in first.parameters():
            weight.copy_(weight.to(getattr(torch, dtype)))
    assert torch.equal(scores(hf.load(into).model, ids)[..., :rows], scores(first, ids))
    told(capsys, "export", into, tmp_path / "out", "--format", "llmc", "--dtype", dtype)
    back = llmc.read(tmp_path / "out" / "model.bin")
    assert back.vocab_size == tokenizer.vocab_size
    for name, weight in first.state_dict().items():
        if name not in ("embed.weight", "head.weight"):
            assert torch.equal(back.weights[name].float(), weight), name
    assert torch.equal(back.weights["embed.weight"][:rows].float(), first.embed.weight)
    assert importers.read(tmp_path / "out" / "tokenizer.bin")[1] == tokenizer.document_id


def test_a_model_of_llm_c_has_as_many_ids_as_its_tokenizer_but_for_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small().save(tmp_path)
    ids = small().vocab_size
    words = ("import", tmp_path / "model.bin", "--tokenizer", tmp_path / "tokenizer.json")
    for rows in (ids + 1, ids + 300):
        llmc.write(tmp_path / "model.bin", lively(llmc.shape(12, 1, 2, 20), 0, rows))
        said = refused(capsys, *words, tmp_path / "out")
        assert f"model.bin: has {rows:,} token IDs, but the tokenizer {tmp_path / 'tokenizer.json'} has {ids}" in said
    for rows in (ids, -(-ids // 64) * 64):
        llmc.write(tmp_path / "model.bin", lively(llmc.shape(12, 1, 2, 20), 0, rows))
        told(capsys, *words, tmp_path / f"{rows}")


@pytest.mark.parametrize("padding", [0, 78])
def test_a_model_with_a_tokenizer_from_here_comes_back_from_files_of_llm_c_without_rows_that_have_no_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], padding: int
) -> None:
    model = saved(tmp_path / "model", llmc.shape(24, 2, 3, 40), padding)
    told(capsys, "export", tmp_path / "model", tmp_path / "out", "--format", "llmc")
    told(capsys, "import", tmp_path / "out" / "model.bin", tmp_path / "again")
    found = hf.load(tmp_path / "again")
    assert (found.model.config, found.model.vocab_size) == (model.config, small().vocab_size)
    assert found.tokenizer.special == small().special
    assert found.tokenizer.encode("the lamp, 12 and é") == small().encode("the lamp, 12 and é")
    for name, weight in found.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name][: len(weight)]), name


@pytest.mark.parametrize(("form", "dtype"), [("hf", "float16"), ("llmc", "bfloat16")])
def test_a_weight_that_a_number_format_cannot_hold_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, dtype: str
) -> None:
    model = lively(llmc.shape(24, 2, 3, 40), 0, small().vocab_size)
    with torch.no_grad():
        model.get_parameter("norm.weight")[3] = -3.4e38
    hf.save(tmp_path / "model", model, Renderer(small()), SAID)
    said = refused(capsys, "export", tmp_path / "model", tmp_path / "out", "--format", form, "--dtype", dtype)
    name = {"hf": "transformer.ln_f.weight", "llmc": "norm.weight"}[form]
    assert f"{name} holds numbers up to 3.4e+38, but the largest {dtype} is" in said
    assert not list((tmp_path / "out").glob("*"))
    told(capsys, "export", tmp_path / "model", tmp_path / "out", "--format", form)


def test_a_model_file_without_its_tokenizer_asks_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llmc.write(tmp_path / "model.bin", lively(llmc.shape(12, 1, 2, 20), 0, 61))
    said = refused(capsys, "import", tmp_path / "model.bin", tmp_path / "out")
    assert "needs one *tokenizer*.bin in its folder, which has none" in said
    assert "--tokenizer FILE" in said


def test_a_folder_of_transformers_becomes_one_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path / "theirs", SHAPES[1])
    for ours in ("bloomery.json", "SHA256SUMS"):
        (tmp_path / "theirs" / ours).unlink()
    told(capsys, "import", tmp_path / "theirs", tmp_path / "ours")
    found = hf.load(tmp_path / "ours")
    assert found.lineage == Lineage(tokenizer=small().hash, template=None, shards="imported")
    for name, weight in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], weight), name


@pytest.mark.parametrize("verb", ["export", "import"])
def test_a_place_where_no_folder_can_be_is_an_error_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    saved(tmp_path / "model", SHAPES[0])
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for out in ("file", "link", "file/below", "link/below"):
        assert " is not a folder\nChoose another folder." in refused(capsys, verb, tmp_path / "model", tmp_path / out)
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


def test_a_place_that_the_system_has_no_folders_in_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "model", SHAPES[0])
    assert "cannot be created" in refused(capsys, "export", tmp_path / "model", "/proc/none/out")


def trained_run(root: Path) -> Path:
    """A run that finetuned a model whose card states a license, and evaluated it; returns the folder of the model."""
    base, names = root / "base", ["08-instruct-aaaaaaaa", "09-finetune-bbbbbbbb", "10-evaluate-cccccccc"]
    saved(base, SHAPES[0])
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The base\n")
    run = root / "runs" / "mine"
    saved(run / names[1] / "model", SHAPES[0])
    (run / "recipe.toml").write_text("")
    sources = [{"kind": "hub", "dataset": "me/talks", "license": "cc0-1.0"}, {"kind": "jsonl", "path": "own.jsonl"}]
    started = {"start_from": str(base), "lora": {"rank": 8, "base_dtype": "nf4"}}
    stats = {"steps": 1200, "tokens": 99_000, "validation_loss": 1.25}
    configs: list[tuple[dict[str, Any], dict[str, Any]]] = [({"sources": sources}, {}), (started, stats), ({}, {})]
    inputs = [{}, {"instruct": names[0]}, {"finetune": names[1]}]
    for name, (config, counted), before in zip(names, configs, inputs, strict=True):
        (run / name).mkdir(parents=True, exist_ok=True)
        facts = manifest() | {"stage": name.split("-")[1], "config": config, "stats": counted, "inputs": before}
        (run / name / "manifest.json").write_text(json.dumps(facts))
    score = {"value": 0.25, "low": 0.2, "high": 0.31, "n": 200}
    report = {"tasks": {"arc_easy": {"scores": {"acc": score}}}}
    (run / names[2] / "report.json").write_text(json.dumps(report))
    (run / "data_card.md").write_text("# Data of mine\n")
    return run / names[1] / "model"


def test_a_model_card_states_base_license_data_training_and_scores_as_the_hub_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "export", trained_run(tmp_path), tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    front = card.data.to_dict()
    assert (front["license"], front["datasets"], front["library_name"]) == ("apache-2.0", ["me/talks"], "transformers")
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == ("arc_easy", "acc", 0.25)
    for line in (
        "| base | base |",
        "| adapters | LoRA of rank 8, base kept as nf4 |",
        "| tokens | 99,000 |",
        "| validation loss | 1.2500 nats per token |",
        "| arc_easy | acc | 0.25 | 0.2 to 0.31 |",
        "| me/talks | cc0-1.0 |",
        "| own.jsonl | not stated |",
        "# Data of mine",
    ):
        assert line in card.text.splitlines(), line


def test_the_card_of_a_checkpoint_has_its_step_and_not_the_results_of_the_final_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = trained_run(tmp_path).parent
    saved(stage / "checkpoints" / "000000400", SHAPES[0])
    told(capsys, "export", stage / "checkpoints" / "000000400", tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert not card.data.eval_results
    assert "| checkpoint of step | 400 |" in card.text
    for text in ("99,000", "validation loss", "arc_easy"):
        assert text not in card.text


@pytest.mark.parametrize("was_there", [True, False])
def test_an_export_that_ends_early_leaves_no_files_so_that_the_same_command_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, was_there: bool
) -> None:
    saved(tmp_path / "in", SHAPES[0])
    if was_there:
        (tmp_path / "out").mkdir()
    words = ["export", str(tmp_path / "in"), str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(export, "_write_card", interrupted)
        assert main(words) == 130
    assert (tmp_path / "out").exists() == was_there
    assert not was_there or not list((tmp_path / "out").iterdir())
    capsys.readouterr()
    told(capsys, *words)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_disk_that_is_full_is_said_where_numpy_says_only_how_much_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("940032 requested and 306912 written")

    saved(tmp_path / "in", SHAPES[0])
    monkeypatch.setattr(GGUFWriter, "write_tensor_data", full)
    error = refused(capsys, "export", tmp_path / "in", tmp_path / "a.gguf", "--format", "gguf")
    assert "No space left on device" in error
    assert not list(tmp_path.glob("a.gguf*"))


def test_options_that_do_not_apply_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "in", SHAPES[0])
    words = ["export", tmp_path / "in", tmp_path / "out", "--format", "peft", "--dtype", "q4_0"]
    assert "adapters are written in float32" in refused(capsys, *words)


def test_a_license_that_is_stated_goes_before_that_of_the_base_into_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained_run(tmp_path)
    told(capsys, "export", folder, tmp_path / "a.gguf", "--format", "gguf")
    assert gguf.read(tmp_path / "a.gguf").license == "apache-2.0"
    told(capsys, "export", tmp_path / "a.gguf", tmp_path / "again")
    assert ModelCard.load(tmp_path / "again" / "README.md").data.license == "apache-2.0"
    told(capsys, "export", folder, tmp_path / "out", "--license", "mit")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license == "mit"
    told(capsys, "import", tmp_path / "out", tmp_path / "copy")
    saved(tmp_path / "plain", SHAPES[0])
    told(capsys, "export", tmp_path / "copy", tmp_path / "last")
    assert ModelCard.load(tmp_path / "last" / "README.md").data.license == "mit"
    told(capsys, "export", tmp_path / "plain", tmp_path / "unknown")
    assert "| license | not known: state it with --license" in (tmp_path / "unknown" / "README.md").read_text()
    assert "is not a license identifier" in refused(capsys, "export", folder, tmp_path / "x", "--license", "a: b")


def test_weights_are_written_in_several_files_with_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path / "model", SHAPES[0])
    facts = told(capsys, "export", tmp_path / "model", tmp_path / "out", "--shard-size", "2e-5")
    assert sum(name.endswith(".safetensors") for name in facts["files"]) > 1
    assert "README.md" in facts["files"]
    assert "LlamaForCausalLM" in (tmp_path / "out" / "README.md").read_text()
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = hf.load(tmp_path / "out").model
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert torch.equal(other.model.embed_tokens.weight, model.embed.weight)


def test_a_file_that_is_streamed_has_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(7)}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    save_sharded(
        tmp_path,
        {name: tensor.clone for name, tensor in tensors.items()},
        shapes,
        dict.fromkeys(tensors, torch.float32),
    )
    expected = safetensors.torch.save(tensors, metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("dtype", ["float32", "q8_0"])
def test_a_gguf_file_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    saved(tmp_path / "model", SHAPES[0])
    words = ("export", tmp_path / "model", tmp_path / "a.gguf", "--format", "gguf", "--dtype", dtype)
    assert told(capsys, *words)["architecture"] == "llama"
    assert gguf.read(tmp_path / "a.gguf").roles["eos_token"] == "<|endoftext|>"
    assert "exists" in refused(capsys, *words)
    assert "does not end with .gguf" in refused(capsys, *words[:2], tmp_path / "a", *words[3:])
    assert "of GGUF only" in refused(capsys, "export", tmp_path / "model", tmp_path / "b", "--dtype", "q8_0")
    assert "is not hub:OWNER/NAME" in _usage(capsys, *words, "--push", "somewhere")


class Hub(BaseHTTPRequestHandler):
    """The few addresses of a hub that an upload asks for."""

    asked: ClassVar[list[tuple[str, str, bytes]]] = []
    is_private = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.path, self.headers.get("Authorization", ""), body))
        assert isinstance(self.server, ThreadingHTTPServer)
        here = f"http://127.0.0.1:{self.server.server_port}"
        said: dict[str, Any] = {"url": f"{here}/me/mine", "id": "me/mine"}
        if "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            said = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        elif "/commit/" in self.path:
            said = {"commitUrl": f"{here}/me/mine/commit/{'a' * 40}", "commitOid": "a" * 40}
        elif "validate-yaml" in self.path:
            said = {"errors": [], "warnings": []}
        data = json.dumps(said).encode()
        self.send_response(401 if "wrong" in self.headers.get("Authorization", "") else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):  # once a day, the client also reads a public list
            self.asked.append((self.path, self.headers.get("Authorization", ""), b""))
        data = json.dumps({"id": "me/mine", "private": self.is_private, "siblings": []}).encode()
        self.send_response(401 if "wrong" in self.headers.get("Authorization", "") else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("public", [False, True])
def test_a_folder_is_uploaded_private_unless_it_is_said_and_the_token_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, public: bool
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    Hub.asked.clear()
    saved(tmp_path / "model", SHAPES[0])
    words = ["export", tmp_path / "model", tmp_path / "out", "--push", "hub:me/mine", *["--public"] * public]
    try:
        assert main([*map(str, words)]) == 0
        made = next(json.loads(body) for path, _, body in Hub.asked if path == "/api/repos/create")
        assert (made["name"], made["organization"]) == ("mine", "me")
        assert made.get("visibility", made.get("private")) in (["public", False] if public else ["private", True])
        sent = next(body for path, _, body in Hub.asked if "/commit/" in path).decode()
        for name in ("model.safetensors", "README.md", "tokenizer.json"):
            assert f'"path": "{name}"' in sent or f'"path":"{name}"' in sent
        assert {token for _, token, _ in Hub.asked} == {"Bearer hf_secret"}
        if not public:
            monkeypatch.setattr(Hub, "is_private", False)
            words[2] = tmp_path / "there"
            assert "hub:me/mine: is public, and was there before" in refused(capsys, *words)
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        words[2] = tmp_path / "again"
        said = refused(capsys, *words)
    finally:
        server.shutdown()
        server.server_close()
    assert "hub:me/mine: was not uploaded" in said
    assert "hf_" not in said.replace("HF_TOKEN", "")


def _usage(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit):
        main([*map(str, words)])
    return capsys.readouterr().err
