"""Load a drafter and a verifier that may stand in one cascade, and say exactly which two models they are.

Two models fit together when one token id means one token in both. That is checked here, on the tokenizers, before any
position is scored: different tokenizers are refused by the first id on which they differ. Heads of unequal height over
one tokenizer are common (151,936 and 152,064 rows for one vocabulary) and fine: only the common real ids count.

Knows nothing of prompts, traces or rules.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cascade.drafters import early_exit
from ..cascade.packing import can_pack, pack_weights
from .embedded import fetch
from .progress import quiet_transformers

__all__ = [
    "Pair",
    "PairConfig",
    "PairIdentity",
    "length_borders",
    "load_model",
    "load_pair",
    "load_tokenizer",
    "vocabulary_fingerprint",
]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

SMALL_MODEL = 1_000_000_000
"""Up to this many parameters, 'auto' picks float32 on a CPU without fast bfloat16."""

_EARLY_EXIT = re.compile(r"early-exit:(\d+)")


@dataclass(frozen=True)
class PairConfig:
    """Which two models, and how to hold them.

    Args:
        drafter: 'embedded:NAME', a folder, a hub id, or 'early-exit:K' (the verifier's own first K layers).
        verifier: 'embedded:NAME', a folder or a hub id.
        dtype: 'auto', 'float32', 'bfloat16' or 'float16'. 'auto' is the checkpoint's own, except on a CPU: there it is
            bfloat16 where the processor is fast in it, and elsewhere float32 for models of up to a billion parameters.
        device: 'auto' (this process's GPU, else the CPU) or a torch device such as 'cpu' and 'cuda:1'.
        drafter_device: the drafter's, where it is another.
    """

    drafter: str = "runs/demo/drafter"
    verifier: str = "embedded:smollm2-135m-instruct"
    dtype: str = "auto"
    device: str = "auto"
    drafter_device: str | None = None


@dataclass(frozen=True)
class PairIdentity:
    """Names and SHA-256 digests that tie traces and routers to one pair.

    `drafter_digest` and `verifier_digest` cover the weight files; `vocabulary_fingerprint` covers token-to-id.
    """

    drafter: str
    verifier: str
    drafter_digest: str
    verifier_digest: str
    vocabulary_fingerprint: str


@dataclass(frozen=True)
class Pair:
    """Two loaded models over one vocabulary; ids from `vocab_size` on are padding rows and stand for no token."""

    drafter: Any
    verifier: Any
    tokenizer: Any
    vocab_size: int
    identity: PairIdentity


def load_pair(config: PairConfig, decoding: bool = False) -> Pair:
    """Load both models and the tokenizer they share.

    Args:
        config: which models.
        decoding: they will only decode, so weights are packed where the processor has kernels for it (`pack_weights`).

    Raises:
        ValueError: the tokenizers differ, or a name, dtype, device or number of layers is not usable.
        FileNotFoundError: a model is neither a folder nor to be had from the hub.
    """
    exit_layers = _EARLY_EXIT.fullmatch(config.drafter)
    if config.drafter.startswith("early-exit") and not exit_layers:
        raise ValueError(
            f"drafter: expected 'early-exit:K' with K layers, such as 'early-exit:8', got {config.drafter!r}"
        )
    if exit_layers and config.drafter_device not in (None, config.device):
        raise ValueError(
            f"drafter_device: expected none, as {config.drafter!r} shares the verifier's weights, "
            f"got {config.drafter_device!r}"
        )
    verifier = _load(config, "verifier", decoding)
    tokenizer = load_tokenizer(config.verifier, role="verifier")
    verifier_digest = weight_digest(config.verifier)
    if exit_layers:
        drafter = early_exit(verifier, int(exit_layers[1]))
        drafter_digest = hashlib.sha256(f"{config.drafter} of {verifier_digest}".encode()).hexdigest()
    else:
        drafter = _load(config, "drafter", decoding)
        _check_same_vocabulary(load_tokenizer(config.drafter, role="drafter"), tokenizer, config)
        drafter_digest = weight_digest(config.drafter)
    identity = PairIdentity(
        config.drafter, config.verifier, drafter_digest, verifier_digest, vocabulary_fingerprint(tokenizer)
    )
    rows = min(_head_rows(drafter), _head_rows(verifier))
    return Pair(drafter, verifier, tokenizer, min(max(tokenizer.get_vocab().values()) + 1, rows), identity)


def _load(config: PairConfig, role: str, decoding: bool) -> Any:
    own_device = config.drafter_device if role == "drafter" else None
    model = load_model(getattr(config, role), config.dtype, own_device or config.device, role)
    _check_direction(model, getattr(config, role), role)
    return pack_weights(model) if decoding and can_pack(model) else model


def _check_direction(model: Any, name: str, role: str) -> None:
    """Refuse a model that looks ahead, such as BERT without is_decoder: it would see the very token it predicts."""
    with torch.inference_mode():
        ids = torch.tensor([[0, 0], [0, 1]], device=model.device)
        first = model(input_ids=ids, use_cache=False).logits[:, 0].float()
    spread = first.max() - first.min()
    if float((first[0] - first[1]).abs().max()) > 0.02 * float(spread):
        raise ValueError(
            f"{role} {name!r}: expected a decoder-only model, got {model.config.model_type}, which looks at later "
            "tokens"
        )


def load_model(name: str, dtype: str = "auto", device: str = "auto", role: str = "model") -> Any:
    """Load one decoder-only model in evaluation mode; `role` names it in errors.

    Raises:
        ValueError: unknown dtype or device, or a model that is not decoder-only.
        FileNotFoundError: no such folder, and no such model on the hub.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype: expected auto, {', '.join(DTYPES)}, got {dtype!r}")
    where = _resolve_device(device)
    path = _resolve_name(name, role)
    with quiet_transformers(), _named_failure(name, role):
        config = AutoConfig.from_pretrained(path)
        if config.is_encoder_decoder:
            raise ValueError(
                f"{role} {name!r}: expected a decoder-only model, got the encoder-decoder {config.model_type}"
            )
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES.get(dtype, "auto"))
    if dtype == "auto" and where.type == "cpu":
        if _has_fast_bfloat16():
            model = model.to(torch.bfloat16)
        elif model.num_parameters() <= SMALL_MODEL:
            model = model.float()
    return model.to(where).eval()


def length_borders(pair: Pair) -> list[int]:
    """Lengths beyond which a model reads a whole batch by other position frequencies (longrope, as in Phi-3 128k).

    The frequencies lie in the model and change with each call, so that sequences from both sides of a border must not
    share a batch, nor run at one time.
    """
    borders = set()
    for model in (pair.drafter, pair.verifier):
        config = model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        for one in (rope, *rope.values()):
            if isinstance(one, dict) and one.get("rope_type") == "longrope":
                own = getattr(config, "original_max_position_embeddings", None)
                border = own or one.get("original_max_position_embeddings") or config.max_position_embeddings
                borders.add(int(border))
    return sorted(borders)


def load_tokenizer(name: str, role: str = "model") -> Any:
    """Load the tokenizer of a model by the same names as `load_model`."""
    from transformers import AutoTokenizer

    with quiet_transformers(), _named_failure(name, f"tokenizer of the {role}"):
        return AutoTokenizer.from_pretrained(_resolve_name(name, role))


def vocabulary_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of the tokenizer's token-to-id table: equal exactly where every id means the same token."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def weight_digest(name: str) -> str:
    """SHA-256 over a model's weight files, by file name in sorted order.

    Raises:
        FileNotFoundError: the model's folder holds no weight file.
    """
    folder = _weights_folder(name)
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise FileNotFoundError(f"model {name!r}: no *.safetensors or *.bin in {folder}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file_digest(file).encode())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _resolve_name(name: str, role: str) -> str:
    """Turn a name into what transformers loads: a folder or a hub id."""
    if name.startswith("embedded:"):
        return str(fetch(name.removeprefix("embedded:")))
    if Path(name).is_dir():
        return name
    looks_like_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith(".")
    if not looks_like_hub_id:
        hint = "; `speccascade tune-drafter` makes a drafter, and 'early-exit:K' is one" if role == "drafter" else ""
        raise FileNotFoundError(
            f"{role}: expected a folder, a hub id or 'embedded:NAME', got {name!r}: no such folder{hint}"
        )
    return name


def _weights_folder(name: str) -> Path:
    path = Path(_resolve_name(name, "model"))
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, local_files_only=True, allow_patterns=["*.safetensors", "*.bin"]))


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        # Of the processes that torchrun and accelerate launch start on a host, each takes a GPU of its own.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
        if where.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected auto, cpu or an available device, got {device!r} ({reason})") from error
    return where


def _has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AMX or AVX-512); others emulate it, many times slower."""
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))


def _head_rows(model: Any) -> int:
    head = model.get_output_embeddings()
    return int(model.config.vocab_size if head is None else head.weight.shape[0])


def _check_same_vocabulary(drafter_tokenizer: Any, verifier_tokenizer: Any, config: PairConfig) -> None:
    """Refuse two tokenizers that give one id two meanings, by the first such id."""
    of_drafter = {index: token for token, index in drafter_tokenizer.get_vocab().items()}
    of_verifier = {index: token for token, index in verifier_tokenizer.get_vocab().items()}
    if of_drafter == of_verifier:
        return
    first = min(i for i in of_drafter.keys() | of_verifier.keys() if of_drafter.get(i) != of_verifier.get(i))
    raise ValueError(
        f"drafter {config.drafter!r} and verifier {config.verifier!r} have different tokenizers: id {first} is "
        f"{_spell(of_drafter, first)} in the drafter and {_spell(of_verifier, first)} in the verifier"
    )


def _spell(table: dict[int, str], index: int) -> str:
    return repr(table[index]) if index in table else "missing"


@contextmanager
def _named_failure(name: str, role: str) -> Iterator[None]:
    """Turn the library's many-line loading errors into one line that names the model."""
    try:
        yield
    except (OSError, KeyError, ValueError) as error:
        if isinstance(error, ValueError) and str(error).startswith(role):
            raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FileNotFoundError(f"{role} {name!r} cannot be loaded: {reason}") from error
