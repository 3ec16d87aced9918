"""What is loaded as a model: folders of models and adapters, tokenizers, and checkpoints of a run."""

import shutil
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import load_file

from bloomery.core import io as core_io
from bloomery.core.io import MANIFEST, read_json
from bloomery.model.config import Lora
from bloomery.stages import tokenizer as stage
from bloomery.tokenizer import importers
from bloomery.tokenizer.config import Imported, SentencePiece
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.tokenizer.train import learned
from bloomery.weights import checkpoint, hf
from tests.fuzz.mutation import bytes_like, json_like, named, split
from tests.fuzz.outcome import Target, WrongError, command
from tests.model.made import SHAPES
from tests.tokenizer.made import small, training_texts
from tests.train import made
from tests.weights.made import model as model_folder
from tests.weights.test_peft import adapted

WEIGHTS_BYTES = 64
"""Of a file of weights, what is damaged besides its header. The rest follows later, so that cases are small."""
TEXTS = ["Where is the lamp?\n", "zwölf 東京 12 + 30 😀", " a  b\t<|user|>"]


def tokenizers(folder: Path) -> Target:
    small().save(folder)
    importers.write(folder / "t.bin", small())
    spec = read_json(folder / "tokenizer.json")
    few = dict(list(spec["model"]["vocab"].items())[:300])
    little = spec | {"model": spec["model"] | {"vocab": few, "merges": []}}
    ranks = b"".join(b"%s %d\n" % (word, number) for number, word in enumerate((b"YQ==", b"Yg==", b"YWI=", b"IA==")))
    pieces = folder / "pieces.model"
    pieces.write_bytes(learned(training_texts(), SentencePiece(kind="sentencepiece", vocab_size=400)))
    inputs = {
        "tokenizer.json": st.one_of(json_like([spec, little]), json_like([little])),
        "a.tiktoken": bytes_like([ranks]),
        "tokenizer.model": bytes_like([pieces.read_bytes()]),
        "a.bin": bytes_like([(folder / "t.bin").read_bytes()]),
    }

    def attempt(data: bytes, work: Path) -> None:
        name, body = split(data, list(inputs))
        (path := work / name).write_bytes(body)
        (out := work / "out").mkdir()
        settings = Imported(path=path, measure=False)
        stage.external_inputs(settings)
        stage.run(settings, {}, out)
        made = Tokenizer.load(out)
        for text in TEXTS:
            encoded = [made.encode(text) for _ in range(3)]
            if encoded[0] != encoded[1] or encoded[0] != encoded[2]:
                raise WrongError("absurd", f"{text!r} is encoded in several ways", "a random tokenizer")

    return Target(named(inputs), attempt)


def models(folder: Path) -> Target:
    """A model folder of ours, the same as transformers leaves it, and one of adapters, of which one file is another."""
    ours = model_folder(folder / "ours")
    theirs = Path(shutil.copytree(ours, folder / "theirs"))
    (theirs / hf.LINEAGE).unlink()
    adapted(folder, SHAPES[0], Lora(rank=2))
    inputs = {}
    for sums in folder.rglob("SHA256SUMS"):  # it would refuse every change, before any other reader sees it
        sums.unlink()
    for kind in ("ours", "theirs", "adapters"):
        for file in sorted((folder / kind).iterdir()):
            if file.name != "tokenizer.json" and file.suffix == ".json":
                inputs[f"{kind}/{file.name}"] = json_like([read_json(file)])
            elif file.suffix == ".safetensors":
                inputs[f"{kind}/{file.name}"] = bytes_like([file.read_bytes()[: _head_bytes(file)]])

    def attempt(data: bytes, work: Path) -> None:
        name, body = split(data, list(inputs))
        for kind in {"base", name.partition("/")[0]}:
            shutil.copytree(folder / kind, work / kind)
        (work / name).write_bytes(_with_rest(body, folder / name))
        command("import", (work / name).parent, work / "out")
        for tensor, weight in load_file(work / "out" / hf.WEIGHTS).items():
            if not np.isfinite(weight).all():
                raise WrongError("absurd", f"{tensor} is not finite, and was imported", "weights that are not finite")

    return Target(named(inputs), attempt)


def _head_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little") + WEIGHTS_BYTES


def _with_rest(head: bytes, whole: Path) -> bytes:
    """The head of a file of weights with what follows it there; of any other file, as it is."""
    return head + whole.read_bytes()[_head_bytes(whole) :] if whole.suffix == ".safetensors" else head


def checkpoints(folder: Path) -> Target:
    """A run of a few steps that goes on from a checkpoint whose files its manifest vouches for."""
    made.write_samples(folder / "shards")
    made.session(folder / "shards", folder / "out", steps=3).run()
    root = folder / "out" / "checkpoints"
    newest = checkpoint.folders(root)[-1]
    state = read_json(newest / checkpoint.STATE)
    inputs = {
        checkpoint.STATE: json_like([state]),
        checkpoint.ENVIRONMENT: json_like([read_json(newest / checkpoint.ENVIRONMENT)]),
        MANIFEST: json_like([read_json(newest / MANIFEST)]),
    }
    for file in sorted(newest.rglob("*.safetensors")):
        inputs[file.relative_to(newest).as_posix()] = bytes_like([file.read_bytes()[: _head_bytes(file)]])

    def attempt(data: bytes, work: Path) -> None:
        name, body = split(data, list(inputs))
        shutil.copytree(folder / "out", work / "out")
        damaged = work / "out" / "checkpoints" / newest.name
        (damaged / name).write_bytes(_with_rest(body, newest / name))
        if name != MANIFEST:
            facts = read_json(damaged / MANIFEST)
            core_io.write_json(damaged / MANIFEST, facts | {"outputs": core_io.listing(damaged)})
        made.session(folder / "shards", work / "out", steps=4).run()

    return Target(named(inputs), attempt)
